"""Environments of NeMo Gym: a resources server of this file that misbehaves, and a true one (marked `servers`)."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import counting_server
import pytest
from aiohttp import web
from counting_server import CountingServer
from policies import Policy
from waiting import until_requested

from areal_agents.foreign_process import EnvironmentServerError, ForeignProgram
from areal_agents.nemo_gym import server as nemo_gym_server
from areal_agents.nemo_gym.config import NemoGymDataSettings, NemoGymSettings
from areal_agents.nemo_gym.dataset import NemoGymDataset
from areal_agents.nemo_gym.workflow import NemoGymWorkflow
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from areal_core.data import Episode

TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}}}
    for name in ("add", "break", "recite")
]
ROW = {"responses_create_params": {"input": "Count to 5.", "tools": TOOLS}, "goal": 5, "start": 2, "id": 7}
DONE = "done"


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def play(
    texts: list[str], server: CountingServer, rows: list[dict[str, Any]] | None = None, **settings: Any
) -> list[Any]:
    """Play the rows one after the other with a policy that says the texts; each episode, or its exception."""

    async def run() -> list[Any]:
        policy = Policy("chat", lambda number: texts[number])
        async with server.serving() as address:
            workflow = NemoGymWorkflow(NemoGymSettings(server="counting", address=address, **settings))
            try:
                played: list[Any] = []
                for row in rows or [ROW]:
                    try:
                        played.append(await workflow.run_episode(row, policy.context))
                    except EnvironmentServerError as error:
                        played.append(error)
                return played
            finally:
                await workflow.close()

    return asyncio.run(run())


def outputs(server: CountingServer) -> list[str]:
    """What tools have answered, as /verify has received it."""
    (body,) = [body for path, body in server.requests if path == "/verify"]
    return [item["output"] for item in body["response"]["output"] if item["type"] == "function_call_output"]


def test_the_policy_calls_tools_in_its_session_and_learns_from_its_exact_tokens() -> None:
    server = CountingServer()
    texts = [calling("add", '{"by": 1}') + calling("add", '{"by": 2}'), DONE, DONE]
    right, wrong = play(texts, server, [ROW, ROW])
    assert (right.reward, right.rewards) == (1.0, {"count": 5.0, "is_odd": 1.0})
    assert (wrong.reward, wrong.rewards) == (0.0, {"count": 2.0, "is_odd": 0.0})
    assert [path for path, _ in server.requests] == [
        "/seed_session", "/add", "/add", "/verify", "/seed_session", "/verify",
    ]  # fmt: skip
    assert server.requests[0][1] == ROW
    body = server.requests[3][1]
    assert {key: body[key] for key in ROW} == ROW
    kinds = [item["type"] for item in body["response"]["output"]]
    assert kinds == ["function_call", "function_call", "function_call_output", "function_call_output", "message"]
    assert [item["output"] for item in body["response"]["output"][2:4]] == ["now 3", "now 5"]
    (trajectory,) = right.trajectories
    assert trajectory.agent_id == "policy"
    usage = body["response"]["usage"]
    assert usage["output_tokens"] == int(trajectory.tokens["loss_mask"].sum())


def test_what_is_wrong_with_a_call_is_the_output_of_the_tool() -> None:
    server = CountingServer()
    wrong = [calling("break", "{}"), calling("verify", "{}"), calling("add", '"{by"')]
    (episode,) = play(["".join(wrong[:2]), wrong[2], DONE], server)
    assert episode.reward == 0.0
    assert outputs(server)[:2] == ["out of order", '{"error": "There is no tool verify"}']
    assert len([path for path, _ in server.requests if path == "/verify"]) == 1


def test_after_max_steps_the_episode_is_verified() -> None:
    (episode,) = play([calling("add", '{"by": 1}')] * 20, CountingServer(), max_steps=3)
    assert (episode.reward, episode.rewards["count"]) == (1.0, 5.0)


def test_an_episode_whose_context_is_full_is_verified_as_it_is() -> None:
    server = CountingServer()
    (episode,) = play([calling("add", '{"by": 3}'), calling("recite", "{}")], server, max_tokens=1500)
    assert (episode.reward, episode.rewards["count"]) == (1.0, 5.0)
    assert outputs(server) == ["now 5", "a word " * 1000]


def test_a_context_that_is_full_before_the_first_answer_fails_the_episode() -> None:
    (error,) = play([DONE], CountingServer(), max_tokens=8)
    assert "context_length_exceeded" in str(error)


async def _broken(_: dict[str, Any], __: int) -> web.Response:
    return web.Response(status=500, text="no disk")


async def _silent(_: dict[str, Any], __: int) -> web.Response:
    await asyncio.sleep(60.0)
    raise AssertionError


def _answering(text: str) -> Callable[[dict[str, Any], int], Awaitable[web.Response]]:
    async def verify(_: dict[str, Any], __: int) -> web.Response:
        return web.Response(text=text)

    return verify


@pytest.mark.parametrize(
    ("verify", "reason"),
    [
        pytest.param(_broken, "answered /verify with 500: no disk", id="500"),
        pytest.param(_answering('{"reward": null}'), "without a finite reward: None", id="null"),
        pytest.param(_answering("{}"), "without a finite reward: None", id="no reward"),
        pytest.param(_answering('{"reward": NaN}'), "without a finite reward: nan", id="nan"),
        pytest.param(_answering('{"reward": "1"}'), "without a finite reward: '1'", id="text"),
        pytest.param(_answering("[1]"), "answered /verify with no JSON object: [1]", id="list"),
        pytest.param(_answering("<html>"), "answered /verify with no JSON object: <html>", id="no JSON"),
        pytest.param(_silent, r"did not answer /verify in request_timeout_s: 0.5", id="hangs"),
    ],
)
def test_an_episode_that_is_not_verified_fails_and_has_no_reward(
    verify: Callable[[dict[str, Any], int], Awaitable[web.Response]], reason: str
) -> None:
    server = CountingServer()
    server.verify = verify
    (error,) = play([DONE], server, request_timeout_s=0.5)
    assert isinstance(error, EnvironmentServerError)
    assert "the server of NeMo Gym's counting at http" in str(error)
    assert reason in str(error)


def test_a_seed_that_fails_or_offers_tools_over_mcp_fails_the_episode() -> None:
    server = CountingServer()
    without_start = {key: value for key, value in ROW.items() if key != "start"}
    (error,) = play([DONE], server, [without_start])
    assert "answered /seed_session with 500" in str(error)
    server.seeded = b'{"mcp": {"server_name": "weather"}}'
    (error,) = play([DONE], server)
    assert "offers its tools over MCP" in str(error)
    server.seeded = b"null"
    (episode,) = play([DONE], server)
    assert episode.reward == 0.0


def test_a_server_that_no_longer_answers_health_checks_fails_its_episodes_and_is_connected_to_again() -> None:
    async def run() -> Episode:
        server, policy = CountingServer(), Policy("chat", lambda _: DONE)
        server.verify = _silent
        async with server.serving() as address:
            settings = NemoGymSettings(server="counting", address=address, silence_timeout_s=0.4)
            workflow = NemoGymWorkflow(settings)
            try:
                playing = asyncio.create_task(workflow.run_episode(ROW, policy.context))
                await until_requested(server.requests, "/verify")
                await asyncio.sleep(0.6)
                assert not playing.done(), "a long request is not a hung server"
                server.is_silent = True
                with pytest.raises(EnvironmentServerError, match=r"did not answer for silence_timeout_s: 0\.4"):
                    await playing
                server.is_silent, server.verify = False, server.verify_count
                return await workflow.run_episode(ROW, policy.context)
            finally:
                await workflow.close()

    assert asyncio.run(run()).reward == 0.0


def test_an_address_without_a_server_is_named() -> None:
    async def run() -> None:
        workflow = NemoGymWorkflow(NemoGymSettings(server="counting", address="http://127.0.0.1:9"))
        try:
            with pytest.raises(EnvironmentServerError, match=r"NeMo Gym's counting at http.*9 cannot be reached"):
                await workflow.run_episode(ROW, Policy("chat", lambda _: DONE).context)
        finally:
            await workflow.close()

    asyncio.run(run())


@pytest.mark.parametrize(("text", "reason"), [("1", "exit code 3.*the disk is gone"), ("2", "silence_timeout_s: 2")])
def test_a_server_that_dies_or_hangs_is_named_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    (tmp_path / "broken").touch()

    def program(settings: Any, server: str, _: Any = None) -> ForeignProgram:
        return ForeignProgram(Path(counting_server.__file__), settings, {}, f"NeMo Gym's {server}")

    monkeypatch.setattr(nemo_gym_server, "server_program", program)
    settings = NemoGymSettings(server="counting", python=Path(sys.executable), folder=tmp_path, silence_timeout_s=2.0)

    async def run() -> Episode:
        texts = [calling("add", f'{{"by": {text}}}'), DONE, DONE]
        policy = Policy("chat", lambda number: texts[number])
        workflow = NemoGymWorkflow(settings)
        try:
            with pytest.raises(EnvironmentServerError, match=f"(?s)the server of NeMo Gym's counting.*{reason}"):
                await workflow.run_episode(ROW, policy.context)
            (tmp_path / "broken").unlink()
            return await workflow.run_episode(ROW, policy.context)
        finally:
            await workflow.close()

    assert asyncio.run(run()).rewards["count"] == 2.0


def test_a_data_set_has_the_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({**ROW, "id": number}) for number in range(4)) + "\n\n")
    dataset = NemoGymDataset(NemoGymDataSettings(path=path, first=1, size=2))
    assert [row["id"] for row in dataset] == [1, 2]
    workflow = NemoGymWorkflow(NemoGymSettings(server="counting"))
    assert workflow.check_row(dataset[0]) == ""
    assert "a row has no `responses_create_params`" in workflow.check_row({"prompt": "1+1"})
    path.write_text('{"id": 1}\n[2]\n')
    with pytest.raises(RunError, match="line 2: not a JSON object"):
        NemoGymDataset(NemoGymDataSettings(path=path))
    with pytest.raises(RunError, match="cannot be read"):
        NemoGymDataset(NemoGymDataSettings(path=tmp_path / "no"))
    with pytest.raises(RunError, match="has no NeMo Gym"):
        NemoGymDataset(NemoGymDataSettings(server="mcqa", python=Path(sys.executable)))


# A true server of NeMo Gym.


async def verify_directly(address: str, row: dict[str, Any], text: str) -> float:
    """The reward for one answer of a server that knows nothing of areal."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
    response = {"id": "r", "created_at": 0, "model": "p", "object": "response", "output": [message]}
    response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{address}/verify", json={**row, "response": response}) as answer,
    ):
        return float((await answer.json())["reward"])


