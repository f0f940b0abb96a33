"""How the other libraries are called: their own functions as PyPI has them, with numbers instead of models."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from types import MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import openrlhf
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.rewards import get_soft_overlong_punishment
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from samples import Sample

__all__ = ["core_algos", "openrlhf_losses", "openrlhf_utils", "rollout_corr_helper"]


def _openrlhf_losses() -> ModuleType:
    """Return `openrlhf.models.loss`.

    The package `openrlhf.models` also imports its models, which need FlashAttention and with it a GPU. So the package
    is registered with its folder alone, and its modules `loss` and `utils` are imported as they are.
    """
    package = ModuleType("openrlhf.models")
    package.__path__ = [f"{openrlhf.__path__[0]}/models"]
    sys.modules[package.__name__] = package
    return importlib.import_module("openrlhf.models.loss")


openrlhf_losses = _openrlhf_losses()
openrlhf_utils = importlib.import_module("openrlhf.models.utils")
ON_CPU = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
"""Arguments that every trainer of TRL needs on a machine without a GPU."""


class _OneProcess:
    """The accelerator of a process alone."""

    num_processes = 1
    sync_gradients = True
    device = torch.device("cpu")

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values


def trl_policy(
    given: Sample, loss_type: str = "dapo", *, cap: float | None = None, calls: int = 1, **settings: Any
) -> torch.Tensor:
    """Return the loss of `GRPOTrainer._compute_loss`, of `GMPOTrainer` for the loss type `gmpo`.

    Args:
        given: Batch and numbers.
        loss_type: TRL's name of the loss.
        cap: Upper bound of the importance weights π_prox / μ that the trainer would compute; None: there are none.
        calls: Number of updates on the batch, of which the last one's loss is returned.
        settings: Further settings of `GRPOConfig`.
    """
    is_gmpo = loss_type == "gmpo"
    kind: Any = GMPOConfig if is_gmpo else GRPOConfig
    config = kind(
        **ON_CPU, **({} if is_gmpo else {"loss_type": loss_type}), max_completion_length=64, temperature=1.0, **settings
    )
    given_logprobs = given.current, given.pad(given.passes["entropy"]), None
    trainer = SimpleNamespace(
        **{
            **vars(config),
            "args": config,
            "epsilon_low": config.epsilon,
            "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
            "use_vllm": cap is not None,
            "aux_loss_enabled": False,
            "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1,
            "accelerator": _OneProcess(),
            "_entropy_bonus_enabled": config.entropy_coef != 0 or config.use_adaptive_entropy,
            "_entropy_window_stats": None,
            "_last_world_entropy": 0.0,
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "_get_per_token_logps_and_entropies": lambda *_, **__: given_logprobs,
            "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
            "get_gamma_weights": GRPOTrainer.get_gamma_weights,
        }
    )
    trainer.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    mask = given.mask
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros_like(mask, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": given.advantages.sum(1) / mask.sum(1).clamp(min=1),
        "old_per_token_logps": given.proximal,
        "ref_per_token_logps": given.reference,
        "sampling_per_token_logps": given.behavior,
        "num_items_in_batch": mask.sum(),
    }
    if cap is not None:
        inputs["importance_sampling_ratio"] = torch.where(mask.bool(), given.ratio, 1.0).clamp(max=cap)
    compute: Any = (GMPOTrainer if is_gmpo else GRPOTrainer)._compute_loss
    for _ in range(calls):
        result = compute(trainer, None, inputs)
    return result


def simpo(given: Sample, **settings: Any) -> torch.Tensor:
    """Return the loss of `CPOTrainer.cpo_loss`, over pairs."""
    return CPOTrainer.cpo_loss(_of(CPOConfig(**ON_CPU, **settings)), *given.means(given.current))[0].mean()


def odds_ratio(given: Sample, weight: float) -> torch.Tensor:
    """Return ORPO's loss with the second term of `ORPOTrainer.odds_ratio_loss`, over pairs."""
    sides = given.means(given.current)
    config = ORPOConfig(**ON_CPU, beta=weight)
    return (-sides[0] - ORPOTrainer.odds_ratio_loss(_of(config), *sides)[0]).mean()


def overlong(lengths: list[int], max_length: int, buffer: int) -> torch.Tensor:
    """Return TRL's reward of answers with these lengths."""
    reward = get_soft_overlong_punishment(max_length, buffer)
    return torch.tensor(reward(completion_ids=[[0] * length for length in lengths]))


def _of(config: Any) -> SimpleNamespace:
    """Return what a trainer's method reads of the trainer."""
    return SimpleNamespace(**{**vars(config), "alpha": getattr(config, "alpha", 0.0), "accelerator": _OneProcess()})


def actor(**settings: Any) -> ActorConfig:
    """Return verl's settings of a policy loss. Without `clip_ratio_c` there is no dual clip."""
    return ActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **{"clip_ratio_c": 1e9, **settings}
    )


def weights(given: Sample, level: str, threshold: str | float, of: str = "proximal") -> torch.Tensor:
    """Return verl's rollout correction weights of a policy to the one that sampled, padded."""
    difference = getattr(given, of).detach() - given.behavior
    return rollout_corr_helper.compute_rollout_correction_weights(difference, given.mask, level, threshold)[0]


def verl_policy(
    function: Callable[..., Any],
    aggregation: str = "token-mean",
    weigh: Callable[[Sample], torch.Tensor] | None = None,
    old: str = "proximal",
    advantages: Callable[[Sample], torch.Tensor] | None = None,
    **settings: Any,
) -> Callable[[Sample], torch.Tensor]:
    """Return the loss of one of verl's policy losses.

    Args:
        function: Of `core_algos`.
        aggregation: verl's name of the loss aggregation.
        weigh: Computes importance weights; None for none.
        old: The pass that verl's ratio is relative to.
        advantages: Computes the advantages; None: those of the sample.
        settings: Of the actor.
    """

    def compute(given: Sample) -> torch.Tensor:
        importance = None if weigh is None else weigh(given)
        estimates = given.advantages if advantages is None else advantages(given)
        return function(
            getattr(given, old), given.current, estimates, given.mask, aggregation, actor(**settings), importance
        )[0]

    return compute


def openrlhf_policy(given: Sample, **settings: Any) -> torch.Tensor:
    """Return the loss of OpenRLHF's `PolicyLoss`."""
    loss = openrlhf_losses.PolicyLoss(**settings)
    return loss(given.current, given.proximal, given.advantages, given.mask, given.behavior)[0]
