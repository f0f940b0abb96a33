"""docs/reference/coming_from.md: every areal key of its tables is one that a config may have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from areal_convert.convert import entries
from areal_convert.source import TABLE
from areal_core.config.schema import json_schema
from areal_core.plugins import PluginManager

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = yaml.safe_load(
    (Path(__file__).parents[2] / "docs" / "reference" / "coming_from.yaml").read_text(encoding="utf-8")
)
PLUGINS = ("grpo", "sglang", "vllm", "hf", "fsdp", "rewards", "trackers", "ray", "slurm")
CARRIED = {name for _, ours, _, _ in entries() for name in ours.split()} | set(TABLE["together"].values())
OPEN = "inference_engine.options"
"""A mapping whose keys are the server's own."""


class Schema:
    """The keys of a config, those of all components among them."""

    def __init__(self) -> None:
        self._whole = json_schema(PluginManager.load(list(PLUGINS)))
        self._components = self._whole["x-areal-components"]

    def has(self, key: str) -> bool:
        """Whether a dotted key is one; `+TYPE` is an item of a list."""
        parts = key.split(".")
        if parts[0] == "roles":  # a role has what the training engine has, and a path
            parts = ["train_engine", *parts[2:]] if parts[2:] != ["path"] else ["model", "path"]
        nodes = [(self._whole, self._whole)]
        for part in parts:
            found = [(one, root) for node, root in nodes for one, root in self._meanings(node, root)]
            if part.startswith("+"):
                nodes = found
                continue
            nodes = [(one["properties"][part], root) for one, root in found if part in one.get("properties", {})]
        return bool(nodes)

    def _meanings(self, node: Any, root: Any) -> Iterator[tuple[Any, Any]]:
        """What a node may be: itself, an alternative, an item, a component's settings."""
        yield node, root
        if "$ref" in node:
            yield from self._meanings(root["$defs"][node["$ref"].rpartition("/")[2]], root)
        for one in [*node.get("anyOf", ()), *node.get("oneOf", ()), *filter(None, [node.get("items")])]:
            yield from self._meanings(one, root)
        for component in self._components.get(node.get("x-areal-kind"), {}).values():
            if settings := component.get("settings"):
                yield from self._meanings(settings, settings)


@pytest.fixture(scope="module")
def schema() -> Schema:
    return Schema()


@pytest.mark.parametrize("key", sorted({*WORDS["keys"], *CARRIED}))
def test_a_key_of_areal_exists(key: str, schema: Schema) -> None:
    assert schema.has(key), f"no config has {key}"


@pytest.mark.parametrize(
    "key", ["rollout.group_sise", "train_engine.adapter.rang", "algorithm.corrections.+token_mask.hi"]
)
def test_another_key_does_not(key: str, schema: Schema) -> None:
    assert not schema.has(key)


def test_every_row_has_a_cell_for_each_framework() -> None:
    assert [idea for idea, cells in WORDS["concepts"].items() if len(cells) != 5] == []
    assert [key for key, cells in WORDS["keys"].items() if len(cells) != 3] == []
