"""A run from a Python script, without the command line: the same parts, the same processes.

from areal_core.library import train

def brevity(completion: str) -> float:
    return -len(completion) / 100

train({"steps": 100, "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"}, "rewards": [brevity], ...})
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_core.runs.roles import execute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def train(
    config: Mapping[str, Any],
    *,
    plugins: Sequence[str] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
) -> Path:
    """Run a config to its end, in this process's terminal.

    Call it below `if __name__ == "__main__":`, for the processes of the run import the script too, to find its
    functions.

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
    folder = Path(run_dir) if run_dir else Path("runs") / f"library-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "library.yaml"
        # Relative paths mean the current folder, not that of the temporary file.
        path.write_text(yaml.safe_dump({"base_dir": str(Path.cwd()), **_named(config)}, sort_keys=False))
        resolved = resolve(path, plugins)
    code = execute(
        resolved,
        run_dir=None if resume else folder,
        resume=folder if resume else None,
        dry_run=False,
        allow_changed_plugins=False,
    )
    if code:
        raise KeyboardInterrupt
    return folder


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
    return f"{Path(inspect.getfile(target)).resolve()}:{name}"
