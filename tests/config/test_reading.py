"""Files and pipes that a config is read from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_core.config.presets import read_file
from areal_core.errors import ConfigError


def test_a_config_comes_through_a_pipe():
    text = "steps: 3\nplugins: []\n"
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    assert read_file(f"/dev/fd/{reading}").text == text
    assert read_file(f"/dev/fd/{reading}").text == text, "who asks again is told the same"
    assert read_file(f"/dev/fd/{reading}").folder == Path.cwd()
    os.close(reading)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_config_that_is_nested_without_end_is_told_so(tmp_path, text):
    (tmp_path / "deep.json").write_text(text)
    with pytest.raises(ConfigError, match=r"deep\.json: not valid YAML: more than 40 levels are nested"):
        read_file(tmp_path / "deep.json")


def test_letters_that_the_terminal_does_not_have_are_written_as_codes(kit):
    kit.file("gé.yaml", "plugins: [kit]\npreset: kit/small\n")
    outcome = kit.areal("config", "check", "gé.yaml", PYTHONIOENCODING="ascii")
    assert (outcome.code, outcome.out) == (0, "g\\xe9 is valid; plugins: kit\n"), outcome.err