@pytest.mark.nightly
def test_a_true_server_gives_the_rewards_that_it_gives_directly(nemo_gym_python: str) -> None:
    python = Path(nemo_gym_python)
    dataset = NemoGymDataset(NemoGymDataSettings(server="reasoning_gym", python=python))
    rows = [dict(row) for row in dataset]
    assert len(rows) == 5

    async def run() -> None:
        workflow = NemoGymWorkflow(NemoGymSettings(server="reasoning_gym", python=python, max_tokens=8192))
        try:
            for row in rows:
                for answer, expected in ((row["answer"], 1.0), ("nonsense", None)):
                    text = f"<answer>{answer}</answer>"
                    episode = await workflow.run_episode(row, Policy("chat", lambda _, text=text: text).context)
                    connection = workflow._server._keeper.connection
                    assert connection is not None
                    assert connection.process is not None
                    assert episode.reward == await verify_directly(connection.process.address, row, text)
                    assert episode.rewards == {"score": episode.reward}
                    assert expected in (None, episode.reward)
        finally:
            await workflow.close()

    asyncio.run(run())


@pytest.mark.nightly
def test_a_server_that_is_not_there_is_named(nemo_gym_python: str) -> None:
    with pytest.raises(RunError, match="there is no resources server no_such_server"):
        NemoGymDataset(NemoGymDataSettings(server="no_such_server", python=Path(nemo_gym_python)))
