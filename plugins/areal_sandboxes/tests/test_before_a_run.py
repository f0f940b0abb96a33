"""What `areal config check`, `areal run --dry-run` and the start of a run say of sandboxes: all of them resolve."""

from __future__ import annotations

import json

import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_sandboxes import programs


def chosen(sandbox, *words):
    """A config with this sandbox, resolved; its words are looked up anew."""
    pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")
    programs.find_program.cache_clear()
    rewards = [{"type": "sandboxes/unit_tests", "sandbox": sandbox}]
    return resolve(None, ["grpo", "sandboxes"], [f"rewards={json.dumps(rewards)}", *words])


@pytest.mark.parametrize(
    ("sandbox", "told"),
    [
        (
            {"type": "sandboxes/bubblewrap"},
            "needs the program bwrap, which is not installed .* apt-get install b",
        ),
        ({"type": "sandboxes/container"}, "needs docker or podman, and neither is installed .* apt-get install podman"),
        ({"type": "sandboxes/container", "program": ["nerdctl", "--debug"]}, "needs nerdctl, which is not installed"),
    ],
)
def test_a_program_that_is_missing_is_told_before_a_run(sandbox, told, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"(?s)rewards.*{told}"):
        chosen(sandbox)
    elsewhere = json.dumps({"type": "external", "nodes": 2})
    assert chosen(sandbox, f"launcher={elsewhere}"), "nodes elsewhere may have it"


def test_an_interpreter_that_is_not_there_is_told_before_a_run(bubblewrap, tmp_path):
    bubblewrap()
    with pytest.raises(ConfigError, match="which is not a program of this machine"):
        chosen({"type": "sandboxes/bubblewrap", "python": str(tmp_path / "python")})


def test_that_nothing_isolates_is_noted(bubblewrap):
    bubblewrap()
    (note,) = chosen("sandboxes/none").config.cross_notes()
    assert note.startswith("rewards.0.sandbox: sandboxes/none isolates nothing")
    assert list(chosen("sandboxes/bubblewrap").config.cross_notes()) == []
