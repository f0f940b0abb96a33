"""AReaL's GSM8K example carried over: the config that `areal convert` makes trains, and so do the parts beside it."""

from __future__ import annotations

import json
import random
import runpy
import shutil
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import pytest
import torch

from areal_convert.convert import account, convert
from areal_convert.source import Source, read
from areal_core.config.sections import TrainingSection
from areal_core.training.context import BatchContext
from areal_grpo.batch_transforms import kl_in_reward
from areal_grpo.generalized_advantages import reinforce_pp
from areal_testing.conformance import make_batch

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PARTS = ROOT / "examples" / "from_areal.py"
CONFIG = ROOT / "plugins" / "areal_convert" / "tests" / "configs" / "grpo.yaml"
HERE = [
    "model.path=null", "model.dtype=float32", "inference_engine=hf", "placement=null", "placement.generation=null",
    "dataset.type=rewards/jsonl", "dataset.paths=[rows.jsonl]", "dataset.prompt='{question}'",
    "dataset.answer='{answer}'", "dataset.answer_after='####'", "workflow.chat_template=never", "evaluation=null",
    "rewards=[from_areal.py:last_number]", "train_engine.activation_checkpointing=none",
    "train_engine.learning_rate=3e-4", "run_dir=run",
]  # fmt: skip
"""What a machine without hub, servers and GPUs needs otherwise; the algorithm and its settings are as converted."""


def carry_over(workplace: Workplace) -> None:
    """The converted config, sums in the form of GSM8K's rows, and the parts of the example."""
    random.seed(0)
    sums = [(random.randrange(10, 100), random.randrange(10, 100)) for _ in range(2000)]
    rows = [{"question": f"{a}+{b}=", "answer": f"{a} and {b} are {a + b}.\n#### {a + b}"} for a, b in sums]
    (workplace.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(PARTS, workplace.folder)
    done = workplace.areal("convert", "areal", str(CONFIG), "-o", "my.yaml")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    "template",
    ["", pytest.param("{% for message in messages %}+{{ message['content'] }}{% endfor %}", marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("workflow", [pytest.param("OneTurn", marks=pytest.mark.nightly), "TryAgain"])
def test_a_workflow_in_place_of_one_of_areals_trains(workflow: str, template: str, workplace: Workplace) -> None:
    carry_over(workplace)
    shutil.copytree(workplace.folder / "model", workplace.folder / "written")
    if template:
        (workplace.folder / "written" / "chat_template.jinja").write_text(template)
    words = [*HERE[1:], "model.path=written", "steps=2", "rollout.batch_size=2", "rollout.group_size=2"]
    words += ["sampling.max_new_tokens=8", f"workflow=from_areal.py:{workflow}"]
    words = [word for word in words if not word.startswith("workflow.")]
    done = workplace.areal("run", "my.yaml", *words)
    assert done.code == 0, done.err
    assert workplace.metrics()[-1]["step"] == 2
    (episode, *_) = json.loads((workplace.folder / "run/samples.jsonl").read_text().splitlines()[0])["episodes"]
    assert episode["text"].startswith("+") == bool(template)
    assert (" wrong, again: " in episode["text"]) == (workflow == "TryAgain")
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"So \boxed{1,234}", "1,234", 1), (r"\boxed{18}. I used 3 steps", "18", 1), ("it is 18.", "18", 1),
        (r"\boxed{17}, not 18", "18", 0), (r"\boxed{}", "18", 0), ("none", "18", 0),
    ],
)  # fmt: skip
def test_the_number_that_an_answer_says(completion: str, answer: str, reward: float) -> None:
    assert runpy.run_path(str(PARTS))["last_number"](completion, answer) == reward


@pytest.mark.nightly
def test_the_example_learns(workplace: Workplace) -> None:
    carry_over(workplace)
    words = ["model.source=grpo/addition_model", "steps=60", "rollout.batch_size=16", "rollout.group_size=8"]
    done = workplace.areal("run", "my.yaml", *HERE, *words, "sampling.max_new_tokens=22")
    assert done.code == 0, done.err
    rewards = [line["reward/mean"] for line in workplace.metrics() if "reward/mean" in line]
    assert len(rewards) == 60
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.2


def test_carried_kl_and_discounts_give_areals_advantages() -> None:
    """What AReaL computes, in loops: -kl_ctl (log π - log reference) for each token, the reward at the last one,
    discounted by γλ without a critic, and normalized over the tokens in the loss."""
    tree = read(CONFIG)
    tree["actor"] |= {"kl_ctl": 0.05, "reward_norm": None, "discount": 0.9, "gae_lambda": 0.8}
    source = Source(tree)
    config = convert(source)
    assert {"actor.kl_ctl", "ref.path", "actor.discount", "actor.gae_lambda"} <= account(source)["carried"].keys()
    batch = make_batch(seed=3)
    draw = torch.Generator().manual_seed(4)
    policy = batch["logprobs"].double()
    reference = policy + torch.randn(len(policy), generator=draw, dtype=torch.float64)
    batch = batch.with_tokens(proximal_logprobs=policy, reference_logprobs=reference)
    batch = batch.with_sequences(
        reward=torch.arange(len(batch), dtype=torch.float64), episode_id=torch.arange(len(batch))
    )
    wanted = {}
    for row in range(len(batch)):
        later, places = 0.0, [t for t in range(batch.token_count) if batch.tokens.row_index[t] == row]
        reward = float(batch["reward"][row])
        for t in reversed([t for t in places if batch["loss_mask"][t]]):
            later = reward - 0.05 * float(policy[t] - reference[t]) + 0.9 * 0.8 * later
            wanted[t], reward = later, 0.0
    values = torch.tensor([wanted[t] for t in sorted(wanted)], dtype=torch.float64)
    *_, transform = config["algorithm"]["batch_transforms"]
    context = BatchContext(TrainingSection(), {}, state={})
    found = kl_in_reward(batch, context, coefficient=transform["coefficient"], target=None, horizon=1)
    advantages = reinforce_pp(batch.with_tokens(**found), gamma=config["algorithm"]["advantage"]["gamma"])
    expected = (values - values.mean()) / (values.std() + 1e-5)
    torch.testing.assert_close(advantages[batch["loss_mask"]], expected, rtol=0, atol=1e-4)
