"""A server that scores given tokens with a model, as SGLang and vLLM answer: python scoring_server.py MODEL PORT."""

import json
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import torch


def handler_of(score, requests, models):
    """A handler whose `score(ids)` returns the log-probability of each token but the first."""
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append((self.path, body, self.headers.get("Authorization")))
                ids = body["input_ids"] if self.path == "/generate" else body["prompt"]
                status, answer = 200, score(ids)
            if isinstance(answer, int):
                status, answer = answer, {"error": "no"}
            elif self.path == "/generate":
                scored = [[value, token, None] for value, token in zip([None, *answer], ids, strict=True)]
                answer = {"text": "", "meta_info": {"input_token_logprobs": scored}}
            else:
                answer = {"choices": [{"logprobs": {"token_logprobs": [None, *answer, -0.5]}}]}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            data = json.dumps({"data": [{"id": name} for name in models]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    return Handler


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # with the default of 5, connections that come together wait for minutes


@contextmanager
def serving(score, models=("tiny",)):
    """Serve on a free port; yields the address, and a list of (path, body, authorization) that grows."""
    requests = []
    server = _Server(("127.0.0.1", 0), handler_of(score, requests, models))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def scores_of(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(ids):
        with torch.no_grad():
            table = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        return table[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    return score


if __name__ == "__main__":
    torch.set_num_threads(1)
    _Server(("127.0.0.1", int(sys.argv[2])), handler_of(scores_of(sys.argv[1]), [], ["tiny"])).serve_forever()
