"""The plainest inference server that areal can use: it computes the whole sequence for each token.

    python toy_server.py --model FOLDER --port 8000

The adapter in `inference_engines.py` starts it, sends it requests and changes its weights. Nothing here knows areal.
"""

from __future__ import annotations

import argparse
import json
import threading
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
                    yield {"ids": [], "logprobs": [], "finish": "abort", "spans": spans}
                    return
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
        """Pause, resume, end all requests, load weights, or label them."""
        with self.turn:
            if path == "/load":
                self.model.load_state_dict(load_file(Path(request["folder"]) / "model.safetensors"), strict=False)
            self.label = request.get("label", self.label)
            self.is_paused = path == "/pause" or (self.is_paused and path != "/resume")
            self.aborts += path == "/abort"
            self.turn.notify_all()


class Handler(BaseHTTPRequestHandler):
    """One connection. `model` is set before the server starts."""

    protocol_version = "HTTP/1.1"
    model: Model

    def do_GET(self) -> None:
        """Answer health checks, and say which model this is."""
        config = self.model.model.config
        self.answer({"model": self.model.folder, "context": config.max_position_embeddings, "version": "1"})

    def do_POST(self) -> None:
        """Generate, or change the model."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.path != "/generate":
            self.model.change(self.path, request)
            self.answer({})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.model.generate(request):  # a client that disconnects ends this by a broken pipe
            self.send_chunk(f"data: {json.dumps(event)}\n\n")
        self.send_chunk("data: [DONE]\n\n")
        self.send_chunk("")

    def send_chunk(self, text: str) -> None:
        """Send a part of a streamed answer."""
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def answer(self, value: dict[str, Any]) -> None:
        """Send a whole answer."""
        data = json.dumps(value).encode()
        self.send_response(200)
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Handler.model = Model(arguments.model)
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
