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


@pytest.fixture(autouse=True)
def no_shared_cache(tmp_path, monkeypatch):
    """The library `datasets` keeps converted copies of files; each test has its own."""
    try:
        import datasets
    except ImportError:
        return
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
