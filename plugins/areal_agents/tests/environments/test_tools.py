"""Conversations with tools: what is called wrongly comes back as an error that the policy reads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from policies import Policy

from areal_agents.environments.config import ToolSettings
from areal_agents.environments.tools import ToolWorkflow
from areal_core.config import resolve
from areal_core.data import FinishReason
from areal_core.errors import ConfigError

FILE = Path(__file__).with_name("calculator.py")


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def run(
    *texts: str, names: tuple[str, ...] = ("add", "wait", "block", "fail"), **settings: Any
) -> tuple[Any, list[str]]:
    """The episode, and what stood behind each answer as text."""
    policy = Policy("chat", lambda number: texts[min(number, len(texts) - 1)])
    tools = [f"{FILE}:{name}" for name in names]
    workflow = ToolWorkflow(ToolSettings.model_validate({"tools": tools, **settings}))
    episode = asyncio.run(workflow.run_episode({"prompt": "go"}, policy.context))
    heard = []
    for (prompt, said), (then, _) in zip(policy.said, policy.said[1:], strict=False):
        heard.append(policy.tokenizer.decode(then[len(prompt) + len(said.output_ids) :]))
    (trajectory,) = episode.trajectories
    last_prompt, last = policy.said[-1]
    assert trajectory.tokens["input_ids"].tolist() == [*last_prompt, *last.output_ids]
    return episode, heard


def test_calls_are_answered_until_there_is_none():
    both = call("add", '{"a": 2, "b": "3"}') + call("wait", '{"seconds": 0}')
    episode, heard = run(both, call("block", '{"seconds": 0.0}'), "The answer is 5.")
    assert "<result>5</result>" in heard[0]
    assert "<result>waited</result>" in heard[0]
    assert '<result>{"blocked": 0.0}</result>' in heard[1]
    assert episode.reward == 1.0
    assert (episode.metrics["agents/calls"], episode.metrics["agents/tool_errors"]) == (3, 0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (call("add", '{"a": "much"}'), "error: a: Input should be a valid integer"),
        (call("add", '{"c": 1}'), "c: Unexpected keyword argument"),
        (call("sum", "{}"), "error: ValueError: there is no tool 'sum'; there are add, wait, block, fail"),
        (call("fail", "{}"), "error: LookupError: nothing is found"),
        (call("wait", '{"seconds": 100}'), "error: the tool took longer than 0.5 s"),
        ("<tool_call>{</tool_call>", "error: a call of a tool could not be read"),
    ],
)
def test_a_wrong_call_comes_back_as_an_error(wrong, told):
    episode, heard = run(wrong, "I see.", tool_timeout_s=0.5)
    assert told in heard[0]
    counted = episode.metrics["agents/tool_errors"] + episode.metrics["agents/malformed_calls"]
    assert counted == 1


def test_a_malformed_call_beside_a_good_one_is_told_by_the_user():
    """A tool's result without the id of a call is refused by templates such as Mistral's."""
    policy = Policy("chat", lambda number: call("add", '{"a": 1}') + "<tool_call>{</tool_call>" if not number else "")
    workflow = ToolWorkflow(ToolSettings.model_validate({"tools": [f"{FILE}:add"]}))
    given: list[Any] = []
    template = policy.tokenizer.apply_chat_template

    def watch(messages: Any, **arguments: Any) -> Any:
        given.extend(messages)
        return template(messages, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy.tokenizer, "apply_chat_template", watch)
        asyncio.run(workflow.run_episode({"prompt": "go"}, policy.context))
    assert all(message.get("tool_call_id") for message in given if message["role"] == "tool")
    assert any("could not be read" in message["content"] for message in given if message["role"] == "user")


def test_a_row_is_read_as_other_workflows_read_it():
    settings = ToolSettings.model_validate(
        {"tools": [f"{FILE}:add"], "system": "Be brief.", "chat_template_kwargs": {"shown": 1}}
    )
    policy = Policy("chat", lambda _: "done")
    rows: tuple[Any, ...] = (
        {"prompt": [{"from": "human", "value": "go"}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "go"}], "name": None}], "tools": None},
        {"prompt": "go", "tools": "a column of another meaning"},
    )
    for row in rows:
        assert settings.check_row(row) == ""
        asyncio.run(ToolWorkflow(settings).run_episode(row, policy.context))
    assert policy.said[0][0] == policy.said[1][0] == policy.said[2][0]
    for row, words in (
        ({"prompt": []}, "empty list"),
        ({"question": "go"}, "has no 'prompt'"),
        ({"prompt": "go", "chat_template_kwargs": {"tokenize": True}}, "which the run decides"),
    ):
        assert words in settings.check_row(row)
    with pytest.raises(ValueError, match="names truncation, which the run decides"):
        ToolSettings.model_validate({"tools": [f"{FILE}:add"], "chat_template_kwargs": {"truncation": True}})


def test_a_long_result_is_cut_and_says_so():
    _, heard = run(call("add", '{"a": 123456789012}'), "done", longest_result=5)
    assert "<result>12345 ... (cut)</result>" in heard[0]


def test_turns_and_room_are_bounded():
    again = call("add", '{"a": 1}')
    episode, heard = run(again, max_turns=3)
    assert len(heard) == 2
    full, heard = run(again, max_tokens=1200, max_turns=100)
    assert 0 < len(heard) < 20, "the conversation is full"
    assert len(full.trajectories[0]) <= 1200
    assert episode.reward == full.reward == 1.0
    for cut in (episode, full):
        assert int(cut.trajectories[0].sequence["finish_reason"]) == FinishReason.LENGTH, (
            "whatever its last answer's was"
        )


def test_what_a_config_binds_is_no_business_of_the_policys(tmp_path, monkeypatch):
    pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")
    monkeypatch.chdir(tmp_path)
    tools = [{"type": "calculator.py:add", "b": 5}, "calculator.py:wait"]
    (tmp_path / "calculator.py").write_text(FILE.read_text())
    words = ["workflow=" + json.dumps({"type": "agents/tools", "tools": tools})]
    settings = resolve(None, ["grpo", "agents"], words).config.workflow.settings
    texts = [call("add", '{"a": 2, "b": 100}'), call("add", '{"a": 2}'), "7"]
    policy = Policy("chat", lambda number: texts[number])
    asyncio.run(ToolWorkflow(settings).run_episode({"prompt": "go"}, policy.context))
    (first, _), (refused, _), (second, _) = policy.said
    assert "b is not an argument of this tool" in policy.tokenizer.decode(refused)
    assert '"b"' not in policy.tokenizer.decode(first)
    assert "<result>7</result>" in policy.tokenizer.decode(second)
    with pytest.raises(ConfigError, match="nowhere"):
        resolve(None, ["grpo", "agents"], [*words, 'workflow.tools=["calculator.py:nowhere"]'])


def test_a_tool_that_says_nothing_of_itself_is_refused():
    with pytest.raises(ConfigError, match="the tool silent cannot be described to the policy"):
        ToolWorkflow(ToolSettings.model_validate({"tools": []}), [lambda_named("silent")])


def lambda_named(name: str) -> Any:
    def function(a):
        return a

    function.__name__ = name
    return function
