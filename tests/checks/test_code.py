"""The checks of the code behind a config, of the rows that it reads, and of the process in which they run."""

from __future__ import annotations

import time

import pytest

from areal_core.checks import memory, reading
from areal_core.checks.child import inspect
from areal_core.checks.preflight import check_evaluation, preflight
from areal_core.config import resolve
from areal_core.config.resolve import CONFIG_FILE
from areal_core.errors import ConfigError
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.process_tree import has_ended, identify

PARTS = """\
from pathlib import Path
def reward(completion):
    with Path(__file__).with_name("calls").open("a") as file:
        file.write("x")
    return 1.0
def plain(batch): return batch["reward"]
def loss(terms): return -terms.logprobs, {}
class Source:
    def prepare(self, cache): raise AssertionError("no model is made")
class Rows:
    def __len__(self): return 1
    def __getitem__(self, index): return {"prompt": "a", "completion": "b"}
class HeldOut:
    def __init__(self): self.rows = [{"prompt": "a", "answer": "x", "level": 1}] * 13 + [{"prompt": "a", "answer": "x"}]
    def __len__(self): return len(self.rows)
    def __getitem__(self, index): return self.rows[index]
class Engine:
    from areal_testing.fakes import FakeEngine
    capabilities = FakeEngine.capabilities
    def __init__(self, **settings): pass
"""
CONFIG = """\
steps: 1
model: {source: parts.py:Source}
dataset: parts.py:Rows
train_engine: parts.py:Rows
algorithm: {type: policy_gradient, advantage: "parts.py:plain", policy_loss: "parts.py:loss"}
workflow: single_turn
rewards: ["parts.py:reward"]
inference_engine: parts.py:Engine
"""
ROWS_OF_A_FILE = """\
import json
class Rows:
    def __init__(self): self.rows = json.loads(Path(__file__).with_name("rows").read_text())
    def __len__(self): return len(self.rows)
    def __getitem__(self, index): return self.rows[index]
"""
HELD_OUT = "evaluation={dataset: parts.py:HeldOut}"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the config, and its parts with this code behind the right one; return the config as it is read."""
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def write(code="", *overrides, config=CONFIG, parts=PARTS):
        file = tmp_path / "parts.py"
        if not file.is_file() or file.read_text() != f"{parts}{code}\n":
            file.write_text(f"{parts}{code}\n")
        (tmp_path / CONFIG_FILE).write_text(config)
        return resolve(tmp_path / CONFIG_FILE, overrides=overrides)

    write.folder = tmp_path
    return write


@pytest.fixture
def found(write):
    """What the child finds, without a process of its own."""

    def find(code="", *overrides, **texts):
        resolved = write(code, *overrides, **texts)
        (write.folder / CONFIG_FILE).write_text(resolved.to_yaml())
        return inspect(resolved, write.folder)

    return find


@pytest.fixture
def problems(write):
    """The problems of a whole preflight, with its child."""

    def find(code="", *overrides):
        try:
            preflight(write(code, *overrides), RunFolder(write.folder / "run"), [], starts=False)
        except ConfigError as error:
            return list(error.problems)
        return []

    return find


@pytest.fixture
def imported(found, write, capsys):
    """What the child imports, and how often it calls the reward."""

    def find(*arguments, **texts):
        capsys.readouterr()
        assert found(*arguments, **texts).problems == []
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("importing ")]
        file = write.folder / "calls"
        count = len(file.read_text())
        file.unlink()
        return {"plugins": sum("core/" in line for line in lines), "own": sum(".py:" in line for line in lines)}, count

    return find


def test_ones_own_code_is_tried_every_time_and_plugins_are_imported_once(imported, write, monkeypatch):
    """Rows, variables and files that the user's code opens may change without the config."""
    everything, calls = imported()
    assert (everything["plugins"] > 0, everything["own"], calls) == (True, 7, 1)
    only_own = {"plugins": 0, "own": 7}
    assert imported() == (only_own, 1)
    for change in (
        (write.folder / "torch_is_installed_again").mkdir,  # in a folder of sys.path
        lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7"),
        lambda: monkeypatch.setattr("platform.node", lambda: "a node with GPUs"),
    ):
        monkeypatch.syspath_prepend(str(write.folder))
        imported()
        assert imported() == (only_own, 1)
        change()
        assert imported() == (everything, 1)
        assert imported() == (only_own, 1)


