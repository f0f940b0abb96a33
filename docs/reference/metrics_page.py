"""`metrics.md`: every metric, in the words of `metrics.yaml`, diagnostics, and the tokens that `view` logs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import yaml

from areal_core.diagnostics.conditions import CONDITIONS, STEPS
from areal_view.rollouts import COLUMNS, RATIOS

WORDS: Final = Path(__file__).with_name("metrics.yaml")


def page() -> str:
    """The whole page."""
    text = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    parts = ["# Metrics", text["introduction"].strip()]
    for group in text["groups"]:
        parts += [f"## {group['title']}", *([group["text"].strip()] if "text" in group else [])]
        rows = ["| metric | unit | meaning | worry when |", "|---|---|---|---|"]
        for names, cells in group["metrics"].items():
            keys = ", ".join(f"`{name}`" for name in names.split())
            words = (*(cell.replace("|", "\\|") for cell in cells), *[""] * (3 - len(cells)))
            rows.append(f"| {keys} | {' | '.join(words)} |")
        parts.append("\n".join(rows))
    parts += ["## Diagnostics", text["diagnostics"].strip().replace("STEPS", str(STEPS))]
    parts.append("\n".join(f"- {_generic(one.words)}" for one in CONDITIONS))
    parts += ["## Tokens", text["tokens"].strip()]
    columns = {**text["token_columns"], **{name: f"{title}: {words}" for name, (title, words) in COLUMNS.items()}}
    rows = [f"| `{name}` | {words} |" for name, words in columns.items() if name not in RATIOS]
    parts.append("\n".join(["| column | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _generic(words: str) -> str:
    """What a diagnostic says, with a metric's name for its value."""
    names = re.sub(r"\{(\w+?)_(\w+?)(:[^}]*)?\}", lambda m: f"`{m[1]}/{m[2]}`", words)
    return f"{names[0].upper()}{names[1:]}."
