"""From the arguments of TRL's trainer to a config of areal.

Everything that decides what is trained is written out, so that TRL's defaults hold and not areal's. What areal cannot
honor is collected: `Mapping.problems` has all of it. `Mapping.notes` says what areal does in another way.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from typing import TYPE_CHECKING, Any, Final

from areal_core.trl.arguments import NO_EFFECT, REFUSED
from areal_core.trl.reward import not_passed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.trl.arguments import GRPOConfig

EPSILON: Final = 1e-4
"""TRL adds this to a standard deviation of rewards."""
LOSS_AGGREGATIONS: Final = {
    "dapo": "token_mean", "cispo": "token_mean", "bnpo": "token_mean", "grpo": "sequence_mean", "sapo": "sequence_mean",
    "dr_grpo": "constant_length", "luspo": "constant_length",
}  # fmt: skip
"""How TRL adds up the tokens' losses, by `loss_type`, in the words of areal."""
OPTIMIZERS: Final = (None, "adamw_torch", "adamw_torch_fused")
SCHEDULES: Final = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
}  # fmt: skip
_PEFT: Final = ("r", "lora_alpha", "target_modules")
"""Fields of PEFT's `LoraConfig` that areal honors; others must have their defaults."""


class Mapping:
    """The config that areal trains with, for a `GRPOConfig` of TRL.

    Args:
        arguments: TRL's arguments.
        rows: number of rows of the training data set; None if it has no length.
        has_evaluation: whether there is an evaluation data set.
        num_processes: processes of `accelerate launch` for which the script was written. TRL's batch grows with them.

    Attributes:
        config: the config, without model, data sets and rewards.
        problems: what areal cannot honor, a sentence each.
        notes: what areal does in another way than TRL, a sentence each.
    """

    def __init__(
        self, arguments: GRPOConfig, rows: int | None, *, has_evaluation: bool, num_processes: int = 1
    ) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._arguments = arguments
        self._others()
        batch = self._batch(num_processes)
        self._epoch = self._updates_of_an_epoch(rows)
        steps = self._steps()
        self.config: dict[str, Any] = {
            **batch,
            "steps": steps,
            "seed": arguments.seed,
            "shuffle": arguments.shuffle_dataset,
            "deterministic": arguments.full_determinism,
            "workflow": {"type": "single_turn", "chat_template_kwargs": arguments.chat_template_kwargs},
            "sampling": self._sampling(),
            "train_engine": self._train_engine(steps),
            "algorithm": self._algorithm(),
            "checkpoint": self._checkpoint(steps),
            "trackers": self._trackers(),
        }
        if has_evaluation and arguments.eval_strategy != "no":
            self.config["evaluation"] = self._evaluation(steps)

    @property
    def updates(self) -> int:
        """Optimizer updates of a step of areal, which is what a generation batch of TRL is."""
        return int(self._minibatches * self._arguments.num_iterations)

    def _refuse(self, name: str, why: str) -> None:
        self.problems.append(f"{name}={getattr(self._arguments, name)!r}: {why}")

    def _others(self) -> None:
        """Sort the arguments that have no equal in areal's config."""
        for name, value in self._arguments.others.items():
            default, why = REFUSED.get(name, (None, f"{NO_EFFECT.get(name, '')}"))
            if name in NO_EFFECT:
                self.notes.append(f"{name} has no effect: {why}")
            elif name not in REFUSED:
                self.problems.append(f"{name}: TRL 1.16 has no such argument")
            elif value != default:
                self.problems.append(f"{name}={value!r}: {why}")

    def _batch(self, num_processes: int) -> dict[str, Any]:
        """Return the sections of the generation batch and of its updates."""
        a = self._arguments
        per_step = a.per_device_train_batch_size * max(1, num_processes)
        if num_processes < 1:
            self.problems.append(f"num_processes={num_processes}: must be at least 1")
        steps, size = a.steps_per_generation, a.generation_batch_size
        if steps is not None and size is not None:
            self._refuse("generation_batch_size", "give it or steps_per_generation, and not both")
        if steps is None:
            wanted = size or per_step * a.gradient_accumulation_steps
            steps = wanted // per_step
            if wanted % per_step:
                self._refuse(
                    "generation_batch_size",
                    f"must be a multiple of per_device_train_batch_size x num_processes, which is {per_step}",
                )
        self._minibatches = max(1, steps // a.gradient_accumulation_steps)
        if steps % a.gradient_accumulation_steps and a.gradient_accumulation_steps % max(1, steps):
            self._refuse(
                "gradient_accumulation_steps", f"must divide the {steps} steps of a generation, or be a multiple"
            )
        answers = per_step * max(steps, a.gradient_accumulation_steps)
        self._generation = (steps, per_step * steps // a.num_generations)
        self.notes.append(
            f"a batch has {answers} answers, {a.num_generations} for each prompt, as TRL's with {num_processes} "
            "process(es): set num_processes of GRPOTrainer to what `accelerate launch` would start"
        )
        groups = answers // a.num_generations
        if answers % a.num_generations or not groups:
            self._refuse("num_generations", f"does not divide the {answers} answers of a batch")
        elif groups % self._minibatches:
            self.problems.append(
                f"steps_per_generation: {self._minibatches} updates must divide {groups} groups; change "
                "steps_per_generation or num_generations"
            )
        if a.num_iterations > 1 and steps < a.gradient_accumulation_steps:
            self._refuse(
                "num_iterations", "num_iterations > 1 needs steps_per_generation >= gradient_accumulation_steps"
            )
        if self._minibatches > 1 and LOSS_AGGREGATIONS.get(a.loss_type) == "token_mean":
            self.notes.append("an update divides by the number of its own tokens, TRL's by the generation batch's mean")
        return {
            "rollout": {
                "batch_size": max(1, groups), "group_size": a.num_generations, "max_staleness": 0,
                "max_pending_batches": 1,
            },
            "training": {"num_minibatches": self._minibatches, "num_epochs": a.num_iterations},
        }  # fmt: skip

    def _updates_of_an_epoch(self, rows: int | None) -> int | None:
        """Return the updates with which TRL trains on all rows once. An incomplete last batch of rows is dropped."""
        if rows is None:
            return None
        a = self._arguments
        steps, groups = self._generation
        batches = rows // max(1, groups)
        return max(1, math.ceil(batches * a.num_iterations * steps / a.gradient_accumulation_steps))

    def _steps(self) -> int:
        """Return the steps of areal: a generation batch each, rounded up to whole batches."""
        a = self._arguments
        if a.max_steps > 0:
            updates = a.max_steps
        elif self._epoch is not None:
            updates = math.ceil(a.num_train_epochs * self._epoch)
        else:
            self._refuse("max_steps", "the data set has no length, so the number of steps must be set")
            return 1
        steps = max(1, math.ceil(updates / self.updates))
        if steps * self.updates != updates:
            self.notes.append(
                f"{steps * self.updates} updates are trained where TRL trains {updates}: a batch is trained on to its "
                f"end, which takes {self.updates} updates"
            )
        return steps

    def _in_steps(self, value: float, steps: int) -> int:
        """Return an interval in steps of areal. Below 1 it is a share of the run, as in transformers."""
        return max(1, round(value * steps if value < 1 else value / self.updates))

    def _sampling(self) -> dict[str, Any]:
        a = self._arguments
        narrow = {"top_p": a.top_p, "top_k": a.top_k, "min_p": a.min_p or 0.0}
        is_plain = narrow == {"top_p": 1.0, "top_k": 0, "min_p": 0.0} and a.repetition_penalty == 1
        return {
            "temperature": a.temperature,
            "max_new_tokens": a.max_completion_length,
            **narrow,
            "repetition_penalty": a.repetition_penalty,
            "allow_mismatched_sampling": not is_plain,  # TRL trains on such samples as they are
        }

    def _train_engine(self, steps: int) -> dict[str, Any]:
        a = self._arguments
        if a.optim not in OPTIMIZERS:
            self._refuse("optim", "the optimizer is AdamW")
        schedule = SCHEDULES.get(str(getattr(a.lr_scheduler_type, "value", a.lr_scheduler_type)))
        if schedule is None:
            self._refuse("lr_scheduler_type", f"choose one of {', '.join(SCHEDULES)}")
        warmup = math.ceil(a.warmup_steps * steps * self.updates) if a.warmup_steps < 1 else int(a.warmup_steps)
        if warmup and a.lr_scheduler_type == "constant":
            warmup = 0
        if warmup:
            self.notes.append(f"the learning rate rises from 1/{warmup} of its height; transformers' begins at 0")
        if a.router_aux_loss_coef is None:
            self.notes.append("an MoE has no auxiliary loss of its router unless router_aux_loss_coef is set")
        return {
            "learning_rate": a.learning_rate,
            "betas": [a.adam_beta1, a.adam_beta2],
            "epsilon": a.adam_epsilon,
            "weight_decay": a.weight_decay,
            "warmup_steps": warmup,
            "schedule": schedule,
            "max_gradient_norm": a.max_grad_norm or None,
            "activation_checkpointing": "full" if a.gradient_checkpointing else "none",
            "router_loss": a.router_aux_loss_coef or 0.0,
        }

    def _algorithm(self) -> dict[str, Any]:
        a = self._arguments
        scale = a.scale_rewards
        if isinstance(scale, bool):
            scale = "group" if scale else "none"
        advantages: dict[str, dict[str, Any]] = {
            "group": {"type": "group_normalized", "epsilon": EPSILON},
            "batch": {"type": "lite_ppo", "epsilon": EPSILON},
            "none": {"type": "group_centered"},
        }
        if scale not in advantages:
            self._refuse("scale_rewards", f"choose one of {', '.join(advantages)}")
        advantage = advantages.get(scale, {})
        if a.multi_objective_aggregation == "normalize_then_sum":
            advantage = {"type": "gdpo", "epsilon": EPSILON}
        elif a.multi_objective_aggregation != "sum_then_normalize":
            self._refuse("multi_objective_aggregation", "choose sum_then_normalize or normalize_then_sum")
        aggregation: dict[str, Any] = {"type": LOSS_AGGREGATIONS.get(a.loss_type, "token_mean")}
        if a.loss_type == "dr_grpo":
            aggregation["length"] = a.max_completion_length
        if a.loss_type == "luspo":
            aggregation["length"] = 1
        if a.loss_type not in LOSS_AGGREGATIONS:
            self._refuse("loss_type", f"choose one of {', '.join(LOSS_AGGREGATIONS)}")
        if a.loss_type == "bnpo" and a.gradient_accumulation_steps > 1:
            self._refuse("loss_type", "areal's denominators are of a whole update: take dapo, or accumulate nothing")
        regularizers: list[dict[str, Any]] = []
        if a.beta:
            estimator = "unbiased" if a.use_bias_correction_kl else "k3"
            regularizers.append({"type": "reference_kl", "coefficient": a.beta, "estimator": estimator})
            if a.use_bias_correction_kl and a.importance_sampling_level == "sequence":
                self._refuse("use_bias_correction_kl", "areal weighs the KL by the ratio of each token")
        if a.entropy_coef:
            regularizers.append({"type": "entropy_bonus", "coefficient": a.entropy_coef})
            if aggregation["type"] != "token_mean":
                self._refuse("entropy_coef", f"with loss_type={a.loss_type!r} areal's bonus is not a mean over tokens")
        return {
            "type": "grpo",
            "advantage": advantage,
            "policy_loss": self._policy_loss(),
            "loss_aggregation": aggregation,
            "corrections": self._corrections(),
            "regularizers": regularizers,
            "group_filters": ["mask_truncated"] if a.mask_truncated_completions else [],
        }

    def _policy_loss(self) -> dict[str, Any]:
        a = self._arguments
        high = a.epsilon if a.epsilon_high is None else a.epsilon_high
        is_of_sequences = a.importance_sampling_level == "sequence"
        if a.importance_sampling_level not in ("token", "sequence"):
            self._refuse("importance_sampling_level", "choose token or sequence")
        if a.delta is not None and (is_of_sequences or a.delta < 1 + high):
            self._refuse("delta", "areal bounds the ratios of tokens, from 1 + epsilon_high on")
        if a.loss_type in ("cispo", "sapo") and is_of_sequences:
            self._refuse("importance_sampling_level", f"with loss_type={a.loss_type!r} ratios are of tokens")
        if a.loss_type == "cispo":
            if high < 1:
                self.problems.append(
                    f"epsilon_high={high!r}: with loss_type='cispo' it is the largest weight of a token, and areal's "
                    "is at least 1"
                )
            return {"type": "cispo", "clip_high": max(0.0, high - 1)}
        if a.loss_type == "sapo":
            temperatures = {"positive": a.sapo_temperature_pos, "negative": a.sapo_temperature_neg}
            return {"type": "sapo", **{f"temperature_{sign}": value for sign, value in temperatures.items()}}
        if is_of_sequences:
            return {"type": "gspo", "clip_low": a.epsilon, "clip_high": high}
        return {"type": "ppo_clip", "clip_low": a.epsilon, "clip_high": high, "dual_clip": a.delta}

    def _corrections(self) -> list[dict[str, Any]]:
        """TRL corrects for the distance between engine and trainer with vLLM only."""
        a = self._arguments
        low, high = a.vllm_importance_sampling_clip_min, a.vllm_importance_sampling_clip_max
        bounds = {"low": low or 1e-9, "high": high or 1e9}
        corrections: list[dict[str, Any]] = []
        if a.off_policy_mask_threshold is not None:
            corrections.append({"type": "opsm", "threshold": a.off_policy_mask_threshold})
        if not (a.use_vllm and a.vllm_importance_sampling_correction):
            return corrections
        mode = a.vllm_importance_sampling_mode
        if mode.endswith("_truncate") and (low is not None or high is None):
            self._refuse("vllm_importance_sampling_mode", "areal truncates from above only, at clip_max")
        match mode:
            case "token_truncate" | "sequence_truncate":
                corrections.append({"type": mode, "cap": high})
            case "token_mask":
                corrections.append({"type": mode, **bounds})
            case "sequence_mask":  # TRL weighs the sequences that it keeps
                corrections += [
                    {"type": "sequence_truncate", "cap": bounds["high"]},
                    {"type": "product_mask", **bounds},
                ]
            case _:
                self._refuse("vllm_importance_sampling_mode", "TRL has no such mode")
        return corrections

    def _evaluation(self, steps: int) -> dict[str, Any]:
        a = self._arguments
        strategy = str(getattr(a.eval_strategy, "value", a.eval_strategy))
        if strategy not in ("steps", "epoch"):
            self._refuse("eval_strategy", "choose no, steps or epoch")
        every = self._in_steps(a.eval_steps or a.logging_steps, steps)
        return {
            "every": self._epoch_in_steps(steps) if strategy == "epoch" else every,
            "samples_per_prompt": a.num_generations_eval or a.num_generations,
            "at_start": a.eval_on_start,
        }

    def _checkpoint(self, steps: int) -> dict[str, Any]:
        a = self._arguments
        strategy = str(getattr(a.save_strategy, "value", a.save_strategy))
        if strategy not in ("no", "steps", "epoch"):
            self._refuse("save_strategy", "choose no, steps or epoch; trainer.run.best has the best model")
        every = {"no": 0, "epoch": self._epoch_in_steps(steps)}.get(strategy, self._in_steps(a.save_steps, steps))
        kept = {} if a.save_total_limit is None else {"keep": a.save_total_limit}
        if a.save_total_limit is None:
            self.notes.append("the last two checkpoints are kept: set save_total_limit for more")
        return {"every": every, "every_s": 0.0, **kept}  # TRL writes no checkpoint by the clock

    def _epoch_in_steps(self, steps: int) -> int:
        return steps if self._epoch is None else max(1, round(self._epoch / self.updates))

    def _trackers(self) -> list[str]:
        wanted = self._arguments.report_to or []
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        names = [name for name in names if name != "none"]
        if "all" in names:
            self._refuse("report_to", "name the trackers")
        if self._arguments.run_name and names:
            self.notes.append("run_name has no effect: trackers name a run after its folder")
        return names


def model_section(arguments: GRPOConfig, model: object, problems: list[str]) -> dict[str, Any]:
    """Return the section `model`."""
    if not isinstance(model, str):
        problems.append("model: areal loads the model in its own processes: pass its folder, or its name on the hub")
    options = dict(arguments.model_init_kwargs or {})
    dtype = str(options.pop("dtype", options.pop("torch_dtype", ""))).removeprefix("torch.")
    trusts = bool(options.pop("trust_remote_code", False)) or arguments.trust_remote_code
    options.pop("attn_implementation", None)  # areal takes the fastest kernel
    options.pop("device_map", None)
    if dtype not in ("", "auto", "float32", "bfloat16"):
        problems.append(f"model_init_kwargs: dtype {dtype}: areal computes in bfloat16 or float32")
    problems += [f"model_init_kwargs: areal has no equal of {name!r}" for name in options]
    is_half = arguments.bf16 is not False or dtype == "bfloat16"
    return {"path": model, "dtype": "bfloat16" if is_half else "float32", "trust_remote_code": trusts}


def adapter_section(peft_config: Any, problems: list[str]) -> dict[str, Any] | None:
    """Return the section `train_engine.adapter` for PEFT's `LoraConfig`."""
    if peft_config is None:
        return None
    given, plain = peft_config.to_dict(), type(peft_config)().to_dict()
    ignored = {*_PEFT, "task_type", "base_model_name_or_path", "inference_mode"}
    changed = [name for name, value in given.items() if name not in ignored and value != plain.get(name)]
    problems += [f"peft_config: areal has no equal of {name}={given[name]!r}" for name in changed]
    if str(getattr(given.get("peft_type"), "value", given.get("peft_type"))) != "LORA":
        problems.append("peft_config: areal trains adapters of LoRA")
        return None
    modules = given["target_modules"]
    names = modules if isinstance(modules, str) or modules is None else sorted(modules)
    if names is None:
        problems.append("peft_config: target_modules must be set, such as 'all-linear'")
    return {"rank": given["r"], "alpha": given["lora_alpha"], "modules": names}


def reward_sections(
    functions: Sequence[Any], weights: Sequence[float] | None, problems: list[str]
) -> list[dict[str, Any]]:
    """Return the section `rewards`.

    Args:
        functions: reward functions of TRL, or paths of reward models.
        weights: a weight for each; None is 1 for all.
        problems: what areal cannot honor is added here.
    """
    if weights is not None and len(weights) != len(functions):
        problems.append(f"reward_weights: there are {len(weights)} weights, and {len(functions)} reward functions")
        weights = None
    sections: list[dict[str, Any]] = []
    for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        if isinstance(function, str):
            name = _unused(function.rstrip("/").rpartition("/")[2], sections)
            sections.append({"type": "rewards/reward_model", "name": name, "path": function, "weight": weight})
            continue
        if not callable(function) or hasattr(function, "parameters"):
            problems.append("reward_funcs: a model is given as its folder, or its name on the hub")
            continue
        inner = function.func if isinstance(function, functools.partial) else function
        shown = getattr(inner, "__name__", type(inner).__name__)
        problems += [f"reward_funcs: {shown} requires {one}, which areal does not pass" for one in not_passed(function)]
        is_async = inspect.iscoroutinefunction(function)
        sections.append(
            {
                "type": f"areal_core.trl.reward:{'AsyncReward' if is_async else 'Reward'}",
                "name": _unused(shown.replace("<lambda>", "reward"), sections),
                "weight": weight,
                "function": function,
            }
        )
    return sections


def _unused(name: str, sections: Sequence[dict[str, Any]]) -> str:
    """Return a name that no section has yet: two lambdas are `reward` and `reward_2`."""
    taken = {section["name"] for section in sections}
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return name if name not in taken else next(one for one in numbered if one not in taken)
