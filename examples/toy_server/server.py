"""The plainest inference server that areal can use: one token at a time, the whole sequence through the model for each.

    python server.py --model FOLDER --port 8000

`adapter.py` beside this file has areal start it, ask it and change its weights. Nothing here knows areal.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class Model:
    """The model, whose weights and their label change together, between two tokens."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.label = "0"
        self.turn = threading.Condition()  # held for each token and each change
        self.is_paused, self.aborts = False, 0

    def generate(self, asked: dict[str, Any]):
        """What is told of each token, as it is drawn."""
        output: list[int] = []
        spans: list[list[Any]] = []  # [label, first token, behind the last one]
        draw, aborts, finish = torch.Generator().manual_seed(asked["seed"]), self.aborts, None
        while finish is None:
            with self.turn:
                self.turn.wait_for(lambda: not self.is_paused or self.aborts != aborts)
                if self.aborts != aborts:
                    yield {"ids": [], "logprobs": [], "finish": "abort", "spans": spans}
                    return
                token, logprob = self.draw(asked, output, draw)
                label = self.label
            output.append(token)
            if not spans or spans[-1][0] != label:
                spans.append([label, len(output) - 1, 0])
            spans[-1][2] = len(output)
            if token in asked["stop_token_ids"]:
                finish = "stop"
            elif len(output) == asked["max_new_tokens"]:
                finish = "length"
            yield {"ids": [token], "logprobs": [logprob], "finish": finish, "spans": spans}

    @torch.no_grad()
    def draw(self, asked: dict[str, Any], output: list[int], generator: torch.Generator) -> tuple[int, float]:
        """A token, and its log-probability at the temperature."""
        ids = torch.tensor([asked["input_ids"] + output])
        logprobs = torch.log_softmax(self.model(input_ids=ids).logits[0, -1].double() / asked["temperature"], -1)
        drawable = logprobs.clone()
        if len(output) < asked["min_new_tokens"]:
            drawable[asked["stop_token_ids"]] = -torch.inf
        chosen = drawable.argmax() if asked["greedy"] else torch.multinomial(drawable.exp(), 1, generator=generator)
        return int(chosen), float(logprobs[int(chosen)])

    def change(self, path: str, asked: dict[str, Any]) -> None:
        """Pause, go on, end all requests, take over weights, or name them."""
        with self.turn:
            if path == "/load":
                self.model.load_state_dict(load_file(Path(asked["folder"]) / "model.safetensors"), strict=False)
            self.label = asked.get("label", self.label)
            self.is_paused = path == "/pause" or (self.is_paused and path != "/resume")
            self.aborts += path == "/abort"
            self.turn.notify_all()


class Handler(BaseHTTPRequestHandler):
    """One connection; `model` is set before it is used."""

    protocol_version = "HTTP/1.1"
    model: Model

    def do_GET(self) -> None:
        """Health, and who this is."""
        config = self.model.model.config
        self.answer({"model": self.model.folder, "context": config.max_position_embeddings, "version": "1"})

    def do_POST(self) -> None:
        """Everything else."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.path != "/generate":
            self.model.change(self.path, asked)
            self.answer({})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for told in self.model.generate(asked):  # a client that has gone ends this by a broken pipe
            self.chunk(f"data: {json.dumps(told)}\n\n")
        self.chunk("data: [DONE]\n\n")
        self.chunk("")

    def chunk(self, text: str) -> None:
        """A part of a streamed answer."""
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def answer(self, value: dict[str, Any]) -> None:
        """A whole answer."""
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    words = parser.parse_args()
    torch.set_num_threads(1)
    Handler.model = Model(words.model)
    ThreadingHTTPServer((words.host, words.port), Handler).serve_forever()
