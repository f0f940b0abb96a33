"""Generate and score answers with a run's engine and rollout workers, without training.

    python generate.py grpo/addition evaluation.limit=8 model.source.steps=200

The program has a process of its own, `player`, beside the config's rollout workers and servers. areal starts all of
them where the config's launcher has room, watches them, and ends them with the player or at Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from areal_core.config import load_run, resolve
from areal_core.launchers import ProcessGroup
from areal_core.processes import Member, Message, private_folder, run_role
from areal_core.programs import (
    Played,
    RunFolder,
    add_request_arguments,
    check_evaluation,
    open_evaluator,
    print_error,
    print_out,
    read_request,
    rollout_groups,
    supervise,
    write_run_folder,
)

PLAYER = "--player"
"""First argument of the player's command; the run folder follows."""


class Answered(Message):
    """An answer of the model, from the player to the driver."""

    row: int
    reward: float
    text: str


def main(words: list[str]) -> int:
    """Start the processes, and print each answer; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_request_arguments(parser)
    request = read_request(parser.parse_intermixed_args(words))
    resolved = resolve(request.config, request.plugins, request.overrides, imports=True)
    check_evaluation(resolved)
    signals: list[int] = []
    with private_folder() as folder:
        run = RunFolder(folder / "run")
        write_run_folder(resolved, run)
        player = ProcessGroup("player", "player", [sys.executable, __file__, PLAYER, str(run.path)])
        groups = [player, *rollout_groups(resolved.config, run.path, beside=player.name)]
        asyncio.run(
            supervise(
                resolved,
                run,
                groups,
                player.role,
                on_message=show,
                update=lambda progress: None,
                log=print_error,
                signals=signals,
            )
        )
    return 128 + signals[0] if signals else 0


def show(message: Any) -> None:
    """Print an answer. The driver also gets messages of other processes, such as heartbeats."""
    if isinstance(message, Answered):
        print_out(f"row {message.row}  reward {message.reward:g}  {message.text!r}")


def play(member: Member) -> int:
    """Play all episodes in the player's process, or those that end before a Ctrl-C; return its exit code."""
    return member.run(play_episodes(member, RunFolder(Path(sys.argv[2]))))


async def play_episodes(member: Member, run: RunFolder) -> None:
    """Send the driver each episode that has ended."""

    def take(played: Played) -> None:
        if played.episode is None:
            member.log(f"row {played.row} failed: {played.error}")
        else:
            member.notify(Answered(played.row, played.episode.reward, played.episode.text))

    resolved = load_run(run.path)
    async with open_evaluator(resolved, run, member) as (evaluator, _):
        with member.phase("generating"):
            await evaluator.play(take, resolved.config.rollout)


if __name__ == "__main__":
    sys.exit(run_role(play) if sys.argv[1:2] == [PLAYER] else main(sys.argv[1:]))
