"""The plainest inference server that areal can use: it computes the whole sequence for each token.

    python toy_server.py --model FOLDER --port 8000

The adapter in `inference_engines.py` starts it, sends it requests and changes its weights. Nothing here knows areal.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator


class Model:
    """A model whose weights and label change together, between two tokens."""

    def __init__(self, folder: str) -> None:
        load: Any = AutoModelForCausalLM
        self.folder = folder
        self.model = load.from_pretrained(folder, dtype=torch.float32).eval()
        self.label = "0"
        self.turn = threading.Condition()  # held for each token and each change
        self.is_paused = False
        self.aborts = 0

    def generate(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an event for each token as it is drawn."""
        output: list[int] = []
        spans: list[list[Any]] = []  # [label, first token, end]
        generator = torch.Generator().manual_seed(request["seed"])
        aborts = self.aborts
        finish = None
        while finish is None:
            with self.turn:
                self.turn.wait_for(lambda: not self.is_paused or self.aborts != aborts)
                if self.aborts != aborts:
                    break
                token, logprob = self.draw(request, output, generator)
                label = self.label
            output.append(token)
            if not spans or spans[-1][0] != label:
                spans.append([label, len(output) - 1, 0])
            spans[-1][2] = len(output)
            if token in request["stop_token_ids"]:
                finish = "stop"
            elif len(output) == request["max_new_tokens"]:
                finish = "length"
            yield {"ids": [token], "logprobs": [logprob], "finish": finish, "spans": spans}
        else:
            return
        yield {"ids": [], "logprobs": [], "finish": "abort", "spans": spans}  # no lock is held while a client reads

    @torch.no_grad()
    def draw(self, request: dict[str, Any], output: list[int], generator: torch.Generator) -> tuple[int, float]:
        """Return a token, and its log-probability at the temperature."""
        ids = torch.tensor([request["input_ids"] + output])
        logprobs = torch.log_softmax(self.model(input_ids=ids).logits[0, -1].double() / request["temperature"], -1)
        drawable = logprobs.clone()
        if len(output) < request["min_new_tokens"]:
            drawable[request["stop_token_ids"]] = -torch.inf
        if request["greedy"]:
            token = int(drawable.argmax())
        else:
            token = int(torch.multinomial(drawable.exp(), 1, generator=generator))
        return token, float(logprobs[token])

    def change(self, path: str, request: dict[str, Any]) -> None:
        """Pause, resume, end all requests, load weights, or label them.

        Raises:
            ValueError: the weights are not those of this model. Its weights and label are then unchanged.
        """
        with self.turn:
            if path == "/load":
                self.load(load_file(Path(request["folder"]) / "model.safetensors"))
            self.label = request.get("label", self.label)
            self.is_paused = path == "/pause" or (self.is_paused and path != "/resume")
            self.aborts += path == "/abort"
            self.turn.notify_all()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over weights. Tied weights may be missing, others may not: old ones would stay under the new label."""
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        own = self.model.state_dict()
        missing, unexpected = own.keys() - weights.keys() - tied, weights.keys() - own.keys()
        if missing or unexpected:
            raise ValueError(f"weights are missing: {sorted(missing)}, or unknown: {sorted(unexpected)}")
        self.model.load_state_dict(weights, strict=False)


class Handler(BaseHTTPRequestHandler):
    """One connection. `model` and `key` are set before the server starts."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    model: Model
    key = ""

    def do_GET(self) -> None:
        """Answer health checks, and say which model this is."""
        config = self.model.model.config
        self.answer({"model": self.model.folder, "context": config.max_position_embeddings, "version": "1"})

    def do_POST(self) -> None:
        """Generate, or change the model."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.key and not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.key}"):
            self.answer({"error": {"message": "the key is wrong"}}, 401)
        elif self.path == "/generate":
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has disconnected
                self.stream(request)
        else:
            try:
                self.model.change(self.path, request)
                self.answer({})
            except ValueError as error:
                self.answer({"error": {"message": str(error)}}, 400)

    def stream(self, request: dict[str, Any]) -> None:
        """Send an event for each token."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.model.generate(request):
            self.send_chunk(f"data: {json.dumps(event)}\n\n")
        self.send_chunk("data: [DONE]\n\n")
        self.send_chunk("")

    def send_chunk(self, text: str) -> None:
        """Send a part of a streamed answer."""
        data = text.encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self, value: dict[str, Any], status: int = 200) -> None:
        """Send a whole answer."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log no requests."""


def main() -> None:
    """Serve a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    Handler.model = Model(arguments.model)
    Handler.key = os.environ.get("TOY_API_KEY", "")  # not on the command line, which every user of the machine sees
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
