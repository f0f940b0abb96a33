"""Between the process that generates, the engine in the rollout controller, and the clients in rollout workers."""

from __future__ import annotations

from pathlib import Path

from areal_core.interfaces import ModelReference, SamplingParameters
from areal_core.messages.frames import Message


class Load(Message):
    """Load the model; `settings` is the plugin's section as JSON. Answered with `Loaded`."""

    settings: str
    model: ModelReference


class Loaded(Message):
    """The model is ready, and what it can take, in tokens; told to the engine, and to each client when it comes.

    Attributes:
        address: where clients ask.
        experts_shape, experts_dtype: of what is told of each token's experts, layers and choices; nothing where empty.
    """

    address: str
    sequence_length: int
    cache_tokens: int
    vocabulary: int
    experts_shape: tuple[int, ...] = ()
    experts_dtype: str = ""


class Generate(Message):
    """One sequence to continue. Answered within `Finished`, or with `Refused`.

    Attributes:
        number: of the request.
        input_ids: prompt and everything after it so far.
        sampling: its settings.
        seed: of its random numbers.
        images: the files of its pictures, in base64.
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


class Update(Message):
    """Take over the weights in a folder. Answered with `Updated`."""

    version: int
    folder: Path


class Updated(Message):
    """Whether the weights were taken over, and why not."""

    version: int
    error: str | None


class Finished(Message):
    """Requests that have ended, one behind another.

    Attributes:
        numbers: of the requests.
        counts: tokens of each.
        stopped: whether each ended with a stop token.
        columns: tokens, versions (int32) and log-probabilities (float32) of all of them, column by column; then the
            experts of all tokens that were computed.
        computed: of each; see `Outputs`.
    """

    numbers: list[int]
    counts: list[int]
    stopped: list[bool]
    columns: bytes
    computed: list[int]
