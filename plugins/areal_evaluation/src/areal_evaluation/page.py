"""The report of an evaluation: one HTML file with its figures and with what was said in every episode, folded."""

from __future__ import annotations

import json
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

from areal_evaluation.report import interval, length_of, temperature_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

MOST_EPISODES = 2000
"""On the page; a browser opens no more at once. The others stand in `samples.jsonl`."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --dim: #66708a; --line: #d9deea; --card: #fff; --page: #f3f5fa;
  --own: #e8f0ff; --well: #2f9e6e; --badly: #c0392b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaf2; --dim: #98a2ba; --line: #333b4d; --card: #1b2130; --page: #12161f; --own: #22304d; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 32px 20px 60px; } h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 28px 0 8px; } p, small, th { color: var(--dim); }
table { border-collapse: collapse; background: var(--card); } th, td { text-align: left; padding: 4px 14px 4px 8px;
  border-top: 1px solid var(--line);
  font-variant-numeric: tabular-nums; font-weight: inherit; overflow-wrap: anywhere; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: 6px 0; }
summary { cursor: pointer; padding: 6px 12px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
summary b { display: inline-block; min-width: 64px; } .well b { color: var(--well); } .badly b { color: var(--badly); }
.message { border-top: 1px solid var(--line); padding: 6px 12px; } .own { background: var(--own); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; }
input, select { font: inherit; padding: 4px 8px; margin-right: 8px; } input { width: 50%; }
"""
SCRIPT = """
const text = document.getElementById("text"), kind = document.getElementById("kind");
const episodes = [...document.querySelectorAll("details.episode")];
const choose = () => episodes.forEach((one) => {
  const fits = kind.value === "" || one.classList.contains(kind.value);
  one.hidden = !fits || !one.textContent.toLowerCase().includes(text.value.toLowerCase());
});
text.oninput = kind.onchange = choose;
"""


def write_page(path: Path, figures: Mapping[str, Any], samples: Path) -> None:
    """Write the report.

    Args:
        path: of the file.
        figures: as they stand in `evaluation.json`.
        samples: file of JSON lines, one for each episode that has ended.

    Raises:
        OSError: the disk refuses.
    """
    with samples.open(encoding="utf-8") as lines, path.open("w", encoding="utf-8", errors="backslashreplace") as page:
        episodes = sorted(islice(map(json.loads, lines), MOST_EPISODES), key=lambda e: (e["row"], e["sample"]))
        page.writelines(_page(figures, episodes))


def _page(figures: Mapping[str, Any], episodes: list[dict[str, Any]]) -> Iterator[str]:
    name, ended = escape(figures["name"]), figures["finished"] + figures["failed"]
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name} · areal eval</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><main><h1>{name}</h1>'
    if not figures["complete"]:
        because = f": {figures['stopped_by']}" if figures.get("stopped_by") else ""
        yield f"<p>Not complete: {ended} of {figures['episodes']} episodes have ended{escape(because)}</p>"
    yield _table([], _rows(figures))
    if figures["categories"]:
        heads = [figures["category"], "prompts", "mean reward", *(f"pass@{k}" for k in figures["pass_at_k"]), "failed"]
        yield f"<h2>By {escape(figures['category'])}</h2>{_table(heads, _categories(figures))}"
    if figures["failures"]:
        yield f"<h2>Failures</h2>{_table(['episodes', 'cause'], ((str(n), c) for c, n in figures['failures'].items()))}"
    yield "<h2>Episodes</h2>"
    if len(episodes) < ended:
        yield f"<p>The first {len(episodes):,} of {ended:,} that ended; all of them stand in samples.jsonl.</p>"
    yield '<p><input id="text" placeholder="text in an episode"><select id="kind"><option value="">all</option>'
    yield '<option value="well">passed</option><option value="badly">not passed</option>'
    yield '<option value="failed">failed</option></select></p>'
    for episode in episodes:
        yield _episode(episode, figures["threshold"])
    yield f"</main><script>{SCRIPT}</script></html>"


def _rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    evaluation = figures["config"]["evaluation"]
    yield "model", f"{figures['model']}{' at ' + figures['endpoint'] if figures['endpoint'] else ''}"
    yield "data", f"{evaluation['dataset']['type']}: {figures['reward']['prompts']} prompts"
    yield "answers", f"{evaluation['samples_per_prompt']} to each at {temperature_of(dict(figures))}"
    yield "mean reward", interval(figures["reward"])
    for k, estimate in figures["pass_at_k"].items():
        yield f"pass@{k}", interval(estimate)
    for name, value in figures["rewards"].items():
        yield f"reward {name}", f"{value:.3f}"
    for name, value in figures["metrics"].items():
        yield name, f"{value:,.4g}"
    yield "response length", length_of(dict(figures))
    yield "episodes", f"{figures['finished']} of {figures['episodes']}, {figures['failed']} failed"
    yield "seconds", f"{figures['seconds']:,.1f}"


def _categories(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, own in figures["categories"].items():
        prompts = own["reward"]["prompts"] if own["reward"] else 0
        passes = [own["pass_at_k"].get(k) for k in figures["pass_at_k"]]
        told = ["-" if each is None else interval(each) for each in (own["reward"], *passes)]
        yield name, str(prompts), *told, str(own["failed"])


def _table(heads: list[str], rows: Iterable[tuple[str, ...]]) -> str:
    head = f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in heads)}</tr>" if heads else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def _episode(episode: Mapping[str, Any], threshold: float) -> str:
    is_failed = "error" in episode
    kind = "failed" if is_failed else "well" if episode["reward"] >= threshold - 1e-9 else "badly"
    reward = "failed" if is_failed else f"{episode['reward']:.3f}"
    category = f" · {episode['category']}" if "category" in episode else ""
    talks = episode.get("conversations") or []
    opening = str(episode.get("prompt") or next((m["text"] for talk in talks for m in talk), ""))[:200]
    title = f"<b>{reward}</b> <small>{episode['row']}.{episode['sample']}{escape(category)}</small> {escape(opening)}"
    parts = [_message("failure", str(episode["error"]))] if is_failed else []
    if named := episode.get("rewards"):
        parts.append(_message("rewards", ", ".join(f"{name} {value:g}" for name, value in named.items())))
    for number, talk in enumerate(talks, 1):
        if len(talks) > 1:
            parts.append(f'<div class="message"><small>conversation {number} of {len(talks)}</small></div>')
        parts += [_message(m["role"], _said(m), is_own=bool(m.get("sampled"))) for m in talk]
    return f'<details class="episode {kind}"><summary>{title}</summary>{"".join(parts)}</details>'


def _said(message: Mapping[str, Any]) -> str:
    calls = [f"→ {call['name']}({call['arguments']})" for call in message.get("calls", ())]
    thoughts = [f"(thought) {message['reasoning']}"] if message.get("reasoning") else []
    return "\n".join([*thoughts, *([message["text"]] if message["text"] else []), *calls])


def _message(role: str, text: str, *, is_own: bool = False) -> str:
    return f'<div class="message{" own" * is_own}"><small>{escape(role)}</small><pre>{escape(text)}</pre></div>'
