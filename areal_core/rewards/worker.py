"""The main function of a reward process: loads the run's rewards and answers requests.

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
from areal_core.config import load_run
from areal_core.config.sections import RewardTerm, reward_name
from areal_core.files import KeptSources
from areal_core.messages.scores import Score, Scored, ScoreFailed, WorkerReady
from areal_core.rewards.scoring import RewardError, RewardSum, WeightedReward
from areal_core.runtime import frames
from areal_core.runtime.rpc import PeerClosed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Selection
    from areal_core.interfaces.workflow import RewardScore


def build_rewards(selections: Sequence[Selection]) -> RewardSum:
    """Build the run's rewards. A reward without a name is named after its component."""
    terms = []
    for selection in selections:
        common = selection.common
        assert isinstance(common, RewardTerm)
        terms.append(WeightedReward(reward_name(selection), selection.build(), common.weight))
    return RewardSum(terms)


def main(run_dir: Path, connection: socket.socket) -> None:
    """Answer requests until the pool closes the connection."""
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
    pid = os.getpid()
    while True:
        request = frames.receive(connection).message
        try:
            answer = _scored(request, rewards(request.arguments), rewards)
        except RewardError as error:
            answer = _failed(request, error)
        if os.getpid() != pid:  # the reward function forked and its child returned here: only the parent answers
            os._exit(0)
        frames.send(connection, answer)


async def _serve_several(connection: socket.socket, rewards: RewardSum, timeout_s: float) -> None:
    """Answer requests concurrently, for rewards that are coroutine functions. Requests start in order."""
    slots = asyncio.Semaphore(rewards.max_concurrency)
    tasks = set()

    async def answer(request: Score) -> None:
        reply: Scored | ScoreFailed
        async with slots:
            try:
                async with asyncio.timeout(timeout_s):
                    reply = _scored(request, await rewards.score(request.arguments), rewards)
            except TimeoutError:
                reply = ScoreFailed(
                    request.number, f"the reward took longer than rollout.reward_timeout_s: {timeout_s:g}"
                )
            except RewardError as error:
                reply = _failed(request, error)
        frames.send(connection, reply)

    while True:
        frame = await asyncio.to_thread(frames.receive, connection)
        task = start_task(answer(frame.message), "a reward")
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _scored(request: Score, score: RewardScore, rewards: RewardSum) -> Scored | ScoreFailed:
    return Scored(request.number, score.value, score.components, rewards.pop_metrics())


def _failed(request: Score, error: RewardError) -> ScoreFailed:
    """Return the answer for a failed reward. Its traceback goes to the log of this process."""
    traceback.print_exception(error.__cause__ or error)
    return ScoreFailed(request.number, str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
