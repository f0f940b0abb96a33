"""Every example runs, with a tiny model and local data in place of what they would download."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["steps=2", "model.path=model", "model.source=null", "model.dtype=float32", "sampling.max_new_tokens=8"]
SMALL += ["rollout.batch_size=2", "rollout.group_size=2", "algorithm.group_filters=[]", "run_dir=run"]
ROWS = [{"question": f"what is {n} plus {n}?", "answer": f"{n} and {n}\n#### {2 * n}"} for n in range(6)]


def with_local_data(workplace: Workplace, *sections: str) -> list[str]:
    """Overrides that read GSM8K-shaped rows from a file instead of the hub."""
    (workplace.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        word
        for section in sections
        for word in (f"{section}.type=rewards/jsonl", f"{section}.paths=[{workplace.folder}/rows.jsonl]",
                     f"{section}.prompt='{{question}}'", f"{section}.answer='{{answer}}'",
                     f"{section}.answer_after='####'")
    ]  # fmt: skip


def test_gsm8k_by_yaml_has_at_most_forty_lines_and_runs(workplace: Workplace) -> None:
    path = EXAMPLES / "gsm8k.yaml"
    assert len(path.read_text().splitlines()) <= 40
    shutil.copy(path, workplace.folder)
    words = [*SMALL, *with_local_data(workplace, "dataset", "evaluation.dataset"), "evaluation.limit=2"]
    done = workplace.areal("run", "gsm8k.yaml", *words)
    assert done.code == 0, done.err
    assert workplace.metrics()[-1]["step"] == 2
    assert "reward/math_verify" in workplace.metrics()[-1]


@pytest.mark.nightly
def test_vision_runs_on_images(workplace: Workplace) -> None:
    """What the embedded engine generates about images has the trainer's log-probabilities."""
    shutil.copy(EXAMPLES / "vision.yaml", workplace.folder)
    words = ["steps=2", "run_dir=run", "rollout.batch_size=2", "rollout.group_size=2", "evaluation.limit=2"]
    done = workplace.areal("run", "vision.yaml", *words, "rollout.max_staleness=0")
    assert done.code == 0, done.err
    last = {key: value for line in workplace.metrics() for key, value in line.items()}
    assert last["step"] == 2
    assert last["logprob_check/difference_max"] < 1e-3
    assert last["train/behavior_difference"] < 1e-3
    exported = workplace.folder / "run" / "model"
    assert (exported / "preprocessor_config.json").is_file()
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.nightly
def test_lora_runs_and_leaves_the_adapter_beside_the_model(workplace: Workplace) -> None:
    """The reference is the actor's frozen base, and the checkpoint has the adapter alone."""
    pytest.importorskip("peft")
    shutil.copy(EXAMPLES / "lora.yaml", workplace.folder)
    words = ["steps=2", "model.path=model", "model.source=null", "run_dir=run", "rollout.batch_size=2"]
    done = workplace.areal("run", "lora.yaml", *words, "rollout.group_size=2", "evaluation.limit=2")
    assert done.code == 0, done.err
    lines = workplace.metrics()
    assert lines[-1]["step"] == 2
    assert any("engine/reference/forward_s" in line for line in lines)
    gaps = [line.get("logprob_check/difference_max", 0.0) for line in lines]
    assert max(gaps) < 1e-3, "what was synced is not what the trainer computes with"
    exported = workplace.folder / "run" / "model"
    assert (exported / "model.safetensors").is_file()
    assert (exported / "adapter" / "adapter_config.json").is_file()


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: see areal-deepspeed's README"
)


@needs_deepspeed
@pytest.mark.nightly
def test_deepspeed_trains_from_a_json_on_two_ranks(workplace: Workplace) -> None:
    for name in ("deepspeed.yaml", "zero3.json"):
        shutil.copy(EXAMPLES / name, workplace.folder)
    words = [*SMALL, *with_local_data(workplace, "dataset"), "launcher.trainer_processes=2"]
    done = workplace.areal("run", "deepspeed.yaml", *words)
    assert done.code == 0, done.err
    assert workplace.metrics()[-1]["step"] == 2
    assert "reward/math_verify" in workplace.metrics()[-1]


