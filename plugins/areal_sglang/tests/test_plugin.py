import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_core.testing.conformance import PluginSuite

WORDS = ["inference_engine=sglang", "inference_engine.program=[python3]"]


class TestPlugin(PluginSuite):
    plugin = "sglang"


@pytest.mark.parametrize("value", ["{b: 1}", "null", "[[1]]", ".inf", "[.nan]"])
def test_a_value_that_no_option_has_is_told_in_one_sentence(value):
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    with pytest.raises(ConfigError) as caught:
        resolve(None, ["grpo"], [*WORDS, f"inference_engine.options={{a: {value}}}"])
    (problem,) = caught.value.problems
    assert "options.a: must be text, a number, true, false, or a list of these" in str(problem)


@pytest.mark.parametrize("value", ["true", "3", "1.5", "[1, 2.5, x]", "'{\"b\": 1}'"])
def test_values_that_options_have(value):
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    resolve(None, ["grpo"], [*WORDS, f"inference_engine.options={{a: {value}}}"])


@pytest.mark.parametrize("name", ["tp", "tp-size", "port", "model-path"])
def test_options_that_follow_from_the_config_are_refused(name):
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    with pytest.raises(ConfigError, match=f"options.{name.replace('-', '_')}: areal tells servers that itself"):
        resolve(None, ["grpo"], [*WORDS, f"inference_engine.options={{{name}: 2}}"])


def test_several_servers_on_a_gpu_must_say_how_large_their_caches_are():
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    words = [*WORDS, "inference_engine.servers=2", "placement={generation: [0, 0], training: [1]}"]
    with pytest.raises(ConfigError, match=r"a GPU has several servers: set options\.max_total_tokens"):
        resolve(None, ["grpo"], words)
    resolve(None, ["grpo"], [*words, "inference_engine.options={max-total-tokens: 4096}"])
