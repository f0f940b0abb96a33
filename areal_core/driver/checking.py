"""Whether the code behind a config is there and fits: asked in a process of its own, before anything is left on disk.

The process (`areal_core.testing.trial`) imports every component that the config chooses and holds its signature against
its settings, as the run's processes will; where an algorithm learns from rows as they are, it encodes the first ones.
What is the user's own is tried. Whatever it imports, and whatever that does, stays out of the program that asked.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core import interfaces
from areal_core.config import CONFIG_FILE, selections
from areal_core.disk import is_folder
from areal_core.driver.plan import FIRST_ROWS, spread
from areal_core.errors import ArealError, ConfigError
from areal_core.files import KeptSources
from areal_core.interfaces.dataset import name_row
from areal_core.interfaces.launcher import describe_exit
from areal_core.interfaces.workflow import REWARD_ARGUMENTS, SkippedRowError
from areal_core.plugins.catalog import Catalog
from areal_core.runtime.folder import RunFolder, cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from areal_core.config import Resolved, RunConfig, Selection

DEADLINE_S: Final = 600.0
TOLD_S: Final = 15.0
LAST_WORDS: Final = 800
ROWS_S: Final = 3.0
"""Seconds for checking rows of one data set; small data is checked whole."""

CALLED: Final = {
    "reward_shaping": interfaces.RewardShaping,
    "group_filters": interfaces.GroupFilter,
    "batch_transforms": interfaces.BatchTransform,
    "advantages": interfaces.Advantage,
    "corrections": interfaces.Correction,
    "policy_losses": interfaces.PolicyLoss,
    "regularizers": interfaces.Regularizer,
    "auxiliary_losses": interfaces.AuxiliaryLoss,
    "loss_aggregations": interfaces.LossAggregation,
    "example_tokenizers": interfaces.ExampleTokenizer,
}
"""The kinds of functions that areal calls by position, each with the Protocol that says how."""
OFFERED: Final = {"weight_transports": ("engine", "rollouts", "address", "gpu", "timeout_s")}
"""What areal supplies where it makes components of a kind, beside their settings; see the Protocols."""
CALLED_BY_NAME: Final = ("agents", "tools", "reward_functions")


class CodeCheck:
    """A check that is under way as soon as it is made; what else there is to check can be checked meanwhile.

    Importing takes seconds, so the last check that found nothing wrong is remembered with every module that it had
    read: the same config and the same files need none, unless rows of data were encoded, whose files nobody knows.
    """

    def __init__(self, resolved: Resolved) -> None:
        self.modules: dict[str, str] = {}
        """Once there are no problems: the user's own modules that were imported, each with its file."""
        self._notes: list[str] = []
        text = resolved.to_yaml()
        self._key = hashlib.sha256("\n".join([sys.prefix, *sys.path, text]).encode()).hexdigest()
        self._temporary = tempfile.TemporaryDirectory(prefix="areal-check-")
        self._folder = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[str, dict[str, bool]] = {}
        if self._is_known():
            return
        (self._folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        with (self._folder / "output").open("wb") as output:
            kept = [str(KeptSources.folder)] if KeptSources.folder else []
            command = [sys.executable, "-m", "areal_core.testing.trial", str(self._folder), *kept]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def problems(self, rows: Mapping[str, Mapping[str, str]]) -> list[str]:
        """Everything that is wrong with the chosen code, once the check has ended; a program that died counts.

        Args:
            rows: by where in the config a data set is chosen, the keys of its rows, each with the name of a row that
                lacks it, or an empty text.
        """
        return [*self._found(), *self._lacking(rows)]

    def _found(self) -> list[str]:
        if self._process is None:
            return []
        began = time.monotonic()
        while (waited := time.monotonic() - began) < DEADLINE_S:
            try:
                code = self._process.wait(TOLD_S)
            except subprocess.TimeoutExpired:
                with suppress(OSError):  # no result: `--dry-run --json` writes those to standard output
                    sys.stderr.write(f"still checking the components of the config, for {waited + TOLD_S:.0f} s\n")
                continue
            if code or not (answer := self._folder / "answer.json").is_file():
                return [f"checking the components {describe_exit(code)}: {self._last_words() or 'with no output'}"]
            problems, files, untried, self._asked, self.modules, self._notes = json.loads(answer.read_text("utf-8"))
            with suppress(OSError):
                sys.stderr.write(untried)
            if not problems and files:
                self._remember(files)
            return list(problems)
        return [f"checking the components took longer than {DEADLINE_S:g} s: {self._last_words()}"]

    def _lacking(self, rows: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
        given = f"rewards are given {', '.join(REWARD_ARGUMENTS)}, and of a row of"
        for reward, dataset, lacking in self._unfilled(rows, is_required=True):
            names = ", ".join(f"{name}{_instead(key)}" for name, key in lacking.items())
            yield f"{reward} asks for {names}: {given} {dataset} its {', '.join(rows[dataset])}"
        for reward, asked in self._asked.items():
            for dataset, keys in rows.items():
                for name, is_required in asked.items():
                    if is_required and keys.get(name):
                        yield f"{reward} asks for {name}, and {keys[name]} of {dataset} has none"

    def plan_rows(self, rows: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
        """Yield labels and texts for the plan: rows that are left out, and rewards' arguments that keep their defaults.

        A default is a note where rows have a key of a similar name: it may then hide a misspelling.

        Args:
            rows: as for `problems`, which comes first.
        """
        yield from (("note", note) for note in self._notes)
        for reward, dataset, lacking in self._unfilled(rows, is_required=False):
            for name, key in lacking.items():
                text = f"{reward}: no row of {dataset} fills {name}, so its default applies"
                yield ("note", f"{text}{_instead(key)}") if key else ("rewards", text)

    def _unfilled(
        self, rows: Mapping[str, Collection[str]], *, is_required: bool
    ) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Yield by reward and data set the arguments that no row fills, each with the key of a similar name, if any."""
        for reward, names in self._asked.items():
            for dataset, keys in rows.items():
                others = {key.lower(): key for key in keys if key not in names}
                lacking = [name for name, needed in names.items() if needed is is_required and name not in keys]
                near = {name: difflib.get_close_matches(name.lower(), others, n=1) for name in lacking}
                if lacking:
                    yield reward, dataset, {name: others[found[0]] if found else "" for name, found in near.items()}

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._temporary.cleanup()

    def _is_known(self) -> bool:
        with suppress(OSError, ValueError):
            key, files, *found = json.loads(_memory().read_text(encoding="utf-8"))
            if key == self._key and all(Path(path).stat().st_mtime_ns == time for path, time in files.items()):
                self._asked, self.modules = found
                return True
        return False

    def _remember(self, files: Mapping[str, int]) -> None:
        fresh = _memory().with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a home that cannot be written to: then it is checked again
            fresh.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps([self._key, files, self._asked, self.modules]), encoding="utf-8")
            fresh.replace(_memory())

    def _last_words(self) -> str:
        return (self._folder / "output").read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:].strip()


def _instead(key: str) -> str:
    return f" (did you mean the rows' '{key}'? Name both alike)" if key else ""


def _memory() -> Path:
    return cache_folder() / "checked.json"


def import_problems(resolved: Resolved, folder: Path) -> Iterator[str]:
    """What is wrong with the chosen components as far as importing them shows."""
    from areal_core.runs.engines import build_engine

    for plugin in resolved.plugins.names:
        installed = Catalog.scan().get(plugin)
        yield from installed.unmet() if installed is not None else ()
    for path, chosen in selections(resolved.config):
        key = ".".join(map(str, path))
        sys.stderr.write(f"importing {key}: {chosen.target}\n")
        try:
            if chosen.kind == "inference_engines":
                build_engine(resolved.config, RunFolder(folder), folder, None)
            else:
                chosen.prepare(**dict.fromkeys(OFFERED.get(chosen.kind, ())))
                _check_call(chosen)
        except ArealError as error:
            yield ": ".join((f"{key}: {error.message}", *error.hints))


def looks_at_rows(resolved: Resolved) -> bool:
    """Return whether rows of the data are checked with the model's tokenizer or the workflow."""
    config = resolved.config
    if config.algorithm.build().encode is None and config.workflow is not None:
        if hasattr(config.workflow.load(), "check_row"):
            return True
        if not hasattr(config.workflow.settings, "check_prompt"):
            return False
    path = config.model.path
    return path is not None and is_folder(resolved.base_dir / path)  # else the model is yet to be made


def row_problems(resolved: Resolved, folder: RunFolder, notes: list[str]) -> Iterator[str]:
    """Yield why rows of the training and the held-out data cannot be used, the first of each; how many rows are left
    out as too long is added to `notes`.

    Checked are rows spread over all data, as many as `ROWS_S` allows: with the algorithm's example tokenizer, or with
    the workflow's `check_row` and its settings' `check_prompt`. Data that cannot be read is the plan's problem.
    """
    from areal_core.runs.models import load_tokenizer, model_reference
    from areal_core.training.examples import encode_row

    config = resolved.config
    encode = config.algorithm.build().encode
    tokenizer = None
    if encode is not None or hasattr(getattr(config.workflow, "settings", None), "check_prompt"):
        tokenizer = load_tokenizer(model_reference(resolved, folder))
    checks = list(_row_checks(config, tokenizer))
    chosen = [("dataset", config.dataset)]
    if config.evaluation is not None and encode is None:
        chosen.append(("evaluation.dataset", config.evaluation.dataset))
    for key, selection in chosen:
        try:
            dataset = selection.build()
            deadline, checked, skipped = time.monotonic() + ROWS_S, 0, 0
            for index in spread(len(dataset)):
                if checked >= FIRST_ROWS and time.monotonic() > deadline:
                    break
                checked += 1
                try:
                    for check in checks:
                        if told := check(dataset[index]):
                            raise ConfigError(f"{name_row(dataset, index)} {told}")
                    if encode is not None and not encode_row(dataset, index, partial(encode, tokenizer=tokenizer)):
                        skipped += 1
                except SkippedRowError:
                    skipped += 1
            if skipped:
                notes.append(
                    f"{key}: {skipped:,} of the {checked:,} rows that were checked are left out as too long "
                    f"(overlong: skip); it has {len(dataset):,}"
                )
            if checked and skipped == checked:
                raise ConfigError(f"all {checked:,} rows that were checked are too long: see overlong")
        except Exception as error:  # noqa: BLE001 - a data set is anybody's code
            told = str(getattr(error, "message", error))
            yield told if key == "dataset" else f"{key}: {told}"


def _row_checks(config: RunConfig, tokenizer: Any) -> Iterator[Callable[[Any], str]]:
    """Yield the checks of a row: functions from a row to what is wrong with it, empty if nothing is."""
    encode = config.algorithm.build().encode
    if encode is None and config.workflow is not None and hasattr(config.workflow.load(), "check_row"):
        yield config.workflow.build().check_row
    parts = [config.workflow] if encode is None else [part for _, part in selections(config.algorithm)]
    for part in parts:
        if (check := getattr(getattr(part, "settings", None), "check_prompt", None)) is not None:
            yield partial(check, tokenizer=tokenizer)


def _check_call(chosen: Selection) -> None:
    """Raise `ConfigError` where areal could not call a function as its Protocol says."""
    target, protocol = chosen.load(), CALLED.get(chosen.kind)
    if not callable(target) and (protocol is not None or chosen.kind in CALLED_BY_NAME):
        raise ConfigError(f"'{chosen.target}' is {target!r:.40}, and must be a function or a class")
    if protocol is None or isinstance(target, type) or not callable(target):
        return
    names = list(inspect.signature(protocol.__call__).parameters)[1:]
    try:
        inspect.signature(target).bind(*names, **chosen.keywords())
    except TypeError as error:
        raise ConfigError(f"'{chosen.target}' is called with ({', '.join(names)}) and its settings: {error}") from None
