"""Seconds that an SGLang server takes to start, and to prefill, by the prefill graphs that it captures.

    python benchmarks/prefill_graphs.py MODEL [--program "PYTHON -m sglang.launch_server"] [--options JSON] [--rows ...]

Rows: `areal` (the bound that areal sets), `sglang` (all sizes up to the chunk of a prefill, as SGLang alone), `none`.
Each row starts twice: with caches of compiled kernels that are empty, and with those of its first start. Then requests
of each length are sent at once; each generates one token, and seconds are the median of several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from areal_core.engines import ModelReference
from areal_core.runtime.network import free_port
from areal_core.runtime.process_tree import kill_tree
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig

ROWS = {
    "areal": {},
    "sglang": {"cuda_graph_max_bs_prefill": 8192},
    "none": {"cuda_graph_backend_prefill": "disabled"},
}
START_S = 580
ROUNDS = 5


def request(port: int, path: str, body: object = None) -> None:
    """Send a request and wait for its answer; raises OSError if there is none."""
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(message, timeout=START_S) as answer:
        answer.read()


def prefill_s(port: int, requests: int, length: int, vocabulary: int) -> float:
    """Seconds for so many prompts of random tokens, sent at once; no two rounds share a prefix."""

    def once() -> float:
        prompts = [[random.randrange(vocabulary) for _ in range(length)] for _ in range(requests)]
        began = time.perf_counter()
        request(port, "/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}})
        return time.perf_counter() - began

    once()
    return statistics.median(once() for _ in range(ROUNDS))


def measure(arguments: argparse.Namespace, row: str, home: Path, is_cold: bool) -> dict[str, object]:
    """Start a server of a row and measure it; `home` holds its caches."""
    options = json.loads(arguments.options) | ROWS[row]
    settings = SGLangConfig(program=arguments.program.split(), options=options)
    port = free_port()
    model = ModelReference(arguments.model, arguments.dtype)
    command = SGLangAdapter(settings).command(model, "127.0.0.1", port, home)
    caches = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TRITON_CACHE_DIR": str(home / "triton")}
    config = json.loads(Path(arguments.model, "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    log = home / f"{row}.log"
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.arguments, env={**os.environ, **command.environment, **caches}, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        while True:
            try:
                request(port, "/server_info")
                break
            except OSError:
                if process.poll() is not None or time.perf_counter() - began > START_S:
                    raise SystemExit(f"{row}: the server did not start\n{log.read_text()[-3000:]}") from None
                time.sleep(0.2)
        line: dict[str, object] = {"row": row, "cold": is_cold, "start_s": round(time.perf_counter() - began, 1)}
        for requests, length in arguments.prefills:
            line[f"{requests}x{length}_ms"] = round(1e3 * prefill_s(port, requests, length, vocabulary), 1)
        return line
    finally:
        kill_tree(process.pid)
        process.wait()


def pair(text: str) -> tuple[int, int]:
    """`512x40`: so many requests of so many tokens."""
    requests, _, length = text.partition("x")
    return int(requests), int(length)


def main() -> None:
    """Measure what the command line says; one JSON line for each start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--program", default="")
    parser.add_argument("--options", default="{}", help="further options of SGLang, as JSON")
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=[*ROWS])
    parser.add_argument("--prefills", nargs="+", type=pair, default=[(1, 24), (1, 400), (16, 40), (512, 40)])
    arguments = parser.parse_args()
    for row in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            for is_cold in (True, False):
                print(json.dumps(measure(arguments, row, Path(folder), is_cold)), flush=True)


if __name__ == "__main__":
    main()
