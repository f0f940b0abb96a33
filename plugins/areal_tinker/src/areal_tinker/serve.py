"""The driver of a server: starts its processes, and starts them again if one is lost."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from areal_core.config import load_run
from areal_core.errors import LostError, RunError, UsageError
from areal_core.programs import RunFolder, log, model_reference, process_groups, supervise
from areal_tinker.messages import Listening

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import Resolved
    from areal_core.launchers import ProcessGroup
    from areal_tinker.service import Options

MOST_LOSSES: Final = 5
"""Starts in a row that are lost before the server answers, after which the command gives up."""


def serve(resolved: Resolved, folder: Path, options: Options) -> int:
    """Serve until an interrupt, and return the exit code.

    Args:
        resolved: the config.
        folder: of the server; one of an earlier server is continued.
        options: options of the server.

    Raises:
        UsageError: the folder has another model, or another server uses it.
        RunError: the server cannot start.
    """
    resolved = _with_texts(resolved)
    run = RunFolder(folder)
    is_new = not run.config.exists()
    if not is_new:
        _require_same(load_run(folder), resolved, folder)
    if resolved.config.model.source is None:
        model_reference(resolved, run)  # raises if there is no such model, before anything is written
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    run.config.write_text(resolved.to_yaml())
    log(f"{'new' if is_new else 'continued'} server in {folder}")
    signals: list[int] = []
    losses = 0

    def on_message(message: Any) -> None:
        nonlocal losses
        if isinstance(message, Listening):
            losses = 0
            key = f"the key in {options.key_variable}" if options.key_variable else "tml-any"
            log(f"serving {message.model}: TINKER_BASE_URL={message.address} TINKER_API_KEY={key}; Ctrl-C ends it")

    while not signals:
        try:
            asyncio.run(
                supervise(
                    resolved,
                    run,
                    server_groups(resolved, folder, options),
                    "trainer",
                    on_message=on_message,
                    update=lambda _: None,
                    log=log,
                    signals=signals,
                )
            )
        except LostError as error:
            losses += 1
            if losses == MOST_LOSSES:
                raise
            log(f"{error.message}; starting again, clients continue")
        except RunError:
            if signals:  # interrupted while processes were started
                break
            raise
        else:
            break
    log(f"stopped; continue with --run-dir {folder}")
    return 128 + signals[0] if signals else 0


def server_groups(resolved: Resolved, folder: Path, options: Options) -> list[ProcessGroup]:
    """Return the processes of a server: the ranks of the trainer, of which rank 0 serves, and inference servers."""
    command = [sys.executable, "-m", "areal_tinker.service", str(folder), json.dumps(asdict(options))]
    groups = process_groups(resolved.config, folder)
    trainer = next(group for group in groups if group.role == "trainer")
    return [replace(trainer, command=command), *(group for group in groups if group.is_server)]


def _with_texts(resolved: Resolved) -> Resolved:
    """Return the config with servers that decode what they generate: clients may end an answer at a text."""
    chosen = resolved.config.inference_engine
    settings: Any = getattr(chosen, "settings", None)
    if chosen is None or not hasattr(settings, "detokenize"):
        return resolved
    chosen = replace(chosen, settings=settings.model_copy(update={"detokenize": True}))
    return replace(resolved, config=resolved.config.model_copy(update={"inference_engine": chosen}))


def _require_same(former: Resolved, resolved: Resolved, folder: Path) -> None:
    """Raise `UsageError` if the models in a folder would not fit the config."""
    for key in ("model", "train_engine"):
        if getattr(former.config, key) != getattr(resolved.config, key):
            raise UsageError(
                f"the server in {folder} had another {key} in its config", hints=["name a new folder: --run-dir DIR"]
            )