def test_a_reward_that_fails_for_changed_rows_is_a_problem(found, write):
    code = f"{ROWS_OF_A_FILE}def reward(completion, answer): return float(answer)\n"
    data = write.folder / "rows"
    data.write_text('[{"prompt": "a", "answer": "1"}]')
    assert found(code).problems == []
    data.write_text('[{"prompt": "a", "answer": "one"}]')
    (problem,) = found(code).problems
    assert "raised ValueError: could not convert string to float: 'one'" in problem


def test_the_latest_configs_are_stored(imported, monkeypatch):
    monkeypatch.setattr(memory, "MOST_RESULTS", 2)
    imported("", "seed=1")
    for seed, is_stored in ((1, True), (2, False), (1, True), (3, False), (2, True), (1, False)):
        assert (imported("", f"seed={seed}")[0]["plugins"] == 0) is is_stored


@pytest.mark.slow
def test_a_child_that_dies_is_a_problem_with_its_last_line(problems):
    ends = "import os, sys\nif sys.argv[0].endswith('child.py'): os._exit(7)\n"
    (problem,) = problems(ends)
    assert "checking the components ended with exit code 7" in problem


@pytest.mark.slow
@pytest.mark.parametrize(("end", "is_daemon"), [("", False), ("", True), ("os._exit(7)", False)])
def test_processes_that_the_code_has_started_end_with_the_child(problems, write, end, is_daemon):
    """A daemon has left the session of the child, which alone can find it: so not after the child was killed."""
    code = f"""\
import os, subprocess, sys
if sys.argv[0].endswith('child.py'):
    process = subprocess.Popen(["sleep", "600"], start_new_session={is_daemon})
    Path(__file__).with_name("left").write_text(str(process.pid))
    {end}
"""
    assert bool(problems(code)) is bool(end)
    left, deadline = int((write.folder / "left").read_text()), time.monotonic() + 60
    while not has_ended(identify(left)):
        assert time.monotonic() < deadline  # the kill is asynchronous
        time.sleep(0.01)


@pytest.mark.slow
def test_a_slow_child_is_reported_on_standard_error(problems, monkeypatch, capsys):
    """Standard output is for the JSON of a dry run."""
    monkeypatch.setattr(reading, "_LOG_INTERVAL_S", 0.01)
    problems()
    output = capsys.readouterr()
    assert not output.out
    assert "still checking the components of the config, for 0 s" in output.err


@pytest.mark.slow
def test_a_note_is_part_of_the_plan_each_time_and_of_no_refusal(write, capsys):
    """It was written to standard error before the problems."""
    run = RunFolder(write.folder / "run")
    resolved = write("def plain(batch): return batch['of_the_engine']")
    for _ in range(2):
        (note,) = preflight(resolved, run, [], starts=False).notes
        assert note.startswith("algorithm.advantage (")
        assert "was not tried to its end on a made-up batch: KeyError: \"the batch has no key 'of_the_engine'" in note
    code = "def plain(batch): return batch['of_the_engine']\ndef reward(completion): return 'x'"
    with pytest.raises(ConfigError) as refusal:
        preflight(write(code), run, [], starts=False)
    assert "was not tried to its end" not in f"{refusal.value}{capsys.readouterr().err}"


