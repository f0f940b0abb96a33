"""Convert AReaL's config to an areal config with the table keys.yaml."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from areal_convert import values
from areal_convert.source import TABLE, matching

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_convert.source import Source

_HYBRID: Final = re.compile(r"\(attn:(\w+)\|ffn:[dptc\d]*(e\d+)?[dptc\d]*\)")
_PART: Final = re.compile(r"(?:([a-z]\w+)(?:\[\w+\])?[:.])?((?:[dptce]\d+)+)")
_SLEEP: Final = {"sglang": "memory_saver", "vllm": "sleep_mode"}
_PARALLEL: Final = {"t": "tensor", "c": "context", "e": "expert"}

FIRST: Final = ("plugins", "seed", "steps", "model", "dataset", "workflow", "rewards", "sampling", "rollout")
LEVELS: Final = {"mean_level": "batch", "std_level": "batch", "mean_leave1out": False}
"""Fields of AReaL's normalization, with its defaults."""
WHITENED: Final = ("batch", "batch", False)
NORMALIZED: Final = {str(tuple(levels)): (kind, advantage) for levels, kind, advantage in TABLE["normalized"]}


def entries() -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Yield every key with a counterpart: AReaL's key, areal's (or two), the conversion, and its block."""
    for block in TABLE["carried"]:
        for theirs, ours in block.get("of", {"": ""}).items():
            for key, target in block["keys"].items():
                name, conversion = target if isinstance(target, list) else (target, None)
                yield f"{theirs}.{key}".strip("."), f"{ours}.{name}".strip("."), conversion, block


def convert(source: Source) -> dict[str, Any]:
    """Return the areal config. `source` records which keys were carried over."""
    config: dict[str, Any] = {name: {} for name in FIRST}
    config |= {"workflow": {"type": "single_turn", "chat_template": "always"}, "rewards": ["rewards/math_verify"]}
    for key, value in {**_allocation(source), "train_engine.type": "fsdp", **_algorithm(source)}.items():
        _put(config, key, value)
    for entry in entries():
        _carry(source, config, *entry)
    engine = config["inference_engine"]["type"]
    for key in source.flat:
        section, _, name = key.partition(".")
        if section in _SLEEP and section != engine:
            source.unused[key] = "belongs to the engine that is not used"
        elif section == engine and key not in source.unused and not reason(key, "not_needed"):
            ours = "max_concurrent_requests" if name == "max_running_requests" else f"options.{name}"
            source.carried[key] = f"inference_engine.{ours}"
            _put(config, source.carried[key], source.get(key))
    config["algorithm"].setdefault("corrections", [])
    config["plugins"] = ["grpo", engine, "fsdp", "rewards", "view"]
    return {name: _listed(value) for name, value in config.items() if value != {}}


def _carry(source: Source, config: dict[str, Any], key: str, ours: str, conversion: Any, block: dict[str, Any]) -> None:
    if (value := source.get(key)) is None:
        return
    if not all(map(source.holds, block.get("when", ()))) or any(map(source.holds, block.get("unless", ()))):
        reasons = source.unused if "unused" in block else source.lost
        reasons.setdefault(key, block.get("unused") or block.get("otherwise") or reason(key, "lost"))
        return
    try:
        if isinstance(conversion, str):
            value = getattr(values, conversion)(value, key, source)
        elif conversion is not None:
            value = conversion[value]
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        source.lost.setdefault(key, reason(key, "lost") or f"{value} has no counterpart ({error})")
        return
    source.carried[key] = ours
    for name in ours.split() if value is not None else ():
        _put(config, name, value)


def _allocation(source: Source) -> dict[str, Any]:
    """Return inference engine, placement and parallelism, by areal's keys."""
    keys = [key for key in ("rollout.backend", "actor.backend") if source.get("rollout.backend")] or ["allocation_mode"]
    text = _HYBRID.sub(r"\1\2", "+".join(str(source.get(key, "")) for key in keys).replace(" ", "").lower())
    parts = [part for part in map(_PART.fullmatch, re.split(r"[+|]", text)) if part]
    if len(parts) != 2 or parts[0][1] not in _SLEEP or re.search(r"[dptce]0", text):
        source.lost |= dict.fromkeys(keys, "not understood: write inference_engine and placement")
        return {"inference_engine.type": "hf"}
    engine, servers, ranks = parts[0][1], _sizes(parts[0][2]), _sizes(parts[1][2])
    is_colocated = "|" in text or source.holds("rollout.scheduling_strategy.type=colocation")
    placement = (
        f"train={math.prod(ranks[name] for name in 'dptc')} generate=tp{servers['t'] * servers['p']}x{servers['d']}"
    )
    if is_colocated:
        placement += " colocated"
    settings: dict[str, Any] = {"inference_engine.type": engine, "placement": placement}
    settings |= {f"inference_engine.{_SLEEP[engine]}": True} if is_colocated else {}
    settings |= {f"train_engine.parallel.{ours}": ranks[name] for name, ours in _PARALLEL.items() if ranks[name] > 1}
    if ranks["p"] > 1 or parts[1][1] not in (None, "fsdp"):
        source.lost[keys.pop()] = "converted, but to the fsdp engine, in which pipeline ranks become data parallel"
    source.carried |= dict.fromkeys(keys, "placement")
    return settings


