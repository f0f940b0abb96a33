import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_core.testing.conformance import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "vllm"


def test_several_servers_on_a_gpu_must_say_how_much_of_it_each_has():
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    words = ["inference_engine=vllm", "inference_engine.servers=2", "placement={generation: [0, 0], training: [1]}"]
    with pytest.raises(ConfigError, match=r"each would take 0\.92 of it: set options\.gpu_memory_utilization"):
        resolve(None, ["grpo"], words)
    resolve(None, ["grpo"], [*words, "inference_engine.options={gpu-memory-utilization: 0.3}"])


def test_on_the_trainers_gpus_servers_take_turns_with_it():
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    words = ["inference_engine=vllm", "placement={generation: [0], training: [0]}"]
    with pytest.raises(ConfigError, match="set sleep_mode to true"):
        resolve(None, ["grpo"], words)
    assert resolve(None, ["grpo"], [*words, "inference_engine.sleep_mode=true"]).config.takes_turns


def test_on_the_trainers_gpus_servers_of_a_fixed_size_keep_their_memory():
    pytest.importorskip("areal_grpo", reason="the preset is another plugin's")
    words = ["inference_engine=vllm", "placement={generation: [0], training: [0]}"]
    bounds = ["inference_engine.options={kv-cache-memory-bytes: 4000000000, gpu-memory-utilization: 0.3}"]
    assert not resolve(None, ["grpo"], [*words, *bounds]).config.takes_turns
    with pytest.raises(ConfigError, match=r"or options\.kv_cache_memory_bytes and options\.gpu_memory_utilization"):
        resolve(None, ["grpo"], [*words, "inference_engine.options={gpu-memory-utilization: 0.3}"])