@pytest.mark.parametrize("sees", [False, True])
def test_a_workflow_that_shows_images_needs_an_engine_that_takes_them(found, sees):
    pytest.importorskip("areal_vision", reason="the first-party plugins are not installed")
    parts = PARTS.replace("FakeEngine.capabilities", f"replace(FakeEngine.capabilities, images={sees})")
    config = "plugins: [vision]\n" + CONFIG.replace("single_turn", "vision/single_turn")
    rows = "class Rows(Rows):\n    def __getitem__(self, index): return {'prompt': 'a', 'image': b''}\n"
    report = found(rows, config=config, parts=f"from dataclasses import replace\n{parts}")
    own = [problem for problem in report.problems if problem.startswith("inference_engine")]
    assert len(own) == (not sees)
    for problem in own:
        assert problem.startswith("inference_engine: the workflow shows images, which ")
        assert problem.endswith("parts.py:Engine does not support: choose hf, which does")


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        ("value = 3", "agent.py:value' is 3, and must be a function or a class"),
        ("def value(question, endpoint): ...", "the agent asks for question; it is offered row, endpoint, "),
        ("def value(row, /): ...", "the agent has positional parameters (row), but areal passes keywords"),
        ("def value(prompt, endpoint, limit=3): ...", ""),
        ("class Agent:\n    async def __call__(self, prompt, base_url): ...\nvalue = Agent()", ""),
    ],
)
def test_an_agent_that_cannot_be_called_for_the_rows_is_a_problem(found, write, agent, text):
    pytest.importorskip("areal_agents", reason="the first-party plugins are not installed")
    (write.folder / "agent.py").write_text(agent)
    chosen = CONFIG.replace("single_turn", "{type: agents/agent, agent: agent.py:value}")
    problems = found(config=f"plugins: [agents]\n{chosen}").problems
    assert bool(problems) == bool(text)
    assert text in "".join(problems)


def test_a_workflow_that_cannot_be_built_is_a_problem(found):
    code = """\
class Broken:
    def __init__(self): raise OSError('no such device')
    def check_row(self, *_): ...
    async def run_episode(self, row, context): ...
class Nothing: ...
"""
    (problem,) = found(code, "workflow=parts.py:Nothing").problems
    assert problem.endswith("has no method 'run_episode', which a workflow needs")
    (problem,) = found(code, "workflow=parts.py:Broken").problems
    assert problem.startswith("workflow: it cannot be built: OSError: no such device (parts.py:")


def test_constructors_that_raise_are_problems_beside_the_others(found):
    code = """\
class reward:
    def __init__(self): raise OSError("no such device")
    def __call__(self, completion): return 1.0
class plain:
    def __init__(self): raise KeyError("gamma")
    def __call__(self, batch): return batch["reward"]
"""
    reward, algorithm = found(code).problems
    assert reward.startswith("rewards.0: it cannot be built: OSError: no such device (parts.py:")
    assert algorithm.startswith("algorithm: it cannot be built: KeyError: 'gamma' (parts.py:")


def test_functions_in_c_may_hide_their_signature_and_rewards_may_not(found):
    (problem,) = found("plain = reward = max").problems
    assert problem.startswith("rewards.0: the arguments of '")
    assert "parts.py:reward' cannot be read: no signature found for builtin" in problem


def test_a_required_argument_of_a_reward_must_be_a_key_of_every_data_set(found):
    offered = "rewards get prompt, completion, prompt_ids, completion_ids, finish_reason, row, and the keys of the row"
    assert found("async def reward(completion, answer): ...", HELD_OUT).problems == [
        f"rewards.0 needs answer: {offered}, which in dataset are prompt, completion"
    ]


def test_a_key_of_a_similar_name_is_suggested(found):
    first, second = found("async def reward(completion, Answers, **others): ...", HELD_OUT).problems
    assert first.startswith("rewards.0 needs Answers: ")
    assert second.startswith("rewards.0 needs Answers (did you mean the rows' 'answer'? Use the same name in both): ")
    code = "async def reward(completion, answers=None, tolerance=0.1, *, setting=2, **others): return 1.0"
    report = found(code, HELD_OUT)
    assert report.problems == []
    assert report.rows == [
        ("rewards", "rewards.0: no row of dataset fills answers, so its default applies"),
        ("rewards", "rewards.0: no row of dataset fills tolerance, so its default applies"),
        (
            "note",
            "rewards.0: no row of evaluation.dataset fills answers, so its default applies "
            "(did you mean the rows' 'answer'? Use the same name in both)",
        ),
        ("rewards", "rewards.0: no row of evaluation.dataset fills tolerance, so its default applies"),
    ]


