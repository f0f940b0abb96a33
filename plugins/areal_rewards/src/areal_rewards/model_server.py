"""`areal serve_model`: a reward model behind an address, for runs that ask it from their rollout side."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.processes import http_address
from areal_rewards.libraries import load_library
from areal_rewards.reward_models import ScoringModel

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_AT_ONCE = 64
"""Sequences in one pass of the model."""
MOST_BYTES = 64
"""Of a request for each token that a sequence may have."""


_Asked = tuple[list[int], "asyncio.Future[float]"]
"""A sequence and its score to come."""


class ModelServer:
    """Scores what is asked, in batches of what came while the model computed.

    Args:
        model: scores sequences.
        longest: tokens that a sequence may have.
        batch_tokens: tokens of a batch, padding included. A longer sequence is a batch of its own.
    """

    def __init__(self, model: ScoringModel, longest: int, batch_tokens: int) -> None:
        self._web = load_library("areal serve_model", "aiohttp.web", "judge")
        self._model = model
        self.longest = longest
        self._batch_tokens = batch_tokens
        self._waiting: asyncio.Queue[_Asked] = asyncio.Queue()
        self._next: _Asked | None = None

    async def score(self, request: Any) -> Any:
        """Answer POST /score with `prompt`, `completion`, `is_cut`, and `prompt_ids` and `completion_ids` if they
        are of the model's vocabulary; see `ScoringModel.encode`."""
        try:
            asked = await request.json()
            asked = asked if isinstance(asked, dict) else {}
            prompt, completion = asked.get("prompt"), asked.get("completion", "")
            if not (isinstance(prompt, str) and isinstance(completion, str)):
                raise ValueError("a request is a mapping of prompt and completion, both text")
            sampled, prompt_ids = asked.get("completion_ids"), asked.get("prompt_ids") or ()
            ids = self._model.encode(prompt, completion, sampled, prompt_ids, is_cut=bool(asked.get("is_cut")))
            if not 0 < len(ids) <= self.longest:
                raise ValueError(f"{len(ids)} tokens, where 1 to {self.longest} can be scored")
            if not 0 <= min(ids) <= max(ids) < self._model.vocabulary:
                raise ValueError(f"token ids are from 0 to {self._model.vocabulary - 1}; set same_tokens: false")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return self._web.json_response({"error": str(error)}, status=400)
        score: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        await self._waiting.put((ids, score))
        return self._web.json_response({"score": await score, "tokens": len(ids)})

    async def work(self) -> None:
        """Take what waits, score it in a thread, and answer; for ever."""
        while True:
            taken = await self._batch()
            try:
                scores = await asyncio.to_thread(self._model.score, [ids for ids, _ in taken])
            except Exception as error:  # noqa: BLE001 - such as memory; whoever asked is told, and others may ask again
                for _, answer in taken:
                    if not answer.done():
                        answer.set_exception(RuntimeError(str(error)))
                continue
            for (_, answer), value in zip(taken, scores, strict=True):
                if not answer.done():
                    answer.set_result(value)

    async def _batch(self) -> list[_Asked]:
        """Wait for a sequence, and return it with those that have come and fit beside it."""
        taken = [self._next or await self._waiting.get()]
        self._next = None
        longest = len(taken[0][0])
        while len(taken) < MOST_AT_ONCE and not self._waiting.empty():
            asked = self._waiting.get_nowait()
            longest = max(longest, len(asked[0]))
            if longest * (len(taken) + 1) > self._batch_tokens:
                self._next = asked
                break
            taken.append(asked)
        return taken


async def _serve(server: ModelServer, host: str, port: int) -> None:
    web = load_library("areal serve_model", "aiohttp.web", "judge")
    # Tokenizing holds everybody up: what cannot be short enough in tokens is refused by its size.
    application = web.Application(client_max_size=2**16 + MOST_BYTES * server.longest)
    application.router.add_post("/score", server.score)
    application.router.add_get("/health", lambda _: asyncio.sleep(0, web.json_response({"status": "ready"})))
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    address = http_address(host, runner.addresses[0][1])
    sys.stdout.write(f"ready: {address}\n")
    sys.stdout.flush()
    try:
        await server.work()
    finally:
        await runner.cleanup()


def main(words: Sequence[str]) -> int:
    """Serve until interrupted; the exit code."""
    parser = argparse.ArgumentParser(
        "areal serve_model", description="Serve a reward model over HTTP, for the reward remote_reward_model."
    )
    parser.add_argument("model", help="reward model with one output: a Hugging Face folder, or a name on the hub")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=0, help="port to listen on; 0 chooses a free port (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="number format of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=32768, help="maximum length of a sequence in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=65536,
        help="maximum number of tokens in one forward pass, padding included (default: %(default)s)",
    )
    parser.add_argument(
        "--device", help="device of the model: cpu or cuda:N (default: cuda:0 if there is a GPU, else cpu)"
    )
    asked = parser.parse_args(list(words))
    folder = Path(asked.model)
    if not 0 <= asked.port < 2**16 or min(asked.max_tokens, asked.batch_tokens) < 1:
        parser.error("--port is from 0 to 65535, --max-tokens and --batch-tokens at least 1")
    if folder.exists() and not (folder / "config.json").is_file():
        sys.stderr.write(f"areal: '{folder}' is not a model: it has no config.json\n")
        return 2
    gpus = load_library("areal serve_model", "torch", "models").cuda.device_count()
    device = asked.device or ("cuda:0" if gpus else "cpu")
    if device not in ("cpu", *(f"cuda:{number}" for number in range(gpus))):
        parser.error(f"--device is cpu or cuda:N, and this machine has {gpus} GPU(s)")
    try:
        server = ModelServer(ScoringModel(asked.model, asked.dtype, device), asked.max_tokens, asked.batch_tokens)
        asyncio.run(_serve(server, asked.host, asked.port))
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        sys.stderr.write(f"areal: the reward model cannot be served: {error}\n")
        return 1
    return 0
