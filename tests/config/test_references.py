"""Components named by import, and making components out of choices."""

from __future__ import annotations

import pytest

from areal_core.config.imports import import_reference
from areal_core.files import KeptSources

pytestmark = pytest.mark.slow


def test_components_by_file_are_relative_to_the_config_that_names_them_and_hashed(kit):
    kit.file("configs/parts/mine.py", "def reward(answer: str, *, scale: float = 1.0): return (answer, scale)\n")
    kit.file("configs/run.yaml", "preset: kit/small\nrewards:\n  - {type: parts/mine.py:reward, scale: 2, weight: 3}\n")
    then = (
        "reward = config.rewards[0];"
        "print(reward.build()('x'), reward.common.weight, list(resolved.files), resolved.base_dir.name)"
    )
    out = kit.resolve(config="configs/run.yaml", then=then)
    assert out == f"('x', 2.0) 3.0 ['{kit.work}/configs/parts/mine.py'] configs\n"
    kit.file("here.py", "def reward(answer): return 0\n")
    assert kit.shown("config.rewards[0].target", "rewards=['here.py:reward']", config="configs/run.yaml") == (
        f"{kit.work}/here.py:reward"
    )
    names = kit.shown("[record.name for record in resolved.provenance()]", config="configs/run.yaml")
    assert names == f"['core', 'kit', '{kit.work}/configs/parts/mine.py']"


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("nix.py:f", "cannot read {work}/nix.py: No such file or directory"),
        ("mine.py:rewrd", "{work}/mine.py has no 'rewrd'\n  did you mean 'reward'?"),
        ("mine.py:", "'mine.py:' is no reference\n  write package.module:attribute or path/to/file.py:attribute"),
        ("no.such:f", "there is no module named 'no.such' in this environment"),
        ("bad.py:f", "importing {work}/bad.py raises ZeroDivisionError: division by zero"),
        ("{{type: mine.py:reward, weigth: 1}}", "rewards.0.weigth: unknown key\n  did you mean 'weight'?\n"),
        ("{{type: mine.py:reward, scael: 1}}", "rewards.0.scael: unknown key\n  did you mean 'scale'?"),
        ("{{type: mine.py:reward, scale: wide}}", "rewards.0.scale: must be a number, not 'wide'"),
        ("{{type: mine.py:Loose, x: 1}}", "the Config of '{work}/mine.py:Loose' is no Settings model"),
        ("{{type: mine.py:Strict, x: 0}}", "rewards.0.x: must be greater than 0, not 0"),
        ("{{weight: 2}}", "rewards.0.type: must name a reward function\n  available for reward_functions: kit/exact"),
        ("3", "rewards.0: write the name of a reward function, or a section with `type:`"),
    ],
)
def test_wrong_references_by_import(kit, reference, told):
    kit.file(
        "mine.py",
        """
        from pydantic import BaseModel, Field
        from areal_core.config import Settings
        def reward(answer: str, *, scale: float = 1.0): ...
        class Loose:
            class Config(BaseModel):
                x: int
        class Strict:
            class Config(Settings):
                x: int = Field(gt=0)
        """,
    )
    kit.file("bad.py", "1 / 0\ndef f(): ...\n")
    written = reference.format() if "{" in reference else f"'{reference}'" if ":" in reference else reference
    assert told.format(work=kit.work) in kit.resolve(f"rewards=[{written}]", imports=True)


def test_a_file_imports_those_beside_it_when_it_is_loaded_and_when_it_is_called(kit):
    kit.file("parts/scale.py", "FACTOR = 3\n")
    kit.file("parts/late.py", "ADDED = 1\n")
    text = "import scale\ndef reward(answer):\n    import late\n    return scale.FACTOR + late.ADDED\n"
    kit.file("parts/mine.py", text)
    assert kit.resolve("rewards=['parts/mine.py:reward']", then="print(config.rewards[0].build()('x'))") == "4\n"
    hides = kit.file("parts/pluggy.py", "raise RuntimeError('this is not the installed one')\n")
    assert kit.resolve("rewards=['parts/mine.py:reward']", then="import pluggy; print(pluggy.__file__)") != f"{hides}\n"


