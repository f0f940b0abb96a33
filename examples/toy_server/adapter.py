"""An adapter for a kind of inference server that areal does not know: that of `server.py` beside this file.

    areal run --plugins grpo inference_engine.type=examples/toy_server/adapter.py:ToyEngine

The run starts its servers, gives them new weights under live requests, and starts them again where they die; servers
that run elsewhere are named in `inference_engine.addresses`, and `areal serve --join` adds one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_core.servers import (
    Chunk,
    FleetSettings,
    HTTPAdapter,
    InferenceCapabilities,
    RequestRefusedError,
    ServerCommand,
    ServerFleet,
    ServerIdentity,
    ServerRefusedError,
    UpdateRefusedError,
)


class ToyConfig(FleetSettings):
    """Settings of a fleet of these servers."""

    def server_command(self, model, host, port, run_dir):
        """See `FleetSettings.server_command`."""
        return ToyAdapter().command(model, host, port)


class ToyAdapter(HTTPAdapter):
    """Speaks to these servers. See `ServerAdapter` for the methods; those for what they cannot do have defaults."""

    name = "toy"

    def capabilities(self):
        """It has no cache of keys and values, so all of them are of the current weights."""
        return InferenceCapabilities(frozenset({"recompute"}), seeded=True)

    def command(self, model, host, port):
        """The server with this process's own Python."""
        program = [sys.executable, str(Path(__file__).with_name("server.py"))]
        return ServerCommand([*program, "--model", model.path, "--host", host, "--port", str(port)])

    async def identify(self, connection):
        """From the answer to any GET."""
        try:
            told = await connection.get("/info")
            return ServerIdentity(told["version"], told["model"], told["context"], slots=8, dtype="float32")
        except (RequestRefusedError, LookupError, TypeError) as error:
            raise ServerRefusedError(f"answers, but not as a toy server does: {error!r:.200}") from None

    async def generate(self, connection, partial):
        """Streamed, so that a server that dies loses nothing that has come."""
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
        async for told in connection.post_for_events("/generate", body):
            yield Chunk(told["ids"], told["logprobs"], told["finish"], told["spans"])

    async def stop(self, connection, mode):
        """No token is drawn from here on."""
        await connection.post("/pause")

    async def resume(self, connection):
        """Go on."""
        await connection.post("/resume")

    async def abort(self, connection):
        """End all requests."""
        await connection.post("/abort")

    async def load(self, connection, folder, label, mode):
        """Weights and label change together."""
        try:
            await connection.post("/load", {"folder": str(folder), "label": label}, timeout_s=3600)
        except RequestRefusedError as error:
            raise UpdateRefusedError(str(error)) from None

    async def set_label(self, connection, label):
        """Name the weights that are there."""
        await connection.post("/label", {"label": label})


class ToyEngine(ServerFleet):
    """What a config chooses."""

    Config = ToyConfig

    def __init__(self, settings, log_dir, member=None, gpus=None):
        super().__init__(settings, ToyAdapter(), log_dir, member, gpus)
