"""Tracker for TensorBoard: event files in the run folder, for `tensorboard --logdir RUN_DIR`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from areal_trackers.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_trackers.config import TensorBoardSettings


class TensorBoardTracker:
    """A `Tracker` for TensorBoard. A resumed run continues in the same folder.

    TensorBoard then hides what an earlier attempt logged from the first resumed step on.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, settings: TensorBoardSettings) -> None:
        self._settings = settings
        self._library = load_library("tensorboard", "torch.utils.tensorboard")
        self._config: Mapping[str, object] = {}
        self._folder: Path | None = None
        self._writer: Any = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """See `Tracker.start`. The files are opened at the first step, because a resume needs its number."""
        self._folder = run_dir / self._settings.folder
        self._config = config

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log every metric as a scalar of its name; see `Tracker.log`."""
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _open(self, step: int) -> Any:
        if self._folder is None:
            raise RuntimeError("log was called before start")
        resumed = self._folder.is_dir() and any(self._folder.iterdir())
        writer = self._library.SummaryWriter(
            str(self._folder),
            purge_step=step if resumed else None,
            flush_secs=self._settings.flush_every_s,
        )
        # In TensorBoard's Markdown, four leading spaces make a code block.
        text = json.dumps(self._config, indent=2, default=str)
        writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), step)
        return writer

    def close(self) -> None:
        """Close the files; see `Tracker.close`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