def test_the_line_of_ones_own_that_raises_when_a_file_is_loaded_is_told(kit):
    kit.file("deep.py", "import json\n\nSETTINGS = json.loads('{')\n")
    kit.file("mine.py", "import deep\ndef reward(answer): ...\n")
    out = kit.resolve("rewards=['mine.py:reward']", imports=True)
    assert f"importing {kit.work}/mine.py raises JSONDecodeError: " in out
    assert " (deep.py:3, called from mine.py:1)\n" in out


def test_building_components(kit):
    kit.file(
        "mine.py",
        """
        from areal_core.config import Settings
        class Plain:
            def __init__(self, depth: int = 2, *, tokenizer): self.got = (depth, tokenizer)
        class Configured:
            class Config(Settings):
                depth: int = 2
            def __init__(self, settings, tokenizer): self.got = (settings.depth, tokenizer)
        class Greedy:
            def __init__(self, unheard_of): ...
        """,
    )
    build = "print(config.workflow.build(tokenizer='t', engine='e').got)"
    assert kit.resolve("workflow={type: mine.py:Plain, depth: 5}", then=build) == "(5, 't')\n"
    assert kit.resolve("workflow={type: mine.py:Configured, depth: 5}", then=build) == "(5, 't')\n"
    out = kit.resolve("workflow=mine.py:Greedy", then=build)
    assert f"'{kit.work}/mine.py:Greedy' needs unheard_of, which neither the config nor areal supplies" in out
    assert kit.shown("config.train_engine.build(model='m', other=1).settings.learning_rate") == "0.0003"
    assert kit.shown("config.algorithm.settings.advantage.build()('batch')") == "('grouped', 'batch', True)"
    assert kit.shown("config.algorithm.settings.advantage.build()('batch')", "algorithm.advantage=kit/plain") == (
        "('plain', 'batch')"
    )


def test_a_library_that_a_component_misses_is_told_when_it_is_built(kit):
    (kit.site / "kit_package" / "parts.py").write_text("import torch_like")
    assert kit.resolve() == "valid\n"
    assert kit.resolve(then="config.train_engine.build(model='m')") == (
        "PluginBrokenError 2\n"
        "the training engine 'kit/engine' of plugin kit (areal-kit 1.2.3) is installed but cannot be imported: "
        "module 'torch_like' is missing\n  repair it with: pip install --upgrade areal-kit\n"
    )


def test_a_file_that_vanishes_between_checking_and_building_is_told(kit):
    path = kit.file("mine.py", "def reward(answer): ...\n")
    out = kit.resolve("rewards=['mine.py:reward']", then="Path('mine.py').unlink(); config.rewards[0].load()")
    assert (
        out == f"ConfigError 2\ncannot read {path}: No such file or directory\n  a path is relative to the config "
        "that names it\n"
    )


def test_settings_that_are_no_model_and_an_advantage_of_ones_own_that_needs_a_group(kit):
    kit.file("mine.py", "def centered(batch): ...\ncentered.needs_group = True\n")
    words = ["algorithm.advantage=mine.py:centered", "rollout.group_size=1"]
    assert "mine.py:centered' compares the answers to one prompt" in kit.resolve(*words, imports=True)
    kit.plugin(
        "odd",
        '@hookimpl\ndef areal_advantages():\n    return [Component("c", "d", target="x:y", config="json:loads")]\n',
    )
    out = kit.resolve("algorithm.advantage=odd/c")
    assert "'odd/c' of plugin odd (areal-odd 1.2.3) names json:loads, which is no Settings model" in out


def test_processes_of_a_run_execute_files_as_they_were_when_it_started(tmp_path, monkeypatch, capsys):
    """A reward process that is refilled in the middle of a run scores as the first one did."""
    path = tmp_path / "reward.py"
    path.write_text("def reward(completion):\n    return 1.0\n")
    kept = tmp_path / "run" / "sources"
    kept.mkdir(parents=True)
    KeptSources.place(kept, path).write_bytes(path.read_bytes())
    path.write_text("def reward(completion):\n    return 2.0\n")
    assert import_reference(f"{path}:reward", tmp_path).value(completion="") == 2.0
    monkeypatch.setattr(KeptSources, "folder", kept)
    monkeypatch.setattr(KeptSources, "renews", False)
    assert import_reference(f"{path}:reward", tmp_path).value(completion="") == 1.0
    assert "has changed since the run started" in capsys.readouterr().err
    path.unlink()
    assert import_reference(f"{path}:reward", tmp_path).value(completion="") == 1.0


