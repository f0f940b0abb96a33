"""`areal view` on true runs: the tokens that are kept are those that were trained on, and time adds up."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.conftest import Workplace

pd = pytest.importorskip("pandas")
pytestmark = pytest.mark.slow
WORDS = ("run", "run.yaml", "steps=3", "run_dir=run", "plugins=[grpo, hf, fsdp, rewards, view]")


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.nightly), 2])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, workplace_in: Any) -> Workplace:
    """A finished run that has logged every group, on one rank and on two, in several updates of each batch."""
    workplace: Workplace = workplace_in(tmp_path_factory.mktemp("run"))
    also = (f"launcher.trainer_processes={request.param}", "training.logged_groups=100", "training.num_minibatches=2")
    done = workplace.areal(*WORDS, *also)
    assert done.code == 0, done.err
    workplace.ranks = request.param  # type: ignore[attr-defined]
    return workplace


def test_the_tokens_add_up_to_the_loss_and_to_the_metrics(run: Workplace) -> None:
    every = pd.read_parquet(run.folder / "run" / "rollouts")
    for line in run.metrics():
        tokens = every[every.step == line["step"]]
        trained = tokens[tokens.loss_mask]
        assert len(trained) == line["batch/sampled_tokens"]
        # Two updates: the metric is their mean, and each is the sum over the half of the groups that it saw.
        assert (tokens.loss * tokens.loss_weights).sum() / 2 == pytest.approx(line["train/loss"], abs=1e-5)
        for name in ("clip_fraction", "entropy"):
            assert trained[name].mean() == pytest.approx(line[f"train/{name}"], rel=1e-4, abs=1e-6), name
        assert tokens.groupby(["group_id", "sample_index"]).reward.first().mean() == pytest.approx(line["reward/mean"])
        assert trained.advantages.abs().mean() == pytest.approx(line["train/advantage_magnitude"], rel=1e-4)
        first = tokens[tokens.position == 0]
        assert first.logprobs.isna().all(), "nothing predicts the first token"
        assert (trained.versions >= 0).all()
        assert (tokens[~tokens.loss_mask].turn < 0).all()


@pytest.mark.nightly
def test_of_several_updates_the_last_one_counts_and_the_proximal_policy_is_that_of_the_loss(
    workplace: Workplace,
) -> None:
    """In the second epoch a sequence is often on another rank than in the first."""
    also = ("launcher.trainer_processes=2", "training.logged_groups=100", "training.num_minibatches=2")
    also = (*also, "training.num_epochs=2", "algorithm={type: grpo, proximal: behavior}", "steps=1")
    done = workplace.areal(*WORDS, *also)
    assert done.code == 0, done.err
    tokens = pd.read_parquet(workplace.folder / "run" / "rollouts")
    trained = tokens[tokens.loss_mask]
    assert (trained.proximal_logprobs == trained.behavior_logprobs).all(), "as the loss took it"
    assert tokens[tokens.turn < 0].behavior_logprobs.isna().all(), "nobody has sampled them"
    assert (trained.ratio - (trained.logprobs - trained.behavior_logprobs).map(math.exp)).abs().max() < 1e-3
    # Only the first update sees the weights that have sampled.
    moved = (trained.logprobs - trained.behavior_logprobs).abs().groupby([trained.group_id, trained.sample_index]).max()
    assert (moved > 1e-4).all(), "every sequence is that of the second epoch"


def test_every_process_says_what_it_did_and_when(run: Workplace) -> None:
    done = run.areal("view", "run", "--trace")
    assert done.code == 0, done.err
    events = json.loads((run.folder / done.out.strip()).read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ranks = {f"trainer-{rank}" for rank in range(run.ranks)}  # type: ignore[attr-defined]
    assert ranks | {"controller", "worker-0", "server-0"} <= {*names.values()}
    spans = [event for event in events if event["ph"] == "X"]
    by_track: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for span in spans:
        by_track[span["pid"], span["tid"]].append(span)
    for own in by_track.values():
        ordered = sorted(own, key=lambda span: span["ts"])
        ends = [span["ts"] + span["dur"] for span in ordered]
        assert all(end <= after["ts"] for end, after in zip(ends, ordered[1:], strict=False)), "spans overlap"
    for rank in ranks:
        phases = [span["name"] for span in spans if names[span["pid"]] == rank]
        assert phases.count("train") >= 3, phases
        assert "wait" in phases
    held = [span for span in spans if span["name"] == "held"]
    assert len(held) >= 2, "a server is held while its weights change"
    groups = [span for span in spans if span["name"].startswith("version ")]
    assert len({span["args"]["about"] for span in groups}) >= 12


def test_pages_are_written_and_served(run: Workplace) -> None:
    done = run.areal("view", "run", "--no-open")
    assert (done.code, done.out.strip()) == (0, "run/report.html"), done.err
    data = run_data(run.folder / done.out.strip())
    assert data["rollout_steps"] == [1, 2, 3]
    assert len(data["rollouts"]["2"]) == data["sequences"]["step"].count(2)
    done = run.areal("view", "run", "--no-open", "--steps", "2:3")
    assert done.code == 0
    assert [*run_data(run.folder / "run" / "report.html")["rollouts"]] == ["2"]
    process = run.start("view", "run", "--serve", "--no-open")
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url) as page:
            assert b'id="run"' in page.read()
        with urllib.request.urlopen(f"{url}rollouts/step-3.js") as script:
            assert script.read().startswith(b"arealRollouts(3, [{")
        for wrong in (url.rstrip("/")[:-1] + "/", f"{url}rollouts/step-9.js", f"{url}../config.yaml", f"{url}x"):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(wrong)
    finally:
        process.terminate()
        process.communicate()


def test_a_token_of_the_page_has_the_numbers_that_are_stored(run: Workplace) -> None:
    """In a real Chromium: the page is opened, a group chosen by its reward, and each of its tokens pointed at."""
    api = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no chromium on this machine")
    assert run.areal("view", "run", "--no-open").code == 0
    tokens = pd.read_parquet(run.folder / "run" / "rollouts" / "step-000003.parquet")
    best = tokens.loc[tokens.reward.idxmax()]
    own = tokens[(tokens.group_id == best.group_id) & (tokens.sample_index == best.sample_index)].reset_index()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page()
        page.goto(f"{(run.folder / 'run/report.html').absolute().as_uri()}#rollouts")
        page.fill("#step-from", "3")
        page.fill("#reward-from", str(best.reward))
        page.locator("#table tbody tr[data-row]").first.click()
        assert page.url.endswith(f"#tokens/3/{best.group_id}")
        for place in range(len(own)):
            element = page.locator(f"[data-sample='{best.sample_index}'] [data-token='{place}']")
            if not element.count():
                continue  # of the prompt, which all answers share
            element.hover()
            assert json.loads(page.locator("#panel-text").inner_text()) == own.text[place]
            shown = {
                row.get_attribute("data-column"): row.get_attribute("data-value")
                for row in page.locator("#panel tr").all()
            }
            for name in ("advantages", "logprobs", "entropy", "loss", "correction_weights", "behavior_logprobs"):
                stored = own[name][place]
                assert float(shown[name]) == pytest.approx(stored, rel=1e-4), (name, place)
        browser.close()


def run_data(page: Path) -> dict[str, Any]:
    """What a page was given."""
    text = page.read_text()
    found: dict[str, Any] = json.loads(text.partition('id="run">')[2].partition("</script>")[0])
    return found


@pytest.mark.nightly
def test_without_logged_groups_and_of_fine_tuning(workplace: Workplace) -> None:
    done = workplace.areal(*WORDS, "training.logged_groups=0")
    assert done.code == 0, done.err
    assert not (workplace.folder / "run" / "rollouts").exists()
    (workplace.folder / "rows.jsonl").write_text('{"prompt": "1+2=", "completion": "3"}\n' * 4)
    config = "plugins: [fsdp, rewards, finetuning, view]\nsteps: 1\nmodel: {path: model}\nalgorithm: finetuning/sft\n"
    data = "dataset: {type: rewards/jsonl, paths: [rows.jsonl]}\ntrain_engine: fsdp\nrollout: {batch_size: 4}\n"
    (workplace.folder / "sft.yaml").write_text(config + data)
    done = workplace.areal("run", "sft.yaml", "run_dir=sft")
    assert done.code == 0, done.err
    tokens = pd.read_parquet(workplace.folder / "sft" / "rollouts")
    assert set(tokens.text) >= {"1", "+", "3"}
    assert tokens[tokens.loss_mask].logprobs.notna().all()
    assert workplace.areal("view", "sft", "--no-open").code == 0
    done = workplace.areal("view", "model", "--no-open")
    assert done.code == 2
    assert "Traceback" not in done.err


@pytest.mark.nightly
@pytest.mark.parametrize("tracker", ["wandb", "trackio", "mlflow"])
def test_trackers_get_a_table_of_what_was_written(workplace: Workplace, tracker: str) -> None:
    pytest.importorskip(tracker)
    also = {"wandb": ", mode: offline", "trackio": "", "mlflow": f", uri: 'file:{workplace.folder}/mlflow'"}[tracker]
    workplace.environment |= {"TRACKIO_DIR": str(workplace.folder / "store"), "MLFLOW_ALLOW_FILE_STORE": "true"}
    chosen = f"trackers=[{{type: trackers/{tracker}, completions_every: 2{also}}}]"
    done = workplace.areal(*WORDS, chosen, "plugins=[grpo, hf, fsdp, rewards, view, trackers]")
    assert done.code == 0, done.err
    assert "switched off" not in done.err
    rows = {
        "wandb": lambda: wandb_rows(workplace.folder / "run"),
        "trackio": lambda: trackio_rows(workplace),
        "mlflow": lambda: mlflow_rows(workplace.folder / "mlflow"),
    }[tracker]()
    tokens = pd.read_parquet(workplace.folder / "run" / "rollouts" / "step-000002.parquet")
    kept = tokens.groupby(["group_id", "sample_index"])
    assert len(rows) == kept.ngroups == 8, "two groups of four, of the second step alone"
    for row in rows:
        own = kept.get_group((row["group_id"], row["sample_index"]))
        assert row["step"] == 2
        assert row["prompt"] + row["completion"] == "".join(own.text)
        assert row["completion"] == "".join(own[own.turn >= 0].text)
        assert row["reward"] == pytest.approx(own.reward.iloc[0])
        assert row["advantage"] == pytest.approx(own[own.turn >= 0].advantages.mean(), rel=1e-4)


def wandb_rows(run_dir: Path) -> list[dict[str, Any]]:
    (table,) = run_dir.glob("wandb/offline-run-*/files/media/table/*.json")
    found = json.loads(table.read_text())
    return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]


def trackio_rows(workplace: Workplace) -> list[dict[str, Any]]:
    read = (
        "import json; from trackio.sqlite_storage import SQLiteStorage; "
        "print(json.dumps(SQLiteStorage.get_logs('areal', 'run')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", read], env=workplace.environment, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in json.loads(done.stdout) if "completions" in line]
    rows: list[dict[str, Any]] = line["completions"]["_value"]
    return rows


def mlflow_rows(folder: Path) -> list[dict[str, Any]]:
    (table,) = folder.rglob("completions/step-000002.json")
    found = json.loads(table.read_text())
    return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]
