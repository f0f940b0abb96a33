"""What `areal slurm submit` writes and refuses; no SLURM is asked."""

from pathlib import Path

import pytest

from areal_core.errors import ConfigError, RunError, UsageError
from areal_slurm.sizes import gpus_of
from areal_slurm.submission import main, task_numbers

RUN = """
steps: 1
model: {path: tiny}
dataset: parts.py:Part
workflow: single_turn
inference_engine: parts.py:Part
train_engine: parts.py:Part
algorithm: parts.py:Part
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """With a config, and no SLURM."""
    (tmp_path / "parts.py").write_text("class Part: ...\n")
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    return tmp_path


def directives(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize(
    ("words", "is_noted"),
    [
        (["--gres=gpu:8"], True),
        ([], False),
        (["--gres=gpu:8", "launcher.trainer_processes=2"], False),
        (["--gres=gpu:8", "--nodes=2", "placement=train=16"], False),
    ],
)
def test_gpus_that_no_placement_assigns_are_noted(capsys, words, is_noted):
    assert main(["run.yaml", "run_dir=my run", *words, "--dry-run"]) == 0
    assert ("the config has no placement" in capsys.readouterr().err) == is_noted


def test_the_script_starts_the_run_and_goes_on_with_it(capsys, folder):
    words = ["--nodes=4", "--gres=gpu:8", "--time=4:00:00", "--sbatch=--exclusive", "--warn=300"]
    assert main(["run.yaml", "run_dir=my run", "launcher.setup=module load cuda", *words, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert directives(script) == [
        "--job-name=run", "--nodes=4", "--time=4:00:00", "--gres=gpu:8", "--ntasks-per-node=1", "--no-kill",
        "--requeue", "--open-mode=append", "--signal=B:USR1@300", f"--output='{folder}/my run/slurm.log'",
        f"--chdir={folder}", "--exclusive",
    ]  # fmt: skip
    assert script.index("trap '' USR1") < script.index("set -e\nmodule load cuda\nset +e\n") < script.index("\nexec ")
    assert script.endswith(f"-m areal_core run --resume '{folder}/my run'\n\n")
    assert not Path("my run").exists()


def test_an_array_has_a_folder_for_each_run(capsys, folder):
    assert main(["run.yaml", "run_dir=all", "--array=0-3%2", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert f"--output={folder}/all/task-%a/slurm.log" in directives(script)
    assert script.endswith(f"run --resume {folder}/all/task-$SLURM_ARRAY_TASK_ID\n\n")


@pytest.mark.parametrize(
    ("expression", "numbers"), [("0-3", [0, 1, 2, 3]), ("1,5,7%2", [1, 5, 7]), ("0-8:4", [0, 4, 8]), ("0", [0])]
)
def test_numbers_of_an_array(expression, numbers):
    assert task_numbers(expression) == numbers


def test_an_array_of_something_else_is_refused():
    with pytest.raises(UsageError, match="--array=all is not a list of numbers"):
        task_numbers("all")


@pytest.mark.slow
def test_a_refused_submission_leaves_nothing():
    with pytest.raises(RunError, match="the command sbatch was not found on this machine"):
        main(["--plugins", "grpo", "run_dir=run"])
    assert not Path("run").exists()


@pytest.mark.slow
def test_what_cannot_start_is_told_before_it_waits_in_a_queue():
    with pytest.raises(ConfigError, match=r"there is no folder .*/tiny"):
        main(["run.yaml", "run_dir=run"])
    assert not Path("run").exists()


def test_a_folder_that_is_there_is_gone_on_with():
    Path("run").mkdir()
    with pytest.raises(UsageError, match="exists already") as caught:
        main(["run.yaml", "run_dir=run"])
    assert f"areal slurm submit --resume {Path('run').resolve()}" in str(caught.value)


def test_a_config_s_other_launcher_gives_way_with_its_settings(folder):
    (folder / "run.yaml").write_text(f"{RUN}launcher: {{type: local}}\n")
    assert main(["run.yaml", "--dry-run"]) == 0


def test_a_launcher_that_was_chosen_stays():
    with pytest.raises(UsageError, match="the launcher of the run is local, which does not use the nodes of a job"):
        main(["run.yaml", "launcher.type=local", "--dry-run"])


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gpu:8", 8), ("gpu", 1), ("gpu:h200:4", 4), ("gpu:a100", 1), ("nvme:1,gpu:h200:2,gpu:a100:1(S:0-1)", 3),
     ("nvme:2", None), ("gpufs:2", None), (None, None)],
)  # fmt: skip
def test_gpus_of_each_node(gres, gpus):
    assert gpus_of(gres) == gpus


PLACED = ["--plugins", "sglang", "inference_engine=sglang", "placement=train=16 generate=tp2x4", "--dry-run"]


@pytest.fixture
def placed():
    """Words of a job whose run needs 24 GPUs."""
    pytest.importorskip("areal_sglang", reason="the first-party plugins are not installed")
    return ["run.yaml", "run_dir=run", *PLACED]


@pytest.mark.parametrize(
    "words",
    [["--nodes=3", "--gres=gpu:8"], ["--nodes=6-8", "--gres=gpu:h200:4"], ["--nodes=1"],
     ["--gres=gpu:8", "--sbatch=hetjob", "--sbatch=--nodes=2", "--sbatch=--gres=gpu:8"]],
)  # fmt: skip
def test_a_job_that_is_large_enough_or_says_it_in_another_way(placed, words):
    assert main([*placed, *words]) == 0


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--nodes=2", "--gres=gpu:8"], "needs 24 GPUs, but --nodes 2 --gres gpu:8 requests 16\n", "--nodes 3"),
        (["--nodes=5-9", "--gres=gpu:h200:4"], "--nodes 5-9 --gres gpu:h200:4 requests 20 at least", "--nodes 6"),
        (["--gres=gpu:8"], "--nodes 1 --gres gpu:8 requests 8\n", "--nodes 3, or a placement on fewer GPUs"),
    ],
)
def test_a_job_that_is_too_small_is_refused(placed, words, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        main([*placed, *words])
    assert hint in str(caught.value)


def test_gpus_that_do_both_are_counted_once(placed):
    both = ["placement=train=8 generate=tp2x4 colocated", "inference_engine.memory_saver=true"]
    assert main([*placed, *both, "--gres=gpu:8"]) == 0


def test_a_run_that_goes_on_is_held_against_its_new_job(folder, placed):
    (folder / "old").mkdir()
    words = ["launcher: {type: slurm}", "plugins: [sglang, slurm]"]
    words += ['placement: "train=16 generate=tp2x4"', f"base_dir: {folder}"]
    text = RUN.replace("inference_engine: parts.py:Part", "inference_engine: sglang") + "\n".join(words)
    (folder / "old" / "config.yaml").write_text(text)
    with pytest.raises(UsageError, match="needs 24 GPUs"):
        main(["--resume", "old", "--nodes=2", "--gres=gpu:8", "--dry-run"])
    assert main(["--resume", "old", "--nodes=3", "--gres=gpu:8", "--dry-run"]) == 0
