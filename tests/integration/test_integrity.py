"""What a run rests on is what it was started with: in its folder, in the ledger, and outside of both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Workplace

pytestmark = pytest.mark.slow

PARTS = "import helper\n\ndef digits(completion):\n    return helper.share(completion)\n"
HELPER = "def share(completion):\n    return sum(map(str.isdigit, completion)) / 8\n"
IMPORTED = "def short(completion):\n    return -len(completion) / 100\n"
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(1, 30)]
WORDS = (
    "checkpoint.every=1",
    "dataset={type: rewards/jsonl, paths: [data.jsonl]}",
    "plugins=[grpo,hf,fsdp,rewards,view]",
    "rewards=['parts.py:digits','own.rewards:short']",
)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, workplace_in: Callable[[Path], Workplace]) -> Workplace:
    """A run of four steps, with files, modules, data and a model of the user's own; each test leaves it to the next."""
    workplace = workplace_in(tmp_path_factory.mktemp("started"))
    folder = workplace.folder
    found = [str(folder), *filter(None, [workplace.environment.get("PYTHONPATH")])]
    workplace.environment["PYTHONPATH"] = os.pathsep.join(found)  # else there is no module `own.rewards`
    model = (folder / "model").resolve()
    (folder / "model").unlink()
    shutil.copytree(model, folder / "model")
    (folder / "own").mkdir()
    own = {"parts.py": PARTS, "helper.py": HELPER, "own/__init__.py": "", "own/rewards.py": IMPORTED}
    for name, text in own.items():
        (folder / name).write_text(text)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = workplace.areal("run", "run.yaml", "run_dir=run", *WORDS)
    assert done.code == 0, done.err
    return workplace


@pytest.mark.nightly
def test_another_checkpoint_and_numbers_that_are_none_are_errors_in_words(started: Workplace) -> None:
    folder = started.folder
    done = started.areal("run", "run.yaml", "run_dir=other", "seed=1", *WORDS)
    assert done.code == 0, done.err
    path = "attempts/1/checkpoints/step-000004"
    shutil.copytree(folder / "run", folder / "swapped")
    shutil.rmtree(folder / "swapped" / path)
    shutil.copytree(folder / "other" / path, folder / "swapped" / path)
    audit, refused = started.areal("audit", "swapped"), started.areal("run", "--resume", "swapped", "steps=5")
    assert (audit.code, refused.code) == (1, 1)
    for text in (audit.out, refused.err):
        assert "is not the checkpoint that the run committed" in text
    shutil.copytree(folder / "run", folder / "spoiled")
    with closing(sqlite3.connect(folder / "spoiled/attempts/1/ledger/ledger.sqlite")) as database:
        database.execute("UPDATE facts SET value = 'many' WHERE name = 'committed_step'")
        database.commit()
    for words in (("audit", "spoiled"), ("run", "--resume", "spoiled", "steps=5")):
        done = started.areal(*words)
        assert done.code == 1
        assert "is damaged" in done.out + done.err
        assert "Traceback" not in done.out + done.err


@pytest.mark.nightly
def test_a_resume_is_refused_where_something_has_changed(started: Workplace) -> None:
    folder = started.folder
    kept = next((folder / "run/sources").glob("parts-*.py"))
    changes = {
        "dataset: the content of 29 rows": ("data.jsonl", '"4"', '"5"'),
        "module helper: the content": ("helper.py", "/ 8", "* 8"),
        "module own.rewards: the content": ("own/rewards.py", "-len", "len"),
        f"{folder}/parts.py: the content": ("parts.py", "return", "return 64 *"),
        "model.path: the content": ("model/config.json", "{", "{ "),
        f"{folder}/run/config.yaml: was written by the run": ("run/config.yaml", "seed: 0", "seed: 1"),
        f"{kept}: was written by the run": (str(kept), "return", "return 64 *"),
    }
    before = {name: (folder / name).read_text() for name, *_ in changes.values()}
    for name, old, new in changes.values():
        assert old in before[name]
        (folder / name).write_text(before[name].replace(old, new))
    refused, audit = started.areal("run", "--resume", "run", "steps=5", "--dry-run"), started.areal("audit", "run")
    assert (refused.code, audit.code) == (2, 1)
    assert "7 thing(s) have changed" in refused.err
    assert "--allow-changes" in refused.err
    assert [told for told in changes if told not in refused.err] == []
    assert audit.out.count("was written by the run") == 2
    for name, text in before.items():
        (folder / name).write_text(text)
    (folder / "helper.py").write_text(HELPER.replace("/ 8", "* 8"))
    done = started.areal("run", "--resume", "run", "steps=8", "--allow-changes")
    assert done.code == 0, done.err
    assert started.metrics()[-1]["reward/digits"] > 1, "the new helper counts"


@pytest.mark.nightly
def test_a_resume_needs_no_file_of_the_users_own(started: Workplace) -> None:
    """Nor does an audit, nor a report."""
    folder = started.folder
    for name in ("parts.py", "helper.py", "run.yaml"):
        (folder / name).unlink()
    shutil.rmtree(folder / "own")
    (folder / "elsewhere").mkdir()
    (folder / "run").rename(folder / "elsewhere/run")
    audit = started.areal("audit", "elsewhere/run")
    assert audit.code == 0, audit.out
    done = started.areal("run", "--resume", "elsewhere/run", "steps=9")
    assert done.code == 0, done.err
    assert (folder / "elsewhere/run/report.html").is_file()
    assert started.areal("audit", "elsewhere/run").code == 0


SPOILS = """\
from pathlib import Path

SPOILED = set()

def digits(completion):
    run = Path(__file__).parent / "run"
    for path in run.glob("attempts/1/segments/*"):
        if (run / "attempts/1/checkpoints/step-000002").exists() and not (run / "attempts/2").exists():
            if path not in SPOILED:
                SPOILED.add(path)
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
    return sum(map(str.isdigit, completion)) / 8
"""


@pytest.mark.nightly
def test_what_is_damaged_before_it_is_trained_on_is_generated_again(workplace: Workplace) -> None:
    """One bit of every segment, from the first checkpoint on, until somebody has seen it."""
    (workplace.folder / "parts.py").write_text(SPOILS)
    done = workplace.areal(
        "run", "run.yaml", "run_dir=run", "steps=20", "checkpoint.every=2", "rollout.max_staleness=4"
    )
    assert done.code == 0, done.err
    assert "are damaged, from byte" in done.out
    assert ": generating group " in done.out
    assert [line["step"] for line in workplace.metrics()] == [*range(1, 21)]
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.nightly
def test_a_run_that_is_killed_before_its_first_checkpoint_says_what_is_lost(workplace: Workplace) -> None:
    process = workplace.start("run", "run.yaml", "run_dir=run", "steps=500", "checkpoint.every=400")
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = workplace.areal("run", "--resume", "run", "steps=4", "--allow-changes")
    assert done.code == 0, done.err
    assert "has no checkpoint: it begins again, and its first " in done.out
