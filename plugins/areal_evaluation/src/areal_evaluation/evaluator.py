"""The process that plays the episodes of an evaluation."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

from areal_core.config import load_run
from areal_core.data import FinishReason
from areal_core.driver import ASKED_TO_STOP
from areal_core.runs import run_event_loop
from areal_core.runs.controller import RolloutHalf
from areal_evaluation.messages import EpisodePlayed, EpisodesExpected

if TYPE_CHECKING:
    from areal_core.data import Episode
    from areal_core.rollout.evaluation import Played
    from areal_core.runs import Member, RunFolder


def play(run: RunFolder, concurrency: int, member: Member) -> int:
    """Play all episodes, or those that end before somebody interrupts; so many at a time, 0 for as many as in a run."""
    try:
        run_event_loop(_play(run, concurrency, member))
    except asyncio.CancelledError:
        return ASKED_TO_STOP
    return 0


async def _play(run: RunFolder, concurrency: int, member: Member) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    member.on_stop = lambda: loop.call_soon_threadsafe(task.cancel)
    resolved = load_run(run.path)
    rollout, section = resolved.config.rollout, resolved.config.evaluation
    assert section is not None
    half = await RolloutHalf.begin(resolved, run, member, trains=False)
    evaluator = half.evaluator(section)
    try:
        with member.phase("starting the inference engine"):
            await half.starting
        member.notify(EpisodesExpected(evaluator.episodes))
        member.enter("evaluating")
        began = time.monotonic()

        def take(played: Played) -> None:
            line = {"row": played.row, "sample": played.sample, "seconds": time.monotonic() - began}
            facts = describe_episode(played.episode, half.tokenizer) if played.episode else {"error": played.error}
            member.notify(EpisodePlayed({**line, **facts}))

        width = {"batch_size": concurrency, "group_size": 1, "max_pending_batches": 1} if concurrency else {}
        await evaluator.play(take, rollout.model_copy(update=width))
    finally:
        await half.close()


def describe_episode(episode: Episode, tokenizer: Any) -> dict[str, Any]:
    """An episode as it is noted. The completion is all that follows the first prompt, as the rewards see it."""
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
