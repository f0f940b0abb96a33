"""Between the rollout controller and its rollout workers. Fields are the protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from areal_core.interfaces.inference import Grant, SamplingParameters, Want
from areal_core.interfaces.record import Record
from areal_core.messages.frames import Message


class Welcome(Message):
    """The controller has let a worker in.

    Attributes:
        trains: whether it will be asked for groups of training, so that it needs the data set for that.
    """

    trains: bool


class WorkflowsReady(Message):
    """The worker has loaded the workflow and the data.

    Attributes:
        rows: of the data set; 0 where it was not asked for.
        held_out_rows: of the evaluation's.
    """

    rows: int
    held_out_rows: int


class RunGroup(Message):
    """Run episodes of one prompt. Answered with `GroupEnded`, or `Failed` where the run cannot go on.

    Attributes:
        number: of the group; negative in evaluations.
        row, epoch: of the data.
        samples: sample indices, one for each episode.
        sampling: the settings that every generation starts from.
        is_evaluation: episodes of an evaluation; they are not filtered.
        timeout_s: for all attempts at one episode together; see `EpisodeClock`.
    """

    number: int
    row: int
    epoch: int
    samples: tuple[int, ...]
    sampling: SamplingParameters
    is_evaluation: bool = False
    timeout_s: float = math.inf


class EpisodeShown(Message):
    """An episode for the log of samples."""

    text: str
    reward: float
    rewards: Mapping[str, float]


class GroupFacts(Message):
    """What became of a group, beside its trajectories.

    Attributes:
        rewards: of the episodes that ended well, as they were before the group was shaped.
        metrics: sums over these episodes; see `Episode`.
        shown: a few of them.
        failed: episodes that failed.
        failure: why; empty where none did.
        is_kept: whether the algorithm's group filters keep it.
        versions: weight versions that sampled tokens of its trajectories, the oldest first.
        layout: of the columns of its trajectories; see `column_layout`.
        counted: what rewards have counted since the worker's last group, to be added up.
    """

    rewards: tuple[float, ...]
    metrics: Mapping[str, float]
    shown: tuple[EpisodeShown, ...]
    failed: int
    failure: str
    is_kept: bool
    versions: tuple[int, ...] = ()
    layout: Mapping[str, str] = msgspec.field(default_factory=dict)
    counted: Mapping[str, float] = msgspec.field(default_factory=dict)


class GroupEnded(Message):
    """The episodes of a group have ended.

    Attributes:
        facts: about them.
        record: where their trajectories lie; None where there are none, and in evaluations.
        packed: in evaluations, the trajectories as a record has them; empty where there are none.
    """

    facts: GroupFacts
    record: Record | None = None
    packed: bytes = b""


class AttemptFailed(Message):
    """An attempt at an episode has failed."""

    group: int
    sample: int
    attempt: int
    error: str


class Acquire(Message):
    """A slot of a server, please. Answered with `Granted` or `NoSlot`; ends with `Release`, whether it came or not.

    Attributes:
        number: of this slot, the worker's own.
        want: see `Want`.
    """

    number: int
    want: Want


class Granted(Message):
    """Here is a slot."""

    number: int
    grant: Grant


class NoSlot(Message):
    """There will never be a slot; see `RunError`."""

    number: int
    text: str
    hints: tuple[str, ...]


class SlotLost(Message):
    """The server of a slot is lost: nothing that was asked there will be answered."""

    number: int


class Release(Message):
    """A slot is not needed any more; see `Slots.release`."""

    number: int
    has_failed: bool
