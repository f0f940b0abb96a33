"""The check of the code behind a config: what it finds, and when it may be left out."""

from __future__ import annotations

from contextlib import closing

import pytest

from areal_core.config import resolve
from areal_core.driver import checking
from areal_core.driver.checking import CodeCheck
from areal_core.driver.plan import make_plan
from areal_core.errors import ConfigError

pytestmark = pytest.mark.slow

PARTS = """\
def rows(): return []
def reward(completion): return 1.0
class Rows:
    def __len__(self): return 1
    def __getitem__(self, index): return {"prompt": "a", "completion": "b"}
class Engine:
    from areal_core.testing.fakes import FakeEngine
    capabilities = FakeEngine.capabilities
    def __init__(self, **settings): pass
"""
CONFIG = """\
steps: 1
model: {path: nowhere}
dataset: parts.py:Rows
train_engine: parts.py:Rows
algorithm: {type: policy_gradient, advantage: "parts.py:plain", policy_loss: "parts.py:loss"}
workflow: single_turn
rewards: ["parts.py:reward"]
inference_engine: parts.py:Engine
"""


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """What a check finds with these parts, and whether it had to import anything."""
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(CONFIG)

    def find(advantage: str) -> tuple[list[str], bool]:
        parts = tmp_path / "parts.py"
        text = f"{PARTS}\n{advantage}\ndef loss(terms): return terms.logprobs, {{}}\n"
        if not parts.is_file() or parts.read_text() != text:
            parts.write_text(text)
        with closing(CodeCheck(resolve(tmp_path / "run.yaml"))) as check:
            return check.problems({}), check._process is not None

    return find


def test_what_is_right_is_imported_once_and_again_when_a_file_has_changed(problems, monkeypatch, tmp_path):
    right = "def plain(batch): return batch['reward']"
    assert problems(right) == ([], True)
    assert problems(right) == ([], False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert problems(right) == ([], True), "modules may come from elsewhere now"
    assert problems(f"{right}  # changed") == ([], True)
    wrong, imported = problems("def plain(): return 1.0")
    assert imported
    assert ["is called with (batch)" in line for line in wrong] == [True]
    assert problems("def plain(): return 1.0")[1], "what was wrong is looked at again"


@pytest.mark.parametrize("sees", [False, True])
def test_a_workflow_that_shows_images_needs_an_engine_that_takes_them(tmp_path, monkeypatch, sees):
    pytest.importorskip("areal_vision", reason="the first-party plugins are not installed")
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    parts = PARTS.replace("FakeEngine.capabilities", f"replace(FakeEngine.capabilities, images={sees})")
    code = "from dataclasses import replace\ndef plain(batch): return batch['reward']\n"
    code += "def loss(terms): return -terms.logprobs, {}\n"
    (tmp_path / "parts.py").write_text(code + parts)
    (tmp_path / "run.yaml").write_text("plugins: [vision]\n" + CONFIG.replace("single_turn", "vision/single_turn"))
    with closing(CodeCheck(resolve(tmp_path / "run.yaml"))) as check:
        found = check.problems({})
    assert len(found) == (not sees)
    for problem in found:
        assert problem.startswith("inference_engine: the workflow shows images, which ")
        assert problem.endswith("parts.py:Engine does not support: choose hf, which does")


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("value = 3", "agent.py:value' is 3, and must be a function or a class"),
        ("def value(question, endpoint): ...", "the agent asks for question; it is offered row, endpoint, "),
        ("def value(row, /): ...", "the agent takes row by place, and arguments come by name"),
        ("def value(prompt, endpoint, limit=3): ...", ""),
        ("class Agent:\n    async def __call__(self, prompt, base_url): ...\nvalue = Agent()", ""),
    ],
)
def test_an_agent_that_cannot_be_called_for_the_first_rows_is_told(tmp_path, monkeypatch, agent, told):
    pytest.importorskip("areal_agents", reason="the first-party plugins are not installed")
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "parts.py").write_text(
        f"{PARTS}\ndef plain(batch): return batch['reward']\ndef loss(terms): return -terms.logprobs, {{}}\n"
    )
    (tmp_path / "agent.py").write_text(agent)
    text = CONFIG.replace("single_turn", "{type: agents/agent, agent: agent.py:value}")
    (tmp_path / "run.yaml").write_text(f"plugins: [agents]\n{text}")
    with closing(CodeCheck(resolve(tmp_path / "run.yaml"))) as check:
        found = check.problems({})
    assert bool(found) == bool(told)
    assert told in "".join(found)


def test_a_check_that_dies_says_where(problems):
    ends = "import os, sys\nif sys.argv[0].endswith('trial.py'): os._exit(7)\n"
    (found,), _ = problems(f"{ends}def plain(batch): return batch['reward']")
    assert "ended with exit code 7" in found


def test_that_it_takes_long_is_told_beside_the_result(problems, monkeypatch, capsys):
    """On standard output it stood in front of the JSON of a dry run, on every slow machine."""
    monkeypatch.setattr(checking, "TOLD_S", 0.01)
    problems("def plain(batch): return batch['reward']")
    said = capsys.readouterr()
    assert not said.out
    assert "still checking the components of the config, for 0 s" in said.err


