"""Process that runs the episodes of an evaluation: `python -m areal_evaluation.evaluator RUN_DIR OPTIONS`.

OPTIONS is a JSON object with `concurrency`, the maximum number of concurrent episodes (null: as many as in a run), and
`address`, the fields of an `Address` (null: the config's own engine generates).
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config import load_run
from areal_core.processes import run_role
from areal_core.programs import RunFolder
from areal_evaluation.messages import EpisodePlayed, EpisodesExpected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from areal_core.config import Resolved
    from areal_core.data import Episode
    from areal_core.processes import Member
    from areal_core.programs import Evaluator, Played

    Describe = Callable[[Played], Mapping[str, Any]]
    """Returns the results of an episode, for its line in `samples.jsonl`."""


def main(run_dir: str, options: str) -> int:
    """Run all episodes, or those that end before an interruption, and return the exit code."""
    return run_role(lambda member: member.run(_play(RunFolder(Path(run_dir)), member, **json.loads(options))))


async def _play(run: RunFolder, member: Member, concurrency: int | None, address: dict[str, Any] | None) -> None:
    resolved = load_run(run.path)
    if address is not None:
        from areal_evaluation.endpoint import open_endpoint

        opened = open_endpoint(resolved.config, run, member, **address)
    else:
        opened = _open_engine(resolved, run, member)
    async with opened as (evaluator, describe):
        member.notify(EpisodesExpected(evaluator.episodes))
        member.enter("evaluating")
        began_at = time.monotonic()

        def take(played: Played) -> None:
            line = {"row": played.row, "sample": played.sample, "seconds": time.monotonic() - began_at}
            member.notify(EpisodePlayed({**line, **describe(played)}))

        limits = {"batch_size": concurrency, "group_size": 1, "max_pending_batches": 1} if concurrency else {}
        await evaluator.play(take, resolved.config.rollout.model_copy(update=limits))


@asynccontextmanager
async def _open_engine(resolved: Resolved, run: RunFolder, member: Member) -> AsyncIterator[tuple[Evaluator, Describe]]:
    """Open the config's engine and rollout workers, which run the episodes as those of a run."""
    from areal_core.programs import open_evaluator  # importing torch takes long; heartbeats are sent in the meantime

    async with open_evaluator(resolved, run, member) as (evaluator, tokenizer):
        yield evaluator, lambda p: describe_episode(p.episode, tokenizer) if p.episode else {"error": p.error}


def describe_episode(episode: Episode, tokenizer: Any) -> dict[str, Any]:
    """Return the results of an episode. The completion is everything after the first prompt, as rewards see it."""
    from areal_core.data import FinishReason

    prompt, completions, conversations, count = "", [], [], 0
    for trajectory in episode.trajectories:
        tokens, sampled = (trajectory.tokens[key].tolist() for key in ("input_ids", "loss_mask"))
        begin = sampled.index(True) if any(sampled) else len(tokens)
        prompt = prompt or tokenizer.decode(tokens[:begin])
        completions.append(tokenizer.decode(tokens[begin:], skip_special_tokens=True))
        conversations.append(_messages(tokens, sampled, tokenizer))
        count += sum(sampled)
    return {
        "reward": episode.reward,
        "rewards": episode.rewards,
        "tokens": count,
        "truncated": int(episode.trajectories[-1].sequence.get("finish_reason", 0)) == FinishReason.LENGTH,
        "prompt": prompt,
        "completion": "\n".join(completions),
        "metrics": dict(episode.metrics),
        "conversations": conversations,
    }


def _messages(tokens: list[int], sampled: list[bool], tokenizer: Any) -> list[dict[str, Any]]:
    """Return a trajectory as a transcript: sampled text and context in turn, with special tokens."""
    messages: list[dict[str, Any]] = []
    for is_sampled, run in itertools.groupby(zip(sampled, tokens, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run])
        role = "assistant" if is_sampled else "context"
        messages.append({"role": role, "text": text, "sampled": is_sampled})
    return messages


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
