"""When each process of a run did what: from the files beside the logs to tracks, and to a trace for Perfetto.

`logs/NAME.jsonl` has the phases of a process, and that of the controller when each prompt group was run and by which
worker; `servers.jsonl` has each change of a server's state. Times are seconds since 1970, as those of `metrics.jsonl`.
"""

from __future__ import annotations

import heapq
import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from areal_view.lines import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SERVERS = "servers.jsonl"
HELD: Final = {"updating": "held"}
"""A server is asked nothing: its weights change, or the trainer has its memory."""
MOMENTS: Final = 400
"""At which the groups in flight are counted."""


class Span(NamedTuple):
    """Something that lasted; times in seconds, and what more is to be said of it."""

    begin: float
    end: float
    name: str
    about: str = ""


class Track(NamedTuple):
    """What one process did, one thing after another: no two spans of a track overlap."""

    process: str
    name: str
    spans: list[Span]


def read_timeline(logs: Path, most_bytes: int | None = None) -> tuple[list[Track], list[dict[str, Any]]]:
    """All tracks of a run, by process, and when each prompt group was run.

    Args:
        logs: folder of the run's logs.
        most_bytes: of each file, its last; None reads them whole.
    """
    files = (path for path in sorted(logs.glob("*.jsonl")) if path.name != SERVERS)
    spans = {path.stem: read_lines(path, _is_span, most_bytes)[0] for path in files}
    tracks = [
        Track(name, "phases", one_after_another(Span(x["begin"], x["end"], x["phase"]) for x in own if "phase" in x))
        for name, own in spans.items()
    ]
    tracks += _of_servers(read_lines(logs / SERVERS, _is_state, most_bytes)[0])
    groups = [line for own in spans.values() for line in own if "group" in line]
    for worker in sorted({group["worker"] for group in groups}):
        own = [group for group in groups if group["worker"] == worker]
        evaluated = united(Span(x["begin"], x["end"], "evaluation") for x in own if x["group"] < 0)
        trained = [Span(x["begin"], x["end"], version_of(x), f"group {x['group']}") for x in own if x["group"] >= 0]
        tracks.append(Track(worker, "evaluation", evaluated))
        tracks += [Track(worker, f"groups {n}", lane) for n, lane in enumerate(lanes(trained), 1)]
    return [track for track in tracks if track.spans], groups


def version_of(group: dict[str, Any]) -> str:
    """The oldest weight version that sampled a token of a group, in words."""
    version = group.get("version", -1)
    return f"version {version}" if version >= 0 else "no tokens"


def one_after_another(spans: Iterable[Span]) -> list[Span]:
    """Spans by their begin, each ended where the next begins: clocks are read one after another."""
    ordered = sorted(spans)
    ends = [*(span.begin for span in ordered[1:]), math.inf]
    return [span._replace(end=min(span.end, end)) for span, end in zip(ordered, ends, strict=False)]


def united(spans: Iterable[Span]) -> list[Span]:
    """Spans of one name, those that overlap as one."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin <= found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def latest(tracks: Sequence[Track], most: int) -> list[Track]:
    """The same tracks from the moment on behind which they have at most so many spans."""
    begins = sorted(span.begin for track in tracks for span in track.spans)
    since = begins[-most] if len(begins) > most else 0.0
    recent = [track._replace(spans=[span for span in track.spans if span.begin >= since]) for track in tracks]
    return [track for track in recent if track.spans]


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans divided so that none overlaps with another one of its lane, in the fewest lanes."""
    found: list[list[Span]] = []
    free: list[tuple[float, int]] = []  # when each lane is free again
    for span in sorted(spans):
        if free and free[0][0] <= span.begin:
            number = heapq.heappop(free)[1]
        else:
            number = len(found)
            found.append([])
        found[number].append(span)
        heapq.heappush(free, (span.end, number))
    return found


def _of_servers(lines: Sequence[dict[str, Any]]) -> list[Track]:
    """A state of a server lasts until its next one."""
    tracks = []
    for server in sorted({line["server"] for line in lines}):
        own = [line for line in lines if line["server"] == server]
        ends = [line["time"] for line in own[1:]] + [max(line["time"] for line in lines)]
        spans = [
            Span(line["time"], end, HELD.get(line["state"], line["state"]))
            for line, end in zip(own, ends, strict=True)
            if end > line["time"]
        ]
        tracks.append(Track(server, "server", one_after_another(spans)))
    return tracks


def in_flight(groups: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """How many groups of training were under way, by the oldest weight version that sampled a token of them.

    Returns:
        `time` [n] in seconds, `versions` [v], `counts` [v, n].
    """
    trained = [group for group in groups if group["group"] >= 0]
    if not trained:
        return {"time": [], "versions": [], "counts": []}
    times = np.linspace(min(x["begin"] for x in trained), max(x["end"] for x in trained), MOMENTS)
    versions = sorted({group.get("version", -1) for group in trained})
    counts = []
    for version in versions:
        own = [group for group in trained if group.get("version", -1) == version]
        begun, ended = (np.searchsorted(np.sort([x[key] for x in own]), times, "right") for key in ("begin", "end"))
        counts.append((begun - ended).tolist())
    return {"time": times.tolist(), "versions": versions, "counts": counts}


def write_trace(tracks: Sequence[Track], path: Path) -> None:
    """Write tracks in Chrome's trace format (JSON), which Perfetto and chrome://tracing open; times in microseconds."""
    zero = min((track.spans[0].begin for track in tracks), default=0.0)
    processes = {name: number for number, name in enumerate(dict.fromkeys(track.process for track in tracks), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}} for name, number in processes.items()
    ]
    for thread, track in enumerate(tracks, 1):
        where = {"pid": processes[track.process], "tid": thread}
        events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": track.name}})
        for begin, end, name, about in track.spans:
            start = round((begin - zero) * 1e6)
            event = {"ph": "X", "name": name, "ts": start, "dur": round((end - zero) * 1e6) - start, **where}
            events.append({**event, "args": {"about": about}} if about else event)
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"zero": zero}}), encoding="utf-8")


def _is_span(line: Any) -> bool:
    """Whether a line has a begin, an end, and what it is of: a phase, or a prompt group and its worker."""
    return (
        isinstance(line, dict)
        and all(isinstance(line.get(key), float | int) and math.isfinite(line[key]) for key in ("begin", "end"))
        and (
            isinstance(line.get("phase"), str)
            or (isinstance(line.get("group"), int) and isinstance(line.get("worker"), str))
        )
    )


def _is_state(line: Any) -> bool:
    return isinstance(line, dict) and isinstance(line.get("time"), float | int) and {"server", "state"} <= line.keys()
