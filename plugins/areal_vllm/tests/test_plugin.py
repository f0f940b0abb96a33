import pytest

from areal_core.config import resolve
from areal_core.engines import ModelReference
from areal_core.errors import ConfigError
from areal_core.inference.gpu_share import GPUShare
from areal_testing.conformance import PluginSuite
from areal_vllm.adapter import VLLMAdapter
from areal_vllm.config import VLLMConfig


class TestPlugin(PluginSuite):
    plugin = "vllm"


def test_sleep_mode_time_shares_the_trainers_gpus():
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    overrides = ["inference_engine=vllm", "placement={generation: [0], training: [0]}"]
    assert not resolve(None, ["grpo"], overrides).config.takes_turns
    assert resolve(None, ["grpo"], [*overrides, "inference_engine.sleep_mode=true"]).config.takes_turns


def test_options_of_servers_on_a_shared_gpu_bound_their_cache(tmp_path):
    share = GPUShare(
        80 << 30, 20 << 30, 2, weight_bytes=1 << 30, token_bytes=1 << 16, context=4096, useful_tokens=1 << 30
    )
    settings = VLLMConfig.model_validate({"program": ["vllm"]}).within(share)
    arguments = VLLMAdapter(settings).command(ModelReference(str(tmp_path)), "127.0.0.1", 1, tmp_path).arguments
    assert arguments[arguments.index("--kv-cache-memory-bytes") + 1] == str(share.cache_bytes)
    fraction = float(arguments[arguments.index("--gpu-memory-utilization") + 1])
    assert share.cache_bytes < fraction * share.gpu_bytes < 1.05 * share.room_bytes, "this must be free at the start"
    assert "--max-model-len" not in arguments
    small = VLLMConfig.model_validate({"program": ["vllm"]}).within(share._replace(useful_tokens=1024))
    assert small.options["max_model_len"] == 1024, "vLLM refuses a cache that is smaller than the context"


def test_adapter_rank_is_refused_only_if_servers_free_their_memory():
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    overrides = [
        "inference_engine=vllm",
        "placement={generation: [0], training: [0]}",
        "inference_engine.adapter_rank=8",
    ]
    overrides.append("train_engine.adapter={rank: 8, sync: alone}")
    bounds = ["inference_engine.options={kv-cache-memory-bytes: 4000000000, gpu-memory-utilization: 0.3}"]
    resolve(None, ["grpo"], [*overrides, *bounds])
    with pytest.raises(ConfigError, match="lose an adapter's base"):
        resolve(None, ["grpo"], [*overrides, "inference_engine.sleep_mode=true"])
