"""The FSDP engine over the GPUs of one host: tokens a second, memory, and the gradient, as a table.

    python benchmarks/gpu_scaling.py 1:gradient,1.5b 2:gradient,1.5b 4:gradient,1.5b,7b --output scaling.json
    python benchmarks/gpu_scaling.py 1:h100,h100-one+2:h100,h100-one@context2 4:h100,h100-one@context4,moe@expert4

Each argument is so many ranks, one GPU each, and what they do one after another. Every GPU has the batch of
`gpu_train_step.py`, 32,768 packed tokens in 17 sequences, so that the work of a GPU stays; the engine deals sequences
out as it always does. `4x1` means four times one rank, at once and without knowing of each other: what the GPUs of this
host do where nothing is shared. What `+` joins runs at once, each on GPUs of its own. `2-tensor2`, `4-context2`,
`2-replicas2` and `4-expert4` are layouts of the ranks (`parallel` in the engine's config), of all cases, and
`CASE@context2-tensor2` is one for a case; where several ranks have sequences together they have as many more.
`gradient` compares the gradient
of a small float32 model with that of one rank, which has to come before; the cases are in `CASES`. Efficiency is the
tokens a second of a GPU over those of one rank. The output is written anew after every row, and a case that fails is
told and left out. `--tiny` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpu_train_step import GIB, Setting, ShardedEngine, loss_of, make_batch, make_setting, matrix_rate, profile
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.runs.models import read_model
from areal_core.sdk import ACTOR, LossSpec
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.planning.memory import RankLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = timedelta(seconds=300)
"""Of ranks with one another: one loads and compiles while another is done."""
OUTPUTS = ["logprobs", "entropy"]


@dataclass(frozen=True)
class Case:
    """What ranks do.

    Attributes:
        size: of the model.
        recompute: checkpointing.
        microbatches: for each rank.
        is_long: one sequence of all tokens for each rank.
        is_sharded: also where one rank has nobody to share with.
        is_together: the batch of one rank, for all of them together.
        settings: further ones of the engine.
        keeps: what the forward pass has gathered, until the backward pass has used it.
    """

    size: str
    recompute: bool = False
    microbatches: int = 1
    is_long: bool = False
    is_sharded: bool = False
    is_together: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    keeps: bool = False


_HALF = {"optimizer_state_dtype": "bfloat16"}
_IN_80_GB = {"activation_checkpointing": "selective", "activation_memory_gib": 36}
_MOE: dict[str, Any] = {"activation_checkpointing": "selective", **_HALF}
CASES = {
    "1.5b": Case("1.5b"),
    "1.5b-kept": Case("1.5b", keeps=True),
    "1.5b-sharded": Case("1.5b", is_sharded=True),
    "1.5b-recompute": Case("1.5b", recompute=True),
    "1.5b-4": Case("1.5b", microbatches=4),
    "1.5b-long": Case("1.5b", is_long=True),
    "1.5b-one": Case("1.5b", is_long=True, is_together=True),
    "1.5b-long-recompute": Case("1.5b", recompute=True, is_long=True),
    "h100": Case("1.5b", settings=_IN_80_GB),
    "h100-one": Case("1.5b", is_long=True, is_together=True, settings=_IN_80_GB),
    "moe": Case("30b-a3b-slice", settings=_MOE),
    "moe-eager": Case("30b-a3b-slice", settings=_MOE | {"compile": False}),
    "hybrid": Case("qwen3.5-2b", recompute=True),
    "7b": Case("7b", recompute=True),
    "7b-budget": Case("7b", settings={"activation_checkpointing": "selective", "activation_memory_gib": 50, **_HALF}),
    "7b-half": Case("7b", recompute=True, settings=_HALF),
    "7b-one": Case("7b", recompute=True, is_long=True, is_together=True, settings=_HALF),
    "7b-offloaded": Case("7b", recompute=True, settings={"offload_optimizer": True}),
    "7b-4": Case("7b", recompute=True, microbatches=4),
}
LAYOUT = r"(?:tensor|context|replicas|expert)\d+"
HEAD = "| ranks | case | ms | tokens/s of a GPU | efficiency | tokens/s | MFU | peak GiB | planned | TFLOP/s, slowest |"


class Rank:
    """One rank of one group.

    Args:
        arguments: of the command line.
        rank: within the group.
        ranks: of the group.
        parallel: how they stand.
    """

    def __init__(self, arguments: argparse.Namespace, rank: int, ranks: int, parallel: dict[str, int]) -> None:
        self._arguments = arguments
        self._parallel: Any = parallel
        self._rank, self._ranks = rank, ranks
        self._folder: Path = arguments.folder
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    def do(self, names: Sequence[str], label: str) -> int:
        """Cases one after another; how many failed."""
        whole, failed = self._parallel, 0
        for words in names:
            began, (name, _, layout) = time.monotonic(), words.partition("@")
            self._parallel = whole | read_layout(layout)
            try:
                found = self._gradient() if name == "gradient" else self._train(CASES[name])
            except Exception:  # noqa: BLE001 - shown, and the next case may work
                sys.stderr.write(f"{label} {words}, rank {self._rank}: {traceback.format_exc()[-3000:]}\n")
                failed += 1
                continue
            stand = f"{label}-{layout}" if layout else label
            found |= {"ranks": stand, "case": name, "seconds": time.monotonic() - began}
            if self._rank == 0:
                path = self._folder / "rows" / f"{time.time():.6f}-{os.getpid()}.json"
                path.with_suffix(".new").write_text(json.dumps(found))
                path.with_suffix(".new").rename(path)
        return failed

    def _train(self, case: Case) -> dict[str, Any]:
        """A step's time on each GPU's own batch, and the most memory of a rank."""
        setting = make_setting(case.size, repeat=self._arguments.repeat, tiny=self._arguments.tiny)
        if case.is_long:
            setting = replace(setting, lengths=[setting.tokens])
        setting.rate = matrix_rate(setting.device, 256 if self._arguments.tiny else 8192)
        config = FSDPConfig(
            learning_rate=1e-6,
            attention_kernel=self._arguments.kernel,
            **{"activation_checkpointing": case.recompute, **case.settings},
            max_tokens_per_microbatch=round(1.02 * setting.tokens),
            parallel=self._parallel,
        )
        engine = (ShardedEngine if case.is_sharded else FSDPEngine)(config)
        folder = self._model(setting, f"tiny-{case.size}" if self._arguments.tiny else case.size)
        began = time.perf_counter()
        engine.setup(ModelReference(str(folder), "bfloat16"), ACTOR, OptimizerSettings(1000, 1.0))
        loaded = time.perf_counter() - began
        if case.keeps and isinstance(engine._module, FSDPModule):
            engine._module.set_reshard_after_forward(False)
        copies = 1 if case.is_together else self._ranks * case.microbatches
        batch, loss = make_batch(setting, copies), loss_of(copies * setting.tokens, 0.0)
        works = [LossSpec("actor", batch, OUTPUTS, loss)]
        setting.measure(f"rank {self._rank}", lambda: engine.train(works), case.microbatches)
        if self._arguments.profile:
            profile(setting, f"rank {self._rank}", lambda: engine.train(works))
        engine.close()
        setting.free()
        if not setting.rows:
            raise RuntimeError("was not measured, see above")
        _, seconds, batches, _, peak = setting.rows[0]
        batches /= self._ranks if case.is_together else 1
        tokens = batches * setting.tokens / seconds
        return {
            "seconds_of_a_step": seconds,
            "tokens_per_s_of_a_gpu": tokens,
            "flops_per_s_of_a_gpu": batches * setting.flops() / seconds,
            "load_s": loaded,
            "peaks_gib": self._of_all(peak),
            "planned_gib": self._planned(config, folder, copies * setting.tokens // self._ranks),
            "matrix_rates": self._of_all(setting.rate),
        }

    def _planned(self, config: FSDPConfig, folder: Path, tokens: int) -> float | None:
        """What `areal run --dry-run` says that a rank takes for so many tokens; None where it does not know."""
        model, device = read_model(folder), torch.cuda.current_device() if torch.cuda.is_available() else None
        room = None if device is None else torch.cuda.get_device_properties(device).total_memory
        load = RankLoad(model.description, model.shapes, ACTOR, "bfloat16", self._ranks, tokens=tokens, gpu_bytes=room)
        memory = config.memory(load)
        return memory and memory.total / GIB

    def _gradient(self) -> dict[str, Any]:
        """The gradient of a float32 model, and its largest difference from that of one rank."""
        lengths = torch.randint(8, 256, (40,), generator=torch.Generator().manual_seed(2)).tolist()
        setting = replace(make_setting("small", repeat=1), lengths=lengths)
        engine = FSDPEngine(FSDPConfig(max_tokens_per_microbatch=1024, parallel=self._parallel))
        folder = self._model(setting, "small")
        engine.setup(ModelReference(str(folder)), ACTOR, OptimizerSettings(1000, 1.0))
        found: dict[str, torch.Tensor] = {}

        def keep(rate: float) -> dict[str, Any]:
            gradients: Any = zip(engine._parameters, engine._gradients(), strict=True)
            found.update({name: (g.full_tensor() if hasattr(g, "full_tensor") else g).cpu() for name, g in gradients})
            return {}

        engine._update = keep  # type: ignore[method-assign]
        engine.train([LossSpec("actor", make_batch(setting), OUTPUTS, loss_of(setting.tokens, 0.01))])
        engine.close()
        path = self._folder / "gradient.pt"
        if self._ranks == 1 and not path.exists():
            torch.save(found, path)
        wanted = torch.load(path)
        assert found.keys() == wanted.keys()
        return {
            "largest_difference": max(float((found[name] - wanted[name]).abs().max()) for name in wanted),
            "largest": max(float(value.abs().max()) for value in wanted.values()),
            "backend": dist.get_backend() if self._ranks > 1 else "",
            "devices": sorted({str(value) for value in self._of_all(torch.cuda.device_count())}),
        }

    def _model(self, setting: Setting, size: str) -> Path:
        """A folder with random weights, which the group that comes first makes."""
        target, is_mine = self._folder / f"model-{size}", False
        if self._rank == 0:  # others of a group write nothing
            with suppress(FileExistsError):
                (self._folder / f"made-{size}").mkdir()
                is_mine = True
        if is_mine:
            torch.manual_seed(0)
            fresh, dtype = self._folder / f"fresh-{size}", torch.float32 if size == "small" else torch.bfloat16
            with setting.device:
                AutoModelForCausalLM.from_config(setting.config, dtype=dtype).save_pretrained(fresh)
            setting.free()
            fresh.rename(target)
        while not target.exists():
            time.sleep(0.1)
        return target

    def _of_all(self, value: float) -> list[float]:
        """Every rank's number."""
        if self._ranks == 1:
            return [value]
        every: list[Any] = [None] * self._ranks
        dist.all_gather_object(every, value)
        return every


