"""Messages between a server and its peers: the rollout controller and the rollout workers."""

from __future__ import annotations

from pathlib import Path

from areal_core.processes import Message
from areal_core.servers import SamplingParameters


class Loaded(Message):
    """A server's report to each new connection.

    Attributes:
        program: name and version of the program.
        model: folder of the model.
        dtype: dtype of the parameters, as PyTorch names it.
        sequence_length: largest number of tokens of a sequence, prompt and output together.
        experts_shape, experts_dtype: (layers, choices) and dtype of a token's routed experts. Both are empty if the
            server does not report them.
    """

    program: str
    model: str
    dtype: str
    sequence_length: int
    experts_shape: tuple[int, ...] = ()
    experts_dtype: str = ""


class Generate(Message):
    """A request to continue one sequence. The reply is a `Finished`, an `Aborted` or a `Refused` with its number.

    Attributes:
        number: number of the request.
        input_ids: the prompt and everything after it so far.
        sampling: sampling settings.
        seed: seed of the random numbers.
        images: image files, in base64.
    """

    number: int
    input_ids: list[int]
    sampling: SamplingParameters
    seed: int
    images: tuple[str, ...] = ()


class Refused(Message):
    """The server refuses a request, for the reason in `text`."""

    number: int
    text: str


class Cancel(Message):
    """Cancel a request."""

    number: int


class Ping(Message):
    """A health check. The reply is a `Done` between two steps."""


class Abort(Message):
    """End all requests of all peers. Each gets an `Aborted`. The reply is a `Done`."""


class Aborted(Message):
    """A request ended without an answer."""

    number: int


class Update(Message):
    """Load the weights of a folder, or only set the label if the folder is None. The reply is a `Done` or `Failed`."""

    label: str
    folder: Path | None


class Finished(Message):
    """The answers to requests that ended in one step.

    Attributes:
        numbers: numbers of the requests.
        counts: number of tokens of each answer.
        stopped: True for each answer that ended with a stop token.
        columns: concatenated arrays over all tokens: tokens (int32), numbers of weights (int32), log-probabilities
            (float32), likeliest tokens (int32) and their log-probabilities (float32); then the log-probabilities of
            all prompts (float32), and the routed experts of all computed tokens.
        tops: number of likeliest tokens of each token, for each request.
        prompt_counts: number of log-probabilities of each request's prompt.
        computed: number of computed tokens of each request; see `Outputs`.
        oldest: lowest number of weights in `columns`.
        labels: labels of the weights with the numbers `oldest`, `oldest` + 1, ...
    """

    numbers: list[int]
    counts: list[int]
    stopped: list[bool]
    columns: bytes
    tops: list[int]
    prompt_counts: list[int]
    computed: list[int]
    oldest: int
    labels: list[str]
