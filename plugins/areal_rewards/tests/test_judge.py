"""A judge behind a true HTTP server that may be slow, busy, broken, or talk nonsense."""

import asyncio
import json
import sqlite3

import pytest
from aiohttp import web

from areal_core.rewards.scoring import RewardError, RewardSum, WeightedReward
from areal_rewards import client
from areal_rewards import judge as judge_module
from areal_rewards.config import JudgeSettings
from areal_rewards.judge import Judge

pytestmark = pytest.mark.slow


class Server:
    """An OpenAI-compatible server that says what `answers` says, one after another; the last one stays."""

    def __init__(self, *answers, delay_s=0.0):
        self.answers, self.delay_s = list(answers), delay_s
        self.asked, self.keys, self.now, self.most = [], [], 0, 0

    async def answer(self, request):
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return web.Response(status=answer, text="busy")
        if not isinstance(answer, str):
            return web.json_response(answer)
        usage = {"prompt_tokens": 100, "completion_tokens": 20}
        return web.json_response({"choices": [{"message": {"content": answer}}], "usage": usage})


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(client, "PAUSE_S", 0.01)


def judged(server, completions, **settings):
    """What a judge says of completions to one question, scored all at once, and what it has counted."""

    async def work():
        application = web.Application()
        application.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        judge = Judge(JudgeSettings(address=address, model="judge", **settings))
        rewards = RewardSum([WeightedReward("judge", judge)])
        row = {"answer": "8"}
        asked = [rewards.score({"prompt": "4+4?", "completion": text, "row": row}) for text in completions]
        try:
            found = await asyncio.gather(*asked, return_exceptions=True)
            return [score if isinstance(score, Exception) else score.value for score in found], rewards.pop_metrics()
        finally:
            await judge._client.close()
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(work(), 60))


def test_the_last_number_of_the_asked_form_is_the_verdict():
    server = Server("It seems right. Score: 3\nOn second thoughts, Score: 7.5")
    found, counted = judged(server, ["eight"], key=None, input_price=2.0, output_price=10.0)
    assert found == [0.75]
    (asked,) = server.asked
    assert "<question>\n4+4?\n</question>" in asked["messages"][0]["content"]
    assert "eight" in asked["messages"][0]["content"]
    assert (asked["model"], asked["temperature"]) == ("judge", 0)
    assert counted == {
        "judge/requests": 1,
        "judge/prompt_tokens": 100,
        "judge/completion_tokens": 20,
        "judge/cost": pytest.approx((2 * 100 + 10 * 20) / 1e6),
    }


def test_columns_of_the_row_and_another_scale(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    server = Server("VERDICT=-1")
    settings = {"prompt": "{answer}: {completion}", "pattern": r"VERDICT=(-?\d+)", "lowest": -1, "highest": 1}
    assert judged(server, ["nine"], key="env:JUDGE_KEY", **settings)[0] == [0.0]
    assert server.asked[0]["messages"][0]["content"] == "8: nine"
    assert server.keys == ["Bearer very-secret"]


def test_busy_and_broken_servers_are_asked_again():
    server = Server(429, 503, {"choices": []}, "Score: 10")
    found, counted = judged(server, ["eight"])
    assert found == [1.0]
    assert (counted["judge/requests"], counted["judge/retries"]) == (4, 3)


@pytest.mark.parametrize(
    ("answers", "words", "requests"),
    [
        ([503], "503 Service Unavailable: busy", 3),
        ([400], "400 Bad Request: busy", 1),
        ([{"error": "no"}], "did not answer: KeyError", 3),
        (["I cannot say."], "does not match", 1),
        (["Score: 11"], "verdict 11 is not from 0 to 10", 1),
    ],
)
def test_what_is_no_verdict_fails_the_episode_in_words(answers, words, requests):
    found, counted = judged(Server(*answers), ["eight"], max_retries=2)
    assert isinstance(found[0], RewardError)
    assert words in str(found[0])
    assert counted["judge/requests"] == requests


def test_a_server_that_hangs_is_given_up():
    found, _ = judged(Server("Score: 1", delay_s=3), ["eight"], request_timeout_s=0.2, max_retries=1)
    assert "did not answer: TimeoutError" in str(found[0])


def test_the_same_question_is_asked_once_and_answers_are_kept(tmp_path):
    server = Server("Score: 5", delay_s=0.1)
    found, counted = judged(server, ["eight"] * 6 + ["nine"], cache=tmp_path / "cache" / "judge.sqlite")
    assert found == [0.5] * 7
    assert len(server.asked) == 2
    assert counted["judge/cached"] == 5
    again = Server(500)
    # Another address is another judge: what is kept is kept by address, model and question.
    found, counted = judged(again, ["eight"], cache=tmp_path / "cache" / "judge.sqlite", max_retries=0)
    assert "500 Internal Server Error" in str(found[0])


def test_answers_in_a_file_are_those_of_other_processes(tmp_path):
    path = tmp_path / "answers.sqlite"
    judge_module.AnswerCache(path).put("key", "Score: 1")
    assert judge_module.AnswerCache(path).get("key") == "Score: 1"
    assert judge_module.AnswerCache(None).get("key") is None


def test_a_file_of_answers_is_open_while_it_is_used_alone(tmp_path, monkeypatch):
    opened = []

    class Connection(sqlite3.Connection):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            opened.append(self)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **settings: connect(path, factory=Connection, **settings))
    answers = judge_module.AnswerCache(tmp_path / "answers.sqlite")
    answers.put("key", "Score: 1")
    assert answers.get("key") == "Score: 1"
    assert len(opened) == 3
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pattern": "Score"}, "exactly one group"),
        ({"lowest": 3.0, "highest": 3.0}, "lowest must be below highest"),
        ({"address": "api.example.com"}, "address"),
        ({"key": "sk-123"}, "env:NAME"),
    ],
)
def test_settings_that_cannot_be_meant(settings, words):
    with pytest.raises(ValueError, match=words):
        JudgeSettings(**{"address": "http://x", "model": "judge", **settings})


def test_it_says_how_many_it_takes_at_once():
    judge = Judge(JudgeSettings(address="http://x", model="judge", max_concurrency=5))
    assert WeightedReward("judge", judge).max_concurrency == 5
    assert json.dumps(judge.pop_metrics()) == "{}"
