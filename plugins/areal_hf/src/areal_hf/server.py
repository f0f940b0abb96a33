"""The process that generates: one thread, one event loop, a step of all live sequences in each turn.

    python -m areal_hf.server SOCKET PARENT_PID

Requests come over the channel; between two steps the loop reads what has arrived and writes what has ended.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from areal_hf.scheduler import Limits, Scheduler, Sequence
from areal_hf.weights import WeightMismatch, load_weights
from transformers import AutoModelForCausalLM

from areal_core.interfaces import GenerationRequest, SamplingParameters
from areal_core.processes import end_with_parent
from areal_core.rollout.channel import Channel, ChannelClosed, Message, connect

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(fields: dict[str, Any]) -> PreTrainedModel:
    """The model in evaluation mode, on its device."""
    device = fields["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        fields["path"],
        dtype=getattr(torch, fields["dtype"]),
        attn_implementation="sdpa",
        trust_remote_code=fields["trust_remote_code"],
    )
    return model.to(device).eval().requires_grad_(requires_grad=False)


def limits_of(model: PreTrainedModel, fields: dict[str, Any]) -> Limits:
    """How many tokens fit into the memory that the config allows."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    tokens = int(fields["cache_memory_gib"] * 2**30 / bytes_per_token)
    context = getattr(config, "max_position_embeddings", None) or tokens
    return Limits(fields["max_concurrent_requests"], context, tokens)


class Server:
    """Connects the channel to the scheduler."""

    def __init__(self, channel: Channel, fields: dict[str, Any]) -> None:
        torch.set_num_threads(fields["threads"])
        self._channel = channel
        self._model = load_model(fields)
        self._scheduler = Scheduler(self._model, limits_of(self._model, fields))
        self._recomputes = fields["update_mode"] == "recompute"
        self._sequences: dict[str, Sequence] = {}
        self._sampling: dict[int, SamplingParameters] = {}
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        """Serve until the channel closes."""
        receiving = asyncio.ensure_future(self._receive())
        try:
            while not receiving.done():
                if self._scheduler.is_idle:
                    self._arrived.clear()
                    waiting = asyncio.ensure_future(self._arrived.wait())
                    await asyncio.wait({waiting, receiving}, return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
                    continue
                for sequence, generation in self._scheduler.step():
                    self._sequences.pop(sequence.request.request_id, None)
                    fields = {
                        "id": sequence.request.request_id,
                        "output_ids": generation.output_ids,
                        "logprobs": generation.logprobs,
                        "versions": generation.versions,
                        "finish_reason": int(generation.finish_reason),
                    }
                    self._channel.send(Message("generated", fields))
                await asyncio.sleep(0)
        finally:
            receiving.cancel()
            with suppress(asyncio.CancelledError, ChannelClosed):
                await receiving

    async def _receive(self) -> None:
        while True:
            message = await self._channel.receive()
            getattr(self, f"_on_{message.kind}")(message.fields)
            self._arrived.set()

    def _on_sampling(self, fields: dict[str, Any]) -> None:
        values = fields["values"]
        values["stop_token_ids"], values["stop"] = tuple(values["stop_token_ids"]), tuple(values["stop"])
        self._sampling[fields["id"]] = SamplingParameters(**values)

    def _on_generate(self, fields: dict[str, Any]) -> None:
        name = fields["id"]
        request = GenerationRequest(name, fields["input_ids"], self._sampling[fields["sampling"]], fields["seed"])
        refusal = self._scheduler.refusal(request)
        if refusal is not None:
            self._channel.send(Message("refused", {"id": name, "error": refusal}))
            return
        self._sequences[name] = self._scheduler.add(request)

    def _on_cancel(self, fields: dict[str, Any]) -> None:
        sequence = self._sequences.pop(fields["id"], None)
        if sequence is not None:
            sequence.cancelled = True

    def _on_update(self, fields: dict[str, Any]) -> None:
        try:
            load_weights(self._model, Path(fields["path"]))
        except WeightMismatch as error:
            self._channel.send(Message("updated", {"version": fields["version"], "error": str(error)}))
            return
        self._scheduler.version = fields["version"]
        if self._recomputes:
            self._scheduler.rebuild()
        self._channel.send(Message("updated", {"version": fields["version"]}))


async def main(socket: Path) -> None:
    """Connect, load the model that the first message names, and serve."""
    channel = await connect(socket, timeout_s=30)
    with suppress(ChannelClosed):
        server = Server(channel, (await channel.receive()).fields)
        channel.send(Message("ready"))
        await server.run()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    asyncio.run(main(Path(sys.argv[1])))
