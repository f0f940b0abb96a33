"""The words of `areal eval`: what they ask for, and every way in which they can be wrong. Nothing here generates."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

FAKE_EVALUATION = """
import json, sys
import areal_evaluation.evaluation
def evaluate(resolved, asked):
    ks, threshold, output = asked.ks, asked.threshold, asked.output
    config = resolved.config
    section = config.evaluation
    said = [section.samples_per_prompt, section.limit, section.temperature, section.dataset.reference]
    print("asked", said, config.model.path, ks, threshold, output, file=sys.stderr)
    if asked.address: print("at", asked.address, asked.concurrency, file=sys.stderr)
    estimate = {{"value": 0.5, "low": 0.25, "high": 0.75, "prompts": 2, "standard_error": 0.1}}
    figures = {{
        "complete": True, "episodes": 4, "finished": 3, "failed": 1, "reward": estimate,
        "pass_at_k": {{"1": estimate, "2": None}}, "rewards": {{"exact": 0.5}},
        "metrics": {{"agents/turns": 2.5}}, "seconds": 2.0, "endpoint": None, "failures": {{"slow": 1}},
        "category": "kind", "categories": {{"easy": {{"finished": 3, "failed": 1, "reward": estimate,
        "pass_at_k": {{"1": estimate, "2": None}}}}}},
        "response_length": 2.5, "truncated": 0.25, "tokens_per_s": 1234.5, "episodes_per_s": 6.0,
        "name": resolved.name, "model": config.model.path,
        "config": config.model_dump(mode="json", include={{"evaluation", "sampling"}}),
    }}
    return areal_evaluation.evaluation.Measured(figures, {signal})
areal_evaluation.evaluation.evaluate = evaluate
from areal_core.cli import main
code = main({words!r})
assert "torch" not in sys.modules
sys.exit(code)
"""


def evaluated(place, *words, signal=0):
    """`areal eval` with an evaluation that only says what it was asked."""
    return place.python("-c", FAKE_EVALUATION.format(words=["eval", *words], signal=signal))


@pytest.fixture
def folders(place):
    """Two exported models, a run that has them, and one that has none."""
    for name in ("other", "done/model", "done/best", "young"):
        (place.folder / name).mkdir(parents=True)
        (place.folder / name / "config.json").write_text("{}")
    saving = (
        "from areal_core.config import resolve; import pathlib\n"
        "for name in ('done', 'young'): pathlib.Path(name, 'config.yaml').write_text(resolve('run.yaml').to_yaml())"
    )
    saved = place.python("-c", saving)
    assert saved.code == 0, saved.err
    return place


def test_without_words_the_training_prompts_are_answered_once(place):
    outcome = evaluated(place, "run.yaml")
    assert outcome.code == 0, outcome.err
    assert outcome.err == "asked [1, None, None, 'parts.py:Rows'] tiny [1] 1.0 None\n"


def test_every_word_arrives(folders):
    words = ["run.yaml", "--samples", "8", "--limit", "20", "--temperature", "0", "--k", "4,1", "--threshold", "0.5"]
    outcome = evaluated(folders, *words, "--model", "other", "--output", "new")
    assert outcome.code == 0, outcome.err
    assert outcome.err == f"asked [8, 20, 0.0, 'parts.py:Rows'] {folders.folder / 'other'} [1, 4] 0.5 new\n"
    assert "\n  pass@1           0.500  (95%: 0.250 to 0.750; standard error 0.100)\n" in outcome.out
    assert "\n  pass@2           no prompt has enough answers\n" in outcome.out
    assert "2 prompts, 8 answers to each at temperature 0\n" in outcome.out


def test_the_evaluation_section_is_the_default(place):
    section = (
        "evaluation={dataset: {type: 'parts.py:Rows', count: 3}, samples_per_prompt: 5, limit: 2, temperature: 0.5}"
    )
    assert "asked [5, 2, 0.5, 'parts.py:Rows'] tiny [1, 5]" in evaluated(place, section, "run.yaml").err
    message = evaluated(place, section, "run.yaml", "--samples", "2").err
    assert "asked [2, 2, 0.5, 'parts.py:Rows'] tiny [1, 2]" in message


def test_a_run_brings_its_config_and_its_best_model(folders):
    assert f"{folders.folder / 'done/best'} [1]" in evaluated(folders, "--run", "done").err
    (folders.folder / "done/best/config.json").unlink()
    assert f"{folders.folder / 'done/model'} [1]" in evaluated(folders, "--run", "done").err
    assert f"{folders.folder / 'other'} [1]" in evaluated(folders, "--run", "young", "--model", "other").err


def test_an_interruption_is_told_after_the_figures_and_in_the_exit_code(place):
    outcome = evaluated(place, "run.yaml", signal=2)
    assert outcome.code == 130
    assert "mean reward" in outcome.out
    assert "areal: interrupted: the figures cover 3 of 4 episodes" in outcome.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--run", "nix"], "nix is not a run folder: it has no config.yaml"),
        (["--run", "young"], "young has exported no model yet: it has neither best/ nor model/\n  let the run finish"),
        (["--run", "done", "run.yaml"], "CONFIG (run.yaml) cannot be named as well"),
        (["run.yaml", "--model", "nix"], "nix is not a model folder: it has no config.json\n  name a Hugging"),
        (["run.yaml", "--k", "4", "--samples", "2"], "pass@k needs k from 1 to the number of answers per prompt"),
        (["run.yaml", "--k", "4,1"], "--k has 1 to 4\n  sample more answers: --samples 4"),
        (["run.yaml", "--k", "0"], "--k has 0 to 0"),
        (["run.yaml", "--k", "1,x"], "argument --k: invalid numbers value: '1,x'"),
        (["run.yaml", "--limit", "0"], "limit: Input should be greater than or equal to 1"),
        (["run.yaml", "--samples", "-1"], "samples_per_prompt: Input should be greater than or equal to 1"),
        (["run.yaml", "--samples", "many"], "argument --samples: invalid int value: 'many'"),
        (["run.yaml", "--temperature", "-1"], "temperature: Input should be greater than or equal to 0"),
        (
            ["run.yaml", "--temperature", "1e-320"],
            "temperature: must be at least 0.01, or 0, which is greedy, not 1e-320",
        ),
        (["run.yaml", "--temperature", "nan"], "temperature: Input should be"),
        (["run.yaml", "--threshold", "nan"], "argument --threshold: invalid reward value: 'nan'"),
        (["run.yaml", "--output", "other"], "other already exists\n  name a new folder"),
        (
            ["--run", "done", "--output", "/proc/x"],
            "the folder /proc/x cannot be made: No such file or directory\n  name",
        ),
        (["--run", "done", "--output", "done/config.yaml/x"], "done/config.yaml/x cannot be made: Not a directory"),
        (["run.yaml", "--output", "x" * 300], "xxx cannot be made: File name too long"),
        (["run.yaml", "inference_engine=null", "workflow=null", "rewards=[]"], "it has no inference_engine"),
        (["run.yaml"], "model.path: there is no folder"),
        (["nix.yaml"], "there is no config file nix.yaml"),
        ([], "nothing to run"),
    ],
)
def test_wrong_requests_end_with_2_and_leave_nothing_behind(folders, words, told):
    before = sorted(folders.folder.rglob("*"))
    absent_model = ["model.path=./tiny"] if words == ["run.yaml"] else []
    outcome = folders.python("-B", "-m", "areal_core", "eval", *words, *absent_model)
    assert outcome.code == 2, outcome.err
    assert told in outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert sorted(folders.folder.rglob("*")) == before
