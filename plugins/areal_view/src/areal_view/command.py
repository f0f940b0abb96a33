"""Show a run: its metrics, the sampled answers with the numbers of every token, and a timeline of its processes.

The command writes RUN_DIR/report.html and opens it. The page contains the tokens of some steps; --steps chooses others.
--serve shows a run in progress, with the tokens of every step.
Several runs are compared: the charts of the first one have the curves of all, and its head lists the settings in which
they differ. That page is RUN_DIR/comparison.html.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import tempfile
import webbrowser
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import UsageError
from areal_core.programs import print_error, print_out
from areal_view.page import page, run_data, script_of, write_report
from areal_view.timeline import read_timeline, write_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACE_FILE = "trace.json"
NO_METRICS = "there is nothing to see yet: {} has no metrics"


def main(argv: Sequence[str]) -> int:
    """Run `areal view` with these arguments and return its exit code."""
    parser = argparse.ArgumentParser(prog="areal view", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run folder")
    parser.add_argument("others", metavar="OTHER_RUN_DIR", type=Path, nargs="*", help="further runs to compare it with")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--serve", action="store_true", help="serve the pages on this machine until Ctrl-C")
    parser.add_argument(
        "--port",
        metavar="N",
        type=int,
        default=0,
        help="with --serve: port to listen on; 0 chooses a free port (default: 0)",
    )
    modes.add_argument("--trace", action="store_true", help="write trace.json, which https://ui.perfetto.dev opens")
    modes.add_argument("--steps", metavar="A:B", type=_steps, help="include the tokens of steps A to B - 1 in the page")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    arguments = parser.parse_args(argv)
    try:
        _show(arguments.run_dir, arguments)
    except (OSError, OverflowError) as error:  # such as a port in use, or a folder that cannot be written
        raise UsageError(f"{arguments.run_dir}: {error}", hints=["--serve writes no files"]) from error
    return 0


def _show(run_dir: Path, arguments: argparse.Namespace) -> None:
    if arguments.trace:
        print_out(str(_trace(run_dir)))
    elif arguments.serve:
        _serve(run_dir, arguments.others, arguments.port, opens=not arguments.no_open)
    else:
        path = write_report(run_dir, arguments.steps, arguments.others)
        if path is None:
            raise UsageError(NO_METRICS.format(run_dir))
        print_out(str(path))
        if not arguments.no_open:
            _open(path)


def _trace(run_dir: Path) -> Path:
    tracks, _ = read_timeline(run_dir / "logs")
    if not tracks:
        raise UsageError(f"there is no timeline: {run_dir / 'logs'} has no events")
    path = run_dir / TRACE_FILE
    write_trace(tracks, path)
    return path


def _serve(run_dir: Path, others: Sequence[Path], port: int, *, opens: bool) -> None:
    """Serve the pages on this machine until Ctrl-C. The random path keeps other users of the machine out."""
    if run_data(run_dir, is_served=True, others=others) is None:
        raise UsageError(NO_METRICS.format(run_dir))
    key = secrets.token_urlsafe(16)
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Pages, run_dir, others, key))
    url = f"http://127.0.0.1:{server.server_port}/{key}/"
    print_out(url)
    print_error("press Ctrl-C to stop; reload the page to update it")
    with tempfile.NamedTemporaryFile("w", suffix=".html") as redirect:  # other users can see a browser's arguments
        redirect.write(f'<meta http-equiv="refresh" content="0; url={url}">')
        redirect.flush()
        if opens:
            _open(Path(redirect.name))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.server_close()


class _Pages(BaseHTTPRequestHandler):
    """Serves the page, built anew for each request, and the tokens of any step."""

    def __init__(self, run_dir: Path, others: Sequence[Path], key: str, *connection: object) -> None:
        self._run_dir = run_dir
        self._others = others
        self._key = key
        super().__init__(*connection)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer a request."""
        _, key, *rest = self.path.split("/")
        match = re.fullmatch(r"rollouts/step-(\d{1,9})\.js", "/".join(rest))
        try:
            if not secrets.compare_digest(key.encode(), self._key.encode()):
                self.send_error(404)
            elif rest == [""] and (data := self._data()) is not None:
                self._answer(page(data), "text/html")
            elif match:
                self._answer(script_of(self._run_dir, int(match[1])), "text/javascript")
            else:
                self.send_error(404)
        except (BrokenPipeError, ConnectionResetError):
            return  # the browser has closed the connection
        except (OSError, ValueError, LookupError):
            self.send_error(404)

    def _data(self) -> dict[str, Any] | None:
        return run_data(self._run_dir, is_served=True, others=self._others)

    def _answer(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


def _steps(text: str) -> range:
    begin, _, end = text.partition(":")
    try:
        return range(int(begin or 0), int(end) if end else 1 << 31)
    except ValueError:
        raise argparse.ArgumentTypeError(f"write two numbers, such as 100:120, not {text}") from None


def _open(page: Path) -> None:
    """Open a browser if there is a screen."""
    if "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ or os.uname().sysname == "Darwin":
        webbrowser.open(page.absolute().as_uri())
