"""A server: one thread, one event loop, a step of all live requests in each of its turns.

Between two steps the loop reads what has arrived and writes what has ended; generating in a second thread would halve
the throughput of small models, whose cost is Python.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from base64 import b64decode
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig
from transformers.utils import logging

from areal_core.errors import RunError
from areal_core.models import auto_class_of
from areal_core.plugins import extra_module
from areal_core.processes import Credentials, Done, Failed, Peer, PeerClosed, serve
from areal_hf.limits import Limits
from areal_hf.messages import Abort, Aborted, Cancel, Finished, Generate, Loaded, Ping, Refused, Update
from areal_hf.rows import LiveRequest, Outputs
from areal_hf.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from areal_core.engines import ModelReference
    from areal_hf.config import HFConfig
    from areal_vision.images import ImageInputs, ImageReader


_IMAGES_KEPT = 64
"""Of requests of late, as patches."""


def load_model(reference: ModelReference, device: str) -> PreTrainedModel:
    """The model in evaluation mode, on its device, with frozen parameters.

    Raises:
        OSError, ValueError: it cannot be loaded.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path, dtype, trusted = reference.path, getattr(torch, reference.dtype), reference.trust_remote_code
    config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    model: PreTrainedModel = auto_class_of(config).from_pretrained(path, dtype=dtype, trust_remote_code=trusted)
    return model.to(device).eval().requires_grad_(False)


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
    """Connects peers to the scheduler.

    Args:
        settings: of the plugin.
        model: that is served.
    """

    def __init__(self, settings: HFConfig, reference: ModelReference) -> None:
        torch.set_num_threads(settings.threads)
        model = load_model(reference, settings.device)
        limits = limits_for(settings, model)
        ways = {"recompute": settings.update_mode == "recompute", "routed_experts": settings.routed_experts}
        self._scheduler = Scheduler(model, limits, **ways)
        self._labels = [""]
        self._numbers = itertools.count()
        self._requests: dict[int, tuple[Peer, int, LiveRequest]] = {}
        self._peers: set[Peer] = set()
        self._arrived = asyncio.Event()
        self._read = lru_cache(maxsize=_IMAGES_KEPT)(partial(_read, reference.path))
        program = f"transformers {transformers.__version__}"
        told = () if (experts := self._scheduler.experts) is None else (experts.moe.shape, experts.moe.dtype)
        self._loaded = Loaded(program, reference.path, reference.dtype, limits.sequence_length, *told)

    async def on_message(self, peer: Peer) -> None:
        """Let a peer ask for things until it is gone."""
        peer.notify(self._loaded)
        self._peers.add(peer)
        try:
            while True:
                self._handle(peer, *await peer.receive_request())
                self._arrived.set()
        finally:
            self._peers.discard(peer)
            for number in [number for number, (asker, *_) in self._requests.items() if asker is peer]:
                self._scheduler.cancel(self._requests.pop(number)[2])

    async def run(self) -> None:
        """Generate for ever."""
        while True:
            if self._scheduler.idle:
                self._arrived.clear()
                await self._arrived.wait()
            await asyncio.sleep(0)
            for peer in self._peers:  # what has just come takes part in this step
                with suppress(PeerClosed):
                    for request in peer.receive_ready():
                        self._handle(peer, *request)
            if (outputs := self._scheduler.step()) is not None:
                self._report(outputs)

    def _handle(self, peer: Peer, message: Any, number: int) -> None:
        match message:
            case Generate():
                self._add(peer, message)
            case Cancel(cancelled):
                for key, (asker, theirs, request) in [*self._requests.items()]:
                    if asker is peer and theirs == cancelled:
                        del self._requests[key]
                        self._scheduler.cancel(request)
            case Abort():
                self._abort()
                peer.reply(number, Done())
            case Ping():
                peer.reply(number, Done())
            case Update():
                peer.reply(number, self._update(message))
            case unknown:
                raise ValueError(f"a peer sent a message that is not for a server: {type(unknown).__name__}")

    def _add(self, peer: Peer, new: Generate) -> None:
        number = next(self._numbers)
        request = LiveRequest(number, new.input_ids, new.sampling, new.seed)
        try:
            if new.images:
                request.images = self._read(new.images)
            self._scheduler.add(request)
        except Exception as error:  # noqa: BLE001 - an image may make a library raise anything
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            peer.notify(Refused(new.number, message))
        else:
            self._requests[number] = peer, new.number, request

    def _abort(self) -> None:
        """End all requests; what they have so far is not told."""
        ended, self._requests = self._requests, {}
        for peer, theirs, request in ended.values():
            self._scheduler.cancel(request)
            with suppress(PeerClosed):
                peer.notify(Aborted(theirs))

    def _update(self, update: Update) -> Done | Failed:
        version = len(self._labels)
        try:
            if update.folder is not None:
                self._scheduler.update_weights(version, update.folder)
        except RunError as refusal:
            return Failed(refusal.message)
        self._scheduler.version = version
        self._labels.append(update.label)
        return Done()

    def _report(self, outputs: Outputs) -> None:
        """To each peer what it has asked for."""
        oldest = int(outputs.versions.min())
        askers = [self._requests.pop(number) for number in outputs.numbers]
        pieces = [torch.split(each, outputs.counts) for each in (outputs.tokens, outputs.versions, outputs.logprobs)]
        if outputs.computed:
            pieces.append(torch.split(outputs.experts, outputs.computed))
        for peer in dict.fromkeys(asker for asker, *_ in askers):
            own = [place for place, (asker, *_) in enumerate(askers) if asker is peer]
            data = b"".join(piece[place].numpy().tobytes() for piece in pieces for place in own)
            numbers = [askers[place][1] for place in own]
            counts, stopped = [outputs.counts[place] for place in own], [outputs.stopped[place] for place in own]
            computed = [outputs.computed[place] for place in own] if outputs.computed else []
            with suppress(PeerClosed):
                peer.notify(Finished(numbers, counts, stopped, data, computed, oldest, self._labels[oldest:]))


def _read(model: str, images: tuple[str, ...]) -> ImageInputs:
    """The images of a request; its siblings have the same."""
    reader: ImageReader = extra_module("areal_vision.images", "hf", "vision").reader_of(model)
    return reader.read([b64decode(image) for image in images])


async def main(settings: HFConfig, model: ModelReference, address: str, ready: Callable[[str], object]) -> None:
    """Load a model and serve it for ever.

    Args:
        settings: of the plugin, with the run's key.
        model: that is served.
        address: where; see `areal_core.messages.serve`.
        ready: called with where it is by then.
    """
    logging.disable_progress_bar()
    server = Server(settings, model)
    listening = await serve(address, server.on_message, lambda: Credentials(settings.key))
    gc.freeze()  # what the model is made of is not walked again and again
    ready(listening.address)
    await server.run()
