"""Refuse parts of a DeepSpeed config, and say how to fix them.

Only what would silently train differently from what the config says is refused here. DeepSpeed itself refuses other
keys and values that it does not know when the engine is set up.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from areal_deepspeed.document import AUTO, SCHEDULERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_deepspeed.document import Document

_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_KNOWN = {
    "": {
        *("zero_optimization", "optimizer", "scheduler", "gradient_clipping", "bf16", "fp16", *_BATCHES),
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger"),
        *("communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    },
    "bf16": {"enabled"},
    **{key: {"type", "params"} for key in ("optimizer", "scheduler")},
    "optimizer.params": {"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode"},
}
"""Known keys of the sections in which DeepSpeed would ignore an unknown key, or do what this engine does not expect."""
_ONLY: dict[str, dict[str, tuple[object, ...]]] = {
    "areal computes it; max_tokens_per_microbatch sets the size of micro-batches": dict.fromkeys(_BATCHES, ()),
    "its loss scaling skips updates, and model.dtype: bfloat16 needs none": {"fp16.enabled": (False,)},
    "this engine trains with AdamW, whose decay is decoupled": {
        "optimizer.type": ("AdamW", "Adam", "adamw", "adam"),
        "optimizer.params.adam_w_mode": (True,),
    },
    "other schedules do not follow the updates of a run": {"scheduler.type": tuple(SCHEDULERS)},
    "this engine offloads to the host's memory, with PyTorch's AdamW": {
        "zero_optimization.offload_param.device": ("cpu", "none"),
        "zero_optimization.offload_optimizer.device": ("cpu", "none"),
        "zero_optimization.offload_optimizer.super_offload": (False,),
        "zero_optimization.zenflow": (None,),
    },
    "this engine would misinterpret the gradients or the checkpoint": {
        "zero_optimization.compute_grad_norm": (True,),
        "zero_optimization.load_from_fp32_weights": (True,),
        "zero_optimization.elastic_checkpoint": (False,),
        "zero_optimization.round_robin_gradients": (False,),
        "zero_optimization.zero_hpz_partition_size": (1,),
        "zero_optimization.zero_quantized_weights": (False,),
        "zero_optimization.zero_quantized_nontrainable_weights": (False,),
        "zero_optimization.zero_quantized_gradients": (False,),
    },
}
"""Values that this engine supports, in addition to "auto" and a missing value, by the reason for refusing others."""


def no_images(kind: str) -> str:
    """Return why a vision-language model of this type is refused."""
    return (
        f"model type '{kind}' is a vision-language model, which the deepspeed engine does not support: use the train "
        "engine fsdp/fsdp"
    )


def no_float32(kind: str, name: str) -> str:
    """Return why a model with a parameter that must stay float32 is refused."""
    return (
        f"model type '{kind}' keeps '{name}' in float32, but DeepSpeed casts all parameters to bfloat16: use the train "
        "engine fsdp/fsdp, or set model.dtype to float32"
    )


def refusals(document: Document, dtype: str) -> Iterator[str]:
    """Yield each contradiction to the run, our settings or this engine, with its fix.

    Args:
        document: the DeepSpeed config and our settings.
        dtype: dtype of the model.

    Raises:
        ValueError: a section is not an object.
    """
    for path, keys in _KNOWN.items():
        for key in sorted(document.section(path).keys() - keys):
            yield (
                f"the DeepSpeed config has `{f'{path}.{key}'.strip('.')}`, which this engine does not support: remove "
                "it. Precision, activation checkpointing, sharding of layers, checkpoints and trackers are settings of "
                "the run"
            )
    of_dtype: dict[str, tuple[object, ...]] = {"bf16.enabled": (dtype == "bfloat16",)}
    for reason, allowed in {**_ONLY, f"model.dtype is {dtype}": of_dtype}.items():
        for path, values in allowed.items():
            if (value := document.at(path)) not in (AUTO, *values):
                alternatives = " or ".join(json.dumps(choice) for choice in (*values, AUTO))
                yield (
                    f"the DeepSpeed config has {path}: {_short(value)}, but {reason}: make it {alternatives}, "
                    "or remove it"
                )
    if document.stage not in (2, 3):
        yield f"the DeepSpeed config has zero_optimization.stage: {_short(document.stage)}: use 2 or 3, or fsdp/fsdp"
    scheduled = document.own_settings.chosen & {"schedule", "minimum_learning_rate_ratio"}
    if document.has_scheduler and scheduled:
        yield (
            f"the DeepSpeed config has a scheduler, but train_engine sets {' and '.join(sorted(scheduled))}: keep one"
        )
    for name, path in document.paths.items():
        ours, value = getattr(document.own_settings, name), _short(document.at(path))
        if name in document.own_settings.chosen and ours != getattr(document.settings, name):
            yield (
                f"the DeepSpeed config has {path}: {value}, but train_engine.{name} is {ours}: make the former "
                '"auto", or remove the latter'
            )


def _short(value: object) -> str:
    return f"{json.dumps(value, default=str):.60}"
