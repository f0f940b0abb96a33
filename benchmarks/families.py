"""Whether families of models learn on a laptop: the demonstration's task on a tiny model of each.

    python benchmarks/families.py [FAMILY...] [--lessons 800] [--steps 100] [--seed 0] [--folder DIR]

A model with random weights and the demonstration's tokenizer is fine-tuned on the demonstration's lessons, and then
learns by GRPO with the embedded engine and FSDP. The driver is killed once, by SIGKILL at a random step, and the run is
resumed and audited. Prints a line for each family: the way that the engine generates by, the held-out score
before and after, the largest distance of a log-probability of the engine to the trainer's at equal weights, where the
driver was killed, and the minutes of both runs. What `--folder` already holds is not made again.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults import AREAL, Faulty, audit, leftovers, step_of

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **SIZES,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 24,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {
        **SIZES,
        "intermediate_size": 128,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "nemotron_h": {
        **SIZES,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 24,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        **SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def make_model(family: str, folder: Path, seed: int) -> None:
    """Write a model of a family with random weights and the demonstration's tokenizer."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

    from areal_grpo.demonstration.model import make_model as make_demonstration

    make_demonstration(folder)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    settings = {**FAMILIES[family], **tokens, "vocab_size": len(AutoTokenizer.from_pretrained(folder))}
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings)).save_pretrained(folder)


def way_of(folder: Path) -> str:
    """Return how the embedded engine generates with a model."""
    from areal_core.engines import ModelReference
    from areal_hf.server import load_model
    from areal_hf.ways import choose_way

    return str(choose_way(load_model(ModelReference(str(folder)), "cpu")).way)


def teach(family: str, folder: Path, lessons: int, seed: int) -> Path:
    """Return the folder of a fine-tuned model of the family, which is made where it is not there."""
    initial, taught = folder / "initial", folder / "lessons"
    if not (taught / "model" / "config.json").is_file():
        make_model(family, initial, seed)
        words = [f"steps={lessons}", f"dataset.rows={64 * lessons}", f"model.path={initial}", f"run_dir={taught}"]
        done = subprocess.run([*AREAL, "run", "grpo/addition_lessons", *words], stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SystemExit(f"fine-tuning of {family} ended with exit code {done.returncode}: see {taught}")
    return taught / "model"


def learn(model: Path, run_dir: Path, steps: int, seed: int, killed_at: int) -> int:
    """Train with GRPO; kill the driver behind a step and resume.

    Returns:
        The step that the run had come to when the driver was killed.
    """
    words = ["run", "grpo/addition", f"steps={steps}", f"seed={seed}", "model.source=null", f"model.path={model}"]
    words += ["weight_sync.logprob_check_every=10"]
    run = Faulty(words, run_dir)
    run.start()
    while (done := step_of(run_dir)) < killed_at:
        run.wait_for_step(done)
    assert run.process is not None
    killed_at = step_of(run_dir)
    run.process.kill()
    run.process.wait()
    assert not leftovers(run_dir), leftovers(run_dir)
    run.start()
    if run.process.wait():
        raise SystemExit(f"the resumed run failed: {run.log.read_text()[-3000:]}")
    return killed_at


def measure(family: str, folder: Path, arguments: argparse.Namespace) -> str:
    """Return the family's line of the table."""
    result = folder / "result.json"
    if not result.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        model = teach(family, folder, arguments.lessons, arguments.seed)
        steps, seed = arguments.steps, arguments.seed
        killed_at = random.Random(f"{family} {seed}").randint(steps // 5, steps * 4 // 5)
        killed_at = learn(model, folder / "run", steps, seed, killed_at)
        minutes = (time.monotonic() - began) / 60
        result.write_text(json.dumps({"way": way_of(model), "killed_at": killed_at, "minutes": minutes}))
    found = json.loads(result.read_text())
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line["step"] for line in lines if line["step"] > 0]
    assert trained == [*range(1, arguments.steps + 1)], "each step is there once"
    audit(folder / "run")
    scores = [line["evaluation/reward"] for line in lines if "evaluation/reward" in line]
    differences = [line["logprob_check/difference_max"] for line in lines if "logprob_check/difference_max" in line]
    return (
        f"`{family}` | {found['way']} | {scores[0]:.3f} | {scores[-1]:.3f} | {max(differences):.1e} | "
        f"{found['killed_at']} | {found['minutes']:.0f}"
    )


def main() -> None:
    """Make the runs that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[*FAMILIES])
    parser.add_argument("--lessons", type=int, default=800, help="steps of the fine-tuning")
    parser.add_argument("--steps", type=int, default=100, help="steps of GRPO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="families-"))
    print("family | way | before | after | largest difference | killed after step | minutes")
    print("---|---|---|---|---|---|---")
    for family in asked.families:
        print(measure(family, folder / family, asked), flush=True)


if __name__ == "__main__":
    sys.exit(main())
