"""How long `areal view` takes for a large run: 10,000 steps, tokens at their bound of 256 MiB, a timeline of 100 MB.

    python benchmarks/large_view.py RUN_DIR

`RUN_DIR` is a finished run with logged groups. A folder beside it gets its config and its lines over and over, and
copies of its files of tokens. Prints the CPU and wall seconds of the command and the size of the page.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, TOKEN_BYTES, TIMELINE_BYTES = 10_000, 256 << 20, 100 << 20


def main() -> None:
    """Make the large run and time the command."""
    run_dir = Path(sys.argv[1])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory(dir=run_dir.parent) as temporary:
        large = Path(temporary) / "run"
        (large / "logs").mkdir(parents=True)
        (large / "rollouts").mkdir()
        for name in ("config.yaml", "plugins.json", "samples.jsonl"):
            shutil.copy(run_dir / name, large)
        if (run_dir / "sources").is_dir():
            shutil.copytree(run_dir / "sources", large / "sources")
        with (large / "metrics.jsonl").open("w") as file:
            for step, line in zip(range(STEPS), itertools.cycle(lines), strict=False):
                file.write(json.dumps({**line, "step": step, "time": 1.7e9 + step}) + "\n")
        size, copies = 0, itertools.cycle(sorted((run_dir / "rollouts").glob("*.parquet")))
        for step in range(1, STEPS):
            size += shutil.copy(next(copies), large / "rollouts" / f"step-{step:06d}.parquet").stat().st_size
            if size > TOKEN_BYTES:
                break
        written, groups = 0, (run_dir / "logs" / "groups.jsonl").read_text()
        with (large / "logs" / "groups.jsonl").open("w") as file:
            while written < TIMELINE_BYTES:
                written += file.write(groups)
        began, before = time.monotonic(), os.times()
        subprocess.run([sys.executable, "-m", "areal_core", "view", str(large), "--no-open"], check=True)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        page = (large / "report.html").stat().st_size
        print(
            f"{STEPS} steps, {step} files of tokens with {size / 2**20:.0f} MiB, timeline {written / 2**20:.0f} MiB: "
            f"{cpu:.2f} CPU s, {time.monotonic() - began:.2f} s, page {page / 2**20:.1f} MiB"
        )


if __name__ == "__main__":
    main()
