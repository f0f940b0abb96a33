"""`register`: a file becomes a plugin without a change, and its components are declared in one place."""

from __future__ import annotations

import pytest

from areal_core.plugins import Kind, register
from areal_core.plugins.registered import registration

REWARDS = """
    from typing import Annotated
    from pydantic import Field
    from areal_core.config import Settings
    from areal_core.plugins import register

    class RightSettings(Settings):
        digits: int = Field(default=2, ge=1, description="that are compared")
        def check(self, config):
            if self.digits > config.steps:
                yield "digits is more than steps"

    Tokens = Annotated[int, Field(ge=0, description="tokens that cost nothing")]

    @register("reward_functions")
    def brevity(completion_ids, *, free_tokens: Tokens = 20):
        '''Reward short answers.

        Longer ones cost.
        '''
        return min(1.0, free_tokens / len(completion_ids))

    @register("reward_functions", "right", summary="compare digits", config=RightSettings)
    def is_right(completion, *, digits):
        '''Compare digits with the answer.'''
        return float(digits)

    @register("datasets")
    class SmallSums:
        '''Sums of small numbers.'''
        class Config(Settings):
            count: int = Field(default=3, gt=0, description="rows")
        def __init__(self, settings):
            self.count = settings.count

    class Other(SmallSums):
        '''Not registered: the mark is not inherited.'''
"""


def chosen(dataset="kit/rows", reward="short/brevity", count="count: 4", setting="free_tokens: 7"):
    """Overrides of the kit's config."""
    return f"dataset={{type: {dataset}, {count}}}", f"rewards=[{{type: {reward}, {setting}}}]"


@pytest.fixture
def short(kit):
    """The same file as a plugin and in the current folder."""
    kit.plugin("short", modules={"rewards.py": REWARDS}, entry_point="short_package.rewards")
    kit.file("rewards.py", REWARDS)
    return kit


def test_a_plugin_supplies_what_its_module_registers(short):
    out = short.areal("plugins", "short").out
    assert "reward_functions: short/brevity\n  Reward short answers\n  target: short_package.rewards:brevity\n" in out
    assert "free_tokens: whole number from 0, default 20  (tokens that cost nothing)" in out
    assert "reward_functions: short/right\n  compare digits\n" in out
    assert "digits: whole number from 1, default 2  (that are compared)" in out
    assert "datasets: short/small_sums\n  Sums of small numbers\n" in out
    assert "count: whole number above 0, default 3  (rows)" in out
    assert "other" not in out


@pytest.mark.parametrize("prefix", ["short/", "rewards.py:"])
def test_a_component_has_the_same_settings_in_a_file_and_in_a_plugin(short, prefix):
    dataset = prefix + ("small_sums" if prefix == "short/" else "SmallSums")
    words = chosen(dataset, f"{prefix}brevity")
    then = """
    print(config.rewards[0].keywords(), config.dataset.settings)
    print(config.rewards[0].build()(completion_ids=[1] * 14), config.dataset.build().count)
    """.strip().replace("\n    ", "; ")
    assert short.resolve(*words, then=then) == "{'free_tokens': 7} count=4\n0.5 4\n"
    wrong = short.resolve(*words, "rewards.0.free_tokens=-1", "dataset.count=0", imports=True)
    assert "rewards.0.free_tokens" in wrong
    assert "greater than or equal to 0" in wrong
    assert "dataset.count" in wrong
    assert "unknown key" in short.resolve(*words, "rewards.0.fre_tokens=1", imports=True)


def test_the_driver_reads_what_is_imported_anyway(short):
    assert "rewards.0.free_tokens" in short.resolve(*chosen(setting="free_tokens: -1"))


def test_a_function_may_have_a_model_that_checks_the_rest_of_the_config(short):
    assert short.resolve(*chosen(reward="short/right", setting="digits: 5")) == "valid\n"
    assert "digits is more than steps" in short.resolve(*chosen(reward="short/right", setting="digits: 6"))
    words = chosen(reward="rewards.py:is_right", setting="digits: 6")
    assert "digits is more than steps" in short.resolve(*words, imports=True)


def test_a_record_without_a_model_is_imported_by_the_process_that_reads_its_settings(kit):
    """As a file's, its settings are in its signature; the driver imports nothing for them."""
    kit.plugin(
        "own",
        """
        @hookimpl
        def areal_reward_functions():
            return [Component("long", "rewards long answers", target="own_package.heavy:long")]

        @hookimpl
        def areal_advantages():
            return [Component("grouped", "by group", target="own_package.heavy:grouped")]
        """,
        modules={
            "heavy.py": """
            def long(completion_ids, *, scale: float = 1.0):
                return scale * len(completion_ids)

            def grouped(batch):
                return batch["reward"]

            grouped.needs_group = True
            """
        },
    )
    words = chosen(reward="own/long", setting="scale: 2")
    unread = "import sys; print('own_package.heavy' in sys.modules, config.rewards[0].is_read)"
    assert kit.resolve(*words, then=unread) == "False False\n"
    assert kit.resolve("rewards=[own/long]", then=unread) == "False True\n"
    assert "rewards.0.scale" in kit.resolve(*chosen(reward="own/long", setting="scale: x"), imports=True)
    built = "print(config.rewards[0].build()(completion_ids=[1, 2]))"
    assert kit.resolve(*words, then=built) == "4.0\n"
    assert kit.resolve("rewards=[own/long]", then=built) == "2.0\n"
    group = ("algorithm.advantage=own/grouped", "rollout.group_size=1", *words)
    assert "rollout.group_size" in kit.resolve(*group, imports=True)
    assert kit.resolve(*group, then=unread) == "False False\n"


def test_the_same_name_twice_is_refused(kit):
    kit.plugin(
        "both",
        """
        from areal_core.plugins import register

        @register("reward_functions")
        def short(completion):
            '''Reward short answers.'''

        @hookimpl
        def areal_reward_functions():
            return [Component("short", "again", target="both_package.plugin:short")]
        """,
    )
    assert "supplies 'both/short' twice in areal_reward_functions" in kit.areal("plugins", "both").out


def test_a_component_without_a_summary_and_one_inside_a_function_are_refused(kit):
    kit.plugin(
        "bare",
        """
        from areal_core.plugins import register

        @register("reward_functions")
        def short(completion): ...

        def make():
            @register("reward_functions")
            def inner(completion):
                '''Reward.'''
            return inner

        inner = make()
        """,
    )
    out = kit.areal("plugins", "bare").out
    assert "'short' has no summary" in out
    assert "target of 'inner' is" in out


@pytest.mark.parametrize("kind", ["rewards", "presets"])
def test_only_kinds_of_components_can_be_registered(kind):
    with pytest.raises(ValueError, match=f"'{kind}' is no kind of component; kinds: train_engines"):
        register(kind)


def test_a_kind_of_ones_own_is_registered_by_its_object():
    @register(Kind("curriculum_schedules", "schedule"), config=None)
    class HTTPSchedule2Steps:
        """Follow a server."""

    marked = registration(HTTPSchedule2Steps)
    assert marked is not None
    assert (marked.hook, marked.record.name) == ("areal_curriculum_schedules", "http_schedule2_steps")
    assert registration(type("Below", (HTTPSchedule2Steps,), {})) is None
