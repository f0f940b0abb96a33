"""A DeepSpeed config as one has it, and what DeepSpeed is given of it."""

from __future__ import annotations

import errno
import json
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from areal_deepspeed.config import DeepSpeedConfig

AUTO = "auto"
"""The value that Hugging Face's integration fills, and this engine too."""
SCHEDULERS = {
    "WarmupLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"},
    "WarmupDecayLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"},
    "WarmupCosineLR": {"warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type", "total_num_steps"},
}
"""DeepSpeed's schedules that follow the updates of a run, and what each of them takes."""


def read_document(written: Path | Mapping[str, Any]) -> dict[str, Any]:
    """The content of a DeepSpeed config.

    Raises:
        ValueError: the file cannot be read, or is no JSON object.
    """
    if not isinstance(written, Path):
        return deepcopy(dict(written))
    try:
        if written.exists() and not written.is_file():  # a pipe would be waited for
            raise OSError(errno.EINVAL, "it is not a file")
        found = json.loads(written.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise ValueError(
            f"config: the DeepSpeed config '{written}' cannot be read ({error.strerror}): name a JSON file, or write "
            "its content here"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config: '{written}' is no JSON ({error}): mend it, or write its content here") from error
    if not isinstance(found, dict):
        raise ValueError(f"config: '{written}' holds no JSON object: DeepSpeed's configs are one, {{...}}")
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' stands twice in an object")
    return found


class Document:
    """A DeepSpeed config beside the settings that fill what it leaves open.

    Args:
        written: its content.
        settings: of the engine.
    """

    def __init__(self, written: dict[str, Any], settings: DeepSpeedConfig) -> None:
        self.written = written
        self.settings = settings

    def section(self, *path: str) -> dict[str, Any]:
        """An object in the config; empty where it is not there, or is no object."""
        found: Any = self.written
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def stage(self) -> object:
        """What it says of ZeRO's stage."""
        return self.section("zero_optimization").get("stage")

    @property
    def precision(self) -> dict[str, Any]:
        """The section `bf16`, by either of its names."""
        return self.section("bf16") or self.section("bfloat16")

    @property
    def has_scheduler(self) -> bool:
        """Whether DeepSpeed drives the learning rate."""
        return bool(self.section("scheduler"))

    def pairs(self) -> dict[str, tuple[object, str, Any]]:
        """What both may say: by the key in the config, its value there, the name of our setting, and its value."""
        own, optimizer = self.settings, self.section("optimizer", "params")
        found: dict[str, tuple[object, str, Any]] = {
            "gradient_clipping": (
                self.written.get("gradient_clipping", AUTO),
                "max_gradient_norm",
                own.max_gradient_norm or 0.0,
            )
        }
        names = {"lr": "learning_rate", "betas": "betas", "eps": "epsilon", "weight_decay": "weight_decay"}
        for key, name in names.items():
            found[f"optimizer.params.{key}"] = (optimizer.get(key, AUTO), name, getattr(own, name))
        return found

    def value(self, key: str) -> Any:
        """Of what both may say: the config's, and ours where it leaves it open."""
        theirs, _, ours = self.pairs()[key]
        return ours if theirs == AUTO else theirs

    def optimizer_settings(self) -> dict[str, Any]:
        """What `torch.optim.AdamW` is made with, but for `weight_decay`, which is of groups."""
        named = {key: self.value(f"optimizer.params.{key}") for key in ("lr", "betas", "eps")}
        return {**named, "betas": tuple(named["betas"])}

    def schedule(self, total_updates: int) -> dict[str, Any]:
        """The section `scheduler`, filled."""
        found = deepcopy(self.section("scheduler"))
        rate = self.value("optimizer.params.lr")
        open_ones = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": rate,
            "warmup_num_steps": max(1, self.settings.warmup_steps),
            "total_num_steps": total_updates,
        }
        wanted = SCHEDULERS[found["type"]] & {"warmup_max_lr", "warmup_num_steps", "total_num_steps"}
        params = {**dict.fromkeys(wanted, AUTO), **found.get("params", {})}
        return {**found, "params": {key: open_ones[key] if value == AUTO else value for key, value in params.items()}}

    def became(self, filled: dict[str, Any]) -> str:
        """What each "auto" of the config became, in words; empty where it has none. Sizes of batches are the run's.

        Args:
            filled: what DeepSpeed is given, which the optimizer is no part of.
        """
        keys = [key for key in self.pairs() if key.startswith("optimizer.")]
        known = {**filled, "optimizer": {"params": {key.rpartition(".")[2]: self.value(key) for key in keys}}}
        written = {
            key: value for key, value in self.written.items() if "batch" not in key and "accumulation" not in key
        }
        return ", ".join(f"{path}={value}" for path, value in _filled_in(written, known))

    def filled(self, *, dtype: str, hidden_size: int, total_updates: int, trains: bool) -> dict[str, Any]:
        """What DeepSpeed is given: nothing is open in it, and batches are of this engine's making.

        Args:
            dtype: of the model.
            hidden_size: of the model, from which Hugging Face's integration computes ZeRO 3's sizes too.
            total_updates: of the whole run, where a schedule ends.
            trains: whether the role learns.
        """
        found = deepcopy(self.written)
        for key in ("optimizer", "scheduler", "bfloat16", "train_batch_size"):
            found.pop(key, None)
        # A micro-batch is as many sequences as its tokens allow, and as many make an update as the batch needs: the
        # engine says which one is the last.
        found |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        found["gradient_clipping"] = float(self.value("gradient_clipping"))
        found.setdefault("steps_per_print", 1 << 60)
        found["zero_force_ds_cpu_optimizer"] = False
        found["fp16"] = {"enabled": False}
        found["bf16"] = {**self.precision, "enabled": dtype == "bfloat16", "check_grad_overflow": True}
        found["data_types"] = {"grad_accum_dtype": "fp32"}
        sizes = {
            "reduce_bucket_size": hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        zero = found["zero_optimization"]
        found["zero_optimization"] = {key: sizes[key] if value == AUTO else value for key, value in zero.items()}
        if trains and self.has_scheduler:
            found["scheduler"] = self.schedule(total_updates)
        return found


def _filled_in(written: dict[str, Any], filled: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in written.items():
        if isinstance(value, dict) and isinstance(filled.get(key), dict):
            yield from _filled_in(value, filled[key], f"{above}{key}.")
        elif value == AUTO and key in filled:
            yield f"{above}{key}", filled[key]
