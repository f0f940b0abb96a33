"""The agent, at an endpoint that answers everything with 8."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from areal_example.agents import solver


class Eight(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "8"}}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_solver_compares_the_answer():
    with ThreadingHTTPServer(("127.0.0.1", 0), Eight) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        rewards = [asyncio.run(solver(prompt="4+4=", answer=answer, base_url=url, api_key="k")) for answer in "89"]
        server.shutdown()
    assert rewards == [1.0, 0.0]
