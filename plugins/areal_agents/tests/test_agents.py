"""Ways to bring an agent, and what it may say of its episode."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from policies import Policy
from pydantic import ValidationError

from areal_agents import agents
from areal_agents.agents import AgentFailedError, CommandAgent, FunctionAgent, ServiceAgent
from areal_agents.config import CommandSettings, ServiceSettings
from areal_agents.outcomes import read_outcome
from areal_core.errors import ConfigError, RunError
from areal_core.interfaces.agent import Endpoint
from areal_core.runtime.network import own_address

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

NOWHERE = Endpoint("http://127.0.0.1:1/v1", "sk-areal-x")


def policy() -> Policy:
    return Policy("chat", lambda number: f"answer {number}")


def test_a_function_that_blocks_runs_in_a_thread_and_gets_what_it_names(play):
    def agent(question: str, base_url: str, api_key: str, hint: str = "none") -> str:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            message = {"role": "user", "content": f"{question} {hint}"}
            done = client.chat.completions.create(model="any", messages=[message])
        return f"{done.choices[0].message.content}!"

    said = policy()
    episode = play(said, agent, {"question": "why", "other": 1})
    assert "why none" in said.tokenizer.decode(said.said[0][0])
    assert said.scored[0]["completion"] == "answer 0!", "a text is what the run's rewards score"
    assert episode.reward == 1.0


CLIENT = """
import json, os, sys
from openai import OpenAI
client = OpenAI(max_retries=0)
done = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}])
print(json.dumps({"reward": float(done.choices[0].message.content == "answer 0"), "answer": os.environ["NO_PROXY"]}))
"""


@pytest.mark.parametrize("kind", ["function", "command"])
@pytest.mark.parametrize(
    ("host", "already"),
    [
        pytest.param(host, already, marks=[pytest.mark.nightly] * (bool(already) is (host == own_address())))
        for host in ("127.0.0.1", "localhost", "::1", own_address())
        for already in ("", "intranet", "*")
    ],
)
def test_an_agent_reaches_the_endpoint_although_a_proxy_is_set(play, monkeypatch, kind, already, host):
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", already)
    monkeypatch.setenv("NO_PROXY", already)

    def function(base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        done = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}])
        return float(done.choices[0].message.content == "answer 0")

    async def command(row: Any, endpoint: Any) -> Any:
        settings = CommandSettings(
            command=[sys.executable, "-c", CLIENT], environment={"HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": ""}
        )
        return await CommandAgent(settings)(row=row, endpoint=endpoint)

    assert play(policy(), function if kind == "function" else command, host=host).reward == 1.0
    assert os.environ["NO_PROXY"].startswith(already)


def test_many_functions_that_block_wait_side_by_side():
    async def play_all() -> float:
        agent = FunctionAgent(lambda: time.sleep(1.0))
        began = time.monotonic()
        await asyncio.gather(*(agent(row={}, endpoint=NOWHERE) for _ in range(200)))
        return time.monotonic() - began

    assert asyncio.run(play_all()) < 100, "two hundred seconds one after another"


def test_a_function_that_asks_for_what_there_is_not_is_told_what_there_is(play):
    with pytest.raises(Exception, match=r"asks for problem; it is offered row, endpoint, .* and the row's question"):
        play(policy(), lambda problem: None, {"question": "?"})


def test_an_agent_that_asks_for_nothing_leaves_nothing_to_train_on(play):
    with pytest.raises(ValueError, match="received no answer from the policy"):
        play(policy(), lambda: 1.0)


ASKS = """
import json, os, urllib.request
body = {"model": "any", "messages": [{"role": "user", "content": "?"}]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(), {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})).read()
"""
PROGRAM = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": row["question"]}]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
print("I asked,", [name for name in os.environ if name.startswith("AREAL_")])
print(json.dumps({"reward": len(row["question"]), "rewards": {"said": float("answer" in answer)}}))
"""
NODE = """
const row = JSON.parse(require("fs").readFileSync(0, "utf8"));
const headers = {Authorization: "Bearer " + process.env.OPENAI_API_KEY, "Content-Type": "application/json"};
const body = JSON.stringify({model: "any", messages: [{role: "user", content: row.question}]});
fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {method: "POST", headers, body})
  .then(response => response.json())
  .then(answer => console.log(answer.choices[0].message.content));
"""