def _sizes(text: str) -> dict[str, int]:
    return dict.fromkeys("dptce", 1) | {name: int(size) for name, size in re.findall(r"([dptce])(\d+)", text)}


def _algorithm(source: Source) -> dict[str, Any]:
    """Return the algorithm that AReaL's switches make together, and settings whose defaults differ from areal's."""
    reward, batch = _levels(source, "reward_norm"), _levels(source, "adv_norm")
    kind, advantage = NORMALIZED.get(str(reward), ("reinforce_pp", {"type": "reinforce_pp"}))
    used = {"reward_norm": str(reward) in NORMALIZED, "adv_norm": batch == WHITENED and advantage != "group_normalized"}
    if source.holds("critic.path"):
        used = {"adv_norm": batch in ((), WHITENED)}
        kind, advantage = "ppo", {"type": "gae", "gamma": 1.0, "gae_lambda": 1.0, "whiten": batch == WHITENED}
    elif all(used.values()):
        advantage = "reinforce_pp_baseline"
    keys = {f"actor.{name}.{level}" for name, is_used in used.items() if is_used for level in LEVELS}
    source.carried |= dict.fromkeys(keys & source.flat.keys(), "algorithm.advantage")
    filters = source.holds("dynamic_bs") or source.holds("actor.dynamic_sampling")
    kind = "m2po" if source.holds("actor.m2_threshold") else "dapo" if filters and kind == "grpo" else kind
    settings = {"algorithm.type": kind, "algorithm.advantage": advantage, "algorithm.loss_aggregation": "token_mean"}
    settings |= {"algorithm.group_filters": ["zero_variance"]} if filters else {}
    settings |= {"algorithm.policy_loss.type": "ppo_clip"} if kind == "rloo" else {}
    return settings


def _levels(source: Source, name: str) -> tuple[Any, ...]:
    """Return the levels of a normalization; empty if there is none."""
    levels = (source.flat.get(f"actor.{name}.{level}", default) for level, default in LEVELS.items())
    return tuple(levels) if any(key.startswith(f"actor.{name}.") for key in source.flat) else ()


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    are_sections = isinstance(value, dict) and isinstance(tree.get(name), dict)
    tree[name] = {**tree[name], **value} if are_sections else value


def _listed(value: Any) -> Any:
    """Return a section as it is written in a config: keys that begin with + become the items of a list."""
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("+") for key in value):
        return {key: _listed(item) for key, item in value.items()}
    return [{"type": key[1:], **item} if isinstance(item, dict) else item for key, item in value.items()]


def reason(key: str, part: str) -> str:
    """Return the reason that a part of the table has for a key, or an empty string."""
    return next(iter(matching(TABLE[part], key)), "")


def account(source: Source) -> dict[str, dict[str, str]]:
    """Return the outcome of every key: `carried`, `by_default` (from AReaL's defaults), `lost` or `not_needed`."""
    outcome: dict[str, dict[str, str]] = {part: {} for part in ("carried", "by_default", "lost", "not_needed")}
    for key, value in source.flat.items():
        default, problem = (f"AReaL's {value}, " if key in source.defaults else ""), source.lost.get(key)
        unneeded = source.unused.get(key) or ("" if problem else reason(key, "not_needed"))
        if ours := source.carried.get(key):
            outcome["by_default" if default else "carried"][key] = default + ours
        elif not unneeded:
            unread = "its value is not in the file" if "${" in str(value) else ""
            problem = problem or unread or reason(key, "lost") or "areal has nothing of this name"
            outcome["lost"][key] = default + problem
        elif not default:
            outcome["not_needed"][key] = unneeded
    return outcome
