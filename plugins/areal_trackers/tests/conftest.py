import importlib.util

import pytest


@pytest.fixture
def without(monkeypatch):
    """A function that makes a library look as if it were not installed."""
    find = importlib.util.find_spec

    def hide(module):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest)
        )

    return hide


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "runs" / "addition"
    folder.mkdir(parents=True)
    return folder
