"""`register`: a file becomes a plugin without a change, and its components are declared in one place."""

from __future__ import annotations

import functools

import pytest

from areal_core.config import Settings
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
    assert kit.resolve("rewards=[own/long]", then=unread) == "False False\n"
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


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("reward", "'reward' is no kind of component; did you mean 'reward_functions'\\? kinds: train_engines"),
        ("teachers", "'teachers' is no kind of component; "),
        ("polici_losses", "did you mean 'policy_losses'"),
        ("presets", "'presets' are no components: return their records from areal_presets"),
    ],
)
def test_only_kinds_of_components_can_be_registered(kind, words):
    with pytest.raises(ValueError, match=words):
        register(kind)


def test_what_cannot_be_registered_is_refused_where_it_is_written():
    class Model(Settings):
        pass

    class Rows:
        """Rows."""

    with pytest.raises(TypeError, match="register takes the kind of the component: @register"):
        register(print)
    with pytest.raises(TypeError, match=r"register takes a function or class, not functools\.partial"):
        register("reward_functions")(functools.partial(print))
    with pytest.raises(TypeError, match="write the settings model into the class: Config = Model"):
        register("datasets", config=Model)(Rows)
    register("datasets")(Rows)
    with pytest.raises(ValueError, match="Rows is registered already"):
        register("datasets", "again")(Rows)


def test_the_summary_is_the_first_sentence():
    @register("reward_functions")
    def wrapped(completion):
        """Reward answers that are short, by a rule of the paper, v1.5, which
        wraps here. The rest is no summary.
        """

    marked = registration(wrapped)
    assert marked is not None
    assert marked.record.summary == "Reward answers that are short, by a rule of the paper, v1.5, which wraps here"


def test_a_kind_of_ones_own_is_registered_by_its_object():
    @register(Kind("curriculum_schedules", "schedule"), config=None)
    class HTTPSchedule2Steps:
        """Follow a server."""

    marked = registration(HTTPSchedule2Steps)
    assert marked is not None
    assert (marked.hook, marked.record.name) == ("areal_curriculum_schedules", "http_schedule2_steps")
    assert registration(type("Below", (HTTPSchedule2Steps,), {})) is None


def test_what_another_plugin_registers_stays_its_own(short):
    """A plugin that wraps a function of another one imports it."""
    short.plugin("other", "from short_package.rewards import brevity\n")
    assert "brevity" not in short.areal("plugins", "other").out


def test_an_argument_that_the_row_supplies_is_no_setting(kit):
    """A reward would be given the setting for every row."""
    code = """
    from areal_core.plugins import register

    @register("reward_functions")
    def match(completion, answer, *, scale=1.0):
        '''Reward the answer.'''
        return scale * (completion == answer)
    """
    kit.plugin("own", modules={"rewards.py": code}, entry_point="own_package.rewards")
    kit.file("rewards.py", code)
    for reward in ("own/match", "rewards.py:match"):
        told = kit.resolve(*chosen(reward=reward, setting="answer: 42"), imports=True)
        assert "'answer' is an argument of" in told, told
        assert "give it a default in the function to make it a setting" in told
        assert kit.resolve(*chosen(reward=reward, setting="scale: 2"), imports=True) == "valid\n"


RECORDS = """
@hookimpl
def areal_reward_shaping():
    return [Component("shaped", "asks a model", target="own_package.heavy:shaped")]

@hookimpl
def areal_policy_losses():
    return [Component("loss", "learns", target="own_package.heavy:loss")]

@hookimpl
def areal_datasets():
    return [Component("rows", "reads a file", target="own_package.heavy:Rows")]

@hookimpl
def areal_workflows():
    return [Component("shown", "shows images", target="own_package.heavy:Shown")]
"""
HEAVY = """
from areal_core.config import Settings
from areal_core.sdk import REFERENCE

def shaped(episodes, *, scale=1.0):
    return episodes

def loss(terms): ...

shaped.needs = lambda updates: [REFERENCE]

class Rows:
    class Config(Settings):
        path: str
    def __init__(self, settings): ...

class Base:
    shows_images = True

class Shown(Base):
    async def run_episode(self, row, context): ...
"""


@pytest.fixture
def own(kit):
    """A plugin with records of a module that is not imported with it."""
    kit.plugin("own", RECORDS, modules={"heavy.py": HEAVY})
    return kit


@pytest.mark.parametrize("shaping", ["own/shaped", "{type: own/shaped, scale: 2}"])
def test_what_a_function_declares_counts_with_and_without_settings(own, shaping):
    then = "from areal_core.config import roles_of; print(*roles_of(config.algorithm, 1))"
    algorithm = f"{{type: policy_gradient, policy_loss: own/loss, advantage: kit/plain, reward_shaping: [{shaping}]}}"
    assert "reference" in own.resolve(f"algorithm={algorithm}", then=then, imports=True)


def test_a_model_in_a_class_is_found_when_the_class_is_imported(own):
    assert "dataset.path: is required" in own.resolve("dataset=own/rows", imports=True)
    assert own.resolve("dataset={type: own/rows, path: here}", imports=True) == "valid\n"


def test_an_attribute_of_a_base_class_is_declared_too(own):
    declared = "print(config.workflow.declared('shows_images'), config.workflow.declared('needs_group'))"
    assert own.resolve("workflow=own/shown", then=declared, imports=True) == "True None\n"


def test_the_driver_may_have_imported_a_module_that_the_child_has_not(own):
    """What is unread does not depend on what a process has imported."""
    before = "import own_package.heavy"
    then = f"{before}; print(config.workflow.is_read, config.dataset.is_read)"
    assert own.resolve("workflow=own/shown", "dataset={type: own/rows, path: x}", then=then) == "False False\n"


def test_a_required_setting_is_reported_wherever_it_is_declared(kit):
    code = """
    from areal_core.plugins import register

    @register("datasets")
    class Sums:
        '''Sums.'''
        def __init__(self, count: int, seed: int = 0): ...

    @register("group_filters")
    def few(episodes, *, share: float):
        '''Keep few.'''
    """
    kit.plugin("own", modules={"parts.py": code}, entry_point="own_package.parts")
    kit.file("parts.py", code)
    for sums, few in (("own/sums", "own/few"), ("parts.py:Sums", "parts.py:few")):
        assert "dataset.count: is required by" in kit.resolve(f"dataset={sums}", imports=True)
        assert kit.resolve(f"dataset={{type: {sums}, count: 2}}", imports=True) == "valid\n"
        algorithm = (
            f"{{type: policy_gradient, policy_loss: parts.py:few, advantage: kit/plain, group_filters: [{few}]}}"
        )
        assert "group_filters.0.share: is required by" in kit.resolve(f"algorithm={algorithm}", imports=True)
