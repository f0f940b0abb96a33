"""A hub on this machine with a small model and a small data set, under the names that `examples/gsm8k.yaml` has."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_grpo.demonstration.model import make_model
from tests.hub.local_hub import DATASET, MODEL, LocalHub
from tests.integration.conftest import Workplace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXAMPLES = Path(__file__).parents[2] / "examples"
CARD = """\
---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: validation, path: main/validation-*}
  - {split: test, path: main/test-*}
---
"""


class AtHub(Workplace):
    """A place to run `areal` in, whose hub is the one on this machine and whose cache is its own."""

    def __init__(self, folder: Path, hub: LocalHub) -> None:
        super().__init__(folder)
        self.cache = folder / "huggingface"
        self.environment = {
            name: value for name, value in self.environment.items() if not name.startswith(("HF_", "HUGGING"))
        }
        self.environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(self.cache)}


def gsm8k_rows(numbers: Sequence[int]) -> list[dict[str, str]]:
    """Of GSM8K's form."""
    return [{"question": f"what is {n} plus {n}?", "answer": f"{n} and {n}.\n#### {2 * n}"} for n in numbers]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """One file of a data set."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path)


@pytest.fixture(scope="session")
def model_on_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the repository of the model holds: a model, and the same weights in another format.

    The weights have 28 MB: huggingface_hub writes pieces of 10 MB, and of a part of one it keeps nothing.
    """
    folder = make_model(tmp_path_factory.mktemp("model") / "model", hidden=2048, layers=3)
    (folder / "pytorch_model.bin").write_bytes(b"the same weights once more")
    (folder / "README.md").write_text("A model.\n")
    return folder


@pytest.fixture(scope="session")
def dataset_on_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the repository of the data set holds."""
    folder = tmp_path_factory.mktemp("dataset")
    (folder / "README.md").write_text(CARD)
    write_parquet(folder / "main" / "train-00000-of-00001.parquet", gsm8k_rows(range(12)))
    for split in ("validation", "test"):
        write_parquet(folder / "main" / f"{split}-00000-of-00001.parquet", gsm8k_rows(range(20, 26)))
    return folder


@pytest.fixture
def hub(model_on_hub: Path, dataset_on_hub: Path) -> Iterator[LocalHub]:
    """The hub, with both on it."""
    pytest.importorskip("datasets")
    with LocalHub() as made:
        made.add("models", MODEL, model_on_hub)
        made.add("datasets", DATASET, dataset_on_hub)
        yield made


@pytest.fixture
def at_hub(tmp_path: Path, hub: LocalHub) -> AtHub:
    """A place with a cold cache and `gsm8k.yaml`."""
    shutil.copy(EXAMPLES / "gsm8k.yaml", tmp_path)
    return AtHub(tmp_path, hub)
