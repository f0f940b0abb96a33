"""The process of a reward worker: load the run's rewards, then answer one request after another.

python -m areal_core.rewards.worker RUN_DIR ADDRESS NAME
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.config import RewardTerm as RewardSettings
from areal_core.config import load_run
from areal_core.config.imports import KeptSources
from areal_core.messages import BlockingChannel, ChannelClosed
from areal_core.messages.scores import Scored, ScoreFailed, WorkerReady
from areal_core.rewards.scoring import RewardError, RewardSum, RewardTerm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Selection

CONNECT_TIMEOUT_S = 60.0


def build_rewards(selections: Sequence[Selection]) -> RewardSum:
    """The run's rewards from its config; a reward without a name is called after its component."""
    terms = []
    for selection in selections:
        common = selection.common
        assert isinstance(common, RewardSettings)
        name = common.name or selection.reference.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
        terms.append(RewardTerm(name, selection.build(), common.weight))
    return RewardSum(terms)


def main(run_dir: Path, address: str, name: str) -> None:
    """Serve until the pool closes the channel."""
    KeptSources.folder = run_dir / "sources"
    rewards = build_rewards(load_run(run_dir).config.rewards)
    channel = BlockingChannel.connect(address, CONNECT_TIMEOUT_S, name)
    channel.send(WorkerReady())
    own = os.getpid()
    with suppress(ChannelClosed):
        while True:
            request = channel.receive().message
            answer: Scored | ScoreFailed
            try:
                score = rewards(request.arguments)
                answer = Scored(request.number, score.value, score.components)
            except RewardError as error:
                answer = ScoreFailed(request.number, str(error))
            if os.getpid() != own:  # a child that the reward has forked and that came back; this channel is not its own
                os._exit(0)
            channel.send(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
