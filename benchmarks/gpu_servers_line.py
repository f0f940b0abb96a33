"""Print one line of `gpu_servers.sh`: python benchmarks/gpu_servers_line.py PART EXIT-CODE SECONDS FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

SHOWN = (
    "time/step_s",
    "time/weight_sync_s",
    "weight_sync/transfer_s",
    "weight_sync/pause_s",
    "time/sleep_s",
    "logprob_check/difference_mean",
    "logprob_check/difference_max",
)


def main() -> None:
    """Sum up the metrics of a run, or the end of a log."""
    part, code, seconds, folder = sys.argv[1:]
    line = {"part": part, "exit_code": int(code), "seconds": int(seconds)}
    metrics = Path(folder, f"{part}-run", "metrics.jsonl")
    steps = [json.loads(text) for text in metrics.read_text().splitlines()] if metrics.is_file() else []
    if steps:
        line |= {"steps": steps[-1]["step"], "servers_failed": sum(step.get("servers/failed", 0) for step in steps)}
        # The first step compiles and its sync forms the group.
        line |= {key: median(values) for key in SHOWN if (values := [step[key] for step in steps[1:] if key in step])}
    if not steps or line["exit_code"]:
        log = Path(folder, f"{part}.log").read_text(errors="replace").strip().splitlines()
        line["log"] = log[-6:]
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
