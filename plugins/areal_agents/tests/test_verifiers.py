"""Environments of verifiers: a server of this file that misbehaves, and true servers (marked `servers`)."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from policies import Policy
from waiting import until_requested

from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.verifiers.config import VerifiersDataSettings, VerifiersSettings
from areal_agents.verifiers.dataset import VerifiersDataset
from areal_agents.verifiers.server import EnvironmentServer
from areal_agents.verifiers.workflow import VerifiersWorkflow
from areal_core.errors import RunError
from areal_core.sdk import Endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

EXAMPLES = Path(__file__).parents[3] / "examples" / "environments"
ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "sk-1")
AGENT = {"name": "agent", "trainable": True}
REPLY = {"success": True, "head": {"ok": True, "errors": []}, "traces": [{"id": "t"}]}
Frames = list[tuple[bytes, Any]]


class ScriptedServer:
    """A server that answers health checks, and every `run` with the frames of a script; a script may be silence."""

    def __init__(self, script: Callable[[dict[str, Any]], Frames]) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.is_silent = False
        self._script = script
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    async def serve(self) -> None:
        while True:
            client, identifier, method, payload = await self._socket.recv_multipart()
            request = msgspec.msgpack.decode(payload)
            self.requests.append((method.decode(), request))
            frames = [(b"reply", {"success": True})] if method == b"health" else self._script(request)
            for kind, message in [] if self.is_silent else frames:
                content = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
                await self._socket.send_multipart([client, identifier, kind, content])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@asynccontextmanager
async def scripted(
    script: Callable[[dict[str, Any]], Frames], **settings: Any
) -> AsyncIterator[tuple[EnvironmentServer, ScriptedServer]]:
    scripted_server = ScriptedServer(script)
    serving = asyncio.create_task(scripted_server.serve())
    chosen = VerifiersSettings(taskset="sums", address=scripted_server.address, **settings)
    server = EnvironmentServer(chosen)
    try:
        yield server, scripted_server
    finally:
        await server.close()
        serving.cancel()
        await asyncio.wait({serving})
        scripted_server.close()


def delta(**fields: Any) -> tuple[bytes, Any]:
    return b"delta", {"trace": "t", "set": {"agent": AGENT, **fields}}


def test_an_episode_has_the_rewards_and_metrics_of_its_last_deltas() -> None:
    frames = [
        delta(rewards={"right": None}),
        (b"delta", {"trace": "t", "calls": [{}], "nodes": [{}]}),
        (b"delta", {"trace": "given up", "set": {"agent": AGENT, "rewards": {"right": {"score": 9, "weight": 1}}}}),
        (b"delta", {"trace": "given up", "discard": True}),
        delta(rewards={"right": {"score": 0.5, "weight": 2.0}}, metrics={"length": 3, "unknown": None}),
        (b"reply", REPLY),
    ]

    async def run() -> None:
        async with scripted(lambda _: frames) as (server, scripted_server):
            traces = await server.play({"idx": 3}, ENDPOINT)
            (trace,) = traces.values()
            assert (trace.agent, trace.is_trained, trace.has_answers) == ("agent", True, True)
            assert trace.rewards == {"right": 1.0}
            assert trace.metrics == {"length": 3.0}
            (request,) = [request for method, request in scripted_server.requests if method == "run"]
            assert request["task_data"] == {"idx": 3}
            assert "headers" not in request["client"], "verifiers keeps a client for each config"
            assert request["model"] == f"{ENDPOINT.model}@sk-1"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param(
            [
                (b"delta", {"trace": "t", "errors": [{"type": "ToolError", "message": "no disk"}]}),
                delta(rewards={"right": {"score": 0.0, "weight": 1.0}}),
                (b"reply", {**REPLY, "head": {"ok": False, "errors": []}}),
            ],
            "ToolError: no disk",
            id="a failed trace has the reward 0",
        ),
        pytest.param(
            [delta(), (b"reply", {**REPLY, "head": {"ok": False, "errors": [{"type": "E", "message": "m"}]}})],
            "E: m",
            id="a failed episode",
        ),
        pytest.param([delta(rewards={"right": None}), (b"reply", REPLY)], "not compute the reward right", id="None"),
        pytest.param(
            [delta(rewards={"right": {"score": float("nan"), "weight": 1.0}}), (b"reply", REPLY)],
            "not finite: {'right': nan}",
            id="nan",
        ),
        pytest.param([(b"reply", {"success": False, "error": "no such task"})], "no such task", id="refused"),
        pytest.param([(b"reply", REPLY)], "a reply that cannot be read: KeyError", id="a trace that was never sent"),
        pytest.param([(b"reply", b"\xc1")], "not a message of verifiers' protocol", id="no MessagePack"),
        pytest.param([(b"reply", [1])], "not a message of verifiers' protocol", id="no mapping"),
        pytest.param([(b"delta", {"set": {}})], "not a message of verifiers' protocol", id="a delta of no trace"),
    ],
)
def test_an_episode_without_a_result_fails_with_the_reason_and_has_no_reward(frames: Frames, reason: str) -> None:
    async def run() -> None:
        async with scripted(lambda _: frames) as (server, _):
            with pytest.raises(EnvironmentServerError) as raised:
                await server.play({}, ENDPOINT)
            assert reason in str(raised.value)

    asyncio.run(run())


def test_after_a_message_that_cannot_be_read_the_next_episode_connects_again() -> None:
    answers = iter([[(b"reply", b"\xc1")], [delta(), (b"reply", REPLY)]])

    async def run() -> None:
        async with scripted(lambda _: next(answers)) as (server, _):
            with pytest.raises(EnvironmentServerError, match="the server of verifiers' taskset sums at tcp"):
                await server.play({}, ENDPOINT)
            assert set(await server.play({}, ENDPOINT)) == {"t"}

    asyncio.run(run())


def test_a_server_that_no_longer_answers_health_checks_fails_its_episodes() -> None:
    async def run() -> None:
        async with scripted(lambda _: [], silence_timeout_s=0.4) as (server, scripted_server):
            playing = asyncio.create_task(server.play({}, ENDPOINT))
            await until_requested(scripted_server.requests, "run")
            await asyncio.sleep(0.5)
            assert not playing.done(), "a long episode is not a hung server"
            scripted_server.is_silent = True
            with pytest.raises(EnvironmentServerError, match=r"did not answer for silence_timeout_s: 0\.4"):
                await playing

    asyncio.run(run())


def test_a_cancelled_episode_is_cancelled_in_the_server() -> None:
    async def run() -> None:
        async with scripted(lambda _: []) as (server, scripted_server):
            playing = asyncio.create_task(server.play({}, ENDPOINT))
            await until_requested(scripted_server.requests, "run")
            playing.cancel()
            await asyncio.wait({playing})
            await until_requested(scripted_server.requests, "cancel")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"taskset": ""}, "must be the name of a taskset"),
        ({"taskset": {"size": 3}}, "must be the name of a taskset"),
        ({"taskset": "sums", "environment": {"taskset": {"id": "other"}}}, "the taskset is the setting `taskset`"),
        ({"taskset": "sums", "address": "http://host"}, "address"),
    ],
)
def test_settings_that_name_no_taskset_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        VerifiersSettings.model_validate(settings)


# A true server of verifiers.


class Answering(Policy):
    """Answers each prompt with the text that belongs to what the prompt contains."""

    def __init__(self, answers: dict[str, str]) -> None:
        super().__init__("chat", lambda _: self._next)
        self._answers = answers
        self._next = ""

    async def generate(self, input_ids: list[int], **settings: Any) -> Any:
        text = self.tokenizer.decode(input_ids)
        self._next = next(answer for prompt, answer in self._answers.items() if prompt in text)
        return await super().generate(input_ids, **settings)


def play_true(python: str, policy: Policy, rows: list[dict[str, Any]], **settings: Any) -> list[Any]:
    """Play episodes in one workflow; return each episode, or the exception that it raised."""

    async def run() -> list[Any]:
        chosen = {"taskset": "sums-taskset", "python": python, "folder": str(EXAMPLES), **settings}
        workflow = VerifiersWorkflow(VerifiersSettings.model_validate(chosen))
        try:
            playing = (workflow.run_episode(row, policy.context) for row in rows)
            return await asyncio.gather(*playing, return_exceptions=True)
        finally:
            await workflow.close()

    return asyncio.run(run())


def test_the_policy_answers_tasks_of_a_taskset_and_learns_from_its_exact_tokens(verifiers_python: str) -> None:
    settings = {"taskset": "sums-taskset", "python": verifiers_python, "folder": str(EXAMPLES)}
    dataset = VerifiersDataset(VerifiersDataSettings(first=2, size=3, **settings))
    assert len(dataset) == 3
    assert [row["task"]["idx"] for row in dataset] == [2, 3, 4]
    row = dataset[0]
    policy = Policy("chat", lambda _: "{x}" + row["task"]["answer"])
    (right,) = play_true(verifiers_python, policy, [row])
    assert (right.reward, right.rewards) == (1.0, {"is_right": 1.0, "shows_working": 1.0})
    ((prompt, generation),) = policy.said
    (trajectory,) = right.trajectories
    assert trajectory.tokens["input_ids"].tolist() == prompt + generation.output_ids
    (wrong,) = play_true(verifiers_python, Policy("chat", lambda _: "no"), [row])
    assert (wrong.reward, wrong.rewards) == (0.0, {"is_right": 0.0, "shows_working": 0.0})


def test_each_agent_of_an_environment_has_its_own_conversation_and_reward(verifiers_python: str) -> None:
    rows = [{"task": {"idx": 0, "prompt": "20+13=", "answer": "33", "third": 10}}] * 2
    policy = Answering({"20+13=": "33", "33+10=": "99"})
    episodes = play_true(verifiers_python, policy, rows, taskset="relay-taskset")
    for episode in episodes:
        agents = {trajectory.agent_id: float(trajectory.reward) + episode.reward for trajectory in episode.trajectories}
        assert agents == {"first": 1.0, "second": 0.0}
        assert episode.reward == 0.5
        assert episode.rewards == {"first/is_right": 1.0, "second/is_right": 0.0}


def test_the_server_keeps_nothing_of_an_episode_that_has_ended(verifiers_python: str) -> None:
    settings = {"taskset": "sums-taskset", "python": verifiers_python, "folder": str(EXAMPLES)}
    row = {"task": {"idx": 0, "prompt": "1+1=", "answer": "2"}}

    async def run() -> list[int]:
        workflow, policy = VerifiersWorkflow(VerifiersSettings(**settings)), Policy("chat", lambda _: "2")
        sizes = []
        try:
            for _ in range(3):
                await asyncio.gather(*(workflow.run_episode(row, policy.context) for _ in range(40)))
                assert workflow._server._keeper.connection is not None
                assert workflow._server._keeper.connection.process is not None
                status = Path(f"/proc/{workflow._server._keeper.connection.process.pid}/status").read_text()
                sizes.append(int(re.findall(r"VmRSS:\s*(\d+) kB", status)[0]))
        finally:
            await workflow.close()
        return sizes

    sizes = asyncio.run(run())
    assert sizes[-1] - sizes[0] < 25_000, f"the server grows: {sizes} kB"


def test_a_reward_that_raises_fails_the_episode(verifiers_python: str, tmp_path: Path) -> None:
    source = (EXAMPLES / "sums_taskset.py").read_text().replace("return sums.score(", "return 1 / 0 + sums.score(", 1)
    (tmp_path / "broken_taskset.py").write_text(source)
    shutil.copy(EXAMPLES / "sums.py", tmp_path)
    row = {"task": {"idx": 0, "prompt": "1+1=", "answer": "2"}}
    (raised,) = play_true(
        verifiers_python, Policy("chat", lambda _: "2"), [row], taskset="broken-taskset", folder=str(tmp_path)
    )
    assert isinstance(raised, EnvironmentServerError)
    assert "division by zero" in str(raised)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_killed_or_hangs_is_named_and_started_again(verifiers_python: str, fault: int) -> None:
    async def run() -> None:
        settings = {"taskset": "sums-taskset", "python": verifiers_python, "folder": str(EXAMPLES)}
        server = EnvironmentServer(VerifiersSettings(silence_timeout_s=2.0, **settings))
        task = {"idx": 0, "prompt": "1+1=", "answer": "2"}
        policy = Policy("chat", lambda _: "2")
        workflow = VerifiersWorkflow(VerifiersSettings(silence_timeout_s=2.0, **settings))
        workflow._server = server
        try:
            assert (await workflow.run_episode({"task": task}, policy.context)).reward == 1.0
            assert server._keeper.connection is not None
            assert server._keeper.connection.process is not None
            pid = server._keeper.connection.process.pid
            policy.wait_s = 60.0
            playing = asyncio.create_task(workflow.run_episode({"task": task}, policy.context))
            while len(policy.said) < 2:
                await asyncio.sleep(0.01)
            os.kill(pid, fault)
            reason = "was killed by SIGKILL" if fault == signal.SIGKILL else "did not answer for silence_timeout_s: 2"
            with pytest.raises(EnvironmentServerError, match=f"the server of verifiers' taskset sums.*{reason}"):
                await playing
            policy.wait_s = 0.0
            assert (await workflow.run_episode({"task": task}, policy.context)).reward == 1.0
            while Path(f"/proc/{pid}").exists():  # a hung server has some seconds to end before it is killed
                await asyncio.sleep(0.05)
        finally:
            await workflow.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"taskset": "no-such-taskset"}, "taskset 'no-such-taskset' not found"),
        ({"taskset": "sums-taskset", "first": 5000}, "has no task 5000"),
        ({"taskset": "sums-taskset", "python": "/no/such/python"}, "cannot be started"),
    ],
)
def test_a_data_set_that_cannot_be_listed_says_why(
    verifiers_python: str, settings: dict[str, Any], problem: str
) -> None:
    chosen = {"python": verifiers_python, "folder": str(EXAMPLES), **settings}
    with pytest.raises(RunError, match=problem):
        VerifiersDataset(VerifiersDataSettings.model_validate(chosen))