def test_a_single_row_that_lacks_an_argument_is_named(found):
    """Every row needs it: such an episode fails, and evaluations leave its score out."""
    first, second = found("async def reward(level, prompt, **others): ...", HELD_OUT).problems
    assert first.startswith("rewards.0 needs level: "), "no row of the training data has it"
    assert second == (
        "rewards.0 needs level, which row 13 of evaluation.dataset (counted from 0) lacks: add it to the row, or give "
        "the argument a default"
    )


def test_rewards_and_algorithm_of_ones_own_are_tried(found):
    text = "def reward(completion): return int(completion)\ndef loss(terms): return terms.logprobs.log(), {}"
    reward, loss = found(text).problems
    assert "raised ValueError: invalid literal for int() with base 10: 'The answer is 42.' (parts.py:" in reward
    assert loss.startswith("on a made-up batch: the loss of actor is nan; check algorithm.advantage (")


def test_rewards_are_tried_on_held_out_rows_too(found):
    """Else the first evaluation would end the run."""
    (problem,) = found("def reward(row): return float(row.get('answer', 1))", HELD_OUT).problems
    assert "raised ValueError: could not convert string to float: 'x'" in problem
    assert "tried on row 0 of evaluation.dataset" in problem


def test_secrets_are_hidden_from_rewards_that_are_tried(found, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "x")
    assert found("import os\ndef reward(completion): return 1.0 / ('MY_TOKEN' not in os.environ)").problems == []


def test_answers_that_are_scored_need_rewards(write):
    check_evaluation(write(), loads_model=False)
    with pytest.raises(ConfigError) as refusal:
        check_evaluation(write("", "rewards=[]"), loads_model=False)
    problem = "rewards: the workflow scores every answer, and there are none: set rewards"
    assert list(refusal.value.problems) == [problem]


ADAPTER = """
from areal_core.config import Settings
from areal_core.servers import HTTPAdapter, InferenceCapabilities
class Adapter(HTTPAdapter):
    name, seen = "Mine", []
    def capabilities(self): return InferenceCapabilities(frozenset({"recompute"}))
    def generate(self, connection, partial): raise AssertionError("the check asks no server")
    async def nothing(self, connection, *arguments): pass
    identify = stop = resume = abort = load = set_label = nothing
"""
SERVED = "inference_engine={type: parts.py:Adapter, addresses: ['http://127.0.0.1:1']}"


def test_an_adapter_is_an_inference_engine(found):
    assert found(ADAPTER, SERVED).problems == []


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            "    class Config(Settings): addresses: list[str]",
            "is a ServerAdapter, and its settings are no ServerSettings: derive its Config from FleetSettings or",
        ),
        ("    abort, load = HTTPAdapter.abort, HTTPAdapter.load", "lacks abort, load, which every ServerAdapter has"),
        ("    def __init__(self): pass", "takes (), which does not fit its settings: too many positional arguments"),
        (
            "    def __init__(self, settings, scratch): pass",
            "needs scratch, which neither the config nor areal supplies",
        ),
        ("    def __init__(self, settings): pass", "does not keep its settings: call super().__init__(settings)"),
        (
            "    package = 'no_server'",
            "Mine is not installed beside areal, and the run is to start Mine servers: pip install no_server; or set",
        ),
    ],
)
def test_what_is_wrong_with_an_adapter_is_reported_before_a_run(found, lines, told):
    (problem,) = found(f"{ADAPTER}{lines}", SERVED).problems
    assert problem.startswith("inference_engine: ")
    assert told in problem


def test_a_class_that_is_neither_an_adapter_nor_an_engine_is_reported_before_a_run(found):
    (problem,) = found("", "inference_engine=parts.py:Rows").problems
    assert "parts.py:Rows' is neither a ServerAdapter nor an InferenceEngine: derive the class from one of" in problem
