"""Five kinds of components in files, and the same files as a plugin: docs/extend/plugin.md says how."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extend" / "plugin.md").read_text(encoding="utf-8")
CONFIG = """\
plugins: [grpo, fsdp, own]
steps: 1
model: {source: grpo/addition_model}
dataset: grpo/additions
workflow: {type: multi_turn, environment: {type: "second_chances.py:SecondChances", tries: 2}}
rewards: [{type: "custom_parts.py:brevity", free: 8}]
inference_engine: {type: "adapter.py:ToyAdapter", servers: 2}
train_engine: fsdp
algorithm: {type: policy_gradient, advantage: "custom_parts.py:best_of_group", policy_loss: grpo/reinforce}
launcher: {type: "command_launcher.py:CommandLauncher", hosts: {localhost: 0}, host: 127.0.0.1}
"""
FILES = ("examples/custom_parts.py", "examples/command_launcher.py")
OF_A_PLUGIN = {"second_chances.py": "environments.py", "adapter.py": "inference_engines.py"}
"""Files of the example plugin, which become files of their own without their marks."""
IMPORT, MARK = "from areal_core.plugins import register\n", re.compile(r'^@register\("(\w+)"\)\n', re.MULTILINE)


def rows() -> list[list[str]]:
    """The page's table: kind, name in a file, lines that the plugin adds, name in the plugin."""
    _, _, section = PAGE.partition("## From a file to a plugin")
    lines = section.partition("\n## ")[0].splitlines()
    return [re.findall(r"`([^`]+)`", line) for line in lines if line.startswith("| `")]


@pytest.fixture
def areal(tmp_path, monkeypatch):
    """Return a function that runs areal in a folder with the five components, and in an environment with the plugin."""
    site, work = tmp_path / "site", tmp_path / "work"
    package = site / "areal_own"
    package.mkdir(parents=True)
    work.mkdir()
    texts = {Path(name).name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
    for name, original in OF_A_PLUGIN.items():
        text = (ROOT / "examples/plugin/src/areal_example" / original).read_text(encoding="utf-8")
        texts[name] = MARK.sub("", text.replace(IMPORT, ""))
    for name, text in texts.items():
        (work / name).write_text(text)
    (work / "run.yaml").write_text(CONFIG)

    imports, hooks = [], ["from areal_core.plugins import Component, hookimpl\n"]
    for kind, chosen, added, _ in rows():
        name, _, attribute = chosen.partition(":")
        if added.startswith("@register"):
            start = re.compile(rf"^(?:def|class) {attribute}\b", re.MULTILINE)
            assert MARK.fullmatch(f"{added}\n")
            texts[name], count = start.subn(lambda found, added=added: f"{added}\n{found[0]}", texts[name])
            assert count == 1
            texts[name] = texts[name].replace(
                "\nfrom __future__ import annotations\n", f"\nfrom __future__ import annotations\n\n{IMPORT}", 1
            )
            imports.append(f"from areal_own.{name.removesuffix('.py')} import {attribute}\n")
        else:
            hooks.append(f"@hookimpl\ndef areal_{kind}():\n    return [{added}]\n")
    for name, text in {**texts, "plugin.py": "".join([*imports, *hooks]), "__init__.py": ""}.items():
        (package / name).write_text(text)
    metadata = site / "areal_own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: areal-own\nVersion: 1.0\nRequires-Dist: areal-core>=0.1\n"
    )
    (metadata / "entry_points.txt").write_text("[areal.plugins]\nown = areal_own.plugin\n")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "areal_core", *words]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.config = work / "run.yaml"
    return run


def test_each_of_five_kinds_is_the_same_as_a_file_and_as_a_plugin(areal):
    assert [kind for kind, *_ in rows()] == [
        "reward_functions", "environments", "inference_engines", "launchers", "advantages",
    ]  # fmt: skip
    areal("config", "check", "run.yaml")
    as_files = areal("config", "show", "run.yaml")
    text = areal.config.read_text()
    for _, chosen, _, name in rows():
        assert chosen in text
        text = text.replace(chosen, name)
    areal.config.write_text(text)
    areal("config", "check", "run.yaml")
    as_plugin = areal("config", "show", "run.yaml")
    for _, chosen, _, name in rows():
        assert name in as_plugin
        as_plugin = re.sub(rf"\S*{re.escape(name)}", chosen, as_plugin)
        as_files = re.sub(rf"\S*{re.escape(chosen)}", chosen, as_files)
    assert re.sub(" +", " ", as_plugin) == re.sub(" +", " ", as_files)
