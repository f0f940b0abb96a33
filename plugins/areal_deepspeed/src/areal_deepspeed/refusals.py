"""What of a DeepSpeed config is refused, and what to do about it.

What this engine hands to DeepSpeed is a list of keys that are known: one that is not might change what a run computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from areal_deepspeed.document import AUTO, SCHEDULERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_deepspeed.document import Document

_PASSED_ON = {
    *("zero_optimization", "optimizer", "scheduler", "gradient_clipping", "bf16", "bfloat16", "fp16", "amp"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
}
_ZERO = {
    *("stage", "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
    *("allgather_bucket_size", "ignore_unused_parameters", "sub_group_size"),
    *("offload_optimizer", "offload_param", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
}
_FILLED_IN_ZERO = {"reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"}
_OFFLOAD = {"device", "pin_memory", "buffer_count", "buffer_size", "fast_init", "max_in_cpu", "nvme_path"}
_SWITCHES = {
    *("contiguous_gradients", "overlap_comm", "reduce_scatter", "allgather_partitions", "ignore_unused_parameters"),
    *("stage3_gather_16bit_weights_on_model_save", "pin_memory", "fast_init"),
}
_SIZES = {
    *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("buffer_count", "buffer_size", "max_in_cpu"),
}
"""Keys of `zero_optimization` and of its offloads by what DeepSpeed's own models make of them."""
_KINDS: dict[str, tuple[TypeAdapter[Any], str]] = {
    **dict.fromkeys(_SWITCHES, (TypeAdapter(bool | None), "true or false")),
    **dict.fromkeys(_SIZES, (TypeAdapter(Annotated[int, Field(ge=0)]), "a whole number from 0")),
}
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ADAM = {"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode"}
_FILLED_IN_SCHEDULER = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"}
_REPAIRS = {
    "activation_checkpointing": "set train_engine.activation_checkpointing: true, which is what Hugging Face's models "
    "know, and leave it out",
    "tensor_parallel": "ranks divide the batch here, not layers: leave it out, or take the engine fsdp/fsdp, whose "
    "`parallel` divides them",
    "pipeline": "there are no stages of a pipeline here: leave it out",
    "sequence_parallel_size": "leave it out, or take the engine fsdp/fsdp, whose `parallel.context` divides sequences",
    "torch_autocast": "say the precision in model.dtype and leave it out",
    "tensorboard": "leave it out, and name a tracker of areal's in `trackers`",
    "wandb": "leave it out, and name a tracker of areal's in `trackers`",
    "csv_monitor": "leave it out: metrics are in the run folder",
    "checkpoint": "checkpoints are the run's, in the section `checkpoint` of its config: leave it out",
    "data_types": "gradients add up in float32 whatever it says: leave it out",
    "gradient_allreduce_op": "gradients are summed over ranks here: leave it out",
}


_OBJECTS: tuple[str, ...] = (
    "zero_optimization",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "bfloat16",
    "amp",
    "optimizer.params",
)
_OBJECTS += ("scheduler.params", "zero_optimization.offload_optimizer", "zero_optimization.offload_param")


def no_images(kind: str) -> str:
    """Why a model of this type is refused, which sees images."""
    return (
        f"model type '{kind}' sees images, which the deepspeed engine does not show it: take the train engine "
        "fsdp/fsdp for it"
    )


def _no_object(document: Document, path: str) -> Iterator[str]:
    """Whether what must be an object is none; `section` takes such a thing for one that is not there."""
    *above, key = path.split(".")
    found = document.section(*above).get(key)
    if found is not None and not isinstance(found, dict):
        yield f"the DeepSpeed config has `{path}`: {found!r:.60}, and it must be an object: {{...}}"
    elif isinstance(found, dict) and not isinstance(found.get("type", ""), str):
        yield f"the DeepSpeed config has `{path}.type`: {found['type']!r:.60}, and it must be a name"


def refusals(document: Document, dtype: str) -> Iterator[str]:
    """What contradicts the run, our settings or this engine, a sentence each, with its repair.

    Args:
        document: the config and our settings.
        dtype: of the model.
    """
    if odd := [problem for path in _OBJECTS for problem in _no_object(document, path)]:
        yield from odd
        return
    impossible = list(document.settings.impossible(document.pairs()))
    yield from impossible
    for key in document.written:
        if key not in _PASSED_ON and key not in _BATCHES:
            repair = _REPAIRS.get(key, "this engine does not know what it does to a run: leave it out")
            yield f"the DeepSpeed config has `{key}`: {repair}"
    for key in _BATCHES:
        if document.written.get(key, AUTO) != AUTO:
            yield (
                f"the DeepSpeed config fixes {key} at {document.written[key]}, and here the run decides how many "
                'sequences an update has, and max_tokens_per_microbatch how many at once: make it "auto", or leave it '
                "out"
            )
    yield from _of_precision(document, dtype)
    yield from _of_zero(document)
    yield from _of_optimizer(document)
    yield from _of_scheduler(document)
    if not impossible:  # which would be told twice
        yield from _contradictions(document)


