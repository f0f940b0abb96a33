"""The pytest plugin: fixtures for tests of engines and server adapters, and a hook that reports failed background work.

pytest loads this module in every session if areal-testing is installed, so its imports of areal are inside functions.
"""

from __future__ import annotations

import _thread
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping

    from areal_core.engines import ModelReference
    from areal_core.servers import InferenceEngine, ServerAdapter

START_S = 900
"""Timeout for a server to become healthy, also on a slow machine."""
HEALTH_S = 60
"""Timeout of one health check."""

# pytest rewrites the asserts of a plugin's modules by its wheel's file list, which an editable install does not have.
pytest.register_assert_rewrite("areal_testing.conformance")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Fail a test during which background work of areal fails. Otherwise the failure would end the whole session.

    The hook does nothing if no test has imported areal.
    """
    if "areal_core" not in sys.modules:
        return (yield)
    from areal_core.processes import on_failure

    failures: list[tuple[str, BaseException]] = []

    def interrupt(name: str, error: BaseException) -> None:
        failures.append((name, error))
        if len(failures) == 1 and callable(signal.getsignal(signal.SIGINT)):
            _thread.interrupt_main()  # only KeyboardInterrupt and SystemExit leave a callback of an event loop

    previous, result = on_failure(interrupt), None
    try:
        result = yield
    except KeyboardInterrupt:
        if not failures:
            raise
    finally:
        on_failure(previous)
    if failures:
        raise AssertionError(f"background work failed: {failures[0][0]}") from failures[0][1]
    return result


async def _is_healthy(adapter: ServerAdapter, address: str) -> bool:
    from areal_core.servers import RequestRefusedError, ServerLostError

    connection = adapter.connect(address)
    try:
        await adapter.check_health(connection, HEALTH_S)
    except (RequestRefusedError, ServerLostError):
        return False
    finally:
        connection.close()
    return True


@contextmanager
def _running_server(adapter: ServerAdapter, model: ModelReference, log: Path) -> Iterator[Callable[[], str]]:
    """Start a server. Yield a function that waits until it is healthy and returns its address."""
    from areal_core.processes import free_port, http_address, kill_tree

    port = free_port()
    command = adapter.command(model, "127.0.0.1", port, log.parent)
    address = command.address or http_address("127.0.0.1", port)
    environment = {**os.environ, **command.environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.arguments, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip

    def wait_for_address() -> str:
        deadline = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < deadline:
            if asyncio.run(_is_healthy(adapter, address)):
                return address
            time.sleep(0.5)
        problem = "ended" if process.poll() is not None else f"was not healthy after {START_S} s"
        pytest.fail(f"the server {problem}; the end of its log:\n{log.read_text()[-3000:]}", pytrace=False)

    try:
        yield wait_for_address
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()


@pytest.fixture(scope="module")
def server_of_each_shape(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[ServerAdapter], Callable[[Path], str]]]:
    """Start two real servers, one for each architecture of the models in `InferenceEngineSuite`.

    Call the fixture with an adapter. It returns a function from the folder of a model to the address of the server for
    its architecture. The servers end with the module, which frees memory for the servers of the next module.
    """
    from areal_core.engines import ModelReference
    from areal_testing.conformance.models import make_model

    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:

        def start(adapter: ServerAdapter) -> Callable[[Path], str]:
            waits = {}
            for architecture in ("qwen3", "llama"):
                model = ModelReference(str(make_model(folder / architecture, architecture=architecture)))
                log = folder / f"{architecture}.log"
                waits[architecture] = stack.enter_context(_running_server(adapter, model, log))
            addresses = {architecture: wait() for architecture, wait in waits.items()}

            def address(model: Path) -> str:
                config = model / "config.json"
                # A test of the suite starts the engine with a folder that does not exist: any server will do.
                architecture = json.loads(config.read_text())["model_type"] if config.is_file() else "qwen3"
                return addresses[architecture]

            return address

        yield start


class _EngineByModel:
    """An engine that chooses its server by its model in `start`: the tests of the suite use two architectures."""

    def __init__(self, make: Callable[[str], InferenceEngine], address: Callable[[Path], str]) -> None:
        self._make = make
        self._address = address
        self._engine = make("http://127.0.0.1:1")

    async def start(self, model: ModelReference) -> None:
        """Choose the server for the model, and start the engine with its address."""
        self._engine = self._make(self._address(Path(model.path)))
        await self._engine.start(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture(scope="session")
def engine_by_model() -> Callable[..., Any]:
    """Make an engine for `InferenceEngineSuite` on running servers.

    Call the fixture with two functions: one from an address to an engine, and the result of `server_of_each_shape`.
    """
    return _EngineByModel


@pytest.fixture(scope="session")
def recorded_server() -> Callable[..., Any]:
    """Serve recorded answers over HTTP: `async with recorded_server({"/path": answer}) as (address, bodies)`.

    An answer is a JSON value, a list of events in `{"events": [...]}`, or `(status, JSON value or text)`. `bodies`
    collects the JSON bodies of POST requests, merged with their query parameters. It needs `areal-testing[servers]`.
    """
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    @asynccontextmanager
    async def serve(answers: Mapping[str, Any]) -> AsyncIterator[tuple[str, list[Any]]]:
        bodies: list[Any] = []

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.method == "POST":
                bodies.append({**request.query, **await request.json()})
            recorded = answers.get(request.path, (404, {"detail": "Not Found"}))
            status, value = recorded if isinstance(recorded, tuple) else (200, recorded)
            if isinstance(value, str):
                return web.Response(status=status, text=value)
            if not isinstance(value, dict) or "events" not in value:
                return web.json_response(value, status=status)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            for event in [*map(json.dumps, value["events"]), "[DONE]"]:
                await stream.write(f"data: {event}\n\n".encode())
            return stream

        application = web.Application()
        application.router.add_route("*", "/{rest:.*}", answer)
        async with TestServer(application) as server:
            yield str(server.make_url("")).rstrip("/"), bodies

    return serve


@pytest.fixture(scope="session")
def adapter_call(recorded_server: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method of an adapter with recorded answers. Return its result and the bodies that the server received.

    Call the fixture as `adapter_call(answers, method)`, with the answers of `recorded_server` and a function of the
    connection.
    """
    from areal_core.servers import ServerConnection

    def adapter_call(answers: Mapping[str, Any], method: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        async def run() -> tuple[Any, list[Any]]:
            async with recorded_server(answers) as (address, bodies):
                connection = ServerConnection(address)
                try:
                    return await method(connection), bodies
                finally:
                    connection.close()

        return asyncio.run(run())

    return adapter_call


@pytest.fixture(scope="session")
def replay(recorded_server: Callable[..., Any]) -> Callable[..., Any]:
    """Return `recorded_server`, the new name of this fixture. This name is removed in the next minor version."""
    return recorded_server


@pytest.fixture(scope="session")
def replayed(adapter_call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `adapter_call`, the new name of this fixture. This name is removed in the next minor version."""
    return adapter_call
