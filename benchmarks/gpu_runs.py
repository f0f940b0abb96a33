"""GRPO with SGLang and the FSDP engine on GPUs: in turns on one, side by side on two, or sharing the memory of one.

    python benchmarks/gpu_runs.py model FOLDER --size 1.5b
    python benchmarks/gpu_runs.py colocated --model FOLDER --program "python3 -m sglang.launch_server"
    python benchmarks/gpu_runs.py disaggregated --model FOLDER --program "python3 -m sglang.launch_server"
    python benchmarks/gpu_runs.py shared --model FOLDER --set train_engine.adapter.rank=16

The model has the sizes of Qwen2-0.5B, 1.5B or 7B, random weights, and the class of Qwen3, whose tokenizer may be any,
or those of four layers of Qwen3-30B-A3B, an MoE. `--set` changes the config, as `areal run` takes it.
While the run goes on the memory of every GPU is sampled and put beside the trainer's phase.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import yaml

from areal_core.runs import RunFolder
from areal_core.runtime.attempts import ask_driver
from areal_core.runtime.messages import StatusRequest

PORT = 30123
"""Of the server of `shared`."""

SIZES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "head_dim": 64,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "head_dim": 128,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
MOES = {
    "moe": {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
                "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
                "head_dim": 128, "norm_topk_prob": True},
    "tiny-moe": {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
                     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip
PLACEMENTS = {
    "colocated": {"generation": [0], "training": [0]},
    "disaggregated": {"generation": [0], "training": [1]},
    "shared": {"training": [0]},
}
VOCABULARY = 151936
ASK_TIMEOUT_S = 2.0
SHOWN = (
    "reward/mean",
    "staleness/mean",
    "time/step_s",
    "time/wait_s",
    "time/sleep_s",
    "time/train_s",
    "time/weight_sync_s",
    "time/checkpoint_s",
    "time/logprob_check_s",
    "weight_sync/pause_s",
    "weight_sync/transfer_s",
    "weight_sync/resume_s",
    "batch/sampled_tokens",
    "servers/continued",
    "logprob_check/difference_mean",
    "logprob_check/difference_p99",
    "train/router_disagreement",
    "train/behavior_difference",
    "train/behavior_kl",
)


def make_model(folder: Path, size: str) -> None:
    """Random weights in bfloat16, and a tokenizer of one word for each token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192, "eos_token_id": 1, "bos_token_id": 1}
    if size in MOES:
        config = Qwen3MoeConfig(**common, tie_word_embeddings=False, **MOES[size])
    else:
        config = Qwen3Config(**common, **{"num_key_value_heads": 2, "tie_word_embeddings": True} | SIZES[size])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # a direction in which both halves of the vocabulary differ: one that training can find
        rows = model.get_input_embeddings().weight
        half = 0.01 * torch.randn_like(rows[:1])
        rows[: VOCABULARY // 2] += half
        rows[VOCABULARY // 2 :] -= half
    model.save_pretrained(folder)
    words = {"<unknown>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="", cleanup=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>").save_pretrained(
        folder
    )


def make_config(arguments: argparse.Namespace) -> dict:
    """The run, as a config file would have it."""
    parts = Path(__file__).with_name("gpu_parts.py")
    colocated = arguments.what == "colocated"
    options = {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": 0.3 if arguments.what == "shared" else 0.5,
        "disable_custom_all_reduce": True,
        "cuda_graph_bs_decode": [16, 64, 128, 256],
    }
    return {
        "plugins": ["grpo", "fsdp", "sglang"],
        "steps": arguments.steps + 1,  # the run is ended before it writes the last checkpoint
        "model": {"path": str(arguments.model), "dtype": "bfloat16"},
        "dataset": f"{parts}:RandomPrompts",
        "workflow": "single_turn",
        "rewards": [f"{parts}:lower_half"],
        "sampling": {"max_new_tokens": arguments.tokens},
        "rollout": {"batch_size": 16, "group_size": 8, "max_staleness": 1},
        "inference_engine": {
            "type": "sglang",
            "program": shlex.split(arguments.program),
            "memory_saver": colocated,
            "update_mode": arguments.mode,
            "options": options | json.loads(arguments.options),
        },
        # In turns from GPU memory, else by broadcast; `shared` takes a folder.
        "weight_sync": {"logprob_check_every": 2},
        "placement": PLACEMENTS[arguments.what],
        "train_engine": {
            "type": "fsdp",
            "learning_rate": arguments.learning_rate,
            "max_tokens_per_microbatch": 32768,
            "activation_checkpointing": True,
        },
        "algorithm": "grpo",
        "checkpoint": {"export": False},
    }


def watch_memory(run_dir: Path, stop: threading.Event, found: dict) -> None:
    """Memory of each GPU in MiB, by the trainer's phase."""
    while not stop.wait(0.1):
        try:
            driving = ask_driver(RunFolder(run_dir).attempts()[-1], StatusRequest(), ASK_TIMEOUT_S)
            phase = driving.processes["trainer-0"].phase
            text = subprocess.run(
                ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        except (OSError, ValueError, LookupError, AttributeError, subprocess.CalledProcessError):
            continue
        for gpu, used in enumerate(text.split()):
            found[phase, gpu].append(int(used))


def serve(config: Path, changes: list[str]) -> subprocess.Popen[bytes]:
    """A server of this config on the first GPU, which the run finds by its address."""
    words = ["serve", str(config), "--gpus", "0", "--port", str(PORT), *changes]
    return subprocess.Popen([sys.executable, "-m", "areal_core", *words])


def main() -> int:
    """Make the model, or run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("model", *PLACEMENTS))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", default="1.5b", choices=[*SIZES, *MOES])
    parser.add_argument("--program", default="python3 -m sglang.launch_server")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--mode", default="recompute")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="further KEY=VALUE of the config")
    arguments = parser.parse_intermixed_args()
    if arguments.what == "model":
        make_model(arguments.folder, arguments.size)
        return 0
    run_dir = arguments.run_dir or Path(tempfile.mkdtemp(prefix="areal-gpu-")) / "run"
    config = run_dir.parent / f"{arguments.what}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(make_config(arguments), sort_keys=False))
    server = serve(config, arguments.set) if arguments.what == "shared" else None
    own = ["inference_engine.servers=0", f"inference_engine.addresses=[http://127.0.0.1:{PORT}]"] if server else []
    memory, stop = defaultdict(list), threading.Event()
    watcher = threading.Thread(target=watch_memory, args=(run_dir, stop, memory))
    watcher.start()
    began = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "-m", "areal_core", "run", str(config), f"run_dir={run_dir}", *arguments.set, *own],
        env={**os.environ, "NCCL_CUMEM_ENABLE": "0"},
        start_new_session=True,
    )
    metrics = run_dir / "metrics.jsonl"
    while run.poll() is None and time.monotonic() - began < arguments.limit_s:
        if metrics.is_file() and len(metrics.read_text().splitlines()) >= arguments.steps:
            break
        time.sleep(0.2)
    code = run.poll()
    if code is None:
        os.killpg(run.pid, signal.SIGKILL)
    if server is not None:
        server.send_signal(signal.SIGINT)
        server.wait()
    stop.set()
    watcher.join()
    print(f"{arguments.what}: exit code {code} after {time.monotonic() - began:.0f} s")
    for (phase, gpu), used in sorted(memory.items()):
        print(f"  GPU {gpu} while '{phase}': {min(used):,} to {max(used):,} MiB ({len(used)} readings)")
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    for line in lines:
        step = json.loads(line)
        print(f"  step {step['step']}", "  ".join(f"{key} {step[key]:.4g}" for key in SHOWN if key in step))
    return code or int(len(lines) < arguments.steps)


if __name__ == "__main__":
    sys.exit(main())
