"""The engine of a run around an adapter: the settings that its controller, its workers and its servers share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_core.inference.fleet import ServerFleet
from areal_core.runs import RunFolder
from areal_core.runs.engines import build_adapter, build_engine, settings_for

MEMBER = SimpleNamespace(host="10.0.0.7", log=print)


def config_with(*words):
    return resolve("grpo/addition", overrides=[*words, "rollout.max_staleness=0"]).config


@pytest.mark.parametrize("engine", ["hf", "sglang", "vllm"])
def test_every_adapter_has_the_key_of_the_run(engine, tmp_path):
    program = [] if engine == "hf" else ["inference_engine.program=[python]"]
    config, run = config_with(f"inference_engine={engine}", *program), RunFolder(tmp_path)
    fleet = build_engine(config, run, tmp_path, MEMBER)
    assert isinstance(fleet, ServerFleet)
    key = (tmp_path / "servers/key").read_text()
    assert fleet.adapter.settings.key == key
    assert settings_for(config, tmp_path, MEMBER.host).key == key, "its servers ask for the same"


def test_servers_of_a_deterministic_run_are_deterministic(tmp_path):
    plain, deterministic = (config_with("inference_engine=hf", f"deterministic={value}") for value in ("false", "true"))
    assert not build_engine(plain, RunFolder(tmp_path), tmp_path, None).capabilities.deterministic
    assert build_engine(deterministic, RunFolder(tmp_path), tmp_path, None).capabilities.deterministic
    assert settings_for(deterministic, tmp_path, "").deterministic


def test_a_server_program_that_is_missing_is_reported_to_all_who_need_it(tmp_path, monkeypatch):
    config = config_with("inference_engine=sglang")
    monkeypatch.setattr("areal_core.runs.engines.find_spec", lambda name: None)
    refused = pytest.raises(ConfigError, match="SGLang is not installed beside areal")
    with refused as caught:
        build_engine(config, RunFolder(tmp_path), tmp_path, None)
    assert "areal_sglang[engine]'" in caught.value.hints[0]
    with refused:
        build_adapter(config.inference_engine, settings_for(config, tmp_path, ""))


def test_an_engine_that_is_no_adapter_starts_no_servers_by_an_adapter(tmp_path):
    (tmp_path / "own.py").write_text("from areal_testing.fakes import FakeEngine as Engine\n")
    config = config_with(f"inference_engine={tmp_path}/own.py:Engine")
    assert not isinstance(build_engine(config, RunFolder(tmp_path), tmp_path, None), ServerFleet)
    with pytest.raises(ConfigError, match=r"own\.py:Engine' is no ServerAdapter"):
        build_adapter(config.inference_engine, settings_for(config, tmp_path, ""))
