"""`areal run examples/gsm8k.yaml` against a hub: cold cache and warm, interrupted and gone on, and none."""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING

import pytest

from tests.hub.conftest import gsm8k_rows
from tests.hub.local_hub import MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hub.conftest import AtHub
    from tests.hub.local_hub import LocalHub

pytestmark = pytest.mark.slow
SMALL = ["steps=2", "model.dtype=float32", "sampling.max_new_tokens=4", "evaluation.limit=2", "rollout.batch_size=2"]
SMALL += ["rollout.group_size=2", "algorithm.group_filters=[]", "checkpoint.every=0"]
RUN = ["run", "gsm8k.yaml", *SMALL, "run_dir=run"]
WEIGHTS = f"/cdn/models/{MODEL}/model.safetensors"


PIECE = 10 << 20
"""What huggingface_hub writes at a time."""


def weights_in(at_hub: AtHub) -> list[Path]:
    """The weights of the model in the cache, whole."""
    return list(at_hub.cache.glob("hub/models--Qwen--*/snapshots/*/model.safetensors"))


def assert_whole(at_hub: AtHub, hub: LocalHub) -> None:
    """The weights in the cache are those of the hub."""
    (weights,) = weights_in(at_hub)
    assert weights.read_bytes() == hub.repositories["models", MODEL].files["model.safetensors"]


def ranges(hub: LocalHub) -> list[str]:
    """The parts of the weights that were asked for."""
    return [one.range for one in hub.requests if one.path == WEIGHTS and one.method == "GET"]


@pytest.mark.nightly
def test_a_cold_cache_a_warm_one_and_none_but_the_cache(at_hub: AtHub, hub: LocalHub) -> None:
    """The driver downloads before anything starts; the other processes ask for the data set alone, and for no file."""
    dry = at_hub.areal(*RUN, "--dry-run")
    assert dry.code == 0, dry.err
    assert f"{MODEL}, on the Hugging Face hub" in dry.out
    assert not [path for path in hub.downloads() if path.endswith(("model.safetensors", "tokenizer.json"))]

    first = at_hub.areal(*RUN)
    assert first.code == 0, first.err
    assert at_hub.metrics()[-1]["step"] == 2
    fetched = hub.downloads()
    assert len(fetched) == len(set(fetched)), "a file was downloaded twice"
    assert WEIGHTS in fetched
    assert not [path for path in fetched if MODEL in path and path.endswith(("pytorch_model.bin", "README.md"))]
    records = {record["name"]: record for record in json.loads((at_hub.folder / "run/plugins.json").read_text())}
    (weights,) = weights_in(at_hub)
    assert records["model.path"]["location"] == str(weights.parent)

    # What others put into the cache, and what the hub has by then, changes nothing of a run that is there.
    (weights.parent / "pytorch_model.bin").write_bytes(b"other")
    hub.requests.clear()
    resumed = at_hub.areal("run", "--resume", "run", "steps=3")
    assert resumed.code == 0, resumed.err
    assert not [request for request in hub.requests if MODEL in request.path]

    # Where the cache is not that of before, as on another node, the same commit is taken.
    shutil.rmtree(weights.parents[2])
    hub.requests.clear()
    elsewhere = at_hub.areal("run", "--resume", "run", "steps=4")
    assert elsewhere.code == 0, elsewhere.err
    asked = [one.path for one in hub.requests if MODEL in one.path and not one.path.startswith("/cdn/")]
    commit = hub.repositories["models", MODEL].commit
    assert asked
    assert [path for path in asked if commit not in path] == []

    hub.requests.clear()
    second = at_hub.areal(*RUN, "run_dir=second")
    assert second.code == 0, second.err
    assert hub.downloads() == []
    asked_for_model = [request for request in hub.requests if MODEL in request.path]
    assert {request.path for request in asked_for_model} == {f"/api/models/{MODEL}/revision/main"}
    assert len(asked_for_model) == 1, "more than the driver asked, or more than once"

    hub.close()
    at_hub.environment["HF_HUB_OFFLINE"] = "1"
    third = at_hub.areal(*RUN, "run_dir=third")
    assert third.code == 0, third.err


