"""What loading a model takes of a host's memory: a rank's peak, and the plan of a model too large for this machine.

    python benchmarks/loading.py peak [--ranks 2] [--tensor 1] [--gib 1.5] [--of-role actor] [--dtype float32]
    python benchmarks/loading.py plan [--ranks 8] [--tensor 1] [--dtype float32]

`peak` writes a random model and starts ranks over gloo that set up an engine; it prints each rank's peak resident
memory (`ru_maxrss`), and the bytes over what the same process had before. To measure another version of the engine, put
its packages into PYTHONPATH.

`plan` takes the sizes of Llama 3.1 70B and a process group that only pretends to have other ranks. Its file is sparse:
names, shapes and no bytes. Loading and division are the true ones, and stop before the slices are read; what each rank
is going to hold and to read is counted from its shards.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR, REFERENCE
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

LLAMA_70B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=8_192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
    rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    tie_word_embeddings=False,
)
GIB = 1 << 30
LARGEST_FILE = 4 * GIB


def write_sparse(folder: Path, config: LlamaConfig) -> int:
    """A model's folder in bfloat16 whose tensors take no room on the disk; their bytes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Any]] = [{}]
    end = total = 0
    for name, tensor in model.state_dict().items():
        if end > LARGEST_FILE:
            files, end = [*files, {}], 0
        begin, end = end, end + 2 * tensor.numel()
        total += end - begin
        files[-1][name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    for number, header in enumerate(files):
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"{number}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in header.values()))
    places = {name: f"{number}.safetensors" for number, header in enumerate(files) for name in header}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return total


def plan(folder: Path, ranks: int, tensor: int, dtype: str) -> dict[str, float]:
    """What each of so many ranks holds and reads of `LLAMA_70B`, in GiB; counted on the first and on the last."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from areal_fsdp.models.model import RoleModule, load_model
    from areal_fsdp.parallel.mesh import place_ranks
    from areal_fsdp.sharding import shard

    in_files = write_sparse(folder, LLAMA_70B)
    role = ACTOR if dtype == "float32" else REFERENCE
    config = FSDPConfig.model_validate({"parallel": {"tensor": tensor}})
    held, read, undivided = [], [], 0
    for rank in (0, ranks - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        model, files = load_model(ModelReference(str(folder), dtype), role, in_parts=True)
        assert files is not None, "it would be read whole"
        module = RoleModule(model, role, temperature=1.0)
        undivided = sum(parameter.nbytes for parameter in model.parameters())
        shard(module, place_ranks(config.parallel, torch.device("cpu")), config, getattr(torch, dtype))
        own: list[Any] = [parameter.to_local() for parameter in module.parameters()]
        assert all(part.is_meta for part in own)
        held.append(sum(part.nbytes for part in own))
        read.append(sum(2 * part.numel() for part in own))
        dist.destroy_process_group()
    largest = LLAMA_70B.vocab_size * LLAMA_70B.hidden_size
    return {
        "model": undivided / GIB,
        "files": in_files / GIB,
        "rank_holds": max(held) / GIB,
        "rank_reads": max(read) / GIB,
        "slice_at_most": 2 * largest / ranks / GIB,
        "host_holds": ranks * max(held) / GIB,
        "probe_holds_at_most": largest * (4 if dtype == "float32" else 2) / GIB if tensor > 1 else 0.0,
        "process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    }


def write_model(folder: Path, gib: float) -> int:
    """A random model of about so many GiB in float32, held by files in bfloat16, one for each layer; its bytes."""
    layers = max(1, round(gib * GIB / (4 * 12.6e6)))
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = LlamaConfig(**sizes, vocab_size=8_192, num_hidden_layers=layers, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(config)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="30MB")
    return size


class Watched(FSDPEngine):
    """Knows the peak when the model is in its place, before it computes for the first time."""

    def _place(self, *arguments: Any) -> Any:
        result = super()._place(*arguments)
        self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.placed = time.perf_counter()
        return result


def one_rank(arguments: argparse.Namespace) -> None:
    """Set up an engine, and print the peak."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(arguments.folder / "store"), arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.ranks)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine = Watched(FSDPConfig.model_validate({"parallel": {"tensor": arguments.tensor}}))
    role = REFERENCE if arguments.of_role == "reference" else ACTOR
    began = time.perf_counter()
    engine.setup(ModelReference(str(arguments.folder / "model"), arguments.dtype), role, OptimizerSettings(1, 1.0))
    took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    over = [(value - before) * 1024 / GIB for value in (engine.peak, peak)]
    print(
        f"rank {arguments.rank}: {before * 1024 / GIB:.2f} GiB before; its peak is {over[0]:.2f} more when the model "
        f"is in its place ({engine.placed - began:.1f} s), {over[1]:.2f} when it has been checked ({took:.1f} s)",
        flush=True,
    )
    engine.close()
    dist.destroy_process_group()


def peak(arguments: argparse.Namespace) -> None:
    """Start the ranks; the model is written by a process of its own."""
    command = [sys.executable, __file__]
    options = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in ("ranks", "tensor", "dtype", "gib")]
    options += [f"--of-role={arguments.of_role}"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "write", *options, f"--folder={folder}"], check=True)
        started = [
            subprocess.Popen(
                [*command, "rank", *options, f"--folder={folder}", f"--rank={rank}"],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
            for rank in range(arguments.ranks)
        ]
        failed = [process.wait(timeout=1200) for process in started]
        if any(failed):
            raise SystemExit("a rank failed; its own message says why")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("peak", "plan", "rank", "write"), help="`peak` starts `write` and `rank`")
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--of-role", choices=("actor", "reference"), default="actor")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rank", type=int)
    arguments = parser.parse_args()
    if arguments.what == "plan":
        with tempfile.TemporaryDirectory() as folder:
            found = plan(Path(folder), arguments.ranks or 8, arguments.tensor, arguments.dtype)
        print(json.dumps({name: round(value, 2) for name, value in found.items()}))
        return
    arguments.ranks = arguments.ranks or 2
    if arguments.what == "write":
        print(
            f"a model of {write_model(arguments.folder / 'model', arguments.gib) / GIB:.2f} GiB in float32", flush=True
        )
    elif arguments.what == "rank":
        one_rank(arguments)
    else:
        peak(arguments)


if __name__ == "__main__":
    main()
