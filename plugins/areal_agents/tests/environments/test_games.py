"""Games of gymnasium and of TextArena, with the libraries themselves."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from typing import Any

import pytest

from areal_agents.environments.config import GymnasiumSettings, TextArenaSettings
from areal_agents.environments.gymnasium_games import GymnasiumEnvironment
from areal_agents.environments.seeds import seed_of
from areal_agents.environments.textarena_games import TextArenaEnvironment
from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_core.sdk import StepResult
from areal_testing.conformance import DatasetSuite, EnvironmentSuite

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("textarena")

pytestmark = pytest.mark.slow

LAKE = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False}}
MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


def play(environment: Any, row: dict[str, Any], *completions: str) -> tuple[str, list[StepResult]]:
    """What opens the episode, and its turns."""

    async def played() -> tuple[str, list[StepResult]]:
        opening = await environment.reset(row)
        turns = [await environment.step(completion) for completion in completions]
        if hasattr(environment, "close"):
            await environment.close()
        return opening[-1]["content"], turns

    return asyncio.run(played())


def game(**settings: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(GymnasiumSettings.model_validate(settings))


class TestFrozenLake(EnvironmentSuite):
    component = "agents/gymnasium"
    settings = {**LAKE, "arguments": {}, "actions": MOVES, "observation": "rendering"}  # noqa: RUF012
    rows = ({"seed": 1}, {"seed": 2}, {"prompt": "no seed"})
    completions = ("right", "go down", "down", "what?", "right", "down", "right")


class TestBlackjack(EnvironmentSuite):
    component = "agents/gymnasium"
    settings = {"id": "Blackjack-v1"}  # noqa: RUF012
    rows = ({"seed": 1}, {"seed": 2})
    completions = ("1", "0")


@pytest.mark.nightly
class TestPendulum(EnvironmentSuite):
    component = "agents/gymnasium"
    settings = {"id": "Pendulum-v1"}  # noqa: RUF012
    rows = ({"seed": 1}, {"seed": 2})
    completions = ("[0.5]", "[1e999]", "[[0]]", "[9]", "[-2]")


@pytest.mark.nightly
class TestGuessTheNumber(EnvironmentSuite):
    component = "agents/textarena"
    settings = {"id": "GuessTheNumber-v0"}  # noqa: RUF012
    rows = ({"seed": 1}, {"seed": 2})
    completions = ("[10]", "[5]", "[15]", "[7]", "none")


@pytest.mark.nightly
class Test2048(EnvironmentSuite):
    """Draws while it is played."""

    component = "agents/textarena"
    settings = {"id": "2048-v0-ultra-easy"}  # noqa: RUF012
    rows = ({"seed": 1}, {"seed": 2})
    completions = ("[up]", "[left]", "[down]", "[right]", "[up]", "[left]")


class TestSeeds(DatasetSuite):
    component = "agents/seeds"
    settings = {"size": 5, "first": 10}  # noqa: RUF012
    keys = ("seed",)


def test_a_lake_is_crossed_in_words():
    right, down = "I go right", "Left? No: DOWN"
    opening, turns = play(game(**LAKE, actions=MOVES), {"seed": 0}, right, right, down, down, down, right)
    assert opening == "0\n\nSay one of left, down, right, up."
    assert turns == [*map(StepResult, ("1", "2", "6", "10", "14")), StepResult(reward=1.0, terminated=True)]


def test_a_lake_is_shown_as_it_renders_itself():
    settings = {**LAKE, "observation": "rendering", "opening": "{observation}", "turn": "now:\n{observation}"}
    opening, turns = play(game(**settings), {}, "the number 2")
    assert opening == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert turns[0].observation == "now:\n(Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"


def test_what_names_no_action_is_told_costs_and_does_not_move():
    settings = {**LAKE, "actions": MOVES, "invalid_reward": -0.5, "max_steps": 3}
    _, turns = play(game(**settings), {}, "leftover", "right", "hm")
    refused = StepResult("That names no action. Say one of left, down, right, up.", -0.5)
    assert turns == [refused, StepResult("1"), StepResult(reward=-0.5, truncated=True)]
    _, turns = play(game(**LAKE), {}, "7", "1.5", "-1", "99999999999999999999", "about 2")
    assert [turn.reward for turn in turns] == [-0.1] * 4 + [0.0]


def test_an_end_and_a_limit_of_steps_are_told_apart():
    """What a limit ends counts as cut off: `mask_truncated` goes by it."""
    _, turns = play(game(**LAKE, max_steps=2), {}, "2", "1")
    assert [(turn.terminated, turn.truncated) for turn in turns] == [(False, False), (True, False)]  # into a hole
    _, turns = play(game(**LAKE, max_steps=2), {}, "2", "2")
    assert [(turn.terminated, turn.truncated) for turn in turns] == [(False, False), (False, True)]
    limited = TextArenaSettings(id="GuessTheNumber-v0", max_steps=1)
    _, turns = play(TextArenaEnvironment(limited), {"seed": 1}, "no number")
    assert turns[-1].truncated
    _, turns = play(game(**LAKE), {}, "7")
    assert turns[0].observation == "That is not an action. Say a whole number from 0 to 3."


def test_a_seed_is_the_game():
    hands = {play(game(id="Blackjack-v1"), {"seed": seed})[0] for seed in range(8)}
    assert len(hands) > 2
    assert play(game(id="Blackjack-v1", seed_key="deal"), {"deal": 3}) == play(game(id="Blackjack-v1"), {"seed": 3})
    assert seed_of({"a": 1, "b": "x"}, "seed") == seed_of({"b": "x", "a": 1}, "seed") != seed_of({"a": 2}, "seed")
    for wrong in (-1, 2**31, "3", 1.0, None):
        with pytest.raises(ValueError, match="the row's 'seed' is not a seed"):
            seed_of({"seed": wrong}, "seed")


def test_one_describes_it_oneself(tmp_path):
    (tmp_path / "mine.py").write_text("def describe(observation):\n    return f'place {observation}'\n")
    settings = {**LAKE, "describe": f"{tmp_path}/mine.py:describe", "opening": "{observation}"}
    assert play(game(**settings), {})[0] == "place 0"


def test_values_of_all_kinds_are_said():
    import numpy as np
    from gymnasium import spaces

    from areal_agents.environments.spaces import ActionReader, UnreadableError, describe

    whole = spaces.Dict({"at": spaces.Box(-9, 9, (2,)), "bag": spaces.Tuple([spaces.Discrete(3), spaces.Text(9)])})
    said = describe(whole, {"at": np.array([0.5, -1 / 3]), "bag": (np.int64(2), "rope")})
    assert said == "at: 0.5 -0.3333\nbag: 2, rope"
    with pytest.raises(ConfigError, match="an observation of 1200 numbers is not a text"):
        describe(spaces.Box(0, 255, (20, 20, 3)), np.zeros((20, 20, 3)))
    reader = ActionReader(spaces.MultiDiscrete([3, 4]), {})
    assert reader.read("first [9, 9], then [2, 3].").tolist() == [2, 3]
    for wrong in ("[3, 0]", "[1]", "[4294967296, 0]", '["a", 1]', "[" * 5000):
        with pytest.raises(UnreadableError, match="a list of 2 numbers"):
            reader.read(wrong)
    named = ActionReader(whole, {"wait": {"at": np.zeros(2, np.float32), "bag": (0, "a")}})
    assert named.choices == "one of wait"
    assert ActionReader(spaces.Text(5), {}).read(" abc\n") == "abc"


SLOW = """
import time
import gymnasium