def test_a_resume_sees_the_modules_that_are_there_and_the_runs_copies_of_those_that_are_gone(kit, tmp_path):
    """From whatever folder it is started."""
    copies = tmp_path / "run" / "sources" / "modules"
    copies.mkdir(parents=True)
    for name in ("there", "gone"):
        (copies / f"{name}.py").write_text("WHERE = 'copy'\n")
    (tmp_path / "there.py").write_text("WHERE = 'original'\n")
    (tmp_path / "reward.py").write_text("import gone, there\nWHERES = there.WHERE, gone.WHERE\n")
    outcome = kit.python(f"""
        from pathlib import Path
        from areal_core.config.imports import import_reference
        from areal_core.files import KeptSources
        KeptSources.use(Path({str(tmp_path)!r}) / "run" / "sources", renews=True)
        print(import_reference("{tmp_path}/reward.py:WHERES", Path("/")).value)
    """)
    assert outcome.out == "('original', 'copy')\n", outcome.err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rewards=kit/exact", "rewards: must be a list of components: write [kit/exact]"),
        ("rewards={type: kit/exact, weight: 2}", "rewards: must be a list of components: write [kit/exact]"),
        ("workflow=[single_turn]", "workflow: must be one component, not a list: write single_turn"),
        ("workflow=[]", "workflow: must be one component, not a list: write a component"),
        ("roles={critic: 3}", "roles.critic: write the name of a training engine, or a section with `type:` and path"),
        ("roles=null", "roles: must be a mapping of keys to values"),
        ("placement=5", "placement: is a section with its own keys, not a single value"),
    ],
)
def test_one_for_several_and_several_for_one(kit, override, told):
    out = kit.resolve(override)
    assert out.startswith(f"ConfigError 2\ncommand line: {told}"), out


def test_the_command_leaves_the_import_to_a_child_and_stores_what_it_has_read(kit, tmp_path):
    kit.file("imports", "")
    code = "import sys\nfrom pathlib import Path\nwith Path(__file__).with_name('imports').open('a') as file:\n"
    kit.file("mine.py", f"{code}    file.write(f'{{sys.argv[0]}}\\n')\ndef reward(answer, scale: float = 1.0): ...\n")
    words = ["run.yaml", "rewards=[{type: mine.py:reward, scale: '2'}]"]
    for command in ("check", "check", "show"):
        outcome = kit.areal("config", command, *words, AREAL_CACHE=str(tmp_path / "cache"))
        assert not outcome.code, outcome.err
    assert "scale: 2.0" in outcome.out
    (importer,) = (kit.work / "imports").read_text().splitlines()
    assert importer.endswith("checks/reading.py")


HALF_ANNOTATED = """\
from __future__ import annotations
from typing import TYPE_CHECKING, Annotated
from pydantic import Field
if TYPE_CHECKING:
    from collections.abc import Sequence

def short(completion_ids: Sequence[int], *, limit: Annotated[int, Field(ge=1)] = 3, bonus: float = 1.0) -> float:
    return bonus
"""


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("limit: 0", "rewards.0.limit: "),
        ("limit: x", "rewards.0.limit: must be a whole number"),
        ("limit: true", "rewards.0.limit: must be a number, not true"),
        ("bonus: false", "rewards.0.bonus: must be a number, not false"),
        ("limit: 2, bonus: 0.5", "valid"),
    ],
)
def test_annotations_hold_beside_one_for_type_checkers_alone(kit, setting, reason):
    kit.file("short.py", HALF_ANNOTATED)
    told = kit.resolve(f"rewards=[{{type: short.py:short, {setting}}}]", imports=True)
    assert reason.lower() in told.lower()


CLASS = """class score:
    def __init__(self, name="x"): self.name = name
    def __call__(self, completion): return 1.0
"""


@pytest.mark.parametrize("reward", ["def score(completion, *, weight=0.5): return weight\n", CLASS])
def test_a_setting_that_areal_reads_itself_is_refused(kit, reward):
    kit.file("mine.py", reward)
    assert "which never gets a value: areal reads this key itself" in kit.resolve(
        "rewards=['mine.py:score']", imports=True
    )


def test_an_argument_that_is_a_key_of_rows_may_be_called_name(kit):
    kit.file("mine.py", "def score(completion, name, weight=1): return 1.0\n")
    assert kit.resolve("rewards=['mine.py:score']", imports=True) == "valid\n"
