"""Tasks of Harbor, played in a true sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from policies import Policy

from areal_agents.harbor.config import HarborDataSettings, HarborSettings
from areal_agents.harbor.tasks import HarborTasks, read_task
from areal_agents.harbor.workflow import HarborTestsError, HarborWorkflow
from areal_core.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TASK = Path(__file__).parents[3] / "examples" / "environments" / "harbor_tasks" / "count-words"


def bash(command: str) -> str:
    escaped = command.replace("\\", "\\\\").replace('"', '\\"')
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{escaped}"}}}}\n</tool_call>'


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A copy of the example's task."""
    return Path(shutil.copytree(TASK, tmp_path / "count-words"))


@pytest.fixture
def play(bubblewrap: None) -> Callable[..., Any]:
    """Plays a task with a policy that says the texts; the episode."""

    def played(folder: Path, texts: Sequence[str], **settings: Any) -> Any:
        chosen = HarborSettings.model_validate({"sandbox": {"type": "sandboxes/bubblewrap"}, **settings})
        workflow = HarborWorkflow(chosen)
        (row,) = HarborTasks(HarborDataSettings(path=folder))
        assert workflow.check_row(row) == ""
        policy = Policy("chat", lambda number: texts[number])
        return asyncio.run(workflow.run_episode(row, policy.context))

    return played


def test_the_policy_works_in_a_shell_and_the_tests_reward_it(play: Callable[..., Any], task: Path) -> None:
    solution = (task / "solution" / "solve.sh").read_text()
    right = play(task, [bash("pwd; ls"), bash(solution.splitlines()[-1]), "done"])
    assert (right.reward, right.rewards) == (1.0, {"exists": 1.0})
    assert "/app\\ntext.txt" in right.text.replace("\n", "\\n")
    wrong = play(task, [bash("echo 5 > words.txt"), bash("cat words.txt"), "done"])
    assert (wrong.reward, wrong.rewards) == (0.0, {"exists": 1.0})
    assert "5" in wrong.text
    lazy = play(task, ["I will not."])
    assert (lazy.reward, lazy.rewards) == (0.0, {"exists": 0.0})


def test_what_is_wrong_with_a_command_is_its_output(play: Callable[..., Any], task: Path) -> None:
    other = bash("true").replace("bash", "python")
    texts = [bash("no_such_program"), bash("sleep 60"), other, bash("seq 99999"), "done"]
    episode = play(task, texts, command_timeout_s=1.0, longest_result=300, max_tokens=60000)
    for text in ("command not found", "exit code 127", "limit of time", "there is one tool, bash", "... (cut)"):
        assert text in episode.text
    assert episode.metrics["agents/tool_errors"] == 1.0


def test_a_limit_of_steps_ends_the_episode_and_the_tests_run(play: Callable[..., Any], task: Path) -> None:
    count = "wc --words < text.txt > words.txt"
    assert play(task, [bash("true"), bash(count)], max_steps=2).reward == 1.0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param("echo no network; exit 3", r"wrote no reward \(exit code 3\): no network", id="none"),
        pytest.param("echo yes > /logs/verifier/reward.txt", "wrote no number", id="text"),
        pytest.param("echo nan > /logs/verifier/reward.txt", "no finite number", id="nan"),
        pytest.param('echo \'{"reward": "1"}\' > /logs/verifier/reward.json', "no finite number", id="text in JSON"),
        pytest.param("echo '{\"right\": 1}' > /logs/verifier/reward.json", "set reward_key", id="another key"),
        pytest.param("sleep 60", "ended by their limit of time", id="hangs"),
        pytest.param(
            "cd /logs/verifier; echo 1 > reward.json; echo 0 > reward.txt", "which one counts", id="two rewards"
        ),
    ],
)
def test_tests_that_give_no_reward_fail_the_episode(
    play: Callable[..., Any], task: Path, script: str, reason: str
) -> None:
    (task / "tests" / "test.sh").write_text(script)
    with pytest.raises(HarborTestsError, match=reason):
        play(task, ["done"], tests_timeout_s=2.0)


