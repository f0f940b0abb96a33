"""`inference_engine: auto` on machines with and without GPUs and servers."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from areal_core import gpus as machine
from areal_core.config import load_run, resolve
from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.config import Resolved

for plugin in ("areal_grpo", "areal_hf", "areal_sglang", "areal_vllm"):
    pytest.importorskip(plugin, reason="the first-party plugins are not installed")

from areal_sglang.config import SGLangConfig  # noqa: E402

AUTO = "inference_engine={type: auto, max_concurrent_requests: 64}"
Machine = "Callable[[int, Sequence[str]], None]"


@pytest.fixture
def a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this machine one with so many GPUs and these programs: folders as NVIDIA's driver and pip leave them."""

    def make(gpus: int, programs: Sequence[str]) -> None:
        folder = tmp_path / "gpus"
        for number in range(gpus):
            (folder / str(number)).mkdir(parents=True)
        for name in programs:
            (tmp_path / "packages" / name).mkdir(parents=True)
        monkeypatch.setattr(machine, "GPUS", folder)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        packages = [path for path in sys.path if path]
        monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), *packages])

    return make


def chosen(resolved: Resolved) -> tuple[str, list[int] | None, list[int] | None]:
    config = resolved.config
    assert config.inference_engine is not None
    return config.inference_engine.target, config.placement.generation, config.placement.training


@pytest.mark.parametrize(
    ("gpus", "programs", "expected"),
    [
        (0, [], ("hf/hf", None, None)),
        (0, ["sglang"], ("hf/hf", None, None)),
        (1, [], ("hf/hf", None, None)),
        (1, ["vllm"], ("vllm/vllm", [0], [0])),
        (1, ["vllm", "sglang"], ("sglang/sglang", [0], [0])),
        (2, ["sglang"], ("sglang/sglang", [1], [0])),
        (8, ["sglang"], ("sglang/sglang", [4, 5, 6, 7], [0, 1, 2, 3])),
    ],
)
def test_the_fastest_engine_that_can_run_here_is_chosen_and_placed(
    a_machine: Machine, gpus: int, programs: list[str], expected: tuple[str, list[int] | None, list[int] | None]
) -> None:
    a_machine(gpus, programs)
    resolved = resolve(None, ["grpo"], [AUTO])
    assert chosen(resolved) == expected
    assert resolved.config.inference_engine.keywords()["max_concurrent_requests"] == 64
    assert resolved.notes == (f"inference_engine: auto is {expected[0]} on this machine",)
    assert resolved.config.model.dtype == ("float32" if expected[1] is None else "bfloat16")
    others = {"hf", "sglang", "vllm"} - {expected[0].partition("/")[0], "hf"}
    assert not others & set(resolved.plugins.names), "the run loads the plugin of the engine that was chosen alone"
    placed = {path for path, origin in resolved.origins.items() if origin == "inference_engine: auto"}
    assert bool(placed) == (expected[1] is not None)


def test_an_engine_with_which_the_config_is_wrong_is_passed_over(a_machine: Machine) -> None:
    a_machine(1, ["sglang"])
    resolved = resolve(None, ["grpo"], [AUTO, "deterministic=true", "rollout.max_staleness=0"])
    assert chosen(resolved) == ("hf/hf", None, None)
    reason, choice = resolved.notes
    assert reason.startswith("inference_engine: auto is not sglang/sglang: inference_engine: servers do not repeat")
    assert choice == "inference_engine: auto is hf/hf on this machine"


def test_a_mistake_elsewhere_is_reported_once(a_machine: Machine) -> None:
    a_machine(1, ["sglang"])
    with pytest.raises(ConfigError) as raised:
        resolve(None, ["grpo"], [AUTO, "rollout.group_size=0"])
    (problem,) = raised.value.problems
    assert "rollout.group_size" in problem


def test_gpus_that_the_config_names_stay(a_machine: Machine) -> None:
    a_machine(8, ["sglang"])
    words = [AUTO, "placement={generation: [0, 1, 2], training: [3]}"]
    assert chosen(resolve(None, ["grpo"], words)) == ("sglang/sglang", [0, 1, 2], [3])
    words = [AUTO, "placement=train=2 generate=tp1x2 colocated"]
    assert chosen(resolve(None, ["grpo"], words)) == ("sglang/sglang", [0, 1], [0, 1])
    planned = resolve(None, ["grpo"], [AUTO, "placement.gpu_memory_gib=40"])
    assert chosen(planned) == ("sglang/sglang", [4, 5, 6, 7], [0, 1, 2, 3])
    assert planned.config.placement.gpu_memory_gib == 40


