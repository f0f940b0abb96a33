"""A run from Python, without the command line: from a script, a notebook or standard input; the same processes.

from areal_core.library import train

def brevity(completion: str) -> float:
    return -len(completion) / 100

train({"steps": 100, "dataset": [{"prompt": "..."}, ...], "rewards": [brevity], ...})
"""

from __future__ import annotations

import ast
import asyncio
import base64
import hashlib
import json
import linecache
import os
import re
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
from areal_core.runtime.folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WRITTEN = re.compile(r"/\S*/train\(config\)\.yaml(:\d+)?")
"""A place in the file that `train` writes, and nobody else has seen."""
_BYTES = "areal_core.library:bytes"
"""The only key of an object that stands for bytes in the file of the rows."""
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
            itself or as the `type` of a mapping. It must be defined at the top level of its file. A `dataset` may be
            rows themselves: a list of dictionaries, or a `datasets.Dataset`, of what JSON can hold, and bytes. Of a
            `datasets.Dataset`, null fields of structs are removed, and dates, times and decimals become text.
        plugins: as `--plugins`.
        run_dir: of the run; by default a new folder below `runs`.
        resume: go on with the run in `run_dir`.

    Returns:
        The run folder: `model/` is the trained model, `metrics.jsonl` and `report.html` tell how it went.

    Raises:
        ArealError: the config is wrong or the run failed.
        KeyboardInterrupt: the run was interrupted, after a checkpoint.
    """
    if "run_dir" in config:
        raise ConfigError("run_dir is no part of a config: train(config, run_dir=...)")
    if not _under_way.acquire(blocking=False):
        words = "the script calls train() when it is imported, and the run imports it to find its functions"
        raise ConfigError(words, hints=['put the call below: if __name__ == "__main__":'])
    folder = Path(run_dir) if run_dir else Path("runs") / f"library-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    try:
        if folder.exists() and not resume:
            raise ConfigError(f"the run folder {folder} exists already", hints=["resume=True goes on with its run"])
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "train(config).yaml"
            # Relative paths mean the current folder, not that of the temporary file.
            path.write_text(dump({"base_dir": str(Path.cwd()), **_named(config)}), encoding="utf-8")
            run = _run_beside if _has_event_loop() else _run
            code = run(path, folder, resume, plugins)
    except ArealError as error:
        told = [_WRITTEN.sub("train(config)", each) for each in (error.message, *error.hints)]
        error.message, error.hints = told[0], tuple(told[1:])
        raise
    finally:
        _under_way.release()
    if code:
        raise KeyboardInterrupt
    return folder


def _run(path: Path, folder: Path, resume: bool, plugins: Sequence[str]) -> int:
    new, old = (None, folder) if resume else (folder, None)
    return execute(resolve(path, plugins), run_dir=new, resume=old, dry_run=False, allow_changes=False)


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


class Rows:
    """A data set of rows that were given to `train` as they are.

    Args:
        path: of the file that holds them, a JSON object a line.
        notes: what the rows hold differently from what was given; see `Dataset.notes`.
    """

    def __init__(self, path: str, notes: Sequence[str] = ()) -> None:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self._rows = [json.loads(line, object_hook=_with_bytes) for line in lines]
        self._notes = list(notes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return dict(self._rows[index])

    def notes(self) -> Sequence[str]:
        """See `Dataset.notes`."""
        return self._notes


def _written(rows: Any) -> Any:
    """Return rows as a data set that reads them from a file of the cache; what names a data set stays as it is."""
    if isinstance(rows, Mapping) and any(hasattr(each, "column_names") for each in rows.values()):
        raise ConfigError(f"dataset: has the splits {', '.join(rows)}: take one, as dataset[{next(iter(rows))!r}]")
    if isinstance(rows, str | Mapping) or callable(rows) or rows is None:
        return _named(rows)
    notes: list[str] = []
    if hasattr(rows, "column_names"):
        from areal_core.data.tables import ArrowRows

        rows = ArrowRows(rows)
        notes = rows.notes
    lines: list[str] = []
    try:
        for row in rows:
            lines.append(f"{json.dumps(_checked_keys(dict(row)), default=_bytes_as_text)}\n")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"dataset: row {len(lines)} (counted from 0): rows are dictionaries of what JSON can hold, "
            f"and bytes: {error}"
        ) from None
    named = {"notes": notes} if notes else {}
    return {"type": f"{Rows.__module__}:Rows", "path": str(_keep("rows", "".join(lines), ".jsonl")), **named}


def _checked_keys(value: Any) -> Any:
    """Return a value whose keys are text; JSON would turn others into text without a word.

    Raises:
        TypeError: a key is something else.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is {type(key).__name__}, and keys are text")
            _checked_keys(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _checked_keys(part)
    return value


def _bytes_as_text(value: Any) -> Any:
    """Return bytes as JSON can hold them; `_with_bytes` reads them."""
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is neither; an image is the bytes of its file, or its path")


def _with_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if value.keys() == {_BYTES} else value


def _keep(stem: str, text: str, ending: str) -> Path:
    """A file of the cache that holds a text, under a name that is made of it."""
    path = cache_folder() / "library" / f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:12]}{ending}"
    if not path.is_file():  # processes of another run may be reading it
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    return path


def _named(value: Any) -> Any:
    """The same tree with functions and classes replaced by the names under which every process can import them."""
    if isinstance(value, Mapping):
        return {key: _written(item) if key == "dataset" else _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return _reference(value)
    if not isinstance(value, str | int | float | None):
        raise ConfigError(f"a config holds texts, numbers, lists, mappings and functions, not {value!r:.60}")
    return value


def _reference(target: Callable[..., Any]) -> str:
    name = getattr(target, "__qualname__", repr(target))
    if "." in name or "<" in name:
        words = f"{' in '.join(reversed(name.split('.<locals>.')))} cannot be used in a config: a run's processes find"
        hint = "define it with `def` or `class` outside of any function; what it takes from there, as keys beside type"
        raise ConfigError(f"{words} only what stands at the top level of a file", hints=[hint])
    path = Path(_file(target))
    if not path.is_file():
        path = _keep(name, "\n\n".join(_pieces(target, {}).values()), ".py")
    return f"{path.resolve()}:{name}"


def _file(target: Any) -> str:
    """Where a function or class was defined; a cell of a notebook has a name too, but no file."""
    parts = [target, *vars(target).values()] if isinstance(target, type) else [target]
    return next((part.__code__.co_filename for part in parts if hasattr(part, "__code__")), "")


def _pieces(target: Any, pieces: dict[str, str]) -> dict[str, str]:
    """The source of what has no file, and of everything of the same notebook that it uses, by name, in order."""
    name, filename = target.__name__, _file(target)
    text = "".join(linecache.getlines(filename))
    nodes: list[ast.stmt] = []
    with suppress(SyntaxError):
        nodes = [node for node in ast.parse(text).body if getattr(node, "name", None) == name]
    if not nodes:
        words = f"the code of {name} cannot be read: it was not read from a file"
        raise ConfigError(words, hints=[f"put it into a file and name it: path/to/file.py:{name}"])
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
    words = f"{user} uses {name}, a {type(value).__name__} of this session that other processes cannot get"
    raise ConfigError(words, hints=[f"make {name} inside of {user}, or put both into a file"])


if __name__ == "__main__":
    _path = Path(sys.argv[1])
    try:
        sys.exit(_run(_path, Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:]))
    except ArealError as _error:
        _path.with_suffix(".json").write_text(json.dumps({"message": _error.message, "hints": _error.hints}))
        sys.exit(_error.exit_code)