def test_rewards_are_read_as_harbor_reads_them(play: Callable[..., Any], task: Path) -> None:
    (task / "tests" / "test.sh").write_text("echo 0.5 > /logs/verifier/reward.txt")
    assert play(task, ["done"]).reward == 0.5
    (task / "tests" / "test.sh").write_text('echo \'{"a": 0.25, "b": 2}\' > /logs/verifier/reward.json')
    episode = play(task, ["done"], reward_key="a")
    assert (episode.reward, episode.rewards) == (0.25, {"b": 2.0})


def test_the_policy_cannot_write_its_reward_or_read_the_tests_or_lead_areal_out(
    play: Callable[..., Any], task: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    planted = bash(
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; ls /tests; "
        f"rm -rf /logs/verifier; ln -s {tmp_path} /logs/verifier; ln -s {secret} words.txt"
    )
    episode = play(task, [planted, "done"])
    assert episode.reward == 0.0
    assert "cannot access" in episode.text
    # The tests may run the policy's code: a link in their own folder is not followed outside of the sandbox.
    (task / "tests" / "test.sh").write_text(f"ln -s {secret} /logs/verifier/reward.txt")
    with pytest.raises(HarborTestsError, match="wrote no reward"):
        play(task, ["done"])


def test_a_policy_that_fills_the_disk_fails_its_episode_and_nothing_stays(
    play: Callable[..., Any], task: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(ValueError, match=r"more than workflow\.disk_mib"):
        play(task, [bash("head -c 3000000 /dev/zero > large"), "done"], disk_mib=2)
    assert not any((tmp_path / "tmp").iterdir())


def test_the_environment_of_a_task_reaches_commands_and_tests(play: Callable[..., Any], task: Path) -> None:
    toml = (task / "task.toml").read_text().replace('"/app"', '"/work-here"')
    toml += '\n[environment.env]\nNAME = "a b"\n\n[verifier.env]\nSCORE = "0.75"\n'
    (task / "task.toml").write_text(toml)
    (task / "tests" / "test.sh").write_text('[ "$NAME" = "a b" ] && echo $SCORE > /logs/verifier/reward.txt')
    episode = play(task, [bash('echo "<$NAME|$SCORE>"; pwd'), "done"])
    assert episode.reward == 0.75
    assert "<a b|>" in episode.text
    assert "/work-here" in episode.text


def test_limits_of_the_sandbox_below_the_timeouts_are_named() -> None:
    short = {"sandbox": {"type": "sandboxes/bubblewrap", "time_s": 20, "cpu_s": 300}, "tests_timeout_s": 60}
    (problem,) = HarborSettings.model_validate(short).check(None)  # type: ignore[arg-type]
    assert problem.startswith("sandbox: its time_s is 20 and ends commands and tests before")
    assert "set sandbox.time_s to 60" in problem
    assert not list(HarborSettings.model_validate({**short, "tests_timeout_s": 15, "command_timeout_s": 5}).check(None))  # type: ignore[arg-type]


def test_calls_of_one_answer_run_in_their_order(play: Callable[..., Any], task: Path) -> None:
    episode = play(task, [bash("sleep 0.5; mkdir a") + bash("cd a && echo inside"), "done"])
    assert "inside" in episode.text


def test_a_sandbox_without_folders_is_refused() -> None:
    settings = HarborSettings.model_validate({"sandbox": {"type": "sandboxes/none"}})
    with pytest.raises(ConfigError, match="keeps no folders"):
        HarborWorkflow(settings)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"environment/Dockerfile": "FROM a"}, "needs a container that environment/Dockerfile", id="build"),
        pytest.param({"task.toml": '[environment]\ndocker_image = "a:1"'}, "needs the container image a:1", id="image"),
        pytest.param({"task.toml": '[[steps]]\nname = "a"'}, "has several steps", id="steps"),
        pytest.param({"task.toml": '[environment]\nos = "windows"'}, "needs windows", id="system"),
        pytest.param({"task.toml": '[environment]\nworkdir = "/a/b"'}, "works in /a/b", id="folder"),
        pytest.param(
            {"task.toml": '[verifier]\nenvironment_mode = "separate"'},
            "has tests with an environment of their own",
            id="separate",
        ),
        pytest.param({"task.toml": '[verifier.env]\nKEY = "${KEY}"'}, "takes KEY from the environment", id="secret"),
        pytest.param({"tests/test.sh": None}, "has no tests/test.sh", id="no tests"),
    ],
)
def test_tasks_that_a_sandbox_cannot_play_are_named(task: Path, change: dict[str, str | None], reason: str) -> None:
    for path, text in change.items():
        if text is None:
            (task / path).unlink()
        else:
            (task / path).write_text(text)
    assert reason in read_task(task)[1][0]
    shutil.copytree(TASK, task.parent / "a-good-one")
    with pytest.raises(RunError, match=f"1 of 2 tasks cannot be played.*count-words {reason}"):
        HarborTasks(HarborDataSettings(path=task.parent))
    (row,) = HarborTasks(HarborDataSettings(path=task.parent, skip_unsupported=True))
    assert row["folder"].endswith("a-good-one")


