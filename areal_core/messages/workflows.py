"""Messages between the rollout controller and its rollout workers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from areal_core.interfaces.inference import Grant, SamplingParameters, SlotRequest
from areal_core.interfaces.record import Record
from areal_core.runtime.frames import Message


class Welcome(Message):
    """The controller's first message to a worker.

    Attributes:
        trains: whether the worker will run training groups, for which it loads the training data set.
    """

    trains: bool


class WorkflowsReady(Message):
    """The worker has loaded the workflow and the data.

    Attributes:
        rows: number of rows in the training data set; 0 if the worker did not load it.
        held_out_rows: number of rows in the evaluation data set; 0 without an evaluation.
    """

    rows: int
    held_out_rows: int


class RunGroup(Message):
    """Run the episodes of one prompt. Answered with `GroupResult`, or with `Failed` if the run cannot continue.

    Attributes:
        number: number of the group; negative in evaluations.
        row, epoch: data row of the prompt, and epoch of the data set.
        samples: sample indices, one per episode.
        sampling: default sampling parameters of every generation.
        is_evaluation: whether the episodes belong to an evaluation; group filters do not apply to them.
        timeout_s: seconds that all tries of one episode may take together; see `EpisodeClock`.
    """

    number: int
    row: int
    epoch: int
    samples: tuple[int, ...]
    sampling: SamplingParameters
    is_evaluation: bool = False
    timeout_s: float = math.inf


class EpisodeShown(Message):
    """An episode for the sample log.

    Attributes:
        text: prompt and completion.
        reward: reward of the episode.
        rewards: components of the reward.
        prompt_length: characters at the beginning of the text that are the prompt; 0 if that is not known.
    """

    text: str
    reward: float
    rewards: Mapping[str, float]
    prompt_length: int = 0


class GroupOutcome(Message):
    """The outcome of a group, without its trajectories.

    Attributes:
        rewards: rewards of the completed episodes, before reward shaping.
        metrics: sums over the completed episodes; see `Episode`.
        shown: some of the episodes, for the sample log.
        failed: number of episodes that failed.
        failure: error of a failed episode; empty if none failed.
        is_kept: whether the algorithm's group filters keep the group.
        versions: weight versions that sampled tokens of its trajectories, oldest first.
        layout: layout of the columns of its trajectories; see `column_layout`.
        counted: counters of the reward functions since the worker's last group. The controller adds them up.
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


class GroupResult(Message):
    """The episodes of a group have ended.

    Attributes:
        outcome: outcome of the group.
        record: reference to the trajectories in a segment; None if the group has none, and in evaluations.
        packed: bytes of the trajectories in an evaluation, encoded as in a segment; empty otherwise.
    """

    outcome: GroupOutcome
    record: Record | None = None
    packed: bytes = b""


class AttemptFailed(Message):
    """A try of an episode has failed; the worker retries it or gives it up."""

    group: int
    sample: int
    attempt: int
    error: str


class Acquire(Message):
    """Request a slot of a server. Answered with `Granted` or `NoSlot`, and ended with `Release` in each case.

    Attributes:
        number: number of this lease, chosen by the worker.
        request: see `SlotRequest`.
    """

    number: int
    request: SlotRequest


class Granted(Message):
    """The worker holds the slot until it sends `Release`."""

    number: int
    grant: Grant


class NoSlot(Message):
    """The request fails, because no server will ever have a slot. `text` and `hints` are those of a `RunError`."""

    number: int
    text: str
    hints: tuple[str, ...]


class SlotLost(Message):
    """The server of a slot is lost. The worker stops waiting for its answer and continues the request elsewhere."""

    number: int


class Release(Message):
    """The worker returns its slot or leaves the queue; see `Slots.release`."""

    number: int
    has_failed: bool
