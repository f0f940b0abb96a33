"""The suites of environments and model sources pass correct ones and catch each of these broken ones."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from areal_core.sdk import StepResult
from areal_testing.conformance import EnvironmentSuite, ModelSourceSuite


class HigherOrLower:
    """Guess the row's number."""

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


class Believes(HigherOrLower):
    async def step(self, completion):
        int(completion)
        return await super().step(completion)


class Shares(HigherOrLower):
    number = 0

    async def reset(self, row):
        type(self).number = int(row["number"])
        return await super().reset(row)

    async def step(self, completion):
        self._number = self.number
        return await super().step(completion)


class Counts(HigherOrLower):
    turns = 0

    async def step(self, completion):
        type(self).turns += 1
        result = await super().step(completion)
        return replace(result, reward=result.reward - 0.01 * self.turns)


class Meddles(HigherOrLower):
    async def reset(self, row):
        opening = await super().reset(row)
        row.pop("number")
        return opening


class Numbers(HigherOrLower):
    async def reset(self, row):
        await super().reset(row)
        return [{"role": "user", "content": 42}]


class Silent(HigherOrLower):
    async def step(self, completion):
        return replace(await super().step(completion), reward=float("nan"))


class Uncountable(HigherOrLower):
    async def step(self, completion):
        return replace(await super().step(completion), info={"tries": "many"})


class Short(HigherOrLower):
    async def step(self, completion):
        return (await super().step(completion)).observation


class Mute(HigherOrLower):
    async def step(self, completion):
        return StepResult()


class OfBefore(HigherOrLower):
    """Returns pairs, as environments did before `StepResult`."""

    async def step(self, completion):
        result = await super().step(completion)
        return None if result.terminated else result.observation, result.reward


def environment_tests(part):
    values = {
        "make": lambda self: part(),
        "rows": ({"number": 7}, {"number": 40}),
        "completions": ("50", "20", "7", "40"),
    }
    played = type("Suite", (EnvironmentSuite,), values)()
    return {name: getattr(played, name) for name in dir(EnvironmentSuite) if name.startswith("test_")}


def test_a_correct_environment_passes():
    for test in environment_tests(HigherOrLower).values():
        test()


def test_one_of_before_passes_with_a_warning():
    for name, test in environment_tests(OfBefore).items():
        if "opens" in name or "row" in name:
            test()
        else:
            with pytest.warns(FutureWarning, match="step of .* returns a pair: return areal_core.sdk.StepResult"):
                test()


@pytest.mark.parametrize(
    ("part", "test", "words"),
    [
        (Believes, "test_it_answers_whatever_the_policy_says", "invalid literal"),
        (Shares, "test_episodes_at_the_same_time_do_not_meet", "when others are under way"),
        (Counts, "test_the_same_turns_have_the_same_outcome", "with the same turns differ"),
        (Meddles, "test_the_row_is_left_as_it_was", "reset changed the row"),
        (Numbers, "test_it_opens_with_chat_messages", "its values must be texts"),
        (Silent, "test_it_answers_whatever_the_policy_says", "the reward must be a finite number"),
        (Uncountable, "test_it_answers_whatever_the_policy_says", "tries must be a finite number"),
        (
            Short,
            "test_it_answers_whatever_the_policy_says",
            "step of Short returned .* return an areal_core",
        ),
        (Mute, "test_it_answers_whatever_the_policy_says", "step of Mute returned no observation, and neither"),
    ],
)
def test_a_broken_environment_is_caught(part, test, words):
    with pytest.raises((AssertionError, TypeError, ValueError), match=words):
        environment_tests(part)[test]()


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
    """The suite for one of these sources, which a process of its own can import as well."""
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
    ("name", "test", "words"),
    [
        ("InPlace", "test_one_that_was_killed_leaves_nothing_that_is_taken_for_a_model", "after one that was killed"),
        ("Again", "test_it_is_made_once", "files were written again"),
        ("NoTokenizer", "test_the_folder_can_be_loaded", "knows no text"),
    ],
)
def test_a_broken_source_is_caught(name, test, words, source_suite, tmp_path):
    with pytest.raises((AssertionError, OSError, ValueError), match=words):
        getattr(source_suite(name), test)(tmp_path)
