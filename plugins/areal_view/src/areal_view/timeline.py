"""Timeline of a run's processes: read the events in the log folder, and write a trace for Perfetto.

`logs/NAME.jsonl` has the phases of a process. The controller's file also has the begin, end and worker of each prompt
group. `servers.jsonl` has each change of a server's state. Times are in seconds since 1970, as in `metrics.jsonl`.
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
"""Names of states on the page. A held server gets no requests: its weights change, or the trainer uses its memory."""
MOMENTS: Final = 400
"""Number of times at which the groups in flight are counted."""


class Span(NamedTuple):
    """Something that lasted for a while.

    Attributes:
        begin: time in seconds since 1970.
        end: time in seconds since 1970.
        name: what it was, such as a phase.
        about: further text.
    """

    begin: float
    end: float
    name: str
    about: str = ""


class Track(NamedTuple):
    """Spans of one process that do not overlap."""

    process: str
    name: str
    spans: list[Span]


def read_timeline(logs: Path, max_bytes: int | None = None) -> tuple[list[Track], list[dict[str, Any]]]:
    """Return all tracks of a run, by process, and the events of the prompt groups.

    Args:
        logs: folder of the run's logs.
        max_bytes: read only the last bytes of each file; None: read all.
    """
    files = (path for path in sorted(logs.glob("*.jsonl")) if path.name != SERVERS)
    spans = {path.stem: read_lines(path, _is_span, max_bytes)[0] for path in files}
    tracks = [
        Track(name, "phases", one_after_another(Span(x["begin"], x["end"], x["phase"]) for x in lines if "phase" in x))
        for name, lines in spans.items()
    ]
    tracks += _of_servers(read_lines(logs / SERVERS, _is_state, max_bytes)[0])
    groups = [line for lines in spans.values() for line in lines if "group" in line]
    for worker in sorted({group["worker"] for group in groups}):
        worker_groups = [group for group in groups if group["worker"] == worker]
        evaluated = united(Span(x["begin"], x["end"], "evaluation") for x in worker_groups if x["group"] < 0)
        trained = [
            Span(x["begin"], x["end"], version_of(x), f"group {x['group']}") for x in worker_groups if x["group"] >= 0
        ]
        tracks.append(Track(worker, "evaluation", evaluated))
        tracks += [Track(worker, f"groups {n}", lane) for n, lane in enumerate(lanes(trained), 1)]
    return [track for track in tracks if track.spans], groups


def version_of(group: dict[str, Any]) -> str:
    """Return the oldest weight version that sampled a token of a group, as text."""
    version = group.get("version", -1)
    return f"version {version}" if version >= 0 else "no tokens"


def one_after_another(spans: Iterable[Span]) -> list[Span]:
    """Sort spans by their begin, and end each one where the next begins, because clocks differ slightly."""
    ordered = sorted(spans)
    ends = [*(span.begin for span in ordered[1:]), math.inf]
    return [span._replace(end=min(span.end, end)) for span, end in zip(ordered, ends, strict=False)]


def united(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap. All of them must have the same name."""
    united_spans: list[Span] = []
    for span in sorted(spans):
        if united_spans and span.begin <= united_spans[-1].end:
            united_spans[-1] = united_spans[-1]._replace(end=max(united_spans[-1].end, span.end))
        else:
            united_spans.append(span)
    return united_spans


def latest(tracks: Sequence[Track], limit: int) -> list[Track]:
    """Return the tracks with only their latest spans, at most `limit` in all."""
    begins = sorted(span.begin for track in tracks for span in track.spans)
    since = begins[-limit] if len(begins) > limit else 0.0
    recent = [track._replace(spans=[span for span in track.spans if span.begin >= since]) for track in tracks]
    return [track for track in recent if track.spans]


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide spans into the fewest lanes in which no two spans overlap."""
    lane_list: list[list[Span]] = []
    free_at: list[tuple[float, int]] = []  # (time from which a lane is free, lane)
    for span in sorted(spans):
        if free_at and free_at[0][0] <= span.begin:
            number = heapq.heappop(free_at)[1]
        else:
            number = len(lane_list)
            lane_list.append([])
        lane_list[number].append(span)
        heapq.heappush(free_at, (span.end, number))
    return lane_list


def _of_servers(lines: Sequence[dict[str, Any]]) -> list[Track]:
    """Return a track for each server. A state lasts until the server's next one."""
    tracks = []
    for server in sorted({line["server"] for line in lines}):
        states = [line for line in lines if line["server"] == server]
        ends = [line["time"] for line in states[1:]] + [max(line["time"] for line in lines)]
        spans = [
            Span(line["time"], end, HELD.get(line["state"], line["state"]))
            for line, end in zip(states, ends, strict=True)
            if end > line["time"]
        ]
        tracks.append(Track(server, "server", one_after_another(spans)))
    return tracks


def in_flight(groups: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Count the training groups in flight, by the oldest weight version that sampled a token of them.

    Returns:
        `time` [n] in seconds since 1970, `versions` [v], and `counts` [v, n].
    """
    trained = [group for group in groups if group["group"] >= 0]
    if not trained:
        return {"time": [], "versions": [], "counts": []}
    times = np.linspace(min(x["begin"] for x in trained), max(x["end"] for x in trained), MOMENTS)
    versions = sorted({group.get("version", -1) for group in trained})
    counts = []
    for version in versions:
        version_groups = [group for group in trained if group.get("version", -1) == version]
        begun, ended = (
            np.searchsorted(np.sort([x[key] for x in version_groups]), times, "right") for key in ("begin", "end")
        )
        counts.append((begun - ended).tolist())
    return {"time": times.tolist(), "versions": versions, "counts": counts}


def write_trace(tracks: Sequence[Track], path: Path) -> None:
    """Write tracks in Chrome's trace format (JSON, microseconds), which Perfetto and chrome://tracing open."""
    zero = min((track.spans[0].begin for track in tracks), default=0.0)
    processes = {name: number for number, name in enumerate(dict.fromkeys(track.process for track in tracks), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}} for name, number in processes.items()
    ]
    for thread, track in enumerate(tracks, 1):
        ids = {"pid": processes[track.process], "tid": thread}
        events.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": track.name}})
        for begin, end, name, about in track.spans:
            start = round((begin - zero) * 1e6)
            event = {"ph": "X", "name": name, "ts": start, "dur": round((end - zero) * 1e6) - start, **ids}
            events.append({**event, "args": {"about": about}} if about else event)
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"zero": zero}}), encoding="utf-8")


def _is_span(line: Any) -> bool:
    """Return whether a line has begin and end, and either a phase, or a prompt group and its worker."""
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
