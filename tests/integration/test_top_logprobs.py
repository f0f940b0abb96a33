"""Log-probabilities of the likeliest tokens, from the servers through records and batches to the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

OWN_LOSS = """

def comparing(terms):
    gap = (terms.top_logprobs.detach() - terms.behavior_top_logprobs).abs().amax(-1)
    descending = (terms.behavior_top_logprobs.diff(dim=-1) <= 0).all(-1).float()
    return -terms.advantages * terms.logprobs, {"gap": gap, "descending": descending}


comparing.needs_top_logprobs = True
"""


@pytest.mark.slow
def test_both_engines_give_the_same_for_the_same_weights(workplace: Workplace) -> None:
    """Without stale data, a loss of the user's own finds the same numbers from the servers and from the trainer."""
    with (workplace.folder / "parts.py").open("a") as file:
        file.write(OWN_LOSS)
    words = ["algorithm.policy_loss=parts.py:comparing", "algorithm.corrections=[]", "rollout.max_staleness=0"]
    refused = workplace.areal("config", "check", "run.yaml", *words)
    assert refused.code == 1, refused.err
    assert "sampling.top_logprobs: is 0, and" in refused.err
    assert "comparing' needs the log-probabilities of the likeliest tokens" in refused.err
    done = workplace.areal("run", "run.yaml", "run_dir=run", *words, "sampling.top_logprobs=5", "steps=3")
    assert done.code == 0, done.err
    gaps = [line["train/gap"] for line in workplace.metrics()]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4, gaps
    assert [line["train/descending"] for line in workplace.metrics()] == [1.0] * 3


@pytest.mark.slow
def test_a_run_with_both_methods(workplace: Workplace) -> None:
    """Score centering and the optimal token baseline together, with several updates on stale batches."""
    words = ["algorithm.policy_loss={type: score_centering, cap: 2.0}", "algorithm.corrections=[geometric_mask]"]
    words += ["algorithm.advantage=optimal_token_baseline", "training.num_minibatches=2", "sampling.top_logprobs=4"]
    done = workplace.areal("run", "run.yaml", "run_dir=run", *words)
    assert done.code == 0, done.err
    lines = workplace.metrics()
    assert len(lines) == 4
    assert all(0 < line["train/top_mass"] < 1 for line in lines)
    assert all(line["train/skipped"] == 0 for line in lines)
