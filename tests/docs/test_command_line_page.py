"""docs/command-line.md has every command and exactly the options that `--help` shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_core.cli import command_names, main
from areal_core.plugins import PluginManager

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
PLUGINS = (
    "evaluation",
    "view",
    "fsdp",
    "grpo",
    "hf",
    "rewards",
    "sglang",
    "trackers",
    "vllm",
    "ray",
    "slurm",
    "sandboxes",
)
OPTION = re.compile(r"--[a-z][a-z-]+")


def commands() -> list[str]:
    """Every command of the core and of this project's plugins, in full."""
    records = [record for kind, record in PluginManager.load(PLUGINS).records() if kind == "commands"]
    return [*command_names(), *(f"{record.plugin} {record.name}" for record in records)]


def test_the_page_has_every_command() -> None:
    assert sorted(name for name in SECTIONS if name.startswith("areal ")) == sorted(f"areal {c}" for c in commands())


@pytest.mark.parametrize("command", [name for name in SECTIONS if name.startswith("areal ")])
def test_a_command_has_the_options_of_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split()[1:], "--help"]) == 0
    shown = re.findall(r"^ +(?:-\w(?: [A-Z]+)?, )?(--[a-z][a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    first_cells = " ".join(re.findall(r"^\| (.*?) \|", SECTIONS[command], re.MULTILINE))
    assert set(OPTION.findall(first_cells)) == set(shown) - {"--help"}