def test_a_connection_that_breaks_is_taken_up_where_it_broke(at_hub: AtHub, hub: LocalHub) -> None:
    hub.breaks = [PIECE + PIECE // 2]
    done = at_hub.areal(*RUN)
    assert done.code == 0, done.err
    assert ranges(hub) == ["", f"bytes={PIECE}-"]
    assert_whole(at_hub, hub)


@pytest.mark.nightly
def test_a_hub_that_is_lost_in_the_middle_starts_nothing_and_the_next_start_goes_on(
    at_hub: AtHub, hub: LocalHub
) -> None:
    hub.breaks = [PIECE + PIECE // 2] + [0] * 20
    failed = at_hub.areal(*RUN)
    assert failed.code == 2, failed.err
    assert f"'{MODEL}' cannot be downloaded from the Hugging Face hub: " in failed.err
    assert "Traceback" not in failed.err
    assert not (at_hub.folder / "run").exists()
    assert weights_in(at_hub) == []
    hub.breaks = []
    hub.requests.clear()
    done = at_hub.areal(*RUN)
    assert done.code == 0, done.err
    assert not [path for path in hub.downloads() if path.endswith("tokenizer.json")], "a whole file was not kept"
    assert_whole(at_hub, hub)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.nightly), signal.SIGINT])
def test_who_is_ended_while_it_downloads_goes_on_at_the_next_start(at_hub: AtHub, hub: LocalHub, number: int) -> None:
    hub.stalls_after = PIECE + 1
    process = at_hub.start(*RUN)
    at_hub.wait_for(lambda: PIECE in [path.stat().st_size for path in at_hub.cache.rglob("*.incomplete")], process)
    process.send_signal(number)
    if number == signal.SIGINT:
        hub.goes_on.set()  # huggingface_hub waits for the files that are under way
    _, err = process.communicate(timeout=300)
    assert process.returncode == (-number if number == signal.SIGKILL else 130), err
    assert not (at_hub.folder / "run").exists()
    hub.stalls_after = None
    hub.goes_on.set()
    hub.requests.clear()
    done = at_hub.areal(*RUN)
    assert done.code == 0, done.err
    assert not [path for path in hub.downloads() if path.endswith("tokenizer.json")], "a whole file was not kept"
    assert_whole(at_hub, hub)


@pytest.mark.parametrize("words", [["--dry-run"], pytest.param([], marks=pytest.mark.nightly)])
def test_a_name_that_is_not_on_the_hub_starts_nothing(at_hub: AtHub, words: list[str]) -> None:
    done = at_hub.areal(*RUN, "model.path=Qwen/Qwen2.5-0.5B-Instrukt", "dataset.name=openai/gsm9k", *words)
    assert done.code == 2
    assert "model.path: there is no folder" in done.err
    assert "'Qwen/Qwen2.5-0.5B-Instrukt' cannot be downloaded from the Hugging Face hub: 404" in done.err
    assert "Repository Not Found" in done.err
    assert "dataset: the data set openai/gsm9k cannot be read: DatasetNotFoundError" in done.err
    assert not (at_hub.folder / "run").exists()


@pytest.mark.parametrize("words", [["--dry-run"], pytest.param([], marks=pytest.mark.nightly)])
def test_a_hub_that_cannot_be_reached_starts_nothing(at_hub: AtHub, hub: LocalHub, words: list[str]) -> None:
    """The data is a file here: `datasets` itself tries for half a minute."""
    rows = at_hub.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in gsm8k_rows(range(4))))
    data = f"{{type: rewards/jsonl, paths: [{rows}], prompt: '{{question}}'}}"
    local = [f"dataset={data}", f"evaluation.dataset={data}"]
    hub.close()
    done = at_hub.areal(*RUN, *local, *words)
    assert done.code == 2
    assert f"'{MODEL}' cannot be downloaded from the Hugging Face hub: Got: ConnectError" in done.err
    assert not (at_hub.folder / "run").exists()
