"""How long `areal --help` takes beside `python -c pass`, in turn in one run.

python benchmarks/help.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {"python -c pass": ["-c", "pass"], "areal --help": ["-m", "areal_core", "--help"]}


def main() -> None:
    """Measure and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, words in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *words], capture_output=True, check=True)
            seconds[name].append(time.perf_counter() - began)
    medians = [statistics.median(values) for values in seconds.values()]
    for name, median in zip(COMMANDS, medians, strict=True):
        print(f"{name:16s} {1000 * median:6.1f} ms")
    print(f"{'ratio':16s} {medians[1] / medians[0]:6.1f}")


if __name__ == "__main__":
    main()
