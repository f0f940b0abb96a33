"""`areal eval` for real: an engine, rewards in processes, figures that agree with a run's own evaluation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow

HELD_OUT = "evaluation={dataset: {type: grpo/additions, split: held_out}, limit: 10, samples_per_prompt: 2, every: 4}"

HANG_S = 120.0
"""Nothing here takes so long unless it hangs."""

SLOW = """\
import time

def slow(completion, row):
    time.sleep(0.05)
    if row["prompt"].startswith("9"):
        raise ValueError("no nines")
    return 1.0

def never(completion): raise ValueError("never")
"""


def children(process: int) -> list[str]:
    """Processes that descend from a process."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(line.split() for line in listed.splitlines())
    found = [str(process)]
    for parent in found:
        found += [child for child, own in parents.items() if own == parent]
    return found[1:]


def wait_until_gone(processes: list[str]) -> None:
    deadline = time.monotonic() + HANG_S
    while any(Path("/proc", number).exists() for number in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)


@pytest.mark.nightly
def test_the_demonstration(workplace: Workplace) -> None:
    words = ["eval", "--plugins", "grpo", "--limit", "20", "--samples", "4", "--k", "1,2,4", "--output", "out"]
    done = workplace.areal(*words, "--json")
    assert done.code == 0, done.err
    assert "preparing the model  step " in done.err, "plain lines where there is no terminal"
    figures = json.loads(done.out)
    assert figures == json.loads((workplace.folder / "out" / "evaluation.json").read_text())
    assert (figures["episodes"], figures["finished"], figures["failed"], figures["complete"]) == (80, 80, 0, True)
    assert figures["reward"]["prompts"] == 20
    one, two, four = (figures["pass_at_k"][k] for k in ("1", "2", "4"))
    assert one == figures["reward"], "rewards are 0 or 1"
    assert 0.05 < one["value"] < two["value"] < four["value"] < 0.9
    assert all(estimate["low"] < estimate["value"] < estimate["high"] for estimate in (one, two, four))
    assert 2 < figures["response_length"] < 22
    assert figures["truncated"] < 0.1
    assert figures["tokens_per_s"] > figures["episodes_per_s"] > 0
    lines = [json.loads(line) for line in (workplace.folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert sorted((line["row"], line["sample"]) for line in lines) == [(row, n) for row in range(20) for n in range(4)]
    for line in lines:
        assert line["prompt"].endswith("=")
        result = sum(map(int, line["prompt"].rstrip("=").split("+")))
        assert line["reward"] == (line["completion"].rpartition("}")[2] == str(result)), line
    refused = workplace.areal(*words)
    assert refused.code == 2
    assert "out already exists" in refused.err


@pytest.mark.nightly
def test_it_agrees_with_the_evaluations_of_a_run(workplace: Workplace) -> None:
    """The same prompts and random numbers; after training, the model that the run has exported.

    One request at a time: in company the last bits of a sum may be others, and with them a token.
    """
    words = ("run_dir=run", HELD_OUT, "rewards=[parts.py:digits]", "deterministic=true", "rollout.max_staleness=0")
    done = workplace.areal("run", "run.yaml", *words)
    assert done.code == 0, done.err
    before, after = (line for line in workplace.metrics() if "evaluation/reward" in line)
    for model, line in (("model", before), ("run/model", after)):
        measured = workplace.areal("eval", "--run", "run", "--model", model, "--json")
        assert measured.code == 0, measured.err
        figures = json.loads(measured.out)
        assert figures["reward"]["value"] == pytest.approx(line["evaluation/reward"])
        assert figures["response_length"] == pytest.approx(line["evaluation/response_length"])
    best = workplace.areal("eval", "--run", "run", "--limit", "2", "--temperature", "0")
    assert best.code == 0, best.err
    assert f"model            {workplace.folder / 'run' / 'best'}\n" in best.out
    assert "2 prompts, 2 answers to each at temperature 0\n" in best.out
    assert "starting the engine: 0 episodes" in best.err


@pytest.mark.parametrize(
    "number",
    [*(pytest.param(one, marks=pytest.mark.nightly) for one in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
)
def test_stopped_it_leaves_no_process_and_tells_what_it_has(workplace: Workplace, number: int) -> None:
    (workplace.folder / "slow.py").write_text(SLOW)
    process = workplace.start("eval", "run.yaml", "rewards=[slow.py:slow]", "--samples", "2", "--output", "out")
    samples = workplace.folder / "out" / "samples.jsonl"
    workplace.wait_for(lambda: samples.exists() and samples.read_text().count("\n") > 40, process)
    started = children(process.pid)
    assert len(started) >= 4, "guard, evaluator, engine, reward process"
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=HANG_S)
    wait_until_gone(started)
    if number == signal.SIGKILL:
        return
    assert process.returncode == 128 + number, err
    figures = json.loads((workplace.folder / "out" / "evaluation.json").read_text())
    assert not figures["complete"]
    assert figures["finished"] >= 30
    assert figures["failed"] > 0
    assert figures["reward"]["value"] == figures["pass_at_k"]["2"]["value"] == 1
    assert figures["reward"]["low"] < 0.95, "few prompts are no certainty"
    assert f"episodes         {figures['finished']} of 15800, {figures['failed']} failed" in out
    assert f"interrupted: the figures cover {figures['finished']} of 15800 episodes" in err


def test_interrupted_before_anything_was_measured(workplace: Workplace) -> None:
    process = workplace.start("eval", "run.yaml", "--output", "out")
    workplace.wait_for((workplace.folder / "out" / "logs" / "evaluator.log").exists, process)
    started = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    wait_until_gone(started)
    assert (process.returncode, out) == (130, "")
    assert "areal: error: interrupted before the first episode ended" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rewards=[slow.py:never]"], "all 10 episodes failed; the last one:\ndata row "),
        (["rewards=[slow.py:never]"], ", sample 0: reward 'never' raised ValueError: never"),
        (["rewards=[slow.py:nix]"], "has no 'nix'"),
        (["--model", "cut_off"], "cut_off/model.safetensors are incomplete"),
        (["--model", "no_header"], "no_header/model.safetensors are incomplete"),
    ],
)
def test_a_failure_is_told_in_words(workplace: Workplace, words: list[str], message: str) -> None:
    (workplace.folder / "slow.py").write_text(SLOW)
    for name, left in (("cut_off", 0.9), ("no_header", 0.01)):
        weights = shutil.copytree(workplace.folder / "model", workplace.folder / name) / "model.safetensors"
        os.truncate(weights, round(left * weights.stat().st_size))
    done = workplace.areal("eval", "run.yaml", "--limit", "10", "--json", *words)
    assert done.code == (2 if "nix" in message or "incomplete" in message else 1), done.err
    assert done.out == ""
    assert message in done.err
    assert "Traceback" not in done.err.partition("the end of its log")[0]
