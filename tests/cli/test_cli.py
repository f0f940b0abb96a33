"""The command line: help without imports, every command, every way in which its words can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import yaml

import areal_core
from areal_core.cli.commands.run import SAFE_ON_RESUME

pytestmark = pytest.mark.slow

FAKE_RUN = """
import sys, types
fake = types.ModuleType("areal_core.driver.execution")
def execute(resolved, *, run_dir, resume, dry_run, allow_changes, as_json, show):
    print("steps", resolved.config.steps, "folder", run_dir, "resume", resume, dry_run, allow_changes)
    return 7
fake.execute = execute
sys.modules["areal_core.driver.execution"] = fake
from areal_core.cli import main
sys.exit(main({words!r}))
"""

HEAVY = "torch", "pydantic", "pluggy", "rich", "importlib.metadata", "numpy", "yaml"


def run(box, *words, **environment):
    """`areal run` with a run that only says what it was asked."""
    return box.python(FAKE_RUN.format(words=["run", *words]), **environment)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"], ["config", "-h"], ["plugins", "-h"]])
def test_help_imports_nothing_heavy(box, words):
    code = (
        "import sys; from areal_core.cli import main\n"
        f"code = main({words!r})\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules]); sys.exit(code)"
    )
    outcome = box.python(code)
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("heavy: []\n")


def test_help_lists_every_command_and_no_words_are_a_wrong_request(box):
    outcome = box.areal("--help")
    for command in ("run", "plugins", "config", "audit"):
        assert f"\n    {command} " in outcome.out
    assert box.areal().code == 2
    assert box.areal("--version").out == f"areal {areal_core.__version__}\n"


def test_areal_and_python_search_the_same_folders(kit):
    """With `-m` Python puts the current folder in front: `mine:f` was found there and by `areal` not."""
    kit.file("mine.py", "def f(answer): ...\n")
    installed = "import sys; sys.path.remove(''); from areal_core.cli import main; sys.exit(main({words!r}))"
    words = ["config", "check", "run.yaml", "rewards=['mine:f']"]
    for outcome in (kit.areal(*words), kit.python(installed.format(words=words))):
        assert outcome.code == 1
        assert "there is no module named 'mine' in this environment" in outcome.err


def test_a_run_gets_the_resolved_config_and_a_new_folder(kit):
    outcome = run(kit, "run.yaml", "--dry-run", "steps=9", "run_dir=here")
    assert (outcome.code, outcome.out) == (7, "steps 9 folder here resume None True False\n")
    outcome = run(kit, "steps=3", "--plugins", "kit", "seed=4")
    assert outcome.out.startswith("steps 3 folder runs/small-2")


def test_a_word_with_an_equals_sign_is_an_override_wherever_it_stands(kit):
    for words in (["seed=1", "run.yaml", "steps=2"], ["steps=2", "--dry-run", "run.yaml", "seed=1"]):
        assert run(kit, *words, "run_dir=x=y").out.startswith("steps 2 folder x=y")


def saved(kit):
    kit.python(
        "from areal_core.config import resolve; import pathlib; p = pathlib.Path('old'); p.mkdir();"
        "(p / 'config.yaml').write_text(resolve('run.yaml').to_yaml())"
    )


def test_a_resume_takes_the_saved_config_and_tells_what_changes(kit):
    saved(kit)
    outcome = run(kit, "--resume", "old", "--allow-changes")
    assert outcome.out == "steps 5 folder None resume old False True\n"
    outcome = run(
        kit, "--resume", "old", "steps=50", "checkpoint.every=5", "trackers=[{type: kit/remote, token: env:T}]"
    )
    assert "changed on resume: steps: 5 -> 50\n" in outcome.out
    assert "changed on resume: checkpoint.every: 0 -> 5\n" in outcome.out
    assert "changed on resume: trackers.0.type: None -> kit/remote\n" in outcome.out
    assert "steps 50 folder None resume old" in outcome.out


def test_a_resume_with_another_learning_rate_is_refused(kit):
    saved(kit)
    outcome = run(kit, "--resume", "old", "steps=50", "train_engine.learning_rate=1", "seed=3")
    assert outcome.code == 2
    assert outcome.err == (
        "areal: error: 2 of these settings cannot change on resume\n"
        "  seed: 0 -> 3\n"
        "  train_engine.learning_rate: 0.0003 -> 1.0\n"
        f"  may change: {', '.join(SAFE_ON_RESUME)}; for anything else start a new run\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "run.yaml", "b.yaml"], "there is no config file b.yaml\n"),
        (
            ["run", "run.yaml", "run_dir=there"],
            "the run folder there exists already, and is not a run\n  choose another: run_dir=PATH",
        ),
        (
            ["run", "run.yaml", f"run_dir={'x' * 300}"],
            "xxx cannot be made: File name too long\n  choose another: run_dir=",
        ),
        (["run", "run.yaml", f"run_dir=a/{'x' * 300}"], "xxx cannot be made: File name too long"),
        (["run", "run.yaml", f"run_dir={'x/' * 2100}"], "x cannot be made: File name too long"),
        (["run", "run.yaml", "run_dir=/proc/x"], "the run folder /proc/x cannot be made: No such file or directory"),
        (["run", "run.yaml", "--dry-run", "run_dir=run.yaml/x"], "run.yaml/x cannot be made: Not a directory"),
        (["run", "--resume", "there"], "there is not a run folder: it has no config.yaml"),
        (["run", "run.yaml", "--resume", "there"], "CONFIG (run.yaml) cannot be named as well"),
        (["run", "run.yaml", "--allow-changes"], "is only valid with --resume"),
        (["run"], "nothing to run"),
        (["run", "--plugins", "kti"], "no plugin named 'kti' is installed"),
        (["run", "nix.yaml"], "there is no config file nix.yaml"),
        (["run", "run.yaml", "stepz=3"], "command line: stepz: unknown key"),
        (["run", "run.yaml", "--dryrun"], "unrecognized arguments: --dryrun"),
        (["config", "shwo"], "invalid choice: 'shwo'"),
        (["config", "show", "nix.yaml"], "there is no config file nix.yaml"),
        (["run", "/dev/zero"], "cannot read the config file /dev/zero: it is a device"),
        (["config", "check", "nix.yaml"], "there is no config file nix.yaml"),
        (["config", "schema", "run.yaml"], "areal config schema describes every config"),
        (["config", "init", "run.yaml", "--plugins", "kit"], "run.yaml exists already"),
        (["config", "init", "x.yaml", "steps=3"], "areal config init takes no overrides"),
        (["audit", "nix"], "there is no run folder nix"),
        (["plugins", "nix"], "no plugin named 'nix' is installed"),
        (["rnu"], "areal has no command 'rnu', and no plugin named 'rnu' is installed\n  did you mean 'areal run'?"),
        (["kit", "gret"], "plugin kit (areal-kit 1.2.3) supplies no command named 'gret'"),
        (["bare", "x"], "the plugin bare has no commands"),
    ],
)
def test_wrong_requests_end_with_2_and_leave_nothing_behind(kit, words, told):
    (kit.work / "there").mkdir()
    kit.plugin("bare")
    before = sorted(kit.work.rglob("*"))
    outcome = kit.areal(*words)
    assert outcome.code == 2, outcome.err
    assert told in outcome.err
    assert "Traceback" not in outcome.err
    assert sorted(kit.work.rglob("*")) == before


def test_debug_shows_the_traceback(kit):
    outcome = kit.areal("run", "nix.yaml", "--debug")
    assert "Traceback" in outcome.err
    assert "UsageError: there is no config file nix.yaml" in outcome.err


def test_config_check(kit):
    assert kit.areal("config", "check", "run.yaml").out == "run is valid; plugins: kit\n"
    outcome = kit.areal("config", "check", "run.yaml", "stepz=3")
    assert outcome.code == 1
    assert "areal: error: command line: stepz: unknown key" in outcome.err


def test_config_show_tells_the_origin_of_every_value_and_can_be_run(kit):
    outcome = kit.areal("config", "show", "run.yaml", "seed=3", AREAL_SET="rollout.group_size=4")
    lines = {line.partition("  #")[0].strip(): line.partition("# ")[2] for line in outcome.out.splitlines()}
    assert lines["seed: 3"] == "command line"
    assert lines["group_size: 4"] == "AREAL_SET"
    assert lines["learning_rate: 0.0003"] == "run.yaml:8"
    assert lines["batch_size: 16"] == "default"
    assert lines["path: tiny"] == "run.yaml:2"
    kit.file("again.yaml", outcome.out)
    assert kit.areal("config", "check", "again.yaml").code == 0


def test_config_schema_has_descriptions_kinds_and_the_loaded_components(kit):
    schema = json.loads(kit.areal("config", "schema", "--plugins", "kit").out)
    assert schema["properties"]["algorithm"]["x-areal-kind"] == "algorithms"
    assert {"steps", "model", "dataset", "algorithm", "train_engine"} <= set(schema["required"])
    assert "workflow" not in schema["required"]
    assert "kit/policy" in schema["x-areal-components"]["algorithms"]
    settings = schema["x-areal-components"]["train_engines"]["kit/engine"]["settings"]
    assert settings["properties"]["learning_rate"]["description"] == "the step size"


def test_config_init_writes_what_can_be_run(kit):
    outcome = kit.areal("config", "init", "new.yaml", "--plugins", "kit")
    assert outcome.out == "wrote new.yaml; run it with: areal run new.yaml\n"
    assert kit.areal("config", "check", "new.yaml").code == 0
    assert "areal config init needs a preset" in kit.areal("config", "init").err


def test_config_init_writes_a_preset_that_is_named(kit):
    assert kit.areal("config", "init", "kit/small").out == "wrote small.yaml; run it with: areal run small.yaml\n"
    assert kit.areal("config", "check", "small.yaml").code == 0
    assert "small.yaml exists already" in kit.areal("config", "init", "kit/small").err
    assert "no preset named 'nothing'" in kit.areal("config", "init", "kit/nothing").err
    (kit.work / "small.yaml").unlink()
    assert "wrote small.yaml" in kit.areal("config", "init", "small").out, "one plugin alone has a preset of this name"


@pytest.mark.parametrize(
    "own",
    [
        "",
        "plugins: [kit]  # the only one\n",
        "plugins: [\n  kit,\n]\n",
        "plugins:\n\n# of these\n- kit\n",
        "'plugins' :\n  - kit  # the only one\n  # and no other\n",
        "plugins: kit\n",
    ],
)
def test_config_init_keeps_every_plugin_that_was_asked_for(own, kit):
    preset = kit.site / "kit_package" / "small.yaml"
    preset.write_text(f"# A title\n{own}{preset.read_text()}")
    kit.plugin("my-hearer", "@hookimpl\ndef areal_step_finished(step): ...")
    text = kit.areal("config", "init", "--plugins", "kit,my-hearer").out
    assert yaml.safe_load(text) == {**yaml.safe_load(preset.read_text()), "plugins": ["kit", "my_hearer"]}
    assert text.count("# the only one") == own.count("# the only one")


def test_plugins_lists_all_of_them_broken_ones_with_their_cause(kit):
    kit.plugin("broken", "raise RuntimeError('boom')")
    kit.plugin("hearer", "@hookimpl\ndef areal_step_finished(step): ...")
    outcome = kit.areal("plugins")
    assert outcome.code == 0
    assert f"core  areal-core {areal_core.__version__}\n" in outcome.out
    assert "kit  areal-kit 1.2.3\n" in outcome.out
    assert "  advantages: grouped, plain\n" in outcome.out
    assert "  BROKEN: plugin 'broken' (areal-broken 1.2.3) is installed but cannot be imported" in outcome.out
    assert "  event hooks:  step_finished\n" in outcome.out


def test_one_plugin_is_described_with_its_settings(kit):
    out = kit.areal("plugins", "kit").out
    for told in (
        "plugin kit, distribution areal-kit 1.2.3\n",
        "hooks: areal_advantages, areal_algorithms,",
        "train_engines: kit/engine\n  trains\n  target: kit_package.parts:Engine\n",
        "    learning_rate: number above 0, default 1e-05  (the step size)\n",
        "    betas: list, default [0.9, 0.999]\n",
        "    token: text, required\n",
    ):
        assert told in out, told


def test_plugins_as_json(kit):
    kit.plugin("broken", "raise RuntimeError('boom')")
    reports = {report["name"]: report for report in json.loads(kit.areal("plugins", "--json").out)}
    assert "RuntimeError: boom" in reports["broken"]["broken"]
    assert reports["kit"]["broken"] is None
    assert {"kind": "commands", "name": "greet"}.items() <= next(
        found.items() for found in reports["kit"]["components"] if found["kind"] == "commands"
    )
    assert kit.areal("plugins", "broken").code == 1


def test_a_command_of_a_plugin_gets_its_words_and_gives_its_code(kit):
    outcome = kit.areal("kit", "greet", "a", "--b")
    assert (outcome.code, outcome.out) == (4, "hello a --b\n")
    assert "greet                says hello" in kit.areal("kit", "--help").out


def command(name, says):
    """A plugin's record of a command, and the module with its function."""
    records = f"@hookimpl\ndef areal_commands():\n    return [Command('{name}', '{says}', target='%s:run')]\n"
    return records, f"def run(words):\n    print({says!r}, *words)\n    return 3\n"


