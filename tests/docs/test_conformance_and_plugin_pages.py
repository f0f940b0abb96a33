"""The pages about plugins show the files of examples as they are, and every suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_core.plugins.records import KINDS
from areal_testing import conformance

ROOT = Path(__file__).parents[2]
EXTEND = ROOT / "docs" / "extend"
STEPS = (EXTEND / "plugin.md").read_text(encoding="utf-8").partition("## Use it")[0]
PARTS = re.split(r"`(examples/plugin/\S+)`", STEPS)
SHOWN = [
    (path, block)
    for path, text in zip(PARTS[1::2], PARTS[2::2], strict=True)
    for block in re.findall(r"^```(?:python|toml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("path", "block"), SHOWN, ids=[f"{path}-{number}" for number, (path, _) in enumerate(SHOWN)])
def test_a_block_is_a_part_of_the_file_that_is_named_before_it(path: str, block: str) -> None:
    assert block in (ROOT / path).read_text(encoding="utf-8"), f"docs/extend/plugin.md shows an older {path}"


def test_every_part_of_a_plugin_is_shown() -> None:
    assert [Path(path).name for path in dict.fromkeys(path for path, _ in SHOWN)] == [
        "pyproject.toml", "rewards.py", "config.py", "plugin.py", "test_conformance.py",
    ]  # fmt: skip


def test_the_adapter_of_the_toy_server_is_the_one_of_the_example() -> None:
    (block,) = re.findall(r"^```python\n(class ToyConfig.*?)^```$", (EXTEND / "server.md").read_text(), re.M | re.S)
    assert block in (ROOT / "examples/plugin/src/areal_example/inference_engines.py").read_text(encoding="utf-8")


def test_every_kind_but_those_that_the_page_names_has_a_suite() -> None:
    kinds = {getattr(suite, "kind", "") for suite in vars(conformance).values()}
    kinds |= {"train_engines", "inference_engines"}
    without = {"agents", "tools", "weight_transports", "presets", "commands", "health_checks"}
    assert set(KINDS) - kinds == without
