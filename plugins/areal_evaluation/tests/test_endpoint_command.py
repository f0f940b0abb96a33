"""`areal eval --endpoint` for real: agents on OpenAI's SDK, a server in a process of its own, no model anywhere.

The config's model is a folder that is not there, and its engine a part that could not generate.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

HANG_S = 240.0
ROWS = """
KINDS = ("easy", "hard")

class Sums:
    def __init__(self, count: int = 8):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, n):
        return {"prompt": f"{n} and {n}", "answer": str(2 * n + n % 2), "kind": KINDS[n % 2], "number": n}

def right(completion, answer):
    return float(completion.strip() == answer)

class Tokens:
    async def run_episode(self, row, context):
        return await context.generate([1])
"""
AGENT = """
import asyncio, openai, os

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet", max_retries=0)

async def ask(base_url, api_key, text):
    policy = client.with_options(base_url=base_url, api_key=api_key)
    done = await policy.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
    return done.choices[0].message.content

async def solve(prompt, base_url, api_key):
    return await ask(base_url, api_key, f"{prompt}; <script>alert(1)</script>")

async def fails(prompt, number, base_url, api_key):
    if number == 0:
        raise ValueError("no zeros")
    if number == 1:
        await asyncio.sleep(10_000)
    return await ask(base_url, api_key, prompt + (" 500" if number == 2 else " nonsense" if number == 3 else ""))

tried = set()

async def judges(prompt, number, base_url, api_key):
    await ask(base_url, api_key, prompt)
    if number not in tried:
        tried.add(number)
        raise ValueError("not at once")
    return 0.25

async def dies(prompt, number, base_url, api_key):
    if number == 7:
        await asyncio.sleep(1.0)
        os._exit(3)
    return await ask(base_url, api_key, prompt)

async def waits(prompt, number, base_url, api_key):
    return await ask(base_url, api_key, prompt + (" hang" if number > 3 else ""))
"""
PROGRAM = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
if row["number"] == 1:
    os.kill(os.getpid(), 9)
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": row["prompt"]}]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
assert "RIGHT_KEY" not in os.environ["OPENAI_API_KEY"]
print(json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"])
"""
SECTION = "evaluation={dataset: 'sums.py:Sums', samples_per_prompt: 1}"


