"""The process of a reward worker: load the run's rewards, then answer requests.

python -m areal_core.rewards.worker RUN_DIR SOCKET
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.config import RewardTerm as RewardSettings
from areal_core.config import load_run
from areal_core.config.sections import reward_name
from areal_core.files import KeptSources
from areal_core.messages import PeerClosed, frames
from areal_core.messages.scores import Score, Scored, ScoreFailed, WorkerReady
from areal_core.rewards.scoring import RewardError, RewardSum, RewardTerm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Selection
    from areal_core.interfaces.workflow import RewardScore


def build_rewards(selections: Sequence[Selection]) -> RewardSum:
    """The run's rewards from its config; a reward without a name is called after its component."""
    terms = []
    for selection in selections:
        common = selection.common
        assert isinstance(common, RewardSettings)
        terms.append(RewardTerm(reward_name(selection), selection.build(), common.weight))
    return RewardSum(terms)


def main(run_dir: Path, connection: socket.socket) -> None:
    """Serve until the pool closes the connection."""
    KeptSources.use(run_dir / "sources")
    config = load_run(run_dir).config
    rewards = build_rewards(config.rewards)
    with suppress(PeerClosed):
        frames.send(connection, WorkerReady(rewards.max_concurrency))
        if rewards.max_concurrency > 1:
            asyncio.run(_serve_several(connection, rewards, config.rollout.reward_timeout_s))
        else:
            _serve_in_order(connection, rewards)


def _serve_in_order(connection: socket.socket, rewards: RewardSum) -> None:
    own = os.getpid()
    while True:
        request = frames.receive(connection).message
        try:
            answer = _scored(request, rewards(request.arguments), rewards)
        except RewardError as error:
            answer = _failed(request, error)
        if os.getpid() != own:  # a child that the reward has forked and that came back; this connection is not its own
            os._exit(0)
        frames.send(connection, answer)


async def _serve_several(connection: socket.socket, rewards: RewardSum, timeout_s: float) -> None:
    """For rewards that are coroutines: as many completions at a time as they allow, begun in order."""
    places, tasks = asyncio.Semaphore(rewards.max_concurrency), set()

    async def answer(request: Score) -> None:
        reply: Scored | ScoreFailed
        async with places:
            try:
                async with asyncio.timeout(timeout_s):
                    reply = _scored(request, await rewards.score(request.arguments), rewards)
            except TimeoutError:
                words = f"the reward took longer than rollout.reward_timeout_s: {timeout_s:g}"
                reply = ScoreFailed(request.number, words)
            except RewardError as error:
                reply = _failed(request, error)
        frames.send(connection, reply)

    while True:
        frame = await asyncio.to_thread(frames.receive, connection)
        task = start_task(answer(frame.message), "a reward")
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _scored(request: Score, score: RewardScore, rewards: RewardSum) -> Scored | ScoreFailed:
    return Scored(request.number, score.value, score.components, rewards.take_metrics())


def _failed(request: Score, error: RewardError) -> ScoreFailed:
    """The message travels; the traceback stays in this process's log."""
    traceback.print_exception(error.__cause__ or error)
    return ScoreFailed(request.number, str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