def test_what_could_not_be_tried_is_said_each_time(problems, capsys):
    for _ in range(2):
        assert problems("def plain(batch): return batch['of_the_engine']") == ([], True)
        told = capsys.readouterr().err
        assert told.startswith("algorithm.advantage (")
        assert "was not tried to its end on a made-up batch: KeyError: \"the batch has no key 'of_the_engine'" in told


@pytest.fixture
def found(tmp_path, monkeypatch):
    """What a check finds with this code in place of what is right, for rows with these keys."""
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    right = f"{PARTS}\ndef plain(batch): return batch['reward']\ndef loss(terms): return -terms.logprobs, {{}}\n"

    def find(code: str, *overrides: str, in_plan: bool = False) -> list:
        (tmp_path / "parts.py").write_text(f"{right}{code}\n")
        (tmp_path / "run.yaml").write_text(CONFIG)
        rows = {
            "dataset": {"prompt": "", "completion": "row 7"},
            "evaluation.dataset": {"prompt": "", "answer": "", "level": "row 13"},
        }
        with closing(CodeCheck(resolve(tmp_path / "run.yaml", overrides=overrides))) as check:
            problems = check.problems(rows)
            return list(check.plan_rows(rows)) if in_plan else problems

    find.folder = tmp_path
    return find


def test_what_rewards_ask_of_rows_must_be_there_also_where_nothing_is_imported_again(found):
    told = "rewards are given prompt, completion, prompt_ids, completion_ids, finish_reason, row, and of a row of"
    for _ in range(2):
        assert found("async def reward(completion, answer): ...") == [
            f"rewards.0 asks for answer: {told} dataset its prompt, completion"
        ]


def test_an_argument_of_a_reward_that_rows_have_under_a_similar_name_is_named(found):
    told = found("async def reward(completion, Answers, **others): ...")
    assert "rewards.0 asks for Answers: " in told[0]
    assert "rewards.0 asks for Answers (did you mean the rows' 'answer'? Name both alike): " in told[1]
    code = "async def reward(completion, answers=None, tolerance=0.1, *, setting=2, **others): return 1.0"
    assert found(code) == []
    wanted = [
        ("rewards", "rewards.0: no row of dataset fills answers, so its default applies"),
        ("rewards", "rewards.0: no row of dataset fills tolerance, so its default applies"),
        (
            "note",
            "rewards.0: no row of evaluation.dataset fills answers, so its default applies "
            "(did you mean the rows' 'answer'? Name both alike)",
        ),
        ("rewards", "rewards.0: no row of evaluation.dataset fills tolerance, so its default applies"),
    ]
    assert found(code, in_plan=True) == wanted


def test_a_row_without_what_a_reward_asks_for_is_named(found):
    """Every row needs it: such an episode fails, and in evaluations the score leaves it out."""
    told = found("async def reward(level, prompt, **others): ...")
    assert told[1:] == ["rewards.0 asks for level, and row 13 of evaluation.dataset has none"]
    assert "rewards.0 asks for level: " in told[0], "no row of the other data set has it"


def test_rewards_and_algorithm_of_ones_own_are_tried(found):
    text = "def reward(completion): return int(completion)\ndef loss(terms): return terms.logprobs.log(), {}"
    reward, loss = found(text)
    assert "raised ValueError: invalid literal for int() with base 10: 'The answer is 42.' (parts.py:" in reward
    assert loss.startswith("on a made-up batch: the loss of actor is nan; look at algorithm.advantage (")


def test_rewards_are_tried_on_held_out_rows_too(found):
    """Else the first evaluation would end the run."""
    rows = "class HeldOut(Rows):\n    def __getitem__(self, index): return {'prompt': 'a', 'answer': 'x'}\n"
    code = f"{rows}def reward(row): return float(row.get('answer', 1))"
    held_out = "evaluation={dataset: 'PARTS:HeldOut'}".replace("PARTS", str(found.folder / "parts.py"))
    (told,) = found(code, held_out)
    assert "raised ValueError: could not convert string to float: 'x'" in told
    assert "tried on row 0 of evaluation.dataset" in told


def test_a_reward_that_hangs_is_named(found):
    (told,) = found("def reward(completion):\n    while True: pass", "rollout.reward_timeout_s=1")
    assert told.startswith(
        "rewards.0: reward 'reward' raised RuntimeError: it took longer than rollout.reward_timeout_s"
    )
    assert "tried on row 0" in told


def test_answers_that_are_scored_need_rewards(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS + "def plain(batch): ...\ndef loss(terms): ...\n")
    (tmp_path / "run.yaml").write_text(CONFIG)
    make_plan(resolve(tmp_path / "run.yaml"), loads_model=False, trains=False)
    with pytest.raises(ConfigError) as refusal:
        make_plan(resolve(tmp_path / "run.yaml", overrides=["rewards=[]"]), loads_model=False, trains=False)
    told = "rewards: the workflow scores every answer, and there are none: set rewards"
    assert list(refusal.value.problems) == [told]
