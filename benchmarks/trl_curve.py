"""TRL's side of `curve.py`: its GRPO trainers on the data set, rewards and sizes of one of areal's configs.

    python benchmarks/trl_curve.py CONFIG --server http://127.0.0.1:8000 --metrics metrics.jsonl [section.key=value ...]
    python benchmarks/trl_curve.py CONFIG --asynchronous ...
    torchrun --nproc-per-node 2 benchmarks/trl_curve.py CONFIG --colocated ...      # vLLM within the ranks, no server

Runs in TRL's environment, which has areal-core and the plugins of the data set and rewards beside TRL and vLLM, so that
both sides draw the same problems and score them with the same code. The server is vLLM's own, as TRL wants it:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'
      --logprobs-mode processed_logprobs --max-logprobs -1

Taken from the config: batch, group, seed, steps, evaluation, temperature and longest answer, optimizer, warm-up, and
how far the ratio and the importance weight may go. A config with another algorithm than `grpo`, with `top_p`,
`top_k`, `stop`, `schedule` or `clip_high`, with minibatches or epochs, is not compared fairly. The rest is TRL's
default, but for activation checkpointing, which is off as areal's is, and the size of a micro-batch. TRL's warm-up
begins with a learning rate of 0, areal's with the first fraction of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from vllm import SamplingParams
from vllm.utils.network_utils import get_open_port

from areal_core.config import resolve
from areal_core.rewards.worker import build_rewards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch


RANKS = int(os.environ.get("WORLD_SIZE", "1"))
"""As torchrun says."""


class Problems:
    """The data set and the rewards of a config; what TRL's rollout process gets by pickling is how to make them."""

    __name__ = "reward"

    def __init__(self, config: str, overrides: Sequence[str]) -> None:
        self._arguments = (config, tuple(overrides))

    def __call__(self, completions: Sequence[Any], index: Sequence[int], **_: Any) -> list[float]:
        """A reward function as TRL calls it."""
        texts = [item if isinstance(item, str) else item[-1]["content"] for item in completions]
        return self.score(self.train, texts, index)

    def score(self, rows: Any, texts: Sequence[str], index: Sequence[int]) -> list[float]:
        """Of one completion for each index."""
        return [
            self._rewards({"completion": text, "row": rows[number]}).value
            for text, number in zip(texts, index, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"_arguments": self._arguments}

    @functools.cached_property
    def config(self) -> Any:
        """All of it."""
        config, overrides = self._arguments
        return resolve(config, overrides=list(overrides)).config

    @functools.cached_property
    def train(self) -> Any:
        """The data set that is trained on."""
        return self.config.dataset.build()

    @functools.cached_property
    def held_out(self) -> Any:
        """The data set of the evaluation."""
        return self.config.evaluation.dataset.build()

    @functools.cached_property
    def _rewards(self) -> Any:
        return build_rewards(self.config.rewards)


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds added to a part."""

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - began

        return call

    def take(self) -> dict[str, float]:
        """Since they were taken last."""
        taken, self.parts = self.parts, {}
        return taken


class Journal(TrainerCallback):
    """Writes a line for each step with the names that areal's metrics have, and evaluates.

    Args:
        path: of the lines.
        problems: to evaluate with.
        tokenizer: of the model.
        generate: answers for prompts, as `VLLMClient.generate` takes them: a list of token ids for each answer.
    """

    def __init__(self, path: Path, problems: Problems, tokenizer: Any, generate: Callable[..., Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._path, self._problems, self._tokenizer = path, problems, tokenizer
        self.generate = generate
        self.clock = Clock()
        self.bring_weights: Callable[[int], None] = lambda step: None
        self._ended = 0.0
        self._line: dict[str, float] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Evaluate the first weights."""
        self._step_ended(0)
        self._write({})

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Note the time; `on_log` follows."""
        self._step_ended(state.global_step)

    def on_log(self, _: Any, state: Any, *__: Any, logs: dict[str, float], **___: Any) -> None:
        """Write the line of the step; what is logged at the very end has no reward."""
        if state.global_step and "reward" in logs:
            self._write(logs)

    def _step_ended(self, step: int) -> None:
        now, parts = time.time(), self.clock.take()
        waited, synced = parts.get("generate", 0.0) + parts.get("reward", 0.0), parts.get("weight_sync", 0.0)
        self._line = {"step": step, "time": now}
        if step:
            self._line |= {"time/step_s": now - self._ended, "time/wait_s": waited, "time/weight_sync_s": synced}
        every = self._problems.config.evaluation.every
        if every and step % every == 0:
            self.bring_weights(step)
            scored = evaluation(self._problems, self._tokenizer, self.generate)
            self._line["evaluation/reward"], self._line["time/evaluate_s"] = scored
            self._line["time"] = time.time()
            self.clock.take()  # what the evaluation took is no part of the next step
        self._ended = time.time()

    def _write(self, logs: dict[str, float]) -> None:
        line, rollout = dict(self._line), self._problems.config.rollout
        if logs:
            sequences = logs.get("batch/samples_per_step", rollout.batch_size * rollout.group_size)
            line |= {"reward/mean": logs["reward"], "batch/sequences": sequences}
            line |= {
                ours: logs[theirs]
                for ours, theirs in (
                    ("batch/response_length", "completions/mean_length"),
                    ("batch/truncated", "completions/clipped_ratio"),
                    ("train/entropy", "entropy"),
                    ("train/gradient_norm", "grad_norm"),
                    ("staleness/mean", "sample/staleness_mean"),
                    ("time/wait_s", "perf/rollout_wait_s"),  # the asynchronous trainer keeps these times itself
                    ("time/weight_sync_s", "perf/weight_sync_s"),
                )
                if theirs in logs
            }
            # All the rest of the step.
            line["time/train_s"] = line["time/step_s"] - line["time/wait_s"] - line["time/weight_sync_s"]
        with self._path.open("a") as journal:
            journal.write(json.dumps(line) + "\n")


def evaluation(problems: Problems, tokenizer: Any, generate: Callable[..., Any]) -> tuple[float, float]:
    """The held-out score by the weights that vLLM has, and the seconds that it took."""
    began, config = time.perf_counter(), problems.config
    rows, section = problems.held_out, config.evaluation
    count = min(len(rows), section.limit or len(rows))
    temperature = config.sampling.temperature if section.temperature is None else section.temperature
    prompts = [
        tokenizer.apply_chat_template(rows[i]["prompt"], add_generation_prompt=True, return_dict=False)
        for i in range(count)
    ]
    sampling = {"temperature": temperature, "max_tokens": config.sampling.max_new_tokens}
    found = generate(prompts, n=section.samples_per_prompt, **sampling)
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    scores = problems.score(rows, texts, [i for i in range(count) for _ in range(section.samples_per_prompt)])
    return sum(scores) / len(scores), time.perf_counter() - began


def served_answers(client: VLLMClient, prompts: Sequence[Sequence[int]], **sampling: Any) -> Any:
    """Of a vLLM server."""
    return client.generate(prompts, logprobs=None, **sampling)["completion_ids"]


def answers(engine: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Sequence[int]]:
    """Of a vLLM engine in this process."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(asked, sampling_params=SamplingParams(**sampling), use_tqdm=False)
    return [answer.token_ids for output in outputs for answer in output.outputs]


def common_settings(arguments: argparse.Namespace, config: Any, passes: int) -> dict[str, Any]:
    """Of both trainers, from areal's config; a batch takes so many forward passes, of all ranks together."""
    engine = config.train_engine.settings
    if passes % RANKS:
        raise SystemExit(f"{passes} passes cannot be shared by {RANKS} GPUs")
    return {
        "output_dir": f"{arguments.metrics}.trl",
        "per_device_train_batch_size": config.rollout.batch_size * config.rollout.group_size // passes,
        "gradient_accumulation_steps": passes // RANKS,
        "num_generations": config.rollout.group_size,
        "max_completion_length": config.sampling.max_new_tokens,
        "temperature": config.sampling.temperature,
        "learning_rate": engine.learning_rate,
        "adam_beta1": engine.betas[0],
        "adam_beta2": engine.betas[1],
        "weight_decay": engine.weight_decay,
        "max_grad_norm": engine.max_gradient_norm,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": engine.warmup_steps,
        "epsilon": config.algorithm.settings.policy_loss.settings.clip_low,
        "max_steps": config.steps,
        "seed": config.seed,
        "bf16": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def synchronous(arguments: argparse.Namespace, problems: Problems, journal: Journal, rows: Dataset) -> Any:
    """`GRPOTrainer` with a vLLM server on another GPU, or with vLLM in its own ranks."""
    config = problems.config
    place: dict[str, Any] = {"vllm_mode": "colocate"}
    if not arguments.colocated:
        port = get_open_port()  # of the weights' NCCL group
        place = {"vllm_mode": "server", "vllm_server_base_url": arguments.server, "vllm_group_port": port}
    trainer = GRPOTrainer(
        model=str(config.model.path),
        reward_funcs=journal.clock.timed("reward", problems),
        args=GRPOConfig(
            **common_settings(arguments, config, passes=4),
            use_vllm=True,
            **place,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=config.algorithm.settings.corrections[0].settings.cap,
        ),
        train_dataset=rows,
        callbacks=[journal] if int(os.environ.get("RANK", "0")) == 0 else [],
    )
    inner = trainer.vllm_generation
    if arguments.colocated:
        journal.generate = functools.partial(answers, inner.llm)
    inner.sync_weights = journal.clock.timed("weight_sync", inner.sync_weights)
    inner.generate = journal.clock.timed("generate", inner.generate)

    def bring_weights(step: int) -> None:
        inner.sync_weights()
        trainer._last_loaded_step = step  # the next step need not bring the same ones again

    journal.bring_weights = bring_weights
    return trainer


def asynchronous(arguments: argparse.Namespace, problems: Problems, journal: Journal, rows: Dataset) -> Any:
    """The experimental `AsyncGRPOTrainer`, with PyTorch's attention where it takes a kernel from the hub."""
    from torch.nn.attention.varlen import varlen_attn
    from trl.chat_template_utils import qwen3_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
        longest_query: int,
        longest_key: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        repeated = query.shape[1] // key.shape[1]
        if repeated > 1:  # grouped heads
            key, value = key.repeat_interleave(repeated, 1), value.repeat_interleave(repeated, 1)
        window = (-1, 0) if causal and window_size == (-1, -1) else window_size
        return varlen_attn(
            query,
            key,
            value,
            query_starts,
            key_starts,
            int(longest_query),
            int(longest_key),
            scale=softmax_scale,
            window_size=window,
        )

    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attend)
    config = problems.config
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.response_template = qwen3_template  # of ChatML answers; TRL refuses a template that it does not know
    trainer = AsyncGRPOTrainer(
        model=str(config.model.path),
        reward_funcs=problems,
        args=AsyncGRPOConfig(
            **common_settings(arguments, config, passes=1),
            vllm_server_base_url=arguments.server,
            token_budget=0,  # a pass has so many sequences, and their common prompts once
            max_staleness=config.rollout.max_staleness,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.add_callback(journal)  # behind those that bring the weights to the server
    return trainer


def dataset_rows(problems: Problems) -> Iterator[dict[str, Any]]:
    """What TRL is given: a prompt, and the number of its row."""
    for index in range(len(problems.train)):
        yield {"prompt": problems.train[index]["prompt"], "index": index}


def main() -> None:
    """Train, and journal every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--metrics", type=Path, required=True, help="JSON lines, as areal writes them")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--asynchronous", action="store_true", help="with TRL's experimental AsyncGRPOTrainer")
    ways.add_argument("--colocated", action="store_true", help="with vLLM in the trainer's ranks, without a server")
    arguments = parser.parse_intermixed_args()
    problems = Problems(arguments.config, arguments.overrides)
    tokenizer = AutoTokenizer.from_pretrained(problems.config.model.path)
    client = None if arguments.colocated else VLLMClient(base_url=arguments.server, connection_timeout=240)
    journal = Journal(arguments.metrics, problems, tokenizer, functools.partial(served_answers, client))
    rows = Dataset.from_list(list(dataset_rows(problems)))
    make = asynchronous if arguments.asynchronous else synchronous
    make(arguments, problems, journal, rows).train()


if __name__ == "__main__":
    main()
