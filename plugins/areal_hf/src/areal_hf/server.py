"""A server with one thread and one event loop. Each iteration of the loop runs a step of all live requests.

The loop reads and sends messages between two steps. A second thread for generation would halve the throughput of small
models, whose cost is Python code.
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


_CACHED_REQUESTS = 64
"""Number of recent requests whose images are cached as patches."""


def load_model(reference: ModelReference, device: str) -> PreTrainedModel:
    """Load a model in evaluation mode on its device, with frozen parameters.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path, dtype, trusted = reference.path, getattr(torch, reference.dtype), reference.trust_remote_code
    config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    model: PreTrainedModel = auto_class_of(config).from_pretrained(path, dtype=dtype, trust_remote_code=trusted)
    return model.to(device).eval().requires_grad_(False)


def limits_for(settings: HFConfig, model: PreTrainedModel) -> Limits:
    """Return the limits of the settings, within the model's context.

    Raises:
        ValueError: max_sequence_length is larger than the model's context.
    """
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = settings.max_sequence_length
    if length is not None and context is not None and length > context:
        raise ValueError(f"max_sequence_length is {length}, but the model's context is {context} tokens")
    return Limits(
        requests=1 if settings.deterministic else settings.max_concurrent_requests,
        sequence_length=length or context or 1 << 40,
        cache_bytes=int(settings.cache_gib * 2**30),
        prefill_tokens=settings.prefill_tokens,
    )


class Server:
    """Passes requests of peers to the scheduler, and its outputs to the peers.

    Args:
        settings: settings of the plugin.
        reference: the model.
    """

    def __init__(self, settings: HFConfig, reference: ModelReference) -> None:
        torch.set_num_threads(settings.threads)
        model = load_model(reference, settings.device)
        limits = limits_for(settings, model)
        options = {"recompute": settings.update_mode == "recompute", "routed_experts": settings.routed_experts}
        self._scheduler = Scheduler(model, limits, **options)
        self._labels = [""]
        self._numbers = itertools.count()
        self._requests: dict[int, tuple[Peer, int, LiveRequest]] = {}
        self._peers: set[Peer] = set()
        self._arrived = asyncio.Event()
        self._read_images = lru_cache(maxsize=_CACHED_REQUESTS)(partial(_read_images, reference.path))
        program = f"transformers {transformers.__version__}"
        experts = self._scheduler.experts
        experts_form = () if experts is None else (experts.moe.shape, experts.moe.dtype)
        self._loaded = Loaded(program, reference.path, reference.dtype, limits.sequence_length, *experts_form)

    async def on_message(self, peer: Peer) -> None:
        """Handle the messages of a peer until it disconnects. Then its requests are cancelled."""
        peer.notify(self._loaded)
        self._peers.add(peer)
        try:
            while True:
                self._handle(peer, *await peer.receive_request())
                self._arrived.set()
        finally:
            self._peers.discard(peer)
            for number in [number for number, (owner, *_) in self._requests.items() if owner is peer]:
                self._scheduler.cancel(self._requests.pop(number)[2])

    async def run(self) -> None:
        """Generate until this coroutine is cancelled."""
        while True:
            if self._scheduler.idle:
                self._arrived.clear()
                await self._arrived.wait()
            await asyncio.sleep(0)
            for peer in self._peers:  # requests that have just arrived take part in this step
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
                for key, (owner, client_number, request) in [*self._requests.items()]:
                    if owner is peer and client_number == cancelled:
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
                request.images = self._read_images(new.images)
            self._scheduler.add(request)
        except Exception as error:  # noqa: BLE001 - an image may make a library raise anything
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            peer.notify(Refused(new.number, message))
        else:
            self._requests[number] = peer, new.number, request

    def _abort(self) -> None:
        """End all requests without an answer."""
        ended, self._requests = self._requests, {}
        for peer, client_number, request in ended.values():
            self._scheduler.cancel(request)
            with suppress(PeerClosed):
                peer.notify(Aborted(client_number))

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
        """Send each peer the answers to its requests."""
        oldest = int(outputs.versions.min())
        owners = [self._requests.pop(number) for number in outputs.numbers]
        parts = [torch.split(flat, outputs.counts) for flat in (outputs.tokens, outputs.versions, outputs.logprobs)]
        if any(outputs.tops):
            sizes = [count * top for count, top in zip(outputs.counts, outputs.tops, strict=True)]
            parts += [torch.split(flat, sizes) for flat in (outputs.top_ids, outputs.top_logprobs)]
        parts.append(torch.split(outputs.prompt_logprobs, outputs.prompt_counts))
        if outputs.computed:
            parts.append(torch.split(outputs.experts, outputs.computed))
        for peer in dict.fromkeys(owner for owner, *_ in owners):
            indices = [index for index, (owner, *_) in enumerate(owners) if owner is peer]
            data = b"".join(part[index].numpy().tobytes() for part in parts for index in indices)
            numbers = [owners[index][1] for index in indices]
            counts = [outputs.counts[index] for index in indices]
            stopped = [outputs.stopped[index] for index in indices]
            tops = [outputs.tops[index] for index in indices]
            prompts = [outputs.prompt_counts[index] for index in indices]
            computed = [outputs.computed[index] for index in indices] if outputs.computed else []
            with suppress(PeerClosed):
                labels = self._labels[oldest:]
                peer.notify(Finished(numbers, counts, stopped, data, tops, prompts, computed, oldest, labels))


def _read_images(model: str, images: tuple[str, ...]) -> ImageInputs:
    """Return the images of a request as patches. The cache serves siblings, which have the same images."""
    reader: ImageReader = extra_module("areal_vision.images", "hf", "vision").reader_of(model)
    return reader.read([b64decode(image) for image in images])


async def main(settings: HFConfig, model: ModelReference, address: str, ready: Callable[[str], object]) -> None:
    """Load a model, and serve it until the process ends.

    Args:
        settings: settings of the plugin, with the run's key.
        model: the model.
        address: address to listen at; see `areal_core.processes.serve`.
        ready: called with the address of the server when it listens.
    """
    logging.disable_progress_bar()
    server = Server(settings, model)
    listening = await serve(address, server.on_message, lambda: Credentials(settings.key))
    gc.freeze()  # keeps the model's objects out of later garbage collections
    ready(listening.address)
    await server.run()
