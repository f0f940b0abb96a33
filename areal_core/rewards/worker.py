"""The process of a reward worker: load the run's rewards, then answer one request after another.

python -m areal_core.rewards.worker RUN_DIR SOCKET PARENT_PID
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.config import RewardTerm as RewardSettings
from areal_core.config import load_run
from areal_core.launchers.processes import end_with_parent
from areal_core.messages.channel import BlockingChannel, ChannelClosed, Message
from areal_core.rewards.scoring import RewardError, RewardSum, RewardTerm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Selection


def build_rewards(selections: Sequence[Selection]) -> RewardSum:
    """The run's rewards from its config; a reward without a name is called after its component."""
    terms = []
    for selection in selections:
        common = selection.common
        assert isinstance(common, RewardSettings)
        name = common.name or selection.reference.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
        terms.append(RewardTerm(name, selection.build(), common.weight))
    return RewardSum(terms)


def main(run_dir: Path, socket: Path) -> None:
    """Serve until the pool closes the channel."""
    rewards = build_rewards(load_run(run_dir).config.rewards)
    channel = BlockingChannel(socket, timeout_s=30)
    channel.send(Message("ready"))
    while True:
        try:
            request = channel.receive()
        except ChannelClosed:
            return
        try:
            score = rewards(request.fields["arguments"])
            answer = Message("score", {"value": score.value, "components": dict(score.components)})
        except RewardError as error:
            answer = Message("score", {"error": str(error)})
        channel.send(answer)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    main(Path(sys.argv[1]), Path(sys.argv[2]))
