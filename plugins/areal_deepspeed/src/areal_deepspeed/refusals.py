"""What of a DeepSpeed config is refused, and what to do about it.

Only what would silently train otherwise than it says. Other keys and values that DeepSpeed does not know, it refuses
itself when the engine is set up.
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
"""Keys of the sections in which DeepSpeed would ignore one, or do what this engine does not expect."""
_ONLY: dict[str, dict[str, tuple[object, ...]]] = {
    "the run decides it, and max_tokens_per_microbatch how many go at once": dict.fromkeys(_BATCHES, ()),
    "its loss scaling skips updates by itself, and model.dtype: bfloat16 needs none": {"fp16.enabled": (False,)},
    "this engine trains with AdamW, whose decay is decoupled": {
        "optimizer.type": ("AdamW", "Adam", "adamw", "adam"),
        "optimizer.params.adam_w_mode": (True,),
    },
    "other schedules than these do not know the updates of a run": {"scheduler.type": tuple(SCHEDULERS)},
    "this engine offloads to the host's memory, by PyTorch's AdamW": {
        "zero_optimization.offload_param.device": ("cpu", "none"),
        "zero_optimization.offload_optimizer.device": ("cpu", "none"),
        "zero_optimization.offload_optimizer.super_offload": (False,),
        "zero_optimization.zenflow": (None,),
    },
    "what is computed, or read from a checkpoint, would not be what this engine takes it for": {
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
"""Values that this engine works with, beside "auto" and none at all, by why it does with no other."""


def no_images(kind: str) -> str:
    """Why a model of this type is refused, which sees images."""
    return (
        f"model type '{kind}' sees images, which the deepspeed engine does not show it: take the train engine "
        "fsdp/fsdp for it"
    )


def no_float32(kind: str, name: str) -> str:
    """Why a model is refused of which a parameter stays float32."""
    return (
        f"model type '{kind}' keeps '{name}' in float32, and DeepSpeed casts all parameters to bfloat16: take the "
        "train engine fsdp/fsdp for it, or set model.dtype to float32"
    )


def refusals(document: Document, dtype: str) -> Iterator[str]:
    """What contradicts the run, our settings or this engine, a sentence each, with its repair.

    Args:
        document: the config and our settings.
        dtype: of the model.

    Raises:
        ValueError: a section is no object.
    """
    for path, known in _KNOWN.items():
        for key in sorted(document.section(path).keys() - known):
            yield (
                f"the DeepSpeed config has `{f'{path}.{key}'.strip('.')}`, which this engine does not know: leave it "
                "out. Precision, activation checkpointing, division of layers, checkpoints and trackers are settings "
                "of the run"
            )
    of_dtype: dict[str, tuple[object, ...]] = {"bf16.enabled": (dtype == "bfloat16",)}
    for why, taken in {**_ONLY, f"model.dtype is {dtype}": of_dtype}.items():
        for path, values in taken.items():
            if (value := document.at(path)) not in (AUTO, *values):
                wanted = " or ".join(json.dumps(each) for each in (*values, AUTO))
                yield f"the DeepSpeed config has {path}: {_short(value)}, but {why}: make it {wanted}, or leave it out"
    if document.stage not in (2, 3):
        yield f"the DeepSpeed config has zero_optimization.stage: {_short(document.stage)}: take 2 or 3, or fsdp/fsdp"
    own = document.own.chosen & {"schedule", "minimum_learning_rate_ratio"}
    if document.has_scheduler and own:
        yield f"the DeepSpeed config has a scheduler, and train_engine sets {' and '.join(sorted(own))}: keep one"
    for name, path in document.said.items():
        ours, value = getattr(document.own, name), _short(document.at(path))
        if name in document.own.chosen and ours != getattr(document.settings, name):
            yield (
                f"the DeepSpeed config has {path}: {value}, and train_engine.{name} is {ours}: make the former "
                '"auto", or leave the latter out'
            )


def _short(value: object) -> str:
    return f"{json.dumps(value, default=str):.60}"