class Slow(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        if action:
            time.sleep(60)
        return 0, float("nan"), False, False, {}

gymnasium.register("Slow-v0", Slow)
"""


def test_a_game_that_hangs_or_gives_no_number_is_named(tmp_path, monkeypatch):
    (tmp_path / "a_slow_game.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"id": "a_slow_game:Slow-v0", "step_timeout_s": 0.5}
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"Slow-v0 took longer than workflow\.environment\.step_timeout_s: 0\.5"):
        play(game(**settings), {}, "1")
    assert time.monotonic() - began < 30, "it was waited for"
    with pytest.raises(ValueError, match="Slow-v0 gave the reward nan"):
        play(game(**settings), {}, "0")


def test_the_generator_of_others_stays_as_it_was():
    random.seed(5)
    wanted = [random.random() for _ in range(2)]
    random.seed(5)
    found = [random.random()]
    play(TextArenaEnvironment(TextArenaSettings(id="GuessTheNumber-v0")), {"seed": 1}, "[3]", "[4]")
    assert [*found, random.random()] == wanted


def test_what_a_game_draws_follows_from_its_seed_alone():
    def played(others: int, seed: int) -> Any:
        random.seed(others)
        environment = TextArenaEnvironment(TextArenaSettings(id="2048-v0-mega-easy"))
        return play(environment, {"seed": seed}, "[up]", "[left]", "[down]", "[right]")

    assert played(1, seed=7) == played(2, seed=7) != played(1, seed=8)


def test_a_number_is_guessed():
    environment = TextArenaEnvironment(TextArenaSettings(id="GuessTheNumber-v0", arguments={"max_number": 3}))
    opening, turns = play(environment, {"seed": 1}, "[1]", "[2]", "[3]")[0], []
    assert "between 1 and 3" in opening
    for number in (1, 2, 3):
        turns += play(TextArenaEnvironment(TextArenaSettings(id="GuessTheNumber-v0", arguments={"max_number": 3})),
                      {"seed": 1}, f"[{number}]")[1]  # fmt: skip
    assert sorted(turn.reward for turn in turns) == [0.0, 0.0, 1.0]
    told = [turn.observation for turn in turns if not turn.terminated]
    assert len(told) == 2
    assert all("lower" in text or "higher" in text for text in told)
    assert not any("between 1 and 3" in text for text in told), "the opening is said once"


@pytest.fixture
def words():
    pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")

    def written(**environment: Any) -> list[str]:
        import json

        return ["workflow=" + json.dumps({"type": "multi_turn", "environment": environment}), "rewards=[]"]

    return written


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"type": "agents/gymnasium", "id": "FrozenLake-v9"}, "gymnasium cannot make the game 'FrozenLake-v9'"),
        ({"type": "agents/gymnasium", **LAKE, "actions": {"left": 9}}, "actions: left is 9, which is not in"),
        ({"type": "agents/gymnasium", **LAKE, "arguments": {"size": 3}}, "unexpected keyword argument 'size'"),
        ({"type": "agents/gymnasium", **LAKE, "turn": "{board}"}, "names board"),
        ({"type": "agents/textarena", "id": "Go-v0"}, "textarena has no game 'Go-v0'"),
        ({"type": "agents/textarena", "id": "TicTacToe-v0"}, "is not a single-player game"),
        ({"type": "agents/textarena", "id": "GuessTheNumber-v0", "arguments": {"a": 1}}, "cannot start the game"),
    ],
)
def test_what_cannot_be_played_is_told_before_a_run(environment, told, words):
    with pytest.raises(ConfigError) as caught:
        resolve(None, ["grpo", "agents"], words(**environment))
    assert told in str(caught.value)


def test_games_that_need_data_say_which(words):
    with pytest.raises(ConfigError, match="needs data of nltk, which is not on this machine"):
        resolve(None, ["grpo", "agents"], words(type="agents/textarena", id="Wordle-v0"))


@pytest.mark.parametrize(("module", "name"), [("gymnasium", "FrozenLake-v1"), ("textarena", "GuessTheNumber-v0")])
def test_a_missing_library_is_told_with_its_extra(module, name, words, monkeypatch):
    find = importlib.util.find_spec
    hidden = lambda wanted, *rest: None if wanted == module else find(wanted, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(ConfigError) as caught:
        resolve(None, ["grpo", "agents"], words(type=f"agents/{module}", id=name))
    assert f"pip install './plugins/areal_agents[{module}]'" in str(caught.value)
    assert "cannot make" not in str(caught.value)
