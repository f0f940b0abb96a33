"""Tries all families of tests/models/small_models.py, and writes the page of what became of them; takes minutes.

python docs/reference/write_models.py            beside this file
python docs/reference/write_models.py FOLDER     into another folder

The servers' columns are read from the environments that tests/servers_on_cpu/make_environment.py makes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import models_page
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "models"))
import adapters
import small_models
import two_ranks

from areal_core.engines import ModelReference
from areal_core.inference.installations import find_server
from areal_hf.server import load_model
from areal_hf.ways import choose_way
from areal_sglang.architectures import registered as registered_by_sglang
from areal_vllm.architectures import registered as registered_by_vllm

MADE_BY = "<!-- Made by `python docs/reference/write_models.py`. -->\n"


def main() -> None:
    """Write the page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    servers, versions = {}, {"transformers": transformers.__version__}
    for name, read in (("sglang", registered_by_sglang), ("vllm", registered_by_vllm)):
        if (found := find_server(name)) is None:
            raise SystemExit(f"{name} is not installed: python tests/servers_on_cpu/make_environment.py {name}")
        servers[name], versions[name] = read(found.package), found.version
    with tempfile.TemporaryDirectory() as place:
        ranks = two_ranks.measure(small_models.FAMILIES, Path(place))
    rows = {family: _row(family, servers, ranks[family]) for family in small_models.FAMILIES}
    (folder / "models.md").write_text(f"{MADE_BY}{models_page.page(rows, versions)}\n", encoding="utf-8")


def _row(family: str, servers: dict[str, dict[str, str]], ranks: dict[str, str]) -> models_page.Row:
    with tempfile.TemporaryDirectory() as place:
        rung, why = small_models.measure(family, Path(place) / "train")
        adapter = adapters.measure(family, Path(place) / "adapter")
        choice = choose_way(load_model(ModelReference(str(Path(place) / "train" / "model")), "cpu"), LONGEST)
    architecture = small_models.architecture(family)
    return models_page.Row(
        models_page.Cell(rung, models_page.plain(why)),
        models_page.adapter_cell(*adapter),
        models_page.Cell(str(choice.way), models_page.plain(choice.reason)),
        *(models_page.Cell(servers[name].get(architecture, "no")) for name in ("sglang", "vllm")),
        models_page.rank_cell(ranks["tensor"]),
        models_page.rank_cell(ranks["expert"]),
    )


LONGEST = 48
"""Tokens of the longest sequence that the embedded engine is asked for."""


if __name__ == "__main__":
    main()