def add_command(box, plugin, name, says):
    records, code = command(name, says)
    box.plugin(plugin, records.replace("%s", f"{plugin}_package.code"), modules={"code.py": code})


def test_a_command_that_only_one_plugin_has_needs_no_plugin(box):
    add_command(box, "servers", "serve_all", "serving")
    box.plugin("broken", "raise RuntimeError('boom')")
    for words in (["servers", "serve_all"], ["servers", "serve-all"], ["serve_all"], ["serve-all"]):
        outcome = box.areal(*words, "a", "--port", "3")
        assert (outcome.code, outcome.out, outcome.err) == (3, "serving a --port 3\n", "")
    outcome = box.areal("serve_al")
    assert outcome.code == 2
    assert "areal has no command 'serve_al', and no plugin named" in outcome.err
    assert "did you mean 'areal serve_all'?" in outcome.err


def test_a_command_of_two_plugins_is_written_in_full(box):
    add_command(box, "one", "look", "one looks")
    add_command(box, "two", "look", "two looks")
    outcome = box.areal("look", "here")
    assert outcome.code == 2
    assert outcome.err == (
        "areal: error: the command 'look' is supplied by plugin one (areal-one 1.2.3) and by plugin two "
        "(areal-two 1.2.3)\n  write areal one look or areal two look\n"
    )
    assert box.areal("two", "look", "here").out == "two looks here\n"


