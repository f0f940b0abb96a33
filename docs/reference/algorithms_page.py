"""`algorithms.md`: every algorithm and every part of one, from their docstrings and settings."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from config_page import settings_table
from docstrings import protocol_of, text_of

from areal_core.algorithms.settings import PolicyGradientSettings
from areal_core.config.schema import json_schema
from areal_core.plugins import PluginManager
from areal_core.plugins.records import KINDS
from areal_core.sdk import Algorithm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.plugins import Component

PLUGINS: Final = ("grpo", "finetuning")
PARTS: Final = [kind for kind in KINDS if protocol_of(kind).__module__ == Algorithm.__module__]
"""The kinds whose Protocols stand beside that of algorithms."""
COMPOSITION: Final = "areal_core.algorithms.composition:PolicyGradient"
BASE: Final = "areal_core.algorithms.settings:PolicyGradientSettings"
BASE_ANCHOR: Final = "corepolicy_gradient-algorithm"
INTRODUCTION: Final = """# Algorithms

Every algorithm and every part of one that comes with areal: its formula, its settings, and its source. The
[guide](../guides/algorithms.md) helps you choose, [metrics](metrics.md) explains what is logged, and any part may be
[yours](../extend/components.md).

In the formulas π is the policy that learns, π_prox the policy at the start of the batch, μ the policy that sampled;
i counts the episodes of a prompt, t the tokens; r = π / π_prox and ρ = π_prox / μ, both of a token. w_t is the product
of the corrections' weights, by default min(ρ_t, 2). R is a reward, A an advantage, V a critic's value; N are the tokens
of an update in the loss, B its sequences, U its pairs, T_i the tokens of sequence i; y_c and y_r are the chosen and the
rejected answer of a pair; σ(z) = 1 / (1 + e^-z). [T] are the tokens of a batch, [B] its sequences."""


def page() -> str:
    """The whole page."""
    manager = PluginManager.load(PLUGINS)
    schemas = json_schema(manager, imports=True)["x-areal-components"]
    kinds = {kind: [one for one in manager.components(kind) if one.plugin in (*PLUGINS, "core")] for kind in PARTS}
    index = [
        f"- {KINDS[kind].noun}: " + ", ".join(f"[`{one.name}`](#{anchor(kind, one)})" for one in found)
        for kind, found in kinds.items()
    ]
    parts = [INTRODUCTION, "\n".join(index)]
    for kind, found in kinds.items():
        parts.append(f"## {kind.replace('_', ' ').capitalize()}")
        for one in found:
            parts.append(f"### `{one.reference}` {KINDS[kind].noun}\n\n{one.summary[0].upper()}{one.summary[1:]}.")
            parts += described(manager, one, schemas[kind][one.reference]["settings"])
    return "\n\n".join(parts)


def anchor(kind: str, one: Component) -> str:
    """Of a component's heading."""
    return f"{one.reference}-{KINDS[kind].noun}".replace("/", "").replace(" ", "-")


def described(manager: PluginManager, one: Component, settings: dict[str, Any]) -> Iterator[str]:
    """The text of a component's settings or of its code, and its settings; of compositions those that it sets."""
    module, _, name = one.target.partition(":")
    is_composition = one.target == COMPOSITION and one.config is not None
    # An algorithm's formula and paper are in the text of its settings, everything else's in its code.
    is_algorithm = one.config is not None and one in manager.components("algorithms")
    yield text_of(manager.import_from(one, str(one.config)) if is_algorithm else _imported(module, name))
    shown = settings.get("properties", {})
    if is_composition and one.config != BASE:
        common = PolicyGradientSettings.model_json_schema()["properties"]
        shown = {key: part for key, part in shown.items() if part.get("default") != common.get(key, {}).get("default")}
    if shown:
        yield settings_table({**settings, "properties": shown})
    if is_composition and one.config != BASE:
        yield f"Everything else is as in [`core/policy_gradient`](#{BASE_ANCHOR})."


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
