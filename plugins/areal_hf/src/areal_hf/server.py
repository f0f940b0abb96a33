"""The process that generates: one thread, one event loop, a step of all live requests in each of its turns.

    python -m areal_hf.server SOCKET PARENT_PID

Requests come over the channel. Between two steps the loop reads what has arrived and writes what has ended; generating
in a second thread would halve the throughput of small models, whose cost is Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from areal_core.errors import RunError
from areal_core.interfaces import SamplingParameters
from areal_core.launchers.processes import end_with_parent
from areal_core.messages.channel import Channel, ChannelClosed, Message, connect
from areal_hf.attention import attention_for
from areal_hf.config import HFConfig
from areal_hf.rows import LiveRequest, Outputs
from areal_hf.scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONNECT_TIMEOUT_S = 60.0


def load_model(path: str, dtype: str, device: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model in evaluation mode, on its device, with frozen parameters.

    Raises:
        OSError, ValueError: it cannot be loaded.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    if model._supports_sdpa:
        model.set_attn_implementation(attention_for(model.config))
    else:
        model.set_attn_implementation("eager")
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
    """Connects the channel to the scheduler.

    Args:
        channel: to the engine's client, which has checked every request.
        start: the fields of its first message: settings and model.
    """

    def __init__(self, channel: Channel, start: dict[str, Any]) -> None:
        settings = HFConfig(**start["settings"])
        torch.set_num_threads(settings.threads)
        reference = start["model"]
        model = load_model(
            reference["path"], reference["dtype"], settings.device, trust_remote_code=reference["trust_remote_code"]
        )
        limits = limits_for(settings, model)
        self._scheduler = Scheduler(model, limits, recompute=settings.update_mode == "recompute")
        self._channel = channel
        self._requests: dict[int, LiveRequest] = {}
        self._sampling: list[SamplingParameters] = []
        channel.post(
            Message(
                "ready",
                {
                    "sequence_length": limits.sequence_length,
                    "cache_tokens": self._scheduler.cache_tokens,
                    "vocabulary": model.config.get_text_config(decoder=True).vocab_size,
                },
            )
        )

    async def run(self) -> None:
        """Serve until the channel closes."""
        while True:
            if self._scheduler.idle:
                self._handle(await self._channel.receive())
            for message in self._channel.receive_ready():
                self._handle(message)
            outputs = self._scheduler.step()
            if outputs is not None:
                self._report(outputs)
            await asyncio.sleep(0)

    def _handle(self, message: Message) -> None:
        match message.kind:
            case "sampling":
                values = message.fields | {name: tuple(message.fields[name]) for name in ("stop_token_ids", "stop")}
                self._sampling.append(SamplingParameters(**values))
            case "generate":
                for number, input_ids, sampling, seed in message.fields["requests"]:
                    request = LiveRequest(number, input_ids, self._sampling[sampling], seed)
                    self._requests[number] = request
                    self._scheduler.add(request)
            case "cancel":
                cancelled = self._requests.pop(message.fields["number"], None)
                if cancelled is not None:
                    self._scheduler.cancel(cancelled)
            case "update":
                self._update(message.fields["version"], Path(message.fields["path"]))
            case unknown:
                raise ValueError(f"the client sent a message of unknown kind '{unknown}'")

    def _update(self, version: int, folder: Path) -> None:
        error = None
        try:
            self._scheduler.update_weights(version, folder)
        except RunError as refusal:
            error = refusal.message
        self._channel.post(Message("updated", {"version": version, "error": error}))

    def _report(self, outputs: Outputs) -> None:
        for number in outputs.numbers:
            self._requests.pop(number, None)
        columns = (outputs.tokens, outputs.versions, outputs.logprobs)
        fields = {"numbers": outputs.numbers, "counts": outputs.counts, "stopped": outputs.stopped}
        self._channel.post(Message("finished", fields, b"".join(column.numpy().tobytes() for column in columns)))


async def main(socket: Path) -> None:
    """Connect, load the model that the first message names, and serve until the client is gone."""
    channel = await connect(socket, _CONNECT_TIMEOUT_S)
    with contextlib.suppress(ChannelClosed):
        server = Server(channel, (await channel.receive()).fields)
        # The model's modules live as long as the process; walking them again and again costs milliseconds each time.
        gc.freeze()
        await server.run()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    asyncio.run(main(Path(sys.argv[1])))
