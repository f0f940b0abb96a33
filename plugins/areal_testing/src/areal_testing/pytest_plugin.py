"""The pytest plugin: fixtures for tests of engines and server adapters, and failures of background work.

pytest loads this module in every session where areal-testing is installed, so it imports nothing of areal by itself.
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
"""Seconds in which a server that is alive must become healthy, on a slow machine too."""
HEALTH_S = 60
"""Timeout of one health check."""

# pytest does this for the files of a wheel. An editable install lists none, and its asserts would show no values.
pytest.register_assert_rewrite("areal_testing.conformance")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Fail a test during which background work of areal fails. Otherwise the failure would end the whole session.

    Tests of projects that do not import areal are left alone.
    """
    if "areal_core" not in sys.modules:
        return (yield)
    from areal_core.processes import on_failure

    failed: list[tuple[str, BaseException]] = []

    def interrupt(name: str, error: BaseException) -> None:
        failed.append((name, error))
        if len(failed) == 1 and callable(signal.getsignal(signal.SIGINT)):
            _thread.interrupt_main()  # an event loop lets no other exception out of its callbacks

    former, result = on_failure(interrupt), None
    try:
        result = yield
    except KeyboardInterrupt:
        if not failed:
            raise
    finally:
        on_failure(former)
    if failed:
        raise AssertionError(f"background work failed: {failed[0][0]}") from failed[0][1]
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
def _started(adapter: ServerAdapter, model: ModelReference, log: Path) -> Iterator[Callable[[], str]]:
    """Start a server as a run does. Yield a function that waits until it is healthy and returns its address."""
    from areal_core.processes import free_port, http_address, kill_tree

    port = free_port()
    command = adapter.command(model, "127.0.0.1", port, log.parent)
    started = command.address or http_address("127.0.0.1", port)
    environment = {**os.environ, **command.environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.arguments, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip

    def address() -> str:
        deadline = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < deadline:
            if asyncio.run(_is_healthy(adapter, started)):
                return started
            time.sleep(0.5)
        how = "ended" if process.poll() is not None else f"was not healthy after {START_S} s"
        pytest.fail(f"the server {how}; the end of its log:\n{log.read_text()[-3000:]}", pytrace=False)

    try:
        yield address
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()


@pytest.fixture(scope="module")
def server_of_each_shape(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[ServerAdapter], Callable[[Path], str]]]:
    """Start two true servers, one for each shape of model in `InferenceEngineSuite`.

    Call it with an adapter. It returns a function from the folder of a model to the address of the server for it. The
    servers end with the module, so that those of the next module have room.
    """
    from areal_core.engines import ModelReference
    from areal_testing.conformance.models import ARCHITECTURES, make_model

    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:

        def start(adapter: ServerAdapter) -> Callable[[Path], str]:
            waits = {}
            for shape in ARCHITECTURES:
                model = ModelReference(str(make_model(folder / shape, architecture=shape)))
                waits[shape] = stack.enter_context(_started(adapter, model, folder / f"{shape}.log"))
            addresses = {shape: wait() for shape, wait in waits.items()}

            def address(model: Path) -> str:
                config = model / "config.json"
                shape = json.loads(config.read_text())["model_type"] if config.is_file() else "qwen3"
                return addresses[shape]

            return address

        yield start


class _ByModel:
    """An engine that chooses its server when it starts, by its model: the suite's tests use two shapes."""

    def __init__(self, make: Callable[[str], InferenceEngine], address: Callable[[Path], str]) -> None:
        self._make = make
        self._address = address
        self._engine = make("http://127.0.0.1:1")

    async def start(self, model: ModelReference) -> None:
        """Choose the server, and start the engine with its address."""
        self._engine = self._make(self._address(Path(model.path)))
        await self._engine.start(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture(scope="session")
def engine_by_model() -> Callable[..., Any]:
    """Make an engine for `InferenceEngineSuite` on servers that run already.

    Call it with two functions: one from an address to an engine, and what `server_of_each_shape` returned.
    """
    return _ByModel


@pytest.fixture(scope="session")
def recorded_server() -> Callable[..., Any]:
    """Start an HTTP server with recorded answers: `async with recorded_server({"/path": answer}) as (address, bodies)`.

    An answer is a JSON value, a list of events in `{"events": [...]}`, or `(status, JSON value or text)`. `bodies`
    collects what was posted, together with the query of the address. It needs `areal-testing[servers]`.
    """
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    @asynccontextmanager
    async def serve(answers: Mapping[str, Any]) -> AsyncIterator[tuple[str, list[Any]]]:
        bodies: list[Any] = []

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.method == "POST":
                bodies.append({**request.query, **await request.json()})
            found = answers.get(request.path, (404, {"detail": "Not Found"}))
            status, value = found if isinstance(found, tuple) else (200, found)
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
    """Call a method of an adapter against recorded answers. Return its result, and what the server was sent.

    Call it as `adapter_call(answers, method)`. `answers` are those of `recorded_server`, and the method takes only the
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
    """Return `recorded_server`, which is the new name of this fixture. It is removed in the next minor version."""
    return recorded_server


@pytest.fixture(scope="session")
def replayed(adapter_call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `adapter_call`, which is the new name of this fixture. It is removed in the next minor version."""
    return adapter_call
