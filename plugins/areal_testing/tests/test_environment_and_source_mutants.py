"""Test the suites of environments and model sources: correct components pass, and each broken one fails a test."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from areal_core.sdk import StepResult
from areal_testing.conformance import EnvironmentSuite, ModelSourceSuite


class HigherOrLower:
    """An environment in which the policy guesses the row's number."""

    async def reset(self, row):
        self._number = int(row["number"])
        return [{"role": "user", "content": "Guess a number."}]

    async def step(self, completion):
        if not completion.isdecimal() or len(completion) > 9:
            return StepResult("That is not a number.", -0.1)
        guess = int(completion)
        if guess == self._number:
            return StepResult(reward=1.0, terminated=True)
        return StepResult("higher" if guess < self._number else "lower")


class ParsesAnyCompletion(HigherOrLower):
    async def step(self, completion):
        int(completion)
        return await super().step(completion)


class SharesItsNumber(HigherOrLower):
    number = 0

    async def reset(self, row):
        type(self).number = int(row["number"])
        return await super().reset(row)

    async def step(self, completion):
        self._number = self.number
        return await super().step(completion)


class CountsTurnsOfAll(HigherOrLower):
    turns = 0

    async def step(self, completion):
        type(self).turns += 1
        result = await super().step(completion)
        return replace(result, reward=result.reward - 0.01 * self.turns)


class ChangesTheRow(HigherOrLower):
    async def reset(self, row):
        opening = await super().reset(row)
        row.pop("number")
        return opening


class ContentThatIsNoText(HigherOrLower):
    async def reset(self, row):
        await super().reset(row)
        return [{"role": "user", "content": 42}]


class RewardOfNaN(HigherOrLower):
    async def step(self, completion):
        return replace(await super().step(completion), reward=float("nan"))


class InfoOfText(HigherOrLower):
    async def step(self, completion):
        return replace(await super().step(completion), info={"tries": "many"})


class ReturnsAnObservation(HigherOrLower):
    async def step(self, completion):
        return (await super().step(completion)).observation


class NoObservation(HigherOrLower):
    async def step(self, completion):
        return StepResult()


class ReturnsPairs(HigherOrLower):
    """An environment that returns pairs, as environments did before `StepResult`."""

    async def step(self, completion):
        result = await super().step(completion)
        return None if result.terminated else result.observation, result.reward


def environment_tests(environment):
    values = {
        "make": lambda self: environment(),
        "rows": ({"number": 7}, {"number": 40}),
        "completions": ("50", "20", "7", "40"),
    }
    suite = type("Suite", (EnvironmentSuite,), values)()
    return {name: getattr(suite, name) for name in dir(EnvironmentSuite) if name.startswith("test_")}


def test_a_correct_environment_passes():
    for test in environment_tests(HigherOrLower).values():
        test()


def test_an_environment_that_returns_pairs_passes_with_a_warning():
    for name, test in environment_tests(ReturnsPairs).items():
        if "opens" in name or "row" in name:
            test()
        else:
            with pytest.warns(FutureWarning, match="step of .* returns a pair: return areal_core.sdk.StepResult"):
                test()


@pytest.mark.parametrize(
    ("environment", "test", "message"),
    [
        (ParsesAnyCompletion, "test_it_answers_any_completion", "invalid literal"),
        (SharesItsNumber, "test_concurrent_episodes_are_independent", "while others run"),
        (CountsTurnsOfAll, "test_the_same_turns_have_the_same_outcome", "with the same turns differ"),
        (ChangesTheRow, "test_the_row_is_left_as_it_was", "reset changed the row"),
        (ContentThatIsNoText, "test_it_opens_with_chat_messages", "its values must be strings"),
        (RewardOfNaN, "test_it_answers_any_completion", "reward in the StepResult of RewardOfNaN is nan"),
        (InfoOfText, "test_it_answers_any_completion", "tries in the StepResult of InfoOfText is 'many'"),
        (
            ReturnsAnObservation,
            "test_it_answers_any_completion",
            "step of ReturnsAnObservation returned .* return an areal_core",
        ),
        (NoObservation, "test_it_answers_any_completion", "step of NoObservation returned no observation, and neither"),
    ],
)
def test_a_broken_environment_is_caught(environment, test, message):
    with pytest.raises((AssertionError, TypeError, ValueError), match=message):
        environment_tests(environment)[test]()


SOURCES = textwrap.dedent("""
    import shutil, time
    from areal_core.disk import replacing_folder, settle_folder
    from areal_testing.conformance import make_model
    from areal_grpo.demonstration.model import make_model as make_whole

    def write(folder):
        for number in range(3):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.json").write_text("{}")
            time.sleep(0.5)
        make_whole(folder, hidden=32, layers=1)

    class Whole:
        def prepare(self, cache):
            folder = cache / "model"
            settle_folder(folder)
            if not folder.exists():
                with replacing_folder("a model", folder) as fresh:
                    write(fresh)
            return folder

    class InPlace:
        def prepare(self, cache):
            folder = cache / "model"
            if not folder.exists():
                write(folder)
            return folder

    class Again:
        def prepare(self, cache):
            make_whole(cache / "model", hidden=32, layers=1)
            return cache / "model"

    class NoTokenizer:
        def prepare(self, cache):
            return make_model(cache)
""")


@pytest.fixture
def source_suite(tmp_path, monkeypatch):
    """Return a function that makes the suite of one of these sources, which another process can import too."""
    (tmp_path / "some_sources.py").write_text(SOURCES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name: type("Suite", (ModelSourceSuite,), {"component": f"some_sources:{name}"})()


@pytest.mark.slow
def test_a_correct_source_passes(source_suite, tmp_path):
    for name in (name for name in dir(ModelSourceSuite) if name.startswith("test_")):
        (tmp_path / name).mkdir()
        getattr(source_suite("Whole"), name)(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "test", "message"),
    [
        ("InPlace", "test_a_killed_process_leaves_no_incomplete_model", "after a process was killed"),
        ("Again", "test_it_is_made_once", "files were written again"),
        ("NoTokenizer", "test_the_folder_can_be_loaded", "gives no tokens"),
    ],
)
def test_a_broken_source_is_caught(name, test, message, source_suite, tmp_path):
    with pytest.raises((AssertionError, OSError, ValueError), match=message):
        getattr(source_suite(name), test)(tmp_path)