def _of_precision(document: Document, dtype: str) -> Iterator[str]:
    for name in ("fp16", "amp"):
        if document.section(name).get("enabled", False) not in (False, AUTO):
            yield (
                f"the DeepSpeed config enables {name}, whose loss scaling skips updates by itself: disable it, and "
                "set model.dtype: bfloat16, which needs none"
            )
    enabled = document.precision.get("enabled", AUTO)
    if enabled not in (AUTO, dtype == "bfloat16"):
        yield (
            f"the DeepSpeed config has bf16.enabled: {str(enabled).lower()}, and model.dtype is {dtype}: make it "
            '"auto", or set model.dtype: ' + ("bfloat16" if enabled else "float32")
        )
    if odd := sorted(set(document.precision) - {"enabled"}):
        yield f"the DeepSpeed config has bf16.{odd[0]}: this engine knows `enabled` alone there: leave it out"


def _of_zero(document: Document) -> Iterator[str]:
    zero = document.section("zero_optimization")
    if document.stage not in (2, 3) or isinstance(document.stage, bool):
        yield (
            f"the DeepSpeed config has zero_optimization.stage: {document.stage}, and this engine trains with 2 or 3: "
            "take 2, which holds less than 0 and 1 and sends no more, or the engine fsdp/fsdp"
        )
    for key, value in zero.items():
        if key not in _ZERO:
            yield f"the DeepSpeed config has zero_optimization.{key}, which this engine does not know: leave it out"
        elif value != AUTO:
            yield from _odd_value(f"zero_optimization.{key}", value)
        elif key not in _FILLED_IN_ZERO:
            yield f'zero_optimization.{key} is "auto", which nothing fills: write its value, or leave it out'
    for name in ("offload_optimizer", "offload_param"):
        offload = document.section("zero_optimization", name)
        device = offload.get("device", "none")
        if device not in ("none", "cpu"):
            yield f"zero_optimization.{name}.device is {device}: this engine offloads to the cpu: take cpu or none"
        if odd := sorted(set(offload) - _OFFLOAD):
            yield f"zero_optimization.{name} has `{odd[0]}`, which this engine does not know: leave it out"
        for key, value in offload.items():
            yield from _odd_value(f"zero_optimization.{name}.{key}", value)
    if document.section("zero_optimization", "offload_param").get("device") == "cpu" and document.stage != 3:
        yield "zero_optimization.offload_param is for stage 3: set the stage to 3, or leave it out"


def _odd_value(path: str, value: object) -> Iterator[str]:
    """What DeepSpeed would refuse by itself of a switch or a size, once everything has started."""
    kind, words = _KINDS.get(path.rpartition(".")[2], (None, ""))
    try:
        if kind is not None:
            kind.validate_python(value)
    except ValidationError:
        yield f"the DeepSpeed config has {path}: {value!r:.60}, and it must be {words}"


def _of_optimizer(document: Document) -> Iterator[str]:
    optimizer = document.section("optimizer")
    kind = str(optimizer.get("type", "AdamW"))
    if kind.lower() not in ("adam", "adamw"):
        yield f"the DeepSpeed config has the optimizer {kind}: this engine trains with AdamW alone: take AdamW"
        return
    params: dict[str, Any] = document.section("optimizer", "params")
    if params.get("adam_w_mode", True) is not True:
        yield "optimizer.params.adam_w_mode is false: weight decay is decoupled here: make it true, or leave it out"
    if odd := sorted(set(params) - _ADAM):
        yield f"optimizer.params has `{odd[0]}`, which this engine's AdamW does not know: leave it out"


def _of_scheduler(document: Document) -> Iterator[str]:
    if not document.has_scheduler:
        return
    kind, params = document.section("scheduler").get("type"), document.section("scheduler", "params")
    if kind not in SCHEDULERS:
        yield (
            f"the DeepSpeed config has the scheduler {kind}: take one of {', '.join(SCHEDULERS)}, or leave it out and "
            "set train_engine.schedule"
        )
        return
    for key, value in params.items():
        if key not in SCHEDULERS[kind]:
            yield f"scheduler.params has `{key}`, which {kind} does not know: leave it out"
        elif value == AUTO and key not in _FILLED_IN_SCHEDULER:
            yield f'scheduler.params.{key} is "auto", which nothing fills: write its value, or leave it out'
    own = document.settings.chosen & {"schedule", "minimum_learning_rate_ratio"}
    if own:
        yield (
            f"the DeepSpeed config has a scheduler, and train_engine sets {' and '.join(sorted(own))}: keep one of "
            "the two, the other goes"
        )


def _contradictions(document: Document) -> Iterator[str]:
    pairs = document.pairs()
    if document.has_scheduler:
        params, settings = document.section("scheduler", "params"), document.settings
        steps = params.get("warmup_num_steps", AUTO)
        pairs["scheduler.params.warmup_num_steps"] = (steps, "warmup_steps", settings.warmup_steps)
        rate = document.value("optimizer.params.lr")
        if params.get("warmup_max_lr", AUTO) not in (AUTO, rate):
            yield (
                f"scheduler.params.warmup_max_lr is {params['warmup_max_lr']}, and the learning rate {rate}: make it "
                '"auto", or both the same'
            )
    for key, (theirs, name, ours) in pairs.items():
        same = theirs == AUTO or (list(theirs) if isinstance(theirs, list) else theirs) == _as_json(ours)
        if not same and name in document.settings.chosen:
            yield (
                f"the DeepSpeed config has {key}: {theirs}, and train_engine.{name} is {ours}: make the former "
                '"auto", or leave the latter out'
            )


def _as_json(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
