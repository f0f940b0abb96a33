"""Messages of the SDK as batches of tokens, and results as messages. The SDK's own protobuf descriptors are used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as proto

from areal_core.data import PackedBatch, Ragged
from areal_tinker.errors import RequestError
from areal_tinker.losses import find_loss

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from areal_core.data import Generation

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    proto.DTYPE_FLOAT32: np.dtype(np.float32),
    proto.DTYPE_INT64: np.dtype(np.int64),
    proto.DTYPE_INT32: np.dtype(np.int32),
}
TARGETS: Final = "target_tokens"
NO_TOKEN: Final = -99999.0
"""Log-probability that the SDK defines for an empty cell of top-k values."""


def read_forward_backward(body: bytes) -> proto.ForwardBackwardRequest:
    """Parse the message of a forward or forward-backward pass.

    Raises:
        RequestError: the bytes are no such message.
    """
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}") from None
    return message


def settings_of(message: proto.ForwardBackwardRequest) -> dict[str, float]:
    """Return `loss_fn_config`.

    Raises:
        RequestError: a value is a text or not finite, or the bounds are in the wrong order.
    """
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise RequestError(f"loss_fn_config['{name}'] is a text, {value.text!r}; the losses here take numbers")
        settings[name] = value.number
    for name, number in settings.items():
        if not math.isfinite(number):
            raise RequestError(f"loss_fn_config['{name}'] is {number}, which is not finite")
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", math.inf)
    if low > high:
        raise RequestError(f"loss_fn_config has clip_low_threshold {low:g} above clip_high_threshold {high:g}")
    return settings


def read_batch(message: proto.ForwardBackwardRequest, vocabulary: int, longest: int) -> PackedBatch:
    """Return the data of a pass as a batch, checked.

    Args:
        message: the message.
        vocabulary: number of token ids of the model.
        longest: largest number of tokens in a sequence.

    Returns:
        A batch with `input_ids` and `targets`, [sum(T)] int64, and the other `loss_fn_inputs`, [sum(T)] float32.

    Raises:
        RequestError: the data cannot be trained on; the message names the datum.
    """
    loss, settings = find_loss(message.loss_fn), settings_of(message)
    if not message.data:
        raise RequestError("data is empty")
    names = frozenset(message.data[0].loss_fn_inputs)
    loss.check(message.loss_fn, names - {TARGETS}, frozenset(settings))
    lengths: list[int] = []
    columns: dict[str, list[np.ndarray[Any, Any]]] = {
        name: [] for name in ("input_ids", "targets", *sorted(names - {TARGETS}))
    }
    for number, datum in enumerate(message.data):
        where = f"data[{number}]"
        ids = read_tokens(datum.model_input, where)
        if len(ids) > longest:
            raise RequestError(f"{where} has {len(ids)} tokens, and the model's limit is {longest}")
        if frozenset(datum.loss_fn_inputs) != names or TARGETS not in names:
            found = ", ".join(sorted(datum.loss_fn_inputs)) or "none"
            raise RequestError(f"{where} has the loss_fn_inputs {found}; all data need {TARGETS} and the same names")
        lengths.append(len(ids))
        columns["input_ids"].append(ids)
        for name, tensor in datum.loss_fn_inputs.items():
            values = _values(tensor, f"{where}.loss_fn_inputs['{name}']", len(ids), is_ids=name == TARGETS)
            columns["targets" if name == TARGETS else name].append(values)
        _check_ids(ids, vocabulary, f"{where}.model_input")
        _check_ids(columns["targets"][-1], vocabulary, f"{where}.loss_fn_inputs['{TARGETS}']")
    flat = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    tokens = {
        name: value.to(torch.int64 if name in {"input_ids", "targets"} else torch.float32)
        for name, value in flat.items()
    }
    return PackedBatch(Ragged(torch.tensor(lengths), tokens))


def read_tokens(chunks: Iterable[Any], where: str) -> np.ndarray[Any, Any]:
    """Return the tokens of a model input, [T] int64.

    Raises:
        RequestError: it is empty or has an image.
    """
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(f"{where} has a chunk of type {kind}; this server takes text alone")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), where).astype(np.int64))
    if not sum(map(len, parts)):
        raise RequestError(f"{where} has no tokens")
    return np.concatenate(parts)


def _array(content: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(content, dtype)
    except ValueError:
        raise RequestError(f"{where} has {len(content)} bytes, which are no {dtype} numbers") from None


def _values(tensor: proto.Tensor, where: str, length: int, *, is_ids: bool) -> np.ndarray[Any, Any]:
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise RequestError(f"{where} has the shape {list(tensor.shape)}; this server takes one number for each token")
    if tensor.dtype not in _DTYPES:
        raise RequestError(f"{where} has a dtype that this server does not take; use float32 or int64")
    if is_ids and tensor.dtype == proto.DTYPE_FLOAT32:
        raise RequestError(f"{where} has float32 numbers, and tokens are integers")
    values = _array(tensor.dense, _DTYPES[tensor.dtype], where)
    if len(values) != length:
        raise RequestError(f"{where} has {len(values)} values for {length} tokens")
    if not np.isfinite(values).all():
        raise RequestError(f"{where} has a value that is not finite")
    return values


def _check_ids(ids: np.ndarray[Any, Any], vocabulary: int, where: str) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocabulary):
        bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise RequestError(f"{where} has the token {bad}; the model's tokens are 0 to {vocabulary - 1}")


def write_outputs(logprobs: torch.Tensor, lengths: Sequence[int], loss: float) -> bytes:
    """Return the result of a pass.

    Args:
        logprobs: [sum(T)] float32.
        lengths: number of tokens of each datum.
        loss: the sum of the loss over all data.
    """
    result = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    result.metrics["loss:sum"] = loss
    record = result.loss_fn_outputs.add()
    record.num_datums = len(lengths)
    field = record.fields["logprobs"]
    field.dtype = proto.DTYPE_FLOAT32
    field.data = logprobs.to(torch.float32).numpy().tobytes()
    field.offsets = (4 * np.cumsum([0, *lengths], dtype=np.int64)).tobytes()
    return result.SerializeToString()


def write_samples(generations: Sequence[Generation], prompt_length: int, *, has_prompt_logprobs: bool) -> bytes:
    """Return the result of a sampling request.

    Args:
        generations: the samples of one prompt.
        prompt_length: number of its tokens.
        has_prompt_logprobs: whether the request asked for the log-probabilities of the prompt.
    """
    from areal_core.data import FinishReason

    result = proto.SampleResponse()
    for generation in generations:
        sequence = result.sequences.add()
        is_cut = generation.finish_reason is FinishReason.LENGTH
        sequence.stop_reason = proto.STOP_REASON_LENGTH if is_cut else proto.STOP_REASON_STOP
        sequence.tokens = np.asarray(generation.output_ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(generation.logprobs, np.float32).tobytes()
        if generation.top_ids.size:
            _write_top(sequence.topk_sampled_logprobs, generation)
    if has_prompt_logprobs:
        values = generations[0].prompt_logprobs
        assert values is not None
        assert len(values) == prompt_length - 1
        result.prompt_logprobs = np.asarray([np.nan, *values], np.float32).tobytes()
    return result.SerializeToString()


def _write_top(target: proto.TopkLogprobs, generation: Generation) -> None:
    target.token_ids, target.logprobs = generation.top_ids.tobytes(), generation.top_logprobs.tobytes()
    target.length, target.k = generation.top_ids.shape