@pytest.fixture
def ask(place, sums_server, monkeypatch):
    """`areal eval` of an agent against the server; its words."""
    (place.folder / "sums.py").write_text(ROWS)
    (place.folder / "agent.py").write_text(AGENT)
    (place.folder / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("RIGHT_KEY", "right")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def words(agent, *more):
        workflow = agent if agent.startswith("workflow=") else f"workflow={{type: agents/agent, agent: {agent}}}"
        where = ["--endpoint", sums_server, "--model", "sum-9", "--api-key-variable", "RIGHT_KEY"]
        config = ["run.yaml", "model.path=./nowhere", SECTION, "rewards=['sums.py:right']", "rollout.max_retries=0"]
        return ["-m", "areal_core", "eval", *config, workflow, *where, *more]

    return words


def test_an_agent_against_an_address(place, ask):
    words = ["--samples", "2", "--k", "1,2", "--category", "kind", "--output", "out", "--json"]
    done = place.python(*ask("agent.py:solve", *words))
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert figures == json.loads((place.folder / "out/evaluation.json").read_text())
    assert (figures["complete"], figures["finished"], figures["failed"]) == (True, 16, 0)
    assert figures["model"] == "sum-9"
    assert figures["reward"]["value"] == figures["pass_at_k"]["2"]["value"] == 0.5
    rewards = {name: own["reward"]["value"] for name, own in figures["categories"].items()}
    assert rewards == {"easy": 0.0, "hard": 1.0}, "the 1 in what is added to the prompt is a number too"
    assert figures["metrics"]["agents/turns"] == figures["metrics"]["attempts"] == 1.0
    assert figures["response_length"] > 0
    lines = [json.loads(text) for text in (place.folder / "out/samples.jsonl").read_text().splitlines()]
    (talk,) = lines[0]["conversations"]
    assert talk[0]["text"].endswith("; <script>alert(1)</script>"), "verbatim"
    page = (place.folder / "out/report.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page, "escaped"
    assert page.count("<details") == 16
    assert "right" not in re.findall(r"Bearer \w+", page + done.err)
    assert "RIGHT_KEY" not in (place.folder / "out/config.yaml").read_text()


def test_rewards_categories_and_a_single_turn_without_an_agent(place, ask):
    done = place.python(*ask("workflow=core/single_turn", "--category", "kind", "--temperature", "0"))
    assert done.code == 0, done.err
    assert re.search(r"\n  mean reward +0\.500  \(95%: ", done.out), done.out
    assert re.search(r"\n  kind +prompts +reward +pass@1 +failed\n", done.out), done.out
    assert re.search(r"\n  easy +4 +1.000 +1.000 +0\n  hard +4 +0.000 +0.000 +0\n", done.out), done.out
    assert "1 answers to each at temperature 0" in done.out


def test_episodes_that_fail_are_counted_by_their_cause(place, ask):
    words = ["rollout.episode_timeout_s=3", "--output", "out"]
    done = place.python(*ask("agent.py:fails", *words))
    assert done.code == 0, done.err
    assert "4 of 8, 4 failed" in done.out
    causes = json.loads((place.folder / "out/evaluation.json").read_text())["failures"]
    assert sorted(re.sub(r"[:(].*", "", cause) for cause in causes) == [
        "ValueError",
        "the endpoint answered 200, but not with JSON",
        "the endpoint answered 500",
        "the episode took longer than rollout.episode_timeout_s",
    ]
    assert "ValueError: no zeros" in done.out
    page = (place.folder / "out/report.html").read_text()
    assert "out of &lt;order&gt;" in page


@pytest.mark.nightly
def test_an_attempt_that_fails_is_made_again_and_an_agent_may_judge_itself(place, ask):
    done = place.python(*ask("agent.py:judges", "rewards=[]", "rollout.max_retries=1", "--json"))
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert (figures["finished"], figures["reward"]["value"], figures["metrics"]["attempts"]) == (8, 0.25, 2.0)
    assert figures["metrics"]["agents/turns"] == 1.0, "of the attempt that ended well"


@pytest.mark.nightly
def test_a_program_that_is_killed_is_a_failed_episode(place, ask):
    agent = f"{{type: command, command: ['{sys.executable}', program.py], folder: '{place.folder}'}}"
    done = place.python(*ask(agent))
    assert done.code == 0, done.err
    assert "7 of 8, 1 failed" in done.out
    assert "the agent's command was killed by SIGKILL" in done.out


@pytest.mark.nightly
def test_an_agent_that_ends_its_process_leaves_what_was_measured(place, ask):
    done = place.python(*ask("agent.py:dies", "--output", "out"))
    assert done.code == 1, done.err
    assert "7 of 8, 0 failed" in done.out
    assert "not complete: the figures cover 7 of 8 episodes" in done.err
    assert "exit code 3" in done.err
    figures = json.loads((place.folder / "out/evaluation.json").read_text())
    assert "exit code 3" in figures["stopped_by"]
    assert "Not complete" in (place.folder / "out/report.html").read_text()


@pytest.mark.nightly
def test_interrupted_it_tells_what_it_has(place, ask):
    command = [sys.executable, *ask("agent.py:waits", "--output", "out")]
    with subprocess.Popen(command, cwd=place.folder, stdout=-1, stderr=-1, text=True) as process:
        samples, deadline = place.folder / "out/samples.jsonl", time.monotonic() + HANG_S
        while not samples.exists() or samples.read_text().count("\n") < 4:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "4 of 8, 0 failed" in out
    assert "interrupted: the figures cover 4 of 8 episodes" in err
    assert "Not complete: 4 of 8 episodes" in (place.folder / "out/report.html").read_text()


@pytest.mark.parametrize(
    ("agent", "words", "code", "told"),
    [
        ("agent.py:solve", ["--endpoint", "http://127.0.0.1:1/v1"], 1, "http://127.0.0.1:1/v1 cannot be reached: "),
        ("agent.py:solve", ["--api-key-variable", "PATH"], 1, "refuses the key in PATH (401)"),
        ("agent.py:solve", ["--api-key-variable", "NIX_KEY"], 2, "the environment variable NIX_KEY, which holds"),
        ("agent.py:solve", ["--endpoint", "localhost:8000"], 2, "--endpoint 'localhost:8000' is not a URL"),
        ("agent.py:solve", ["--request-timeout", "0"], 2, "--request-timeout is 0; it must be"),
        ("agent.py:solve", ["--concurrency", "0"], 2, "--concurrency is 0; it must be at least 1"),
        ("agent.py:solve", ["--category", "color"], 2, "row 0 (counted from 0) has no 'color' for --category, only"),
        ("agent.py:solve", ["--k", "2"], 2, "pass@k needs k from 1 to the number of answers per prompt, 1"),
        ("agent.py:solve", ["evaluation.dataset.count=0"], 2, "sums.py:Sums is empty; it must have at least one row"),
        pytest.param(
            "workflow='sums.py:Tokens'",
            [],
            2,
            "needs tokens, which --endpoint does not return\n  write it",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("agent.py:fails", ["--limit", "1", "rollout.max_consecutive_failures=1"], 1, "ValueError: no zeros"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_wrong_request_and_a_wrong_address_are_told_in_a_sentence(place, ask, agent, words, code, told):
    done = place.python(*ask(agent, *words))
    assert done.code == code, done.err
    assert told in done.err
    assert done.out == ""
    assert "Traceback" not in done.err


def test_words_of_an_endpoint_need_one(place):
    done = place.python("-m", "areal_core", "eval", "run.yaml", "--api-key-variable", "X")
    assert (done.code, done.out) == (2, "")
    assert "--api-key-variable needs --endpoint URL" in done.err
    done = place.python("-m", "areal_core", "eval", "run.yaml", "--endpoint", "http://127.0.0.1:1/v1")
    assert "needs the name of the model there\n  add --model NAME" in done.err