def test_links_out_of_a_task_are_refused_and_never_followed(
    play: Callable[..., Any], task: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the key")
    (task / "environment" / "inside").symlink_to("text.txt")
    assert "place" in play(task, [bash("cat inside"), "done"]).text
    link = task / "environment" / "outside"
    link.symlink_to(secret)
    with pytest.raises(RunError, match="count-words has environment/outside, which leads out of its folder"):
        HarborTasks(HarborDataSettings(path=task))
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(
        RunError, match="count-words has environment/outside, which leads out of its folder or is no file"
    ):
        HarborTasks(HarborDataSettings(path=task))
    link.unlink()
    (row,) = HarborTasks(HarborDataSettings(path=task))
    link.symlink_to(secret)  # after the data set was read
    workflow = HarborWorkflow(HarborSettings.model_validate({"sandbox": {"type": "sandboxes/bubblewrap"}}))
    texts = [bash("cat outside"), "done"]
    episode = asyncio.run(workflow.run_episode(row, Policy("chat", lambda number: texts[number]).context))
    assert "the key" not in episode.text
    assert "No such file" in episode.text


@pytest.mark.parametrize("toml", ["[environment]\nworkdir = 5", "environment = 5", "[verifier]\nenv = 3"])
def test_a_task_that_cannot_be_read_is_named(task: Path, toml: str) -> None:
    (task / "task.toml").write_text(toml)
    with pytest.raises(RunError, match=r"the task .*count-words cannot be read"):
        HarborTasks(HarborDataSettings(path=task))


def test_tasks_are_chosen_by_name_and_number(task: Path) -> None:
    shutil.copytree(TASK, task.parent / "second")
    names = [Path(row["folder"]).name for row in HarborTasks(HarborDataSettings(path=task.parent))]
    assert names == ["count-words", "second"]
    (row,) = HarborTasks(HarborDataSettings(path=task.parent, first=1))
    assert Path(row["folder"]).name == "second"
    (row,) = HarborTasks(HarborDataSettings(path=task.parent, tasks=["second"]))
    assert Path(row["folder"]).name == "second"
    with pytest.raises(RunError, match="has no tasks third"):
        HarborTasks(HarborDataSettings(path=task.parent, tasks=["third"]))
    with pytest.raises(RunError, match="has no task 2"):
        HarborTasks(HarborDataSettings(path=task.parent, first=2))
    (task / "task.toml").write_text("[")
    with pytest.raises(RunError, match=r"task\.toml cannot be read"):
        HarborTasks(HarborDataSettings(path=task.parent))
