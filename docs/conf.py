"""The site of the documentation: `make docs`. The pages are plain Markdown that GitHub shows as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "areal"
extensions = ["myst_parser"]
highlight_language = "text"  # of blocks that name none
html_theme = "furo"
html_title = "areal"
html_show_sphinx = False
html_copy_source = False
exclude_patterns = ["**/__pycache__"]
myst_heading_anchors = 4  # as GitHub makes them

_LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+)(?:#[^)]*)?\)")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _keep_outside_links)


def _keep_outside_links(app: Sphinx, name: str, source: list[str]) -> None:
    """Beside docs/ MyST copies files and links to the copies, but for pages and folders: those are copied and named."""
    folder, root = (Path(app.srcdir) / name).parent, Path(app.srcdir).resolve()

    def replaced(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if path.is_relative_to(root) or not (path.is_dir() or path.suffix == ".md"):
            return match[0]
        return match[1] if path.is_dir() else f"{{download}}`{match[1].strip('`')} <{match[2]}>`"

    source[0] = _LINK.sub(replaced, source[0])
