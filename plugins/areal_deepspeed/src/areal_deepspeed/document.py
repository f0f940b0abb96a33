"""DeepSpeed config of the user, and the complete config that DeepSpeed gets."""

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
"""Value that this engine fills in, as Hugging Face's integration does."""
SCHEDULERS = {
    "WarmupLR": {"warmup_max_lr"},
    "WarmupDecayLR": {"warmup_max_lr", "total_num_steps"},
    "WarmupCosineLR": {"total_num_steps"},
}
"""DeepSpeed's schedules that follow the updates of a run, and the parameters of each besides `warmup_num_steps`."""
_SAME = {
    "gradient_clipping": "max_gradient_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "betas",
    "optimizer.params.eps": "epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
"""Settings that both configs have: path in the DeepSpeed config, and our name."""


def read_document(source: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a DeepSpeed config.

    Args:
        source: JSON file, or the content itself.

    Raises:
        ValueError: the file cannot be read, or is not a JSON object.
    """
    if not isinstance(source, Path):
        return deepcopy(dict(source))
    try:
        if not source.is_file():  # reading a pipe would block
            raise OSError("there is no such file")
        content = json.loads(source.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object, {...}")
    except (OSError, ValueError, RecursionError) as error:
        problem = f"the DeepSpeed config '{source}' cannot be read ({error})"
        raise ValueError(f"config: {problem}: name a JSON file, or write its content here") from error
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    key, count = Counter(key for key, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if count > 1:
        raise ValueError(f"the key '{key}' occurs twice in an object")
    return dict(pairs)


class Document:
    """A DeepSpeed config, and the settings that fill in what it leaves open.

    Args:
        written: content of the DeepSpeed config.
        own_settings: settings of the engine.

    Attributes:
        written: content of the DeepSpeed config.
        own_settings: settings of the engine.
        settings: the engine's settings, with the values of the DeepSpeed config where it has them.
        paths: path in the DeepSpeed config of each setting that it has, by our name.
        stage: stage of ZeRO.
        has_scheduler: whether DeepSpeed controls the learning rate.

    Raises:
        ValueError: a section is not an object, or a value is invalid for the setting of the same meaning.
    """

    def __init__(self, written: dict[str, Any], own_settings: DeepSpeedConfig) -> None:
        self.written = written
        self.own_settings = own_settings
        self.paths: dict[str, str] = {}
        values = {}
        for path, name in _SAME.items():
            value = self.at(path)
            if value == AUTO:
                continue
            value = None if name == "max_gradient_norm" and value == 0 else value
            try:
                values[name] = getattr(type(own_settings).model_validate({"config": {}, name: value}), name)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise ValueError(f"the DeepSpeed config has {path}: {value!r:.60}: {reason}") from error
            self.paths[name] = path
        self.settings = own_settings.model_copy(update=values)
        self.stage = self.at("zero_optimization.stage")
        self.has_scheduler = bool(self.section("scheduler"))

    def section(self, path: str) -> dict[str, Any]:
        """Return a section of the config; empty if it is missing.

        Raises:
            ValueError: it is not an object.
        """
        section, name = self.written, ""
        for key in filter(None, path.split(".")):
            value = section.get(key)
            section = {} if value is None else value
            name = f"{name}.{key}".strip(".")
            if not isinstance(section, dict):
                raise ValueError(f"the DeepSpeed config has `{name}`: {section!r:.60}, but it must be an object")
        return section

    def at(self, path: str) -> Any:
        """Return a value of the config; "auto" if it is missing."""
        parent, _, key = path.rpartition(".")
        return self.section(parent).get(key, AUTO)

    def _scheduler(self, total_updates: int) -> dict[str, Any]:
        """Return the section `scheduler`, filled in. DeepSpeed's defaults ignore our learning rate and updates."""
        kind = self.at("scheduler.type")
        params = {key: value for key, value in self.section("scheduler.params").items() if value != AUTO}
        filled = {"warmup_max_lr": self.settings.learning_rate, "total_num_steps": total_updates}
        params = {key: filled[key] for key in SCHEDULERS.get(kind, ())} | params
        return {"type": kind, "params": {**params, "warmup_num_steps": max(1, self.settings.warmup_steps)}}

    def filled(self, *, dtype: str, hidden_size: int, total_updates: int, trains: bool) -> dict[str, Any]:
        """Return the complete config for DeepSpeed. This engine, not DeepSpeed, makes the batches.

        Args:
            dtype: dtype of the model.
            hidden_size: hidden size of the model; ZeRO 3's sizes follow from it, as in Hugging Face's integration.
            total_updates: updates of the whole run, for schedules.
            trains: whether the role is trained.
        """
        zero = self.section("zero_optimization")
        sizes = {
            "reduce_bucket_size": hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        others = {key: value for key, value in self.written.items() if key not in ("optimizer", "scheduler")}
        return {
            "steps_per_print": 1 << 60,
            **{key: value for key, value in others.items() if value != AUTO},
            # Micro-batches have varying numbers of sequences, and updates varying numbers of micro-batches: the engine
            # marks the last one with `set_gradient_accumulation_boundary`.
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
