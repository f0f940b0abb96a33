"""Between a server and those who ask it: the rollout controller and the rollout workers."""

from __future__ import annotations

from pathlib import Path

from areal_core.processes import Message
from areal_core.servers import SamplingParameters


class Loaded(Message):
    """What a server is and can take, in tokens; told to everybody who comes.

    Attributes:
        program: whose version it is, and the version.
        model: its folder.
        dtype: of its parameters, as PyTorch names it.
        sequence_length: the longest sequence, prompt and output.
        experts_shape, experts_dtype: of what is told of each token's experts, layers and choices; nothing where empty.
    """

    program: str
    model: str
    dtype: str
    sequence_length: int
    experts_shape: tuple[int, ...] = ()
    experts_dtype: str = ""


class Generate(Message):
    """One sequence to continue. Answered within `Finished` or `Aborted`, or with `Refused`.

    Attributes:
        number: of the request.
        input_ids: prompt and everything after it so far.
        sampling: its settings.
        seed: of its random numbers.
        images: the files of its images, in base64.
    """

    number: int
    input_ids: list[int]
    sampling: SamplingParameters
    seed: int
    images: tuple[str, ...] = ()


class Refused(Message):
    """A request cannot be served; why."""

    number: int
    text: str


class Cancel(Message):
    """Nobody wants the answer to a request any more."""

    number: int


class Ping(Message):
    """Whether the server still goes from step to step. Answered with `Done`."""


class Abort(Message):
    """End all requests, whoever asked. Answered with `Done`, and whoever asked is told by `Aborted`."""


class Aborted(Message):
    """A request that was ended without an answer."""

    number: int


class Update(Message):
    """Take over the weights in a folder, or the label alone where it is None. Answered with `Done`, or `Failed`."""

    label: str
    folder: Path | None


class Finished(Message):
    """Requests that have ended, one behind another.

    Attributes:
        numbers: of the requests.
        counts: tokens of each.
        stopped: whether each ended with a stop token.
        columns: tokens, numbers of weights (int32) and log-probabilities (float32) of all of them, column by column;
            then the experts of all tokens that were computed.
        computed: of each; see `Outputs`.
        oldest: the lowest of the numbers of weights.
        labels: of the weights, from this number on.
    """

    numbers: list[int]
    counts: list[int]
    stopped: list[bool]
    columns: bytes
    computed: list[int]
    oldest: int
    labels: list[str]
