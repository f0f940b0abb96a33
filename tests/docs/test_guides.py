"""Every config of the guides resolves, and every `areal` command in them is understood; nothing is trained."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from areal_core.cli import main
from areal_core.config import resolve

pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in GUIDES}
BLOCKS = [
    (name, language, text)
    for name, page in TEXTS.items()
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
]
NAMED = re.compile(r"# (my_\w+\.(?:py|yaml))\n")
FILES = [(found[1], text) for _, _, text in BLOCKS if (found := NAMED.match(text))]
CONFIGS = [(page, text) for page, language, text in BLOCKS if language == "yaml"]
COMMANDS = [
    (page, line)
    for page, language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
    if line.startswith("areal ")
]
PLUGINS = "agents, finetuning, fsdp, grpo, hf, ray, rewards, sandboxes, sglang, slurm, trackers, view, vision, vllm"
BEGIN = f"plugins: [{PLUGINS}]\npreset: grpo/addition\n"
"""Over which a block is resolved that is only a part of a config."""
PRESET = "grpo/addition"
WORDS = {"my.yaml": PRESET, "HOST": "127.0.0.1", "'launcher.hosts={gpu1: 8, gpu2: 8}'": "launcher.hosts={gpu1: 8}"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with every file of the guides and some rows."""
    assert len(dict(FILES)) == len(FILES), "two guides show files of one name"
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    for library in ("verifiers", "nemo_gym", "openenv"):
        (tmp_path / library / "bin").mkdir(parents=True)
        (tmp_path / library / "bin" / "python").symlink_to(sys.executable)
    shutil.copytree(ROOT / "examples" / "environments" / "harbor_tasks", tmp_path / "harbor_tasks")
    (tmp_path / "my_rows.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    for name in ("command_launcher.py", "from_areal.py"):
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
    monkeypatch.chdir(tmp_path)
    # As a reader has it, who has activated the environment: `python` is the one that areal is in.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    return tmp_path


def check(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`areal config check`; skipped where a library that a plugin wants is not installed."""
    code = main(["config", "check", *words])
    message = capsys.readouterr().err
    if code and re.search(r"pip install '?\"?\.?/?[\w/-]+\[", message):
        pytest.skip(message.strip().splitlines()[0])
    assert code == 0, message


@pytest.mark.parametrize(("page", "text"), CONFIGS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(CONFIGS)])
def test_a_config_resolves(page: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = re.search(r"^(plugins|preset):", text, re.MULTILINE)
    (folder / "shown.yaml").write_text(text if whole else BEGIN + text)
    check(["shown.yaml"], capsys)


def is_run(line: str) -> bool:
    return line.startswith("areal run ") and "--resume" not in line


@pytest.mark.parametrize("line", dict.fromkeys(line for _, line in COMMANDS if is_run(line)))
def test_a_run_resolves(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [WORDS.get(word, word) for word in shlex.split(line, comments=True)[2:] if word != "--dry-run"]
    check([str(ROOT / word) if word.startswith("examples/") else word for word in words], capsys)


@pytest.mark.parametrize("line", dict.fromkeys(line for _, line in COMMANDS if not is_run(line)))
def test_a_command_has_its_options(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line, comments=True)[1:]
    depth = 2 if words[0] in {"ray", "rewards", "slurm", "tinker", "view"} else 1
    depth = depth + 1 if words[0] == "config" else depth
    assert main([*words[:depth], "--help"]) == 0
    shown = capsys.readouterr().out
    options = [word.partition("=")[0] for word in words[depth:] if re.match(r"--?[a-z]", word)]
    assert [option for option in options if not re.search(rf"(?<![\w-]){option}\b", shown)] == []


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for page, line in COMMANDS if page == "your-own-run" and "--resume" in line])
def test_a_resume_is_understood(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = resolve("my_run.yaml", (), ["model.source={type: grpo/addition_model, steps: 2}"])
    (folder / "my_run").mkdir()
    (folder / "my_run" / "config.yaml").write_text(resolved.to_yaml())
    plugins = [record.as_dict() for record in resolved.provenance()]
    (folder / "my_run" / "plugins.json").write_text(json.dumps(plugins))
    assert main([*shlex.split(line)[1:], "--dry-run"]) == 0, capsys.readouterr().err