def read_label(label: str) -> tuple[int, int, dict[str, int]]:
    """Groups, ranks of each, and how these stand."""
    found = re.fullmatch(rf"(?:(\d+)x)?(\d+)((?:-{LAYOUT})*)", label)
    if found is None:
        raise SystemExit(f"'{label}' is not RANKS, GROUPSxRANKS or RANKS-tensorN-contextN-replicasN-expertN")
    return int(found[1] or 1), int(found[2]), read_layout(found[3])


def read_layout(words: str) -> dict[str, int]:
    """`tensor2-context2` as settings."""
    return {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", words)}


def be_a_rank(arguments: argparse.Namespace) -> int:
    """What one of the started processes does; how many cases failed."""
    group, rank, ranks = (int(word) for word in arguments.rank.split("/"))
    label, names = arguments.plan[0].split(":")
    if ranks > 1:
        store = dist.FileStore(str(arguments.folder / f"{arguments.store}-{group}"), ranks)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    _, _, parallel = read_label(label)
    failed = Rank(arguments, rank, ranks, parallel).do(names.split(","), label)
    if ranks > 1:
        dist.destroy_process_group()
    return failed


def run(arguments: argparse.Namespace, item: str) -> bool:
    """Start the ranks of one item of the plan, and wait for them; whether all cases came to their ends."""
    words = [sys.executable, __file__, *sys.argv[1:], "--folder", str(arguments.folder)]
    places: list[tuple[str, str, str]] = []
    for number, part in enumerate(item.split("+")):
        groups, ranks, _ = read_label(part.split(":", maxsplit=1)[0])
        store = f"store-{time.time():.6f}-{number}"
        places += [(part, store, f"{place // ranks}/{place % ranks}/{ranks}") for place in range(groups * ranks)]
    processes = [
        subprocess.Popen(
            [*words, "--store", store, "--item", part, "--rank", rank],
            env={**os.environ, "LOCAL_RANK": str(place)},
        )
        for place, (part, store, rank) in enumerate(places)
    ]
    deadline = time.monotonic() + arguments.limit_s
    try:
        for process in processes:
            process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{item} took longer than {arguments.limit_s:g} s\n")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return not any(process.returncode for process in processes)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    steps = [row for row in rows if "tokens_per_s_of_a_gpu" in row]
    alone = {row["case"]: row["tokens_per_s_of_a_gpu"] for row in steps if row["ranks"] == "1"}
    best = max((rate for row in steps for rate in row["matrix_rates"]), default=0.0)
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for row in steps:
        own, count = row["tokens_per_s_of_a_gpu"], len(row["peaks_gib"])
        efficiency = f"{own / alone[row['case']]:.3f}" if row["case"] in alone else ""
        cells = [row["ranks"], row["case"], f"{1000 * row['seconds_of_a_step']:,.0f}", f"{own:,.0f}", efficiency]
        cells += [f"{count * own:,.0f}", f"{row['flops_per_s_of_a_gpu'] / best:.3f}", f"{max(row['peaks_gib']):.1f}"]
        cells.append(f"{row['planned_gib']:.1f}" if row["planned_gib"] else "")
        cells.append(f"{min(row['matrix_rates']) / 1e12:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    told = [
        f"gradient of {row['ranks']}: at most {row['largest_difference']:.1e} from that of one, largest "
        f"{row['largest']:.2g}, {row['backend']}"
        for row in rows
        if "largest_difference" in row
    ]
    return "\n".join([*lines, "", f"MFU against {best / 1e12:.0f} TFLOP/s", *told])


def main() -> int:
    """Go through the plan and print the table; 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="+", help="RANKS:CASE,CASE,...")
    parser.add_argument("--kernel", default="auto", help="of attention")
    parser.add_argument("--output", type=Path, default=Path("scaling.json"))
    parser.add_argument("--folder", type=Path, help="for models; by default a temporary one")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one item of the plan")
    parser.add_argument("--profile", action="store_true", help="print where each rank's time goes")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--item", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        arguments.plan = [arguments.item]
        return be_a_rank(arguments)
    arguments.folder = arguments.folder or Path(tempfile.mkdtemp(prefix="areal-scaling-"))
    (arguments.folder / "rows").mkdir(parents=True, exist_ok=True)
    failed = False
    for item in arguments.plan:
        began = time.monotonic()
        failed |= not run(arguments, item)
        rows = [json.loads(path.read_text()) for path in sorted((arguments.folder / "rows").glob("*.json"))]
        arguments.output.write_text(json.dumps(rows))
        print(f"{item}: {time.monotonic() - began:.0f} s\n{table(rows)}\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
