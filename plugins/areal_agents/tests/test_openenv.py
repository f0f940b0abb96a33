"""Environments of OpenEnv: a server of this file that misbehaves, and a true one (marked `servers`)."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from policies import Policy
from session_server import SessionServer

from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.interpreter._areal_tasks import list_tasks
from areal_agents.openenv import server as openenv_server
from areal_agents.openenv.config import OpenEnvDataSettings, OpenEnvSettings
from areal_agents.openenv.dataset import OpenEnvDataset
from areal_agents.openenv.workflow import OpenEnvWorkflow
from areal_core.data import FinishReason
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode

ROW = {"split": "train", "index": 3}
EXAMPLES = Path(__file__).parents[3] / "examples" / "environments"


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def play(
    texts: Sequence[str], server: SessionServer, rows: Sequence[dict[str, Any]] = (ROW,), **settings: Any
) -> list[Any]:
    """Play the rows one after the other with a policy that says the texts; each episode, or its exception."""

    async def run() -> list[Any]:
        policy = Policy("chat", lambda number: texts[number])
        async with server.serving() as address:
            workflow = OpenEnvWorkflow(
                OpenEnvSettings(address=address, **{"observation_key": "text", "request_timeout_s": 2.0, **settings})
            )
            played: list[Any] = []
            try:
                for row in rows:
                    assert workflow.check_row(row) == ""
                    try:
                        played.append(await workflow.run_episode(row, policy.context))
                    except EnvironmentServerError as error:
                        played.append(error)
            finally:
                await workflow.close()
            return played

    return asyncio.run(run())


def test_the_policy_acts_by_its_text_and_the_rewards_add_up() -> None:
    server = SessionServer()
    right, wrong = play(["1", "2", "5"], server, [ROW, ROW])
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert server.messages[0] == {"type": "reset", "data": ROW}
    assert server.messages[1] == {"type": "step", "data": {"message": "1"}}
    (trajectory,) = right.trajectories
    assert [float(value) for value in trajectory.turns["turn_rewards"]] == [0.0, 1.0]
    assert "count to 3" in right.text
    assert "now 1" in right.text
    assert server.open == 0


def test_fields_of_actions_and_keys_of_rows_are_settings() -> None:
    server = SessionServer()
    settings = {"reset_keys": ["goal"], "opening_key": "question", "system": "Count.", "action": {"unit": 1}}
    (episode,) = play(["3"], server, [{"goal": 2, "question": "How many?"}], **settings)
    assert server.messages == [
        {"type": "reset", "data": {"goal": 2}},
        {"type": "step", "data": {"unit": 1, "message": "3"}},
    ]
    assert "How many?" in episode.text
    assert "Count." in episode.text
    assert "count to" not in episode.text


def test_rows_that_select_no_task_are_refused_before_the_run() -> None:
    workflow = OpenEnvWorkflow(OpenEnvSettings(address="http://127.0.0.1:9"))
    assert "nothing in the row selects a task" in workflow.check_row({"prompt": "1+1"})
    for row in (ROW, {"seed": 1}, {"index": 0}):
        assert workflow.check_row(row) == ""
    workflow = OpenEnvWorkflow(OpenEnvSettings(address="http://127.0.0.1:9", reset_keys=["a"], opening_key="b"))
    assert "the row has no b, only a" in workflow.check_row({"a": 1})
    workflow = OpenEnvWorkflow(OpenEnvSettings(address="http://127.0.0.1:9", reset_keys=[]))
    assert workflow.check_row({"prompt": "1+1"}) == ""


def test_the_policy_calls_the_tools_of_the_environment() -> None:
    server = SessionServer()
    both = calling("add", '{"by": 1}') + calling("add", '{"by": 1}')
    (episode,) = play([both, calling("sub", "{}"), calling("add", '{"by": 1}'), "never"], server, acts_by="tools")
    assert episode.reward == 1.0
    assert [message["data"].get("tool_name") for message in server.messages[2:]] == ["add", "add", "sub", "add"]
    for text in ("now 1", "now 2", "error: no such tool"):
        assert text in episode.text
    assert episode.metrics["agents/tool_errors"] == 1.0


def test_calls_behind_the_end_of_the_episode_are_not_made() -> None:
    server = SessionServer()
    (episode,) = play([calling("add", '{"by": 3}') + calling("add", '{"by": 9}')], server, acts_by="tools")
    assert episode.reward == 1.0
    assert len(server.messages) == 3


def test_a_limit_ends_the_episode_with_the_rewards_so_far() -> None:
    (episode,) = play(["1", "1"], SessionServer(), [{"index": 9}], max_steps=2)
    assert episode.reward == 0.0
    assert int(episode.trajectories[0].sequence["finish_reason"]) == FinishReason.LENGTH


def test_episodes_wait_for_a_session_of_a_server_that_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_server, "RETRY_S", 0.02)

    async def run(limit_s: float) -> tuple[SessionServer, list[Episode | BaseException]]:
        server, policy = SessionServer(limit=2), Policy("chat", lambda _: "3")
        async with server.serving() as address:
            settings = OpenEnvSettings(address=address, observation_key="text", session_timeout_s=limit_s)
            workflow = OpenEnvWorkflow(settings)
            try:
                episodes = (workflow.run_episode(ROW, policy.context) for _ in range(12))
                return server, await asyncio.gather(*episodes, return_exceptions=True)
            finally:
                await workflow.close()

    server, played = asyncio.run(run(60.0))
    assert [getattr(episode, "reward", episode) for episode in played] == [1.0] * 12
    assert server.peak == 2
    assert server.refused


def test_a_server_without_a_free_session_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_server, "RETRY_S", 0.02)
    (error,) = play(["3"], SessionServer(limit=0), session_timeout_s=0.2)
    assert "had no free session in session_timeout_s: 0.2" in str(error)


def observed(observation: Any = None, reward: Any = None, done: Any = True) -> str:
    data = {"observation": {"text": ""} if observation is None else observation, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param("close", "dropped the request step", id="closes"),
        pytest.param(None, "did not answer a step in request_timeout_s: 0.5", id="hangs"),
        pytest.param("<html>", "something that is no observation: <html>", id="no JSON"),
        pytest.param('{"type": "observation"}', "something that is no observation", id="no data"),
        pytest.param(observed("text"), "something that is no observation", id="text"),
        pytest.param(observed(done=None), "something that is no observation", id="no end"),
        pytest.param(observed(reward="1"), "the reward '1'", id="reward of text"),
        pytest.param(observed(reward=float("nan")), "the reward nan", id="nan"),
        pytest.param(observed(), "ended the episode without a reward", id="no reward"),
        pytest.param(observed({}, done=False), "an observation has no `text`", id="no text"),
        pytest.param(
            '{"type": "error", "data": {"message": "no disk", "code": "EXECUTION_ERROR"}}',
            r"reported an error for a step: no disk (EXECUTION_ERROR)",
            id="error",
        ),
    ],
)
def test_an_episode_that_the_server_fails_has_no_reward(answer: str | None, reason: str) -> None:
    server = SessionServer()
    server.answer = answer
    (error,) = play(["3"], server, request_timeout_s=0.5)
    assert isinstance(error, EnvironmentServerError)
    assert reason in str(error)


def test_an_address_without_a_server_is_named() -> None:
    async def run() -> None:
        workflow = OpenEnvWorkflow(OpenEnvSettings(address="http://127.0.0.1:9"))
        with pytest.raises(EnvironmentServerError, match=r"OpenEnv at http.*9 cannot be reached"):
            await workflow.run_episode(ROW, Policy("chat", lambda _: "3").context)
        with suppress(EnvironmentServerError):
            await workflow.close()

    asyncio.run(run())


def _task_api(**changed: Any) -> Any:
    answers = {
        "/list_environments": ["an env"],
        "/an%20env/num_tasks": {"num_tasks": 3},
        "/an%20env/task_range": {"tasks": ["a", {"index": 7, "text": "b"}]},
        **changed,
    }
    asked: list[Any] = []

    def ask(path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        asked.append(body)
        return (501, "not supported") if path not in answers else (200, json.dumps(answers[path]))

    return ask, asked


def test_tasks_are_rows_with_their_split_and_index() -> None:
    ask, asked = _task_api()
    assert list_tasks(ask, "test", 1, None) == [
        {"task": "a", "split": "test", "index": 1},
        {"text": "b", "split": "test", "index": 2},
    ]
    assert asked == [None, {"split": "test"}, {"split": "test", "start": 1, "stop": 3}]


def test_tasks_that_are_not_there_are_named() -> None:
    for first, size in ((3, None), (2, 2), (0, 4)):
        with pytest.raises(ValueError, match=r"the split test has 3 tasks"):
            list_tasks(_task_api()[0], "test", first, size)
    with pytest.raises(ValueError, match="2 tasks for 0 to 3"):
        list_tasks(_task_api()[0], "test", 0, 3)
    with pytest.raises(RunError, match=r"cannot be listed.*refused"):
        OpenEnvDataset(OpenEnvDataSettings(address="http://127.0.0.1:9"))


# A true server of OpenEnv.


def test_a_true_server_lists_its_tasks_and_plays_them(openenv_python: str) -> None:
    served = {"app": "openenv_sums:app", "python": Path(openenv_python), "folder": EXAMPLES}
    rows = OpenEnvDataset(OpenEnvDataSettings(**served, split="test", first=198))
    assert [row["index"] for row in rows] == [198, 199]
    results = [sum(map(int, row["question"].removesuffix("=").split("+"))) for row in rows]
    texts = [f"{{so}}{results[0]}", str(results[0] + 1), str(results[1])]

    async def run() -> list[float]:
        policy = Policy("chat", lambda number: texts[number])
        workflow = OpenEnvWorkflow(OpenEnvSettings(**served, observation_key="text"))
        try:
            episodes = [await workflow.run_episode(row, policy.context) for row in (rows[0], rows[0], rows[1])]
            connection = workflow._server._keeper.connection
            assert connection is not None
            listed = await asyncio.to_thread(
                lambda: OpenEnvDataset(OpenEnvDataSettings(address=connection.address, split="test", first=198))
            )
            assert list(listed) == list(rows)
            with pytest.raises(RunError, match="the split test has 200 tasks, not 200 to 201"):
                await asyncio.to_thread(
                    lambda: OpenEnvDataset(
                        OpenEnvDataSettings(address=connection.address, split="test", first=200, size=1)
                    )
                )
        finally:
            await workflow.close()
        return [episode.reward for episode in episodes]

    assert asyncio.run(run()) == [1.0, 0.0, 1.0]