def test_commands_of_the_core_and_names_of_plugins_come_before_commands_of_plugins(box):
    add_command(box, "one", "config", "never by itself")
    add_command(box, "two", "three", "never by itself")
    add_command(box, "three", "two", "of three")
    assert "--version" not in box.areal("config").out
    assert box.areal("one", "config").out == "never by itself\n"
    assert box.areal("three", "--help").out == "commands of the plugin three:\n  two                  of three\n"


def test_a_result_that_cannot_be_written_is_told(box):
    for words in ("plugins --json", "config schema"):
        shell = f"' -S -m areal_core {words} > /dev/full', shell=True"
        outcome = box.python(f"import subprocess, sys; sys.exit(subprocess.call(sys.executable + {shell}))")
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err == (
            "areal: error: the result cannot be written: No space left on device\n"
            "  send standard output to where there is room\n"
        )


@pytest.mark.parametrize(("name", "ends"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_what_is_terminated_leaves_nothing_temporary_and_says_so(name, ends, box):
    code = f"""
        import os, signal, sys, tempfile, time
        from areal_core.cli import main
        from areal_core.cli.commands import doctor
        def execute(arguments):
            with tempfile.TemporaryDirectory(dir={str(box.work)!r}):
                os.kill(os.getpid(), signal.{name})
                time.sleep(50)
        doctor.execute = execute
        sys.exit(main(["doctor"]))
        """
    outcome = box.python(f"import signal; signal.signal(signal.{name}, signal.SIG_DFL)\n" + textwrap.dedent(code))
    assert (outcome.code, outcome.err) == (ends, "areal: interrupted\n")
    assert list(box.work.iterdir()) == []


def test_a_result_that_nobody_reads_ends_the_program_quietly(box):
    code = "import os; reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)\n"
    code += "import sys; from areal_core.cli import main; sys.exit(main(['plugins']))"
    outcome = box.python(code)
    assert (outcome.code, outcome.err) == (1, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_nothing(tmp_path, closed):
    """As of a program that a service manager or a script started."""
    command = f"{sys.executable} -m areal_core config check --plugins grpo {closed}"
    ended = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stdout + ended.stderr) == (0, False), ended
