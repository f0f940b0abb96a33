"""An inference engine: an adapter for a kind of inference server that areal does not know, that of `toy_server.py`.

    areal run --plugins grpo inference_engine.type=example/toy_adapter

The run starts its servers, restarts those that die, and gives them new weights under live requests.
`inference_engine.addresses` names servers that run elsewhere, and `areal serve --join` adds one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.plugins import register
from areal_core.servers import (
    Chunk,
    FleetSettings,
    HTTPAdapter,
    InferenceCapabilities,
    RequestRefusedError,
    ServerCommand,
    ServerIdentity,
    ServerRefusedError,
    UpdateRefusedError,
)
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from areal_core.engines import ModelReference
    from areal_core.servers import PartialGeneration, ServerConnection, UpdateMode


class ToyConfig(FleetSettings):
    """Settings of these servers, and those that every fleet has, such as `servers` and `addresses`."""

    threads: int = Field(1, ge=1, description="CPU threads of one server.")


@register("inference_engines")
class ToyAdapter(HTTPAdapter):
    """Generate with toy servers. `ServerAdapter` describes the methods; those that these servers lack have defaults."""

    Config = ToyConfig
    settings: ToyConfig
    name = "toy"

    def capabilities(self) -> InferenceCapabilities:
        """The server has no KV cache, so every key and value is of the current weights."""
        return InferenceCapabilities(frozenset({"recompute"}), seeded=True)

    def command(self, model: ModelReference, host: str, port: int, scratch: Path) -> ServerCommand:
        """Start the server with the Python of this process. Every user of the machine sees a command line: no key."""
        program = [sys.executable, str(Path(__file__).with_name("toy_server.py")), "--model", model.path]
        options = ["--host", host, "--port", str(port), "--threads", str(self.settings.threads)]
        return ServerCommand([*program, *options], {"TOY_API_KEY": self.settings.key})

    async def identify(self, connection: ServerConnection) -> ServerIdentity:
        """Read the answer to a GET."""
        try:
            info = await connection.get("/info")
            return ServerIdentity(info["version"], info["model"], info["context"], slots=8, dtype="float32")
        except (RequestRefusedError, LookupError, TypeError) as error:
            raise ServerRefusedError(f"answers, but not as a toy server does: {error!r:.200}") from None

    async def generate(self, connection: ServerConnection, partial: PartialGeneration) -> AsyncIterator[Chunk]:
        """Stream the tokens, so that those that have arrived survive the server."""
        sampling = partial.sampling
        body = {
            "input_ids": partial.input_ids,
            "seed": partial.seed & (2**63 - 1),
            "temperature": sampling.temperature,
            "greedy": sampling.greedy,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "stop_token_ids": sampling.stop_token_ids,
        }
        async for event in connection.post_for_events("/generate", body):
            yield Chunk(event["ids"], event["logprobs"], event["finish"], event["spans"])

    async def stop(self, connection: ServerConnection, mode: UpdateMode) -> None:
        """Pause: the server draws no token from here on."""
        await connection.post("/pause")

    async def resume(self, connection: ServerConnection) -> None:
        """Continue after a pause."""
        await connection.post("/resume")

    async def abort(self, connection: ServerConnection) -> None:
        """End all requests."""
        await connection.post("/abort")

    async def load(self, connection: ServerConnection, folder: Path, label: str, mode: UpdateMode) -> None:
        """Change weights and label together."""
        try:
            await connection.post("/load", {"folder": str(folder), "label": label}, timeout_s=3600)
        except RequestRefusedError as error:
            raise UpdateRefusedError(str(error)) from None

    async def set_label(self, connection: ServerConnection, label: str) -> None:
        """Label the weights that the server has."""
        await connection.post("/label", {"label": label})
