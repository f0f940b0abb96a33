"""The command `areal serve_model`: serve a reward model over HTTP for the reward `remote_reward_model`."""

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

MAX_SEQUENCES = 64
"""Number of sequences in one forward pass."""
BYTES_PER_TOKEN = 64
"""Limit of a request's size, in bytes for each token that a sequence may have."""


_Request = tuple[list[int], "asyncio.Future[float]"]
"""Token ids of a sequence, and the future of its score."""


class ModelServer:
    """Scores sequences in batches. A batch consists of the requests that arrived while the model was computing.

    Args:
        model: scores sequences.
        longest: maximum number of tokens of a sequence.
        batch_tokens: maximum number of tokens of a batch, padding included. A longer sequence gets a batch of its own.
    """

    def __init__(self, model: ScoringModel, longest: int, batch_tokens: int) -> None:
        self._web = load_library("areal serve_model", "aiohttp.web", "judge")
        self._model = model
        self.longest = longest
        self._batch_tokens = batch_tokens
        self._waiting: asyncio.Queue[_Request] = asyncio.Queue()
        self._next: _Request | None = None

    async def score(self, request: Any) -> Any:
        """Answer a request to POST /score.

        The body is JSON with `prompt` and `completion` as text, `is_cut`, and `prompt_ids` and `completion_ids` if they
        are token ids of the model's vocabulary; see `ScoringModel.encode`. The response has `score` and `tokens`.
        """
        try:
            body = await request.json()
            body = body if isinstance(body, dict) else {}
            prompt, completion = body.get("prompt"), body.get("completion", "")
            if not (isinstance(prompt, str) and isinstance(completion, str)):
                raise ValueError("a request must be an object with prompt and completion, both text")
            completion_ids, prompt_ids = body.get("completion_ids"), body.get("prompt_ids") or ()
            ids = self._model.encode(prompt, completion, completion_ids, prompt_ids, is_cut=bool(body.get("is_cut")))
            if not 0 < len(ids) <= self.longest:
                raise ValueError(f"the sequence has {len(ids)} tokens; it must have 1 to {self.longest}")
            if not 0 <= min(ids) <= max(ids) < self._model.vocabulary:
                raise ValueError(
                    f"token ids must be from 0 to {self._model.vocabulary - 1}; set same_tokens: false if the policy "
                    "has another vocabulary"
                )
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return self._web.json_response({"error": str(error)}, status=400)
        score: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        await self._waiting.put((ids, score))
        return self._web.json_response({"score": await score, "tokens": len(ids)})

    async def work(self) -> None:
        """Score waiting requests in a thread, one batch after another, until cancelled."""
        while True:
            batch = await self._batch()
            try:
                scores = await asyncio.to_thread(self._model.score, [ids for ids, _ in batch])
            except Exception as error:  # noqa: BLE001 - such as out of memory; only these requests fail
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(RuntimeError(str(error)))
                continue
            for (_, answer), value in zip(batch, scores, strict=True):
                if not answer.done():
                    answer.set_result(value)

    async def _batch(self) -> list[_Request]:
        """Wait for a request, and return it with others that have arrived and fit into the batch."""
        batch = [self._next or await self._waiting.get()]
        self._next = None
        longest = len(batch[0][0])
        while len(batch) < MAX_SEQUENCES and not self._waiting.empty():
            request = self._waiting.get_nowait()
            longest = max(longest, len(request[0]))
            if longest * (len(batch) + 1) > self._batch_tokens:
                self._next = request
                break
            batch.append(request)
        return batch


async def _serve(server: ModelServer, host: str, port: int) -> None:
    web = load_library("areal serve_model", "aiohttp.web", "judge")
    # Tokenizing blocks the event loop, so refuse requests that are too large for the maximum number of tokens.
    application = web.Application(client_max_size=2**16 + BYTES_PER_TOKEN * server.longest)
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


def main(argv: Sequence[str]) -> int:
    """Serve a reward model until interrupted, and return the exit code."""
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
    arguments = parser.parse_args(list(argv))
    folder = Path(arguments.model)
    if not 0 <= arguments.port < 2**16 or min(arguments.max_tokens, arguments.batch_tokens) < 1:
        parser.error("--port must be from 0 to 65535, --max-tokens and --batch-tokens at least 1")
    if folder.exists() and not (folder / "config.json").is_file():
        sys.stderr.write(f"areal: '{folder}' is not a model: it has no config.json\n")
        return 2
    gpus = load_library("areal serve_model", "torch", "models").cuda.device_count()
    device = arguments.device or ("cuda:0" if gpus else "cpu")
    if device not in ("cpu", *(f"cuda:{number}" for number in range(gpus))):
        parser.error(f"--device must be cpu or cuda:N; this machine has {gpus} GPU(s)")
    try:
        server = ModelServer(
            ScoringModel(arguments.model, arguments.dtype, device), arguments.max_tokens, arguments.batch_tokens
        )
        asyncio.run(_serve(server, arguments.host, arguments.port))
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        sys.stderr.write(f"areal: the reward model cannot be served: {error}\n")
        return 1
    return 0
