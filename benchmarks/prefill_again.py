"""How much of a conversation a server computes again because weights were synced between its turns.

    python tests/servers_on_cpu/make_environment.py sglang
    python benchmarks/prefill_again.py [--server vllm] [--steps 12] [section.key=value ...]

An agent of four turns is trained with one true server on the CPU: synchronously, so that no weights come between the
turns of an episode, and asynchronously in both update modes. The server counts the prompt tokens that it was sent and
those that it found in its cache; the rest it computed. Every turn brings the whole conversation, so with nothing lost
all but its newest message is cached, and all of it for the siblings of a group whose first turn is the same.

SGLang on 2 cores, 2026-11-23: 76% of prompt tokens were cached with `keep_cache`, 68% with `recompute`.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from faults import Faulty, driving, step_of

ROOT = Path(__file__).parents[1]
ENGINES = {"sglang": "max_running_requests", "vllm": "max_num_seqs"}
"""Servers, and what each calls the requests that it works on at a time."""
AGENT = {
    "type": "agents/agent",
    "agent": f"{ROOT}/benchmarks/asks_again.py:solve_in_four",
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "max_tokens": 256,
}
OVERRIDES = [
    "inference_engine.servers={minimum: 1, maximum: 1}",
    "inference_engine.stream_interval=4",
    "sampling.max_new_tokens=48",
    "rollout.batch_size=8",
    "rollout.group_size=8",
    "weight_sync.logprob_check_every=0",
    "evaluation=null",
    "checkpoint.every=1000",
    "steps=100000",
    "rewards=[]",
]
ROWS = {
    "synchronous": ["rollout.max_staleness=0", "rollout.max_pending_batches=1"],
    "keep_cache": ["rollout.max_staleness=4", "inference_engine.update_mode=keep_cache"],
    "recompute": ["rollout.max_staleness=4", "inference_engine.update_mode=recompute"],
}
COUNTERS = {
    "sglang": ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
    "vllm": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
}
"""Prompt tokens that came, and those that were cached."""
OPTIONS = {
    "sglang": ["inference_engine.options.enable_metrics=true"],
    # A conversation of four turns; vLLM caches whole blocks, on a CPU of 128 tokens by default.
    "vllm": ["inference_engine.options.max_model_len=256", "inference_engine.options.block_size=32"],
}
WARM_UP = 3


def counted(address: str, server: str) -> list[float]:
    """Prompt tokens and cached tokens since the server began."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = []
    for name in COUNTERS[server]:
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if not values:
            raise SystemExit(f"the server's metrics have no {name}")
        found.append(sum(map(float, values)))
    return found


def measure(name: str, server: str, steps: int, overrides: list[str]) -> str:
    """One row: a run of its own."""
    words = [
        f"plugins=[{server},agents]",
        f"workflow={json.dumps(AGENT)}",
        f"inference_engine.options.{ENGINES[server]}=64",
    ]
    config = ["run", f"{ROOT}/tests/servers_on_cpu/{server}.yaml", *OVERRIDES, *OPTIONS[server], *words, *ROWS[name]]
    run = Faulty([*config, *overrides], Path(tempfile.mkdtemp(prefix="prefill-")) / "run")
    run.start()
    assert run.process is not None
    try:
        run.wait_for_step(WARM_UP)
        found = driving(run.run_dir)
        assert found is not None
        address, first = found.processes["server-0"].address, step_of(run.run_dir)
        before = counted(address, server)
        run.wait_for_step(first + steps - 1)
        after = counted(address, server)
        window = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()[first:]]
    finally:
        run.process.send_signal(signal.SIGINT)
        with suppress(Exception):
            run.process.wait(60)
        run.process.kill()
    came, cached = (late - early for late, early in zip(after, before, strict=True))
    ended = sum(metrics["batch/sequences"] for metrics in window)
    versions = [metrics.get("staleness/mean", 0.0) for metrics in window]
    staleness = sum(versions) / len(versions)
    return (
        f"| {name} | {len(window)} | {staleness:.2f} | {came / ended:.0f} | {cached / came:.1%} "
        f"| {(came - cached) / ended:.0f} |"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=ENGINES, default="sglang")
    parser.add_argument("--steps", type=int, default=12, help="measured, for each row")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=[*ROWS])
    arguments, overrides = parser.parse_known_args()
    names = ["", "weight_syncs", "staleness", "prompt tokens an episode", "cached", "computed an episode"]
    began, table = time.monotonic(), [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for name in arguments.rows:
        table.append(measure(name, arguments.server, arguments.steps, overrides))
        print(f"{table[-1]} after {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
