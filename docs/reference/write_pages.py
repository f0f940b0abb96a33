"""Writes the pages of the reference that are made from the code.

python docs/reference/write_pages.py            beside this file
python docs/reference/write_pages.py FOLDER     into another folder
"""

from __future__ import annotations

import sys
from pathlib import Path

import algorithms_page
import api_page
import coming_from_page
import commands_page
import config_page
import engines_page
import hooks_page
import interfaces_page
import metrics_page
import other_implementations_page
import versions_page

FILES = Path(__file__).parents[2].glob("plugins/areal_*/src/*/plugin.py")
PLUGINS = sorted(path.parent.name.removeprefix("areal_") for path in FILES)
MADE_BY = "<!-- Made by `python docs/reference/write_pages.py`. -->\n"


def pages() -> dict[str, str]:
    """The text of each page by the name of its file."""
    return {
        "algorithms.md": algorithms_page.page(),
        "api.md": api_page.page(),
        "coming_from.md": coming_from_page.page(),
        "commands.md": commands_page.page(PLUGINS),
        "components.md": config_page.components_page(PLUGINS),
        "config.md": config_page.config_page(),
        "engines.md": engines_page.page(),
        "hooks.md": hooks_page.page(),
        "interfaces.md": interfaces_page.page(),
        "metrics.md": metrics_page.page(),
        "other_implementations.md": other_implementations_page.page(),
        "versions.md": versions_page.page(),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, text in pages().items():
        (folder / name).write_text(f"{MADE_BY}{text}\n", encoding="utf-8")
