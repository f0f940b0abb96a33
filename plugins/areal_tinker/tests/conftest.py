"""Servers of the Tinker API."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for modules of tests that are no tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def tinker_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    from chat_model import make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("tinker") / "model")


@pytest.fixture
def start_server(tmp_path: Path, tinker_model: Path) -> Iterator[Callable[..., Any]]:
    """Starts a server; it is stopped after the test."""
    from tinker_server import TinkerServer

    servers: list[TinkerServer] = []

    def start(*options: str, **environment: str) -> TinkerServer:
        servers.append(TinkerServer(tmp_path, tinker_model, *options, **environment))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()
