"""Kills processes of a Tinker server at random while a client trains, and compares with an undisturbed server.

    python benchmarks/tinker_kills.py --kills 100 --seed 0

Each kill is a SIGKILL to a random process of the server: the driver, the process that serves or its guard, an inference
server or its guard. A driver is started again with the same folder. The client is the Tinker SDK, and knows nothing of
it. It prints the kills by process, the steps, and the largest difference of what both clients saw; it must be 0.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import tinker

from areal_core.driver import ask_driver
from areal_core.runs import RunFolder
from areal_core.runtime.messages import RunStatus, StatusRequest
from areal_grpo.demonstration.model import make_model

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "areal_tinker" / "tests"))

from tinker_server import TinkerServer, adam, datum


def train(server: TinkerServer, is_done: Any) -> list[float]:
    """Train until `is_done(steps)`, with a sample after each step. Return all losses and log-probabilities seen."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    client = service.create_lora_training_client(base_model=server.model, rank=4).result()
    seen: list[float] = []
    while not is_done(len(seen) // 10):
        step = len(seen) // 10
        passes = [client.forward_backward([datum([4 + step % 40, *range(3, 9)])], "cross_entropy") for _ in range(2)]
        client.optim_step(adam(1e-3)).result()
        seen += [each.result().metrics["loss:sum"] for each in passes]
        final = client.forward([datum([*range(3, 12)])], "cross_entropy").result()
        seen += final.loss_fn_outputs[0]["logprobs"].tolist()
        sampler = client.save_weights_and_get_sampling_client().result()
        assert sampler.sample(
            tinker.types.ModelInput.from_ints([3, 4]), 1, tinker.types.SamplingParams(max_tokens=4)
        ).result()
    return seen


def processes(server: TinkerServer) -> dict[str, list[int]]:
    """Return the processes of a server by what they are: the members of its driver, and their guards."""
    attempt = RunFolder(server.run_dir).last_attempt
    status = ask_driver(attempt, StatusRequest(), 2.0) if attempt is not None else None
    if not isinstance(status, RunStatus):
        return {}
    found = {"driver": [status.pid]}
    for name, process in status.processes.items():
        if process.pid:
            found[name.partition("-")[0]] = [process.pid, parent(process.pid)]
    return {name: [pid for pid in pids if pid > 1] for name, pids in found.items()}


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def main() -> int:
    """Run both servers. Return 0 if the clients saw the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", default="1", help="see areal tinker serve")
    arguments = parser.parse_args()
    generator, counts = random.Random(arguments.seed), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        (folder / "killed").mkdir()
        (folder / "other").mkdir()
        server = TinkerServer(folder / "killed", model, "--save-every", arguments.save_every).start()
        over = threading.Event()
        seen: list[list[float]] = []
        client = threading.Thread(
            target=lambda: seen.append(train(server, lambda steps: over.is_set() and steps >= 20))
        )
        client.start()
        began = time.monotonic()
        while sum(counts.values()) < arguments.kills and client.is_alive():
            time.sleep(generator.uniform(0.2, 4))
            kinds = processes(server)
            kind = generator.choices(["trainer", "server", "driver"], [6, 2, 2])[0]
            if not kinds.get(kind):
                continue  # it is being started
            os.kill(generator.choice(kinds[kind]), signal.SIGKILL)
            counts[kind] += 1
            if kind == "driver":
                server.kill()
                server.start()
        print(f"{sum(counts.values())} kills in {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
        over.set()
        client.join()
        server.stop()
        if not seen:
            print(server.log()[-3000:])
            return 1
        steps = len(seen[0]) // 10
        other = TinkerServer(folder / "other", model).start()
        undisturbed = train(other, lambda count: count >= steps)
        other.stop()
        largest = max(abs(a - b) for a, b in zip(seen[0], undisturbed, strict=True))
        print(f"{steps} steps; largest difference from an undisturbed server: {largest}")
        return int(largest != 0)


if __name__ == "__main__":
    sys.exit(main())
