"""The process that generates: one thread, one event loop, a step of all live requests in each of its turns.

Requests come over the connection. Between two steps the loop reads what has arrived and writes what has ended;
generating in a second thread would halve the throughput of small models, whose cost is Python.
"""

from __future__ import annotations

import asyncio
import gc
from base64 import b64decode
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from areal_core.errors import RunError
from areal_core.messages import Peer, PeerClosed, PeerCorrupt, connect
from areal_hf.attention import attention_for
from areal_hf.config import HFConfig
from areal_hf.messages import (
    Begun,
    Cancel,
    Finished,
    Generate,
    Load,
    Loaded,
    NewRequest,
    NewSampling,
    Refused,
    Update,
    Updated,
)
from areal_hf.rows import LiveRequest, Outputs
from areal_hf.scheduler import Limits, Scheduler
from areal_vision.pictures import Pictures, reader_of
from areal_vision.places import is_vision_config, set_attention

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from areal_core.interfaces import SamplingParameters

_CONNECT_TIMEOUT_S = 60.0
_PICTURES_KEPT = 64
"""Of requests of late, as patches."""


def load_model(path: str, dtype: str, device: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model in evaluation mode, on its device, with frozen parameters.

    Raises:
        OSError, ValueError: it cannot be loaded.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    factory: Any = AutoModelForImageTextToText if is_vision_config(config) else AutoModelForCausalLM
    model: PreTrainedModel = factory.from_pretrained(
        path, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    set_attention(model, attention_for(model.config) if model._supports_sdpa else "eager")
    return model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]


def limits_for(settings: HFConfig, model: PreTrainedModel) -> Limits:
    """What the settings allow, within the model's own context.

    Raises:
        ValueError: the settings ask for more than the model can.
    """
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = settings.max_sequence_length
    if length is not None and context is not None and length > context:
        raise ValueError(f"max_sequence_length is {length}, the model's context is {context} tokens")
    return Limits(
        requests=1 if settings.deterministic else settings.max_concurrent_requests,
        sequence_length=length or context or 1 << 40,
        cache_bytes=int(settings.cache_gib * 2**30),
        prefill_tokens=settings.prefill_tokens,
    )


class Server:
    """Connects the peer to the scheduler.

    Args:
        peer: to the engine's client, which has checked every request.
        load: its first message: settings and model.
    """

    def __init__(self, peer: Peer, load: Load) -> None:
        settings = HFConfig.model_validate_json(load.settings)
        torch.set_num_threads(settings.threads)
        reference = load.model
        model = load_model(
            reference.path, reference.dtype, settings.device, trust_remote_code=reference.trust_remote_code
        )
        limits = limits_for(settings, model)
        ways = {"recompute": settings.update_mode == "recompute", "routed_experts": settings.routed_experts}
        self._scheduler = Scheduler(model, limits, **ways)
        self._peer = peer
        self._requests: dict[int, LiveRequest] = {}
        self._sampling: list[SamplingParameters] = []
        self._read = lru_cache(maxsize=_PICTURES_KEPT)(partial(_read, reference.path))
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        told = () if (experts := self._scheduler.experts) is None else (experts.mixture.shape, experts.mixture.dtype)
        peer.notify(Loaded(limits.sequence_length, self._scheduler.cache_tokens, vocabulary, *told))

    async def run(self) -> None:
        """Serve until the peer closes."""
        while True:
            if self._scheduler.idle:
                self._handle(await self._peer.receive())
            for message in self._peer.receive_ready():
                self._handle(message)
            outputs = self._scheduler.step()
            if begun := self._scheduler.begun:
                self._peer.notify(Begun(begun))
                self._scheduler.begun = []
            if outputs is not None:
                self._report(outputs)
            await asyncio.sleep(0)

    def _handle(self, message: Any) -> None:
        match message:
            case NewSampling(sampling):
                self._sampling.append(sampling)
            case Generate(requests):
                for new in requests:
                    self._add(new)
            case Cancel(number):
                cancelled = self._requests.pop(number, None)
                if cancelled is not None:
                    self._scheduler.cancel(cancelled)
            case Update(version, folder):
                self._update(version, folder)
            case unknown:
                raise ValueError(f"the client sent a message that is not for an engine: {type(unknown).__name__}")

    def _add(self, new: NewRequest) -> None:
        request = LiveRequest(new.number, new.input_ids, self._sampling[new.sampling], new.seed)
        try:
            if new.images:
                request.pictures = self._read(new.images)
            self._scheduler.add(request)
        except Exception as error:  # noqa: BLE001 - a picture may make a library raise anything
            told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._peer.notify(Refused(new.number, told))
        else:
            self._requests[new.number] = request

    def _update(self, version: int, folder: Path) -> None:
        error = None
        try:
            self._scheduler.update_weights(version, folder)
        except RunError as refusal:
            error = refusal.message
        self._peer.notify(Updated(version, error))

    def _report(self, outputs: Outputs) -> None:
        for number in outputs.numbers:
            self._requests.pop(number, None)
        columns = outputs.tokens, outputs.versions, outputs.logprobs, outputs.experts
        data = b"".join(column.numpy().tobytes() for column in columns)
        self._peer.notify(Finished(outputs.numbers, outputs.counts, outputs.stopped, data, outputs.computed))


def _read(model: str, images: tuple[str, ...]) -> Pictures:
    """The pictures of a request; its siblings have the same."""
    return reader_of(model).read([b64decode(image) for image in images])


async def main(address: str) -> None:
    """Connect, load the model that the first message names, and serve until the client is gone."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    peer = await connect(address, _CONNECT_TIMEOUT_S, "hf")
    try:
        server = Server(peer, await peer.receive())
        # The model's modules live as long as the process; walking them again and again costs milliseconds each time.
        gc.freeze()
        await server.run()
    except PeerCorrupt:
        raise
    except PeerClosed:
        return
