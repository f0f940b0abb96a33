"""Fixtures of this repository for the tests of several plugins, and the tier of a test. Others are in areal-testing.

The Makefile selects tiers by markers (pyproject.toml explains them). A test that uses a true server or cluster gets
its marker here from the fixture, so that nobody has to remember it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
SERVERS_ON_CPU = HERE / "tests" / "servers_on_cpu"
SWITCH = "AREAL_WITHOUT_SERVERS"
ON_GPU = os.environ.get("AREAL_SERVERS_ON_GPU") == "1"
"""Tests start the servers that this Python has, on the first GPU, instead of the ones for CPUs."""

# No test asserts a time, and a busy machine takes seconds for what takes milliseconds on a quiet one.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
BEGAN = pytest.StashKey[float]()
NOT_REACHED = "not reached"

TIER_OF_FIXTURE = {
    "vllm_program": "servers",
    "sglang_program": "servers",
    "verifiers_python": "servers",
    "nemo_gym_python": "servers",
    "openenv_python": "servers",
    "tinker_cookbook_python": "servers",
    "others_python": "nightly",
    "cluster": "cluster",
    "ssh": "cluster",
    "bubblewrap": "slow",
    "browser": "slow",
}
"""`make test` needs no server, no cluster and no program beside Python and make."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for checks that must end in time on a busy machine."""
    text = "skip the tests that have not started after so many seconds; the end of the output counts them"
    parser.addoption("--time-limit", type=float, metavar="SECONDS", help=text)
    text = "start with the Nth file (modulo their number), so that a time limit does not always skip the same tests"
    parser.addoption("--start-at", type=int, default=0, metavar="N", help=text)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note when the tests began."""
    session.config.stash[BEGAN] = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that comes after the time limit."""
    limit = item.config.getoption("--time-limit")
    if limit is not None and time.monotonic() - item.config.stash[BEGAN] > limit:
        pytest.skip(f"{NOT_REACHED} within {limit:g} s")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the files with tests that were not reached."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if NOT_REACHED in str(report.longrepr)]
    if skipped:
        counts = Counter(report.nodeid.partition("::")[0] for report in skipped)
        terminalreporter.section(f"{len(skipped)} tests were {NOT_REACHED} in time")
        for file, count in counts.most_common():
            terminalreporter.line(f"{count:5d}  {file}")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its tier, and keep tests that share a fixture of their file on one worker of pytest-xdist."""
    if first := config.getoption("--start-at"):
        numbers = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: (numbers[item.path] - first) % len(numbers))
    for item in items:
        for fixture in TIER_OF_FIXTURE.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(TIER_OF_FIXTURE[fixture])
        if item.path.stem.endswith("_mutants"):  # broken components that try the conformance suites
            item.add_marker("nightly")
        if _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture of module or class scope, which each worker would make again."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(chain[-1].scope in {"module", "class"} for chain in definitions.values() if chain)


def _environment(name: str) -> str:
    """The Python of an environment of another program; made first if need be, which takes minutes."""
    if os.environ.get(SWITCH) == "1":
        pytest.skip(f"{SWITCH}=1: nothing was tried against a true {name}")
    maker = SERVERS_ON_CPU / "make_environment.py"
    found = subprocess.run([sys.executable, str(maker), name], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.fail(
            f"the environment of {name} cannot be made, so its tests cannot run ({SWITCH}=1 skips them):\n"
            f"{found.stderr[-2000:]}",
            pytrace=False,
        )
    return found.stdout.strip()


@pytest.fixture(scope="module")
def no_ranks() -> None:
    """An engine of another file, in the same process, leaves its process group to the end: it is gone."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_rank(no_ranks: None) -> Iterator[None]:
    """A process group of this process alone, as the training loop expects one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def verifiers_python() -> str:
    """The Python of an environment that has verifiers."""
    return _environment("verifiers")


@pytest.fixture(scope="session")
def nemo_gym_python() -> str:
    """The Python of an environment that has NeMo Gym, which needs Python 3.12."""
    try:
        subprocess.run(["python3.12", "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no python3.12: nothing was tried against a true nemo_gym server")
    return _environment("nemo_gym")


@pytest.fixture(scope="session")
def openenv_python() -> str:
    """The Python of an environment that has OpenEnv."""
    return _environment("openenv")


@pytest.fixture(scope="session")
def tinker_cookbook_python() -> str:
    """Return the Python of an environment that has tinker-cookbook."""
    return _environment("tinker_cookbook")


@pytest.fixture(scope="session")
def others_python() -> str:
    """The Python of an environment that has TRL, verl and OpenRLHF."""
    return _environment("others")


@pytest.fixture(scope="session")
def vllm_program() -> list[str]:
    """Words that start a vLLM server, for the settings field `program`."""
    if ON_GPU:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [_environment("vllm"), "-m", "vllm.entrypoints.openai.api_server"]


@pytest.fixture(scope="session")
def vllm_options() -> dict[str, Any]:
    """Options of vLLM for the models of the tests, for the settings field `options`."""
    if ON_GPU:  # a cache of a fixed size lets two servers start on one GPU at the same time
        memory = {"kv_cache_memory_bytes": 1 << 31, "gpu_memory_utilization": 0.3}
        return {"max_model_len": 16384, "max_num_seqs": 32, **memory}
    return {"enforce_eager": True, "distributed_executor_backend": "uni", "max_model_len": 16384, "max_num_seqs": 32}


@pytest.fixture(scope="session")
def sglang_program() -> list[str]:
    """Words that start an SGLang server, for the settings field `program`."""
    if ON_GPU:
        return [sys.executable, "-m", "sglang.launch_server"]
    return [_environment("sglang"), str(SERVERS_ON_CPU / "sglang_cpu.py")]


@pytest.fixture(scope="session")
def sglang_options() -> dict[str, Any]:
    """Options of SGLang for the models of the tests, for the settings field `options`."""
    if ON_GPU:  # SGLang's fast norms refuse float32; those of its deterministic mode take it
        return {
            "enable_deterministic_inference": True,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "context_length": 16384,
            "mem_fraction_static": 0.4,
            "max_total_tokens": 65536,
            "max_running_requests": 32,
            "cuda_graph_max_bs_decode": 32,
            "cuda_graph_backend_prefill": "disabled",
        }
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "context_length": 16384,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 65536,
        "max_running_requests": 32,
        "sleep_on_idle": True,
    }


@pytest.fixture(scope="session")
def server_environment() -> dict[str, str]:
    """Environment variables of servers, for the settings field `environment`."""
    if ON_GPU:  # float32 products in full precision, as the reference computes them
        return {"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="session")
def server_tolerance() -> float:
    """Largest difference between a server's float32 log-probability and the reference."""
    return 1e-3 if ON_GPU else 1e-4
