"""A DeepSpeed config as one has it, and what DeepSpeed is given of it."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_deepspeed.config import DeepSpeedConfig

AUTO = "auto"
"""The value that Hugging Face's integration fills, and this engine too."""
SCHEDULERS = {
    "WarmupLR": {"warmup_max_lr"},
    "WarmupDecayLR": {"warmup_max_lr", "total_num_steps"},
    "WarmupCosineLR": {"total_num_steps"},
}
"""DeepSpeed's schedules that follow the updates of a run, and what each takes beside `warmup_num_steps`."""
_SAME = {
    "gradient_clipping": "max_gradient_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "betas",
    "optimizer.params.eps": "epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
"""What both may say: its place in the config, and our setting."""


def read_document(written: Path | Mapping[str, Any]) -> dict[str, Any]:
    """The content of a DeepSpeed config.

    Raises:
        ValueError: the file cannot be read, or is no JSON object.
    """
    if not isinstance(written, Path):
        return deepcopy(dict(written))
    try:
        if not written.is_file():  # a pipe would be waited for
            raise OSError("there is no such file")
        found = json.loads(written.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object, {...}")
    except (OSError, ValueError, RecursionError) as error:
        told = f"the DeepSpeed config '{written}' cannot be read ({error})"
        raise ValueError(f"config: {told}: name a JSON file, or write its content here") from error
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    key, times = Counter(key for key, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if times > 1:
        raise ValueError(f"the key '{key}' stands twice in an object")
    return dict(pairs)


class Document:
    """A DeepSpeed config beside the settings that fill what it leaves open.

    Args:
        written: its content.
        own: settings of the engine.

    Attributes:
        settings: the same with what the config says in their place.
        said: those of them that it says, with their place in it.
        stage: of ZeRO.
        has_scheduler: whether DeepSpeed drives the learning rate.

    Raises:
        ValueError: a section is no object, or a value is none that the setting of the same meaning takes.
    """

    def __init__(self, written: dict[str, Any], own: DeepSpeedConfig) -> None:
        self.written, self.own, self.said = written, own, dict[str, str]()
        values = {}
        for path, name in _SAME.items():
            if (value := self.at(path)) == AUTO:
                continue
            value = None if name == "max_gradient_norm" and value == 0 else value
            try:
                values[name] = getattr(type(own).model_validate({"config": {}, name: value}), name)
            except ValidationError as error:
                words = error.errors()[0]["msg"]
                raise ValueError(f"the DeepSpeed config has {path}: {value!r:.60}: {words}") from error
            self.said[name] = path
        self.settings = own.model_copy(update=values)
        self.stage = self.at("zero_optimization.stage")
        self.has_scheduler = bool(self.section("scheduler"))

    def section(self, path: str) -> dict[str, Any]:
        """An object in the config; empty where it is not there.

        Raises:
            ValueError: it is something else.
        """
        found, place = self.written, ""
        for key in filter(None, path.split(".")):
            found, place = {} if found.get(key) is None else found[key], f"{place}.{key}".strip(".")
            if not isinstance(found, dict):
                raise ValueError(f"the DeepSpeed config has `{place}`: {found!r:.60}, and it must be an object")
        return found

    def at(self, path: str) -> Any:
        """A value in the config; "auto" where it is not there."""
        above, _, key = path.rpartition(".")
        return self.section(above).get(key, AUTO)

    def _scheduler(self, total_updates: int) -> dict[str, Any]:
        """The section `scheduler`, filled: DeepSpeed's own defaults know neither our learning rate nor the run."""
        kind = self.at("scheduler.type")
        params = {key: value for key, value in self.section("scheduler.params").items() if value != AUTO}
        filled = {"warmup_max_lr": self.settings.learning_rate, "total_num_steps": total_updates}
        params = {key: filled[key] for key in SCHEDULERS.get(kind, ())} | params
        return {"type": kind, "params": {**params, "warmup_num_steps": max(1, self.settings.warmup_steps)}}

    def filled(self, *, dtype: str, hidden_size: int, total_updates: int, trains: bool) -> dict[str, Any]:
        """What DeepSpeed is given: nothing is open in it, and batches are of this engine's making.

        Args:
            dtype: of the model.
            hidden_size: of the model, from which Hugging Face's integration computes ZeRO 3's sizes too.
            total_updates: of the whole run, where a schedule ends.
            trains: whether the role learns.
        """
        zero = self.section("zero_optimization")
        sizes = {
            "reduce_bucket_size": hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        kept = {key: value for key, value in self.written.items() if key not in ("optimizer", "scheduler")}
        return {
            "steps_per_print": 1 << 60,
            **{key: value for key, value in kept.items() if value != AUTO},
            # A micro-batch is as many sequences as its tokens allow, and as many make an update as the batch needs:
            # the engine says which one is the last.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.settings.max_gradient_norm or 0.0,
            "zero_force_ds_cpu_optimizer": False,
            "fp16": {"enabled": False},
            "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": zero | {key: size for key, size in sizes.items() if zero.get(key) == AUTO},
            **({"scheduler": self._scheduler(total_updates)} if trains and self.has_scheduler else {}),
        }
