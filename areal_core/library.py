"""A run from Python, without the command line: from a script, a notebook or standard input; the same processes.

from areal_core.library import train

def brevity(completion: str) -> float:
    return -len(completion) / 100

train({"steps": 100, "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"}, "rewards": [brevity], ...})
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import linecache
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from areal_core.config import resolve
from areal_core.config.yaml_text import dump
from areal_core.driver.execution import execute
from areal_core.errors import ArealError, ConfigError
from areal_core.runs.folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_under_way = threading.Lock()
"""Held while a run is made: a script that is imported for its functions meanwhile must not make another one."""


def train(
    config: Mapping[str, Any], *, plugins: Sequence[str] = (), run_dir: str | Path | None = None, resume: bool = False
) -> Path:
    """Run a config to its end, in this process's terminal; in a notebook, in a process of its own.

    A script calls it below `if __name__ == "__main__":`, for the processes of the run import the script too, to find
    its functions. Those of a notebook are written to a file, with what they use.

    Args:
        config: as in a YAML file; where a component is named, a function or class of a script may stand instead, by
            itself or as the `type` of a mapping. It must be defined at the top level of its file.
        plugins: as `--plugins`.
        run_dir: of the run; by default a new folder below `runs`.
        resume: go on with the run in `run_dir`.

    Returns:
        The run folder: `model/` is the trained model, `metrics.jsonl` and `report.html` tell how it went.

    Raises:
        ArealError: the config is wrong or the run failed.
        KeyboardInterrupt: the run was interrupted, after a checkpoint.
    """
    if not _under_way.acquire(blocking=False):
        raise ConfigError(
            "the script calls train() when it is imported, and the run imports it to find its functions",
            hints=['put the call below: if __name__ == "__main__":'],
        )
    folder = Path(run_dir) if run_dir else Path("runs") / f"library-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    try:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "library.yaml"
            # Relative paths mean the current folder, not that of the temporary file.
            path.write_text(dump({"base_dir": str(Path.cwd()), **_named(config)}), encoding="utf-8")
            run = _run_beside if _has_event_loop() else _run
            code = run(path, folder, resume, plugins)
    finally:
        _under_way.release()
    if code:
        raise KeyboardInterrupt
    return folder


def _run(path: Path, folder: Path, resume: bool, plugins: Sequence[str]) -> int:
    return execute(
        resolve(path, plugins),
        run_dir=None if resume else folder,
        resume=folder if resume else None,
        dry_run=False,
        allow_changed_plugins=False,
    )


def _has_event_loop() -> bool:
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def _run_beside(path: Path, folder: Path, resume: bool, plugins: Sequence[str]) -> int:
    """The same in a process of its own, for a notebook has an event loop already; its output is shown line by line."""
    words = [sys.executable, "-m", __name__, str(path), str(folder), str(int(resume)), *plugins]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        while True:
            try:
                for line in process.stdout:
                    sys.stdout.write(line)
                code = process.wait()
                break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
    error = path.with_suffix(".json")
    if error.is_file():
        raise ArealError(**json.loads(error.read_text(encoding="utf-8")), exit_code=code)
    return code


def _named(value: Any) -> Any:
    """The same tree with functions and classes replaced by the names under which every process can import them."""
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return _reference(value)
    return value


def _reference(target: Callable[..., Any]) -> str:
    name = getattr(target, "__qualname__", repr(target))
    if "." in name or "<" in name:
        raise ConfigError(
            f"{name} cannot be used in a config: the run's processes find only what stands at the top level of a file",
            hints=["define it with `def` or `class` outside of any function"],
        )
    path = Path(_file(target))
    if not path.is_file():
        text = "\n\n".join(_pieces(target, {}).values())
        path = cache_folder() / "functions" / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return f"{path.resolve()}:{name}"


def _file(target: Any) -> str:
    """Where a function or class was defined; a cell of a notebook has a name too, but no file."""
    parts = [target, *vars(target).values()] if isinstance(target, type) else [target]
    codes = [part.__code__ for part in parts if hasattr(part, "__code__")]
    return codes[0].co_filename if codes else ""


def _pieces(target: Any, pieces: dict[str, str]) -> dict[str, str]:
    """The source of what has no file, and of everything of the same notebook that it uses, by name, in order."""
    name, filename = target.__name__, _file(target)
    text = "".join(linecache.getlines(filename))
    try:
        nodes = [node for node in ast.parse(text).body if getattr(node, "name", None) == name]
    except SyntaxError:
        nodes = []
    if not nodes:
        raise ConfigError(
            f"the code of {name} cannot be read: it was not read from a file",
            hints=[f"put it into a file and name it: path/to/file.py:{name}"],
        )
    pieces[name] = ""  # its place, should it use itself
    known = vars(sys.modules[target.__module__])
    used = {node.id for node in ast.walk(nodes[-1]) if isinstance(node, ast.Name)} & set(known) - set(pieces)
    for other in sorted(used):
        value = known[other]
        if isinstance(value, ModuleType):
            pieces[other] = f"import {value.__name__} as {other}"
        elif callable(value) and getattr(value, "__module__", "") == target.__module__:
            _pieces(value, pieces)
        elif callable(value) and hasattr(value, "__qualname__"):
            pieces[other] = f"from {value.__module__} import {value.__qualname__} as {other}"
        else:
            pieces[other] = f"{other} = {_literal(name, other, value)}"
    del pieces[name]
    decorators = [node.lineno for node in getattr(nodes[-1], "decorator_list", [])]
    pieces[name] = "\n".join(text.splitlines()[min([nodes[-1].lineno, *decorators]) - 1 : nodes[-1].end_lineno])
    return pieces


def _literal(user: str, name: str, value: Any) -> str:
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return repr(value)
    raise ConfigError(
        f"{user} uses {name}, a {type(value).__name__} of this session that other processes cannot get",
        hints=[f"make {name} inside of {user}, or put both into a file"],
    )


if __name__ == "__main__":
    _path = Path(sys.argv[1])
    try:
        sys.exit(_run(_path, Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:]))
    except ArealError as _error:
        _path.with_suffix(".json").write_text(json.dumps({"message": _error.message, "hints": _error.hints}))
        sys.exit(_error.exit_code)
