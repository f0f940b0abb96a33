"""Conversions of values, by their names in keys.yaml: functions of `(value, key, source)`. None writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_convert.source import Source


def epochs(value: float, key: str, source: Source) -> int:
    """Return the steps of these epochs."""
    return source.steps(value)


def every(value: float, key: str, source: Source) -> int:
    """Return the steps between two times, from whichever of epochs and steps comes first."""
    section = key.rpartition(".")[0]
    share, steps = source.get(f"{section}.freq_epochs"), source.get(f"{section}.freq_steps")
    return min(([source.steps(share)] if share else []) + ([steps] if steps else []), default=0)


def updates(value: float, key: str, source: Source) -> int:
    """Return the updates in a share of all steps, because AReaL's schedule advances once per step."""
    steps = source.get("total_train_steps") or source.steps(source.get("total_train_epochs"))
    return int(value * steps) * int(source.get("actor.ppo_n_minibatches"))


def batches(value: float, key: str, source: Source) -> int:
    """Return the number of pending batches, one of which may be ready. AReaL counts groups in generation."""
    return int(-(-value // source.get("train_dataset.batch_size")) + 1)


def discounted(value: float, key: str, source: Source) -> float:
    """Return the discount γ λ: without a critic AReaL's λ discounts like γ."""
    return float(source.get("actor.discount", 1.0) * source.get("actor.gae_lambda", 1.0))


def rows(value: str, key: str, source: Source) -> dict[str, Any]:
    """Return a data set of the hub, or a folder. Held-out rows are another split."""
    split = {"split": "test"} if key.startswith("valid") else {}
    return {"type": "rewards/hub", "name": value, **source.known_data(key).get("dataset", {}), **split}


def mask(value: float, key: str, source: Source) -> dict[str, float]:
    """Return bounds with an upper one only. A ValueError means that AReaL has no bound."""
    return {"low": 0.0, "high": float(value)}


def second_moment(value: float, key: str, source: Source) -> dict[str, Any]:
    """Return the threshold of a mean over all tokens, as AReaL computes it."""
    return {"threshold": float(value), "among": "all"}


def modules(value: list[str], key: str, source: Source) -> str | list[str]:
    """Return the modules, or one word for all."""
    return value if value not in ([], ["all-linear"]) else "all-linear"
