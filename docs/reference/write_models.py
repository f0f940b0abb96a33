"""Tries all families of tests/models/small_models.py, and writes the page of what became of them; takes a few minutes.

python docs/reference/write_models.py            beside this file
python docs/reference/write_models.py FOLDER     into another folder
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import models_page

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "models"))
import small_models

MADE_BY = "<!-- Made by `python docs/reference/write_models.py`. -->\n"


def main() -> None:
    """Write the page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    rows = {}
    for family in small_models.FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            rows[family] = small_models.measure(family, Path(place))
    (folder / "models.md").write_text(f"{MADE_BY}{models_page.page(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