@pytest.mark.parametrize(
    ("gpus", "engine", "expected"),
    [
        (1, "servers: 3", ([0, 0, 0], [0])),
        (4, "servers: 3", ([1, 2, 3], [0])),
        (4, "tensor_parallel: 2", ([2, 3], [0, 1])),
        (8, "servers: 2, tensor_parallel: 2", ([4, 5, 6, 7], [0, 1, 2, 3])),
    ],
)
def test_servers_that_the_config_counts_are_placed(
    a_machine: Machine, gpus: int, engine: str, expected: tuple[list[int], list[int]]
) -> None:
    a_machine(gpus, ["sglang"])
    words = [f"inference_engine={{type: auto, {engine}}}"]
    assert chosen(resolve(None, ["grpo"], words)) == ("sglang/sglang", *expected)


@pytest.mark.parametrize("placement", ["{generation: [0, 0]}", "{training: [0]}"])
def test_gpus_of_one_half_alone_are_refused(a_machine: Machine, placement: str) -> None:
    """The other half would be anywhere, and the plan of memory would not know."""
    a_machine(1, ["sglang"])
    with pytest.raises(ConfigError, match="needs both or none"):
        resolve(None, ["grpo"], [AUTO, f"placement={placement}"])


def test_a_complete_config_is_placed_as_well(a_machine: Machine) -> None:
    """Its placement has all keys, each null."""
    a_machine(1, ["sglang"])
    words = [AUTO, "placement={layout: null, generation: null, training: null, gpu_memory_gib: null}"]
    assert chosen(resolve(None, ["grpo"], words)) == ("sglang/sglang", [0], [0])
    with pytest.raises(ConfigError, match="placement: "):
        resolve(None, ["grpo"], [AUTO, "placement=5"])


def test_where_no_engine_fits_the_fastest_ones_reasons_are_reported(a_machine: Machine) -> None:
    a_machine(1, ["sglang"])
    with pytest.raises(ConfigError) as raised:
        resolve(None, ["grpo"], ["inference_engine={type: auto, tensor_parallel: 2}"])
    assert not any("unknown key" in problem for problem in raised.value.problems)
    words = ["inference_engine={type: auto, options: {mem_fraction_static: 0.5}}", "rollout.group_size=0"]
    with pytest.raises(ConfigError) as raised:
        resolve(None, ["grpo"], words)
    (problem,) = raised.value.problems
    assert "rollout.group_size" in problem


def test_a_cluster_needs_a_placement(a_machine: Machine) -> None:
    """The machine where a config is read says nothing of the nodes that a scheduler will give."""
    pytest.importorskip("areal_slurm", reason="the first-party plugins are not installed")
    a_machine(8, ["sglang"])
    assert chosen(resolve(None, ["grpo"], [AUTO, "launcher=slurm"])) == ("hf/hf", None, None)
    words = [AUTO, "launcher=slurm", "placement=train=8 generate=tp1x8"]
    assert chosen(resolve(None, ["grpo"], words))[0] == "sglang/sglang"


@pytest.mark.parametrize(
    ("placement", "gpus"),
    [
        ("train=8 generate=tp2x4", 16),
        ("train=4 generate=tp1x4 colocated", 4),
        ("{layout: train=2 generate=tp1x1, gpu_memory_gib: 80}", 3),
        ("{generation: [0, 0], training: [0]}", 1),
        ("train=8 generate=all", 1),
        ("null", 0),
    ],
)
def test_on_a_cluster_the_gpus_in_placement_count(
    a_machine: Machine, monkeypatch: pytest.MonkeyPatch, placement: str, gpus: int
) -> None:
    pytest.importorskip("areal_slurm", reason="the first-party plugins are not installed")
    a_machine(8, ["sglang"])
    ranked = []
    monkeypatch.setattr(SGLangConfig, "automatic_rank", classmethod(lambda cls, gpus: ranked.append(gpus) or 0))
    with suppress(ConfigError):
        resolve(None, ["grpo"], [AUTO, "launcher=slurm", f"placement={placement}"])
    assert ranked == [gpus]


def test_the_run_folder_names_the_engine(a_machine: Machine, tmp_path: Path) -> None:
    a_machine(1, ["sglang"])
    resolved = resolve(None, ["grpo"], [AUTO])
    (tmp_path / "config.yaml").write_text(resolved.to_yaml())
    reread = load_run(tmp_path)
    assert chosen(reread) == ("sglang/sglang", [0], [0])
    assert reread.notes == ()
