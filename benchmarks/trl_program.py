"""The comparison's other side: TRL's GRPOTrainer on the demonstration's model, task and batch. Run by `against_trl.py`.

    python benchmarks/trl_program.py MODEL OUTPUT THREADS SEED STEPS

Imports only TRL and the demonstration's problems (as a file), so that it runs in an environment without areal.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def load_additions() -> Any:
    """The demonstration's problems, without importing the packages around them."""
    path = Path(__file__).parents[1] / "plugins/areal_grpo/src/areal_grpo/demonstration/additions.py"
    specification = importlib.util.spec_from_file_location("additions", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class StepTimes(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def held_out_score(model: Any, tokenizer: Any, additions: Any) -> float:
    """Share of two samples at temperature 1 that solve a held-out problem, as areal's preset asks."""
    right = 0.0
    problems = additions.problems("held_out") * 2
    for first, second in problems:
        prompt = tokenizer(f"{first}+{second}=", return_tensors="pt", add_special_tokens=False)
        output = model.generate(**prompt, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=22)
        ids = output[0, prompt["input_ids"].shape[1] :].tolist()
        reason = "stop" if tokenizer.eos_token_id in ids else "length"
        completion = tokenizer.decode(ids, skip_special_tokens=True)
        right += additions.right_result(completion, str(first + second), reason)
    return right / len(problems)


def main() -> None:
    """Train, time, score."""
    model_path, output, threads, seed, steps = sys.argv[1:]
    torch.set_num_threads(int(threads))
    additions = load_additions()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in additions.problems("train")]

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [
            additions.right_result(text, right, "stop" if ids and ids[-1] == tokenizer.eos_token_id else "length")
            for text, right, ids in zip(completions, answer, completion_ids, strict=True)
        ]

    settings = GRPOConfig(
        output_dir=f"{output}.trl",
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=22,
        learning_rate=3e-4,
        adam_beta2=0.999,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        max_steps=int(steps),
        temperature=1.0,
        beta=0.0,
        seed=int(seed),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    times = StepTimes()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[times],
    )
    trainer.train()
    seconds = times.times[-1] - times.times[19]
    result: dict[str, Any] = {
        "samples_per_s": 128 * (len(times.times) - 20) / seconds,
        "held_out": held_out_score(trainer.model.eval(), tokenizer, additions),
        "rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line],
    }
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
