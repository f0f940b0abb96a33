"""The hook specifications: every place where areal asks its plugins something or tells them something.

*Registration hooks* return records (strings) and are asked before a config is validated. *Event hooks* observe a run.
Nothing that happens for every token or every sample is a hook: that is a method of a Protocol in
`areal_core.interfaces`. No parameter has a default value, because pluggy would hand plugins the default instead of
the value; wrappers are refused, because then the error of one plugin would look like another's.
"""
# A specification is its signature and its documentation; pluggy never calls it, so it has no body.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins.markers import PROJECT, hookspec
from areal_core.plugins.records import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from pydantic import BaseModel

    from areal_core.plugins.records import Record

# --- registration: what a plugin supplies ---------------------------------------------------------------------


def _registration(kind: str) -> Callable[[], Iterable[Record]]:
    """The hook with which plugins supply one kind of thing; `docs/reference/hooks.md` says what each kind is.

    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """

    def supply() -> Iterable[Record]: ...

    supply.__name__, supply.__doc__ = f"{PROJECT}_{kind}", _registration.__doc__
    return hookspec(supply)


globals().update({f"{PROJECT}_{kind}": _registration(kind) for kind in KINDS})


# --- events: what happens in a run ----------------------------------------------------------------------------
# `config` is the `areal_core.config.RunConfig`: a config names plugins, so these stand below it and hand it on unread.


@hookspec
def areal_configure(config: BaseModel) -> None:
    """The config is resolved, complete and checked.

    When: after every check has passed and before any process is started, never with `--dry-run`.
    Process: the one that launched the run.
    How often: once.
    Exception: ends the program with exit code 2; nothing has started.
    """


@hookspec
def areal_run_started(config: BaseModel, run_dir: Path) -> None:
    """A run begins, or goes on after a resume.

    When: after the run folder is written and before the other processes are started.
    Process: the one that launched the run.
    How often: once; a resume is a new start.
    Exception: ends the run with exit code 1.
    """


@hookspec
def areal_step_finished(run_dir: Path, step: int, metrics: Mapping[str, float]) -> Iterable[str] | None:
    """A training step is over and its metrics are final. Lines that it returns are shown to whoever watches the run.

    When: after the optimizer updates of a batch, beside generation.
    Process: trainer rank 0.
    How often: once for every step.
    Exception: is logged with the plugin's name; the plugin hears no further events and the run goes on.
    """


@hookspec
def areal_batch_logged(run_dir: Path, step: int, batch: object) -> None:
    """A few groups of a batch have been trained on: `training.logged_groups`.

    `batch` is an `areal_core.data.PackedBatch` of their sequences as the algorithm prepared them. Position t holds the
    values of token t + 1, as in `shift_to_predictions`; what the losses found is among them, float32, NaN where no loss
    has seen a token.

    When: after the optimizer updates of a batch, beside generation.
    Process: trainer rank 0.
    How often: once for every batch that was trained on.
    Exception: is logged with the plugin's name; the plugin hears no further events and the run goes on.
    """


@hookspec
def areal_weights_synced(run_dir: Path, step: int, version: int) -> None:
    """New weights are on their way to the servers.

    When: when their sync has begun; tokens say by themselves which version sampled them.
    Process: trainer rank 0.
    How often: once for every weight sync.
    Exception: is logged with the plugin's name; the plugin hears no further events and the run goes on.
    """


@hookspec
def areal_checkpoint_saved(run_dir: Path, step: int, path: Path) -> None:
    """A checkpoint is committed: from now on a resume starts here.

    When: after the commit, never for a checkpoint that is still provisional.
    Process: trainer rank 0.
    How often: once for every checkpoint.
    Exception: is logged with the plugin's name; the plugin hears no further events and the run goes on.
    """


@hookspec
def areal_run_finished(run_dir: Path, outcome: str, signal: int) -> Iterable[str] | None:
    """The run is over: `outcome` is done, interrupted or failed; `signal` asked it to stop, 0 where none did.
    Lines that it returns are shown.

    When: when every other process of the run has ended.
    Process: the one that launched the run.
    How often: once, unless the process was killed.
    Exception: is logged with the plugin's name; the outcome of the run stays.
    """