@needs_deepspeed
@pytest.mark.nightly
def test_deepspeed_fine_tunes_from_a_json(workplace: Workplace) -> None:
    """Rows of one answer are soon known by heart; a number in the JSON that the run decides is refused before."""
    for name in ("deepspeed_sft.yaml", "zero3.json"):
        shutil.copy(EXAMPLES / name, workplace.folder)
    rows = [{"prompt": f"{n} + 1 = ", "completion": "12"} for n in range(8)]
    (workplace.folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["model.path=model", "model.dtype=float32", "rollout.batch_size=4", "run_dir=run", "steps=8"]
    words += ["train_engine.learning_rate=1e-2", "train_engine.warmup_steps=0"]
    done = workplace.areal("run", "deepspeed_sft.yaml", *words)
    assert done.code == 0, done.err
    losses = [line["train/negative_log_likelihood"] for line in workplace.metrics()]
    assert losses[-1] < losses[0] / 2
    fixed = json.loads((workplace.folder / "zero3.json").read_text()) | {"train_batch_size": 4}
    (workplace.folder / "zero3.json").write_text(json.dumps(fixed))
    refused = workplace.areal("run", "deepspeed_sft.yaml", *words, "run_dir=other")
    assert refused.code == 2
    assert "train_batch_size: 4, but the run decides" in refused.err
    assert not (workplace.folder / "other").exists()


@pytest.mark.nightly
def test_lora_on_gsm8k_runs(workplace: Workplace) -> None:
    pytest.importorskip("peft")
    shutil.copy(EXAMPLES / "lora_gsm8k.yaml", workplace.folder)
    done = workplace.areal("run", "lora_gsm8k.yaml", *SMALL, *with_local_data(workplace, "dataset"))
    assert done.code == 0, done.err
    assert workplace.metrics()[-1]["step"] == 2


@pytest.mark.nightly
def test_reasoning_gym_runs_behind_worked_examples(workplace: Workplace) -> None:
    """Without servers and GPUs, and with examples that fit into the tiny model's context."""
    pytest.importorskip("reasoning_gym")
    for name in ("reasoning_gym.yaml", "few_shot.py"):
        shutil.copy(EXAMPLES / name, workplace.folder)
    words = ["inference_engine=hf", "weight_sync.transport=memory", "placement.generation=null"]
    words += ["placement.training=null", "evaluation.limit=2", "evaluation.samples_per_prompt=1"]
    words += [
        f"{section}.examples=[['1 + 1 =', '<answer>2</answer>']]" for section in ("dataset", "evaluation.dataset")
    ]
    done = workplace.areal("run", "reasoning_gym.yaml", *SMALL, *words)
    assert done.code == 0, done.err
    assert "reward/reasoning_gym" in workplace.metrics()[-1]
    prompt = json.loads((workplace.folder / "run/samples.jsonl").read_text().splitlines()[0])["episodes"][0]["text"]
    assert "<answer>2</answer>" in prompt


def in_environment(workplace: Workplace, *words: str) -> dict[str, str]:
    """The environment in which a program that calls `train` makes a small run."""
    return {
        **workplace.environment,
        "AREAL_SET": shlex.join([word for word in words if not word.startswith("run_dir")]),
    }


@pytest.mark.nightly
def test_gsm8k_from_python_runs(workplace: Workplace) -> None:
    shutil.copy(EXAMPLES / "gsm8k.py", workplace.folder)
    environment = in_environment(workplace, *SMALL, *with_local_data(workplace, "dataset"))
    done = subprocess.run(
        [sys.executable, "gsm8k.py"], cwd=workplace.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = Path(done.stdout.splitlines()[-1])
    assert "<svg" in report.read_text()
    metrics = report.with_name("metrics.jsonl").read_text().splitlines()
    assert "reward/correct" in json.loads(metrics[-1])


def test_the_notebook_goes_from_a_call_to_a_chart(workplace: Workplace) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    book = nbformat.read(EXAMPLES / "from_python.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "the notebook is kept without outputs"
    client = nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": workplace.folder}}
    )
    client.execute(env=in_environment(workplace, *SMALL))
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    shown = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "step 2/2" in shown
    assert "2 rows, " in shown, "the metrics"
    assert "prompt" in shown
    assert "17+25=" in shown
    assert len([*workplace.folder.glob("runs/grpo-*/functions/shows_working-*.pickle")]) == 1


@pytest.mark.nightly
def test_parts_of_ones_own_run_from_a_file(workplace: Workplace) -> None:
    for name in ("custom_parts.py", "custom_parts.yaml"):
        shutil.copy(EXAMPLES / name, workplace.folder)
    done = workplace.areal("run", "custom_parts.yaml", *SMALL)
    assert done.code == 0, done.err
    last = workplace.metrics()[-1]
    assert {"reward/right", "reward/brevity", "train/ratio"} <= last.keys()


@pytest.mark.nightly
def test_countdown_runs(workplace: Workplace) -> None:
    for name in ("countdown.py", "countdown.yaml"):
        shutil.copy(EXAMPLES / name, workplace.folder)
    done = workplace.areal("run", "countdown.yaml", *SMALL, "evaluation.limit=2")
    assert done.code == 0, done.err
    assert "reward/solved" in workplace.metrics()[-1]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>8 / (3 - 8 / 3)</answer>", 1.0),
        ("<answer>1</answer> no: <answer> (3 + 3 - 8 + 8) * 4 </answer>", 0.1),  # 24, with a number that is not given
        ("<answer>3 + 3 + 8 + 8</answer>", 0.1),
        ("8 / (3 - 8 / 3)", 0.0),
        ("<answer>8 / (3 - 3)</answer>", 0.0),
        ("<answer>24.0</answer>", 0.0),
        ("<answer>8 ** 8 ** 8 ** 8</answer>", 0.0),
        ("<answer>__import__('os').abort()</answer>", 0.0),
        (f"<answer>{'(' * 99}8{')' * 99}</answer>", 0.1),
        (f"<answer>{'-' * 10000}8</answer>", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_countdown_takes_an_expression_of_the_numbers_and_runs_nothing(completion: str, reward: float) -> None:
    assert countdown().solved(completion, [3, 3, 8, 8], 24) == reward


def test_problems_of_countdown_can_be_solved_and_those_of_another_seed_are_others() -> None:
    ours, others = countdown().Countdown(size=50, numbers=3), countdown().Countdown(size=50, numbers=3, seed=1)
    assert all(len(row["numbers"]) == 3 and 0 < row["target"] <= 990 for row in ours)
    assert ours[7] == countdown().Countdown(size=50, numbers=3)[7]
    assert {row["prompt"] for row in ours}.isdisjoint(row["prompt"] for row in others)


def countdown() -> Any:
    """The file as a config imports it."""
    specification = importlib.util.spec_from_file_location("countdown", EXAMPLES / "countdown.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


GAME = """\
class Guess:
    async def reset(self, row):
        self.answer = row["answer"]
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, completion):
        right = completion == self.answer
        return (None if right else "no, again"), float(right) + len(completion) / 100
"""


@pytest.mark.nightly
def test_a_conversation_with_an_environment_trains(workplace: Workplace) -> None:
    (workplace.folder / "game.py").write_text(GAME)
    words = ["workflow.type=multi_turn", "workflow.environment=game.py:Guess", "workflow.max_turns=3", "rewards=[]"]
    done = workplace.areal("run", "run.yaml", "run_dir=run", "steps=2", *words)
    assert done.code == 0, done.err
    assert workplace.metrics()[-1]["batch/response_length"] > 0