def test_a_command_of_python(play, tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_TOKEN", "secret")
    (tmp_path / "agent.py").write_text(PROGRAM)
    agent = CommandAgent(CommandSettings(command=[sys.executable, str(tmp_path / "agent.py")]))
    episode = play(policy(), agent, {"question": "four"})
    assert (episode.reward, episode.rewards) == (4.0, {"said": 1.0})


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_command_in_another_language(play, tmp_path):
    (tmp_path / "agent.js").write_text(NODE)
    said = policy()
    play(said, CommandAgent(CommandSettings(command=["node", str(tmp_path / "agent.js")])), {"question": "four"})
    assert said.scored[0]["completion"] == "answer 0", "its last line is not JSON: it is the answer"


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import sys; sys.exit('the reason')", "ended with exit code 1: the reason"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("print('{\"rewrad\": 1}')", "returned rewrad, which is none of reward, rewards, turn_rewards, agent_rewards"),
        ("print('{\"reward\": NaN}')", "must be finite"),
        ("print({'reward': 1})", "starts with { but is not JSON: .*it looks like a Python dict: print json.dumps"),
        ("print('\\ufeff{\"reward\": 1')", "starts with { but is not JSON"),
        ("print('{\"answer\": ' + '[' * 5000)", "is not JSON: it is nested too deeply"),
        ('print(\'{"answer": "\\\\ud800"}\')', "is not JSON: .*surrogates not allowed"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40"),
    ],
)
def test_a_command_that_fails_says_how(play, program, told):
    agent = CommandAgent(CommandSettings(command=[sys.executable, "-c", program]))
    with pytest.raises(Exception, match=told):
        play(policy(), agent)


def test_a_command_sees_no_secret_that_its_settings_do_not_name(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_PROFILE", "MAX_TOKENS"):
        monkeypatch.setenv(name, f"value of {name}")
    command = [sys.executable, "-c", "import json, os; print(json.dumps({'answer': json.dumps(dict(os.environ))}))"]
    agent = CommandAgent(CommandSettings(command=command, environment={"KEY": "env:WANDB_API_KEY", "NOTE": "plain"}))
    seen = json.loads(asyncio.run(agent(row={}, endpoint=NOWHERE))["answer"])
    assert seen["KEY"] == "value of WANDB_API_KEY"
    assert (seen["NOTE"], seen["MAX_TOKENS"]) == ("plain", "value of MAX_TOKENS")
    assert not {"HF_TOKEN", "WANDB_API_KEY", "AWS_PROFILE"} & seen.keys()
    lost = CommandAgent(CommandSettings(command=command, environment={"KEY": "env:NOT_SET_ANYWHERE"}))
    with pytest.raises(ConfigError, match="the environment variable NOT_SET_ANYWHERE, which the config names"):
        asyncio.run(lost(row={}, endpoint=NOWHERE))


@pytest.mark.parametrize("said", ["{1, 2, 3}", "{7+8=15;4+3+1=8}85", "{", "{x}"])
def test_a_text_in_braces_is_a_text(said):
    agent = CommandAgent(CommandSettings(command=[sys.executable, "-c", f"print({said!r})"]))
    assert asyncio.run(agent(row={}, endpoint=NOWHERE)) == said


@pytest.mark.parametrize("sign", ["\u2028", "\u0085", "\x0b", "\x1c"])
def test_only_ends_of_lines_end_the_lines_of_a_command(sign):
    result = {"reward": 1.0, "answer": f"one{sign}two"}
    line = json.dumps(result, ensure_ascii=False) if sign > " " else json.dumps(result)
    program = f"import sys; sys.stdout.buffer.write({f'so far 9%{chr(13)}{chr(0xFEFF)}{line}{chr(10)}'!r}.encode())"
    agent = CommandAgent(CommandSettings(command=[sys.executable, "-c", program]))
    assert asyncio.run(agent(row={}, endpoint=NOWHERE)) == result


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"command": ["/etc/passwd"]}, ["command: the program /etc/passwd was not found or is not executable"]),
        ({"command": ["/nonexistent/x"]}, ["command: the program /nonexistent/x was not found"]),
        ({"command": ["no-such-program"]}, ["command: the program no-such-program was not found"]),
        ({"command": ["./agent"], "folder": "FOLDER"}, []),
        ({"command": ["./other"], "folder": "FOLDER"}, ["command: the program ./other was not found"]),
        ({"command": [sys.executable], "folder": "FOLDER/none"}, ["folder: there is no folder"]),
    ],
)
def test_a_command_that_cannot_be_started_is_told_before_a_run_and_in_it(tmp_path, settings, told):
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\necho done\n")
    agent.chmod(0o700)
    folder = settings.get("folder", "FOLDER").replace("FOLDER", str(tmp_path))
    made = CommandSettings.model_validate({**settings, "folder": folder})
    found = list(made.check(SimpleNamespace(launcher=SimpleNamespace(target="core/local"))))
    assert len(found) == len(told)
    assert all(words in line for words, line in zip(told, found, strict=True))
    if not told:
        assert asyncio.run(CommandAgent(made)(row={}, endpoint=NOWHERE)) == "done"
        return
    with pytest.raises(AgentFailedError, match=r"the agent's command .* cannot be started: "):
        asyncio.run(CommandAgent(made)(row={}, endpoint=NOWHERE))
    elsewhere = list(made.check(SimpleNamespace(launcher=SimpleNamespace(target="slurm/slurm"))))
    assert elsewhere == [line for line in found if "/" not in made.command[0]], "what lies on nodes is not known here"


