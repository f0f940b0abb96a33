import pytest

from areal_core.config import resolve
from areal_core.engines import ModelReference
from areal_core.errors import ConfigError
from areal_core.inference.gpu_share import GPUShare
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_testing.conformance import PluginSuite

OVERRIDES = ["inference_engine=sglang", "inference_engine.program=[python3]"]


class TestPlugin(PluginSuite):
    plugin = "sglang"


@pytest.mark.parametrize("value", ["{b: 1}", "null", "[[1]]", ".inf", "[.nan]"])
def test_an_invalid_option_value_is_refused(value):
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    with pytest.raises(ConfigError) as caught:
        resolve(None, ["grpo"], [*OVERRIDES, f"inference_engine.options={{a: {value}}}"])
    (problem,) = caught.value.problems
    assert "options.a: must be text, a number, true, false, or a list of these" in str(problem)


@pytest.mark.parametrize("value", ["true", "3", "1.5", "[1, 2.5, x]", "'{\"b\": 1}'"])
def test_valid_option_values_are_accepted(value):
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    resolve(None, ["grpo"], [*OVERRIDES, f"inference_engine.options={{a: {value}}}"])


@pytest.mark.parametrize("name", ["tp", "tp-size", "port", "model-path"])
def test_options_that_areal_sets_are_refused(name):
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    with pytest.raises(ConfigError, match=f"options.{name.replace('-', '_')}: areal tells servers that itself"):
        resolve(None, ["grpo"], [*OVERRIDES, f"inference_engine.options={{{name}: 2}}"])


def test_options_of_servers_on_a_shared_gpu_bound_their_cache(tmp_path):
    share = GPUShare(
        80 << 30, 20 << 30, 2, weight_bytes=1 << 30, token_bytes=1 << 16, context=4096, useful_tokens=1 << 30
    )
    assert share.cache_tokens == (share.room_bytes - (1 << 30)) >> 16
    settings = SGLangConfig.model_validate({"program": ["sglang"]})
    adapter = SGLangAdapter(settings.within(share))
    arguments = adapter.command(ModelReference(str(tmp_path)), "127.0.0.1", 1, tmp_path).arguments
    assert arguments[arguments.index("--max-total-tokens") + 1] == str(share.cache_tokens)
    own = settings.model_copy(update={"options": {"max_total_tokens": 4096}}).within(share)
    assert own.options["max_total_tokens"] == 4096
