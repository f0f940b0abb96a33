"""The process that plays the episodes of an evaluation: `python -m areal_evaluation.evaluator RUN_DIR WORDS`.

WORDS is a JSON object: `concurrency`, how many episodes are under way at a time, null for as many as in a run; and
`address`, that of somebody else's model, null where the config's own engine generates.
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
    """What is noted of an episode."""


def main(run_dir: str, words: str) -> int:
    """Play all episodes, or those that end before somebody interrupts; the exit code."""
    return run_role(lambda member: member.run(_play(RunFolder(Path(run_dir)), member, **json.loads(words))))


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
        began = time.monotonic()

        def take(played: Played) -> None:
            line = {"row": played.row, "sample": played.sample, "seconds": time.monotonic() - began}
            member.notify(EpisodePlayed({**line, **describe(played)}))

        width = {"batch_size": concurrency, "group_size": 1, "max_pending_batches": 1} if concurrency else {}
        await evaluator.play(take, resolved.config.rollout.model_copy(update=width))


@asynccontextmanager
async def _open_engine(resolved: Resolved, run: RunFolder, member: Member) -> AsyncIterator[tuple[Evaluator, Describe]]:
    """Episodes are played as those of a run are, by rollout workers and the config's engine."""
    from areal_core.programs import open_evaluator  # torch takes long, and this process sends heartbeats already

    async with open_evaluator(resolved, run, member) as (evaluator, tokenizer):
        yield evaluator, lambda p: describe_episode(p.episode, tokenizer) if p.episode else {"error": p.error}


def describe_episode(episode: Episode, tokenizer: Any) -> dict[str, Any]:
    """An episode as it is noted. The completion is all that follows the first prompt, as the rewards see it."""
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
    """A trajectory as a transcript: what the model sampled and what stood around it in turn, with special tokens."""
    messages: list[dict[str, Any]] = []
    for is_own, run in itertools.groupby(zip(sampled, tokens, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run])
        messages.append({"role": "assistant" if is_own else "context", "text": text, "sampled": is_own})
    return messages


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