@pytest.mark.parametrize("url", ["http://", "http:///solve", "ftp://h", "http://:80"])
def test_an_address_without_a_host_is_told_before_a_run(url):
    with pytest.raises(ValidationError, match="url"):
        ServiceSettings(url=url)
    for good in "http://[::1]:8000/solve", "http://worker.0:8000", "https://gpu-node.01/":
        assert ServiceSettings(url=good).url == good


def test_a_command_ends_with_its_episode_and_what_it_started_too(tmp_path):
    """One that leaves a process behind is not waited for; one that hangs ends when nobody waits for the episode."""
    mark = tmp_path / "alive"
    child = f"import time\nwhile True:\n    open({str(mark)!r}, 'w').write(str(time.time()))\n    time.sleep(0.05)"
    leaves = textwrap.dedent(f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {child!r}])
        while True:
            try:
                open({str(mark)!r}); break
            except OSError:
                time.sleep(0.05)
        print('{{"reward": 2.0}}', flush=True)
    """)

    async def run(code: str, timeout: float) -> Any:
        agent = CommandAgent(CommandSettings(command=[sys.executable, "-c", code]))
        async with asyncio.timeout(timeout):
            return await agent(row={}, endpoint=NOWHERE)

    assert asyncio.run(run(leaves, 120)) == {"reward": 2.0}
    with pytest.raises(TimeoutError):
        asyncio.run(run(leaves + "\ntime.sleep(10_000)", 5))
    time.sleep(0.5)
    last = mark.read_text()
    time.sleep(1.0)
    assert mark.read_text() == last, "what it has started has ended"


def test_a_number_that_a_command_prints_is_an_answer_and_no_reward(play):
    said = policy()
    play(said, CommandAgent(CommandSettings(command=[sys.executable, "-c", ASKS + "print(1000000)"])))
    assert said.scored[0]["completion"] == "1000000"


def test_what_the_run_ends_with_is_no_business_of_the_agents(play):
    """It swallows the refusal that it is told, and the run ends all the same."""
    said, is_dead = policy(), False
    alive = said.generate

    async def generate(*given: Any, **settings: Any) -> Any:
        if is_dead:
            raise RunError("the engine has died")
        return await alive(*given, **settings)

    async def agent(base_url: str, api_key: str) -> float:
        nonlocal is_dead
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await client.responses.create(model="any", input="?")
            is_dead = True
            with pytest.raises(openai.APIStatusError, match="the run has ended: the engine has died"):
                await client.responses.create(model="any", input="?")
        return 1.0

    context = said.context
    context.generate = generate
    with pytest.raises(RunError, match="the engine has died"):
        play(SimpleNamespace(context=context), agent)


def test_a_function_that_raises_what_no_future_can_bring_fails(play):
    with pytest.raises(RuntimeError, match="StopIteration"):
        play(policy(), lambda: next(iter(())))


def test_what_is_still_asked_for_when_an_episode_ends_is_cancelled(play):
    said = policy()

    async def agent(base_url: str, api_key: str) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        await client.responses.create(model="any", input="?")
        said.wait_s = 30.0
        left.append(asyncio.ensure_future(client.responses.create(model="any", input="later")))
        while len(said.said) < 2:
            await asyncio.sleep(0.01)
        return 1.0

    left: list[Any] = []
    assert play(said, agent).metrics["agents/turns"] == 1
    assert said.said[1][0] == [], "it was cancelled"


def test_a_service_plays_episodes_and_its_failures_are_told(play):
    async def solve(request: web.Request) -> web.Response:
        body = await request.json()
        assert request.headers["Authorization"] == "Bearer hidden"
        if body["row"].get("fails"):
            return web.Response(status=500, text="out of order")
        if body["row"].get("turns"):
            raise web.HTTPTemporaryRedirect("/solve")
        if body["row"].get("rambles"):
            return web.Response(text="x" * 2000)
        async with openai.AsyncOpenAI(
            base_url=body["endpoint"]["base_url"], api_key=body["endpoint"]["api_key"]
        ) as client:
            done = await client.responses.create(model="any", input=body["row"]["question"])
        return web.json_response({"reward": 3, "rewards": {"length": len(done.output_text)}})

    async def serve() -> tuple[web.AppRunner, str]:
        application = web.Application()
        application.router.add_post("/solve", solve)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/solve"

    async def agent(row: Any, endpoint: Any) -> Any:
        runner, url = await serve()
        try:
            return await ServiceAgent(ServiceSettings(url=url, token="env:SERVICE_TOKEN"))(row=row, endpoint=endpoint)
        finally:
            await runner.cleanup()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVICE_TOKEN", "hidden")
        assert play(policy(), agent, {"question": "?"}).reward == 3.0
        with pytest.raises(Exception, match="answered 500: out of order"):
            play(policy(), agent, {"question": "?", "fails": True})
        with pytest.raises(AgentFailedError, match="failed: TooManyRedirects"):
            play(policy(), agent, {"question": "?", "turns": True})
        patch.setattr(agents, "MAX_OUTPUT_BYTES", 1000)
        with pytest.raises(AgentFailedError, match="answered with more than 1000 bytes"):
            play(policy(), agent, {"question": "?", "rambles": True})


def test_an_outcome_is_read_or_refused():
    assert read_outcome(True).reward == 1.0
    assert read_outcome({"turn_rewards": {"chatcmpl-a": 1, "resp_b": 0.5}}).reward == 1.5
    assert read_outcome({"turn_rewards": {"chatcmpl-a": 1}}).turn_rewards == {"a": 1.0}
    assert read_outcome({"answer": "x"}).reward is None
    for wrong in (float("inf"), {"reward": "much"}, {"rewards": [1]}, {"answer": 3}, [1.0], object()):
        with pytest.raises((TypeError, ValueError)):
            read_outcome(wrong)


def test_the_settings_are_those_of_a_json(tmp_path):
    words = json.loads(json.dumps({"command": ["node", "agent.js"], "folder": str(tmp_path)}))
    assert Path(str(CommandSettings.model_validate(words).folder)) == tmp_path
