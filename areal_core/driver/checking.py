"""Whether the code behind a config is there and fits: asked in a process of its own, before anything is left on disk.

The process (`areal_core.testing.trial`) imports every component that the config chooses and holds its signature against
its settings, as the run's processes will; where an algorithm learns from rows as they are, it encodes the first ones.
What is the user's own is tried. Whatever it imports, and whatever that does, stays out of the program that asked.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Final

from areal_core import interfaces
from areal_core.config import CONFIG_FILE, selections
from areal_core.config.imports import KeptSources
from areal_core.disk import is_folder
from areal_core.driver.plan import FIRST_ROWS
from areal_core.errors import ArealError, ConfigError
from areal_core.interfaces.dataset import name_row
from areal_core.interfaces.launcher import describe_exit
from areal_core.interfaces.workflow import REWARD_ARGUMENTS
from areal_core.plugins.catalog import Catalog
from areal_core.runs.folder import RunFolder, cache_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from areal_core.config import Resolved, Selection

DEADLINE_S: Final = 600.0
TOLD_S: Final = 15.0
LAST_WORDS: Final = 800

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
OFFERED: Final = {"weight_transports": ("engine", "rollouts", "dtype", "address", "gpu", "timeout_s")}
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
        text = resolved.to_yaml()
        self._key = hashlib.sha256("\n".join([sys.prefix, *sys.path, text]).encode()).hexdigest()
        self._temporary = tempfile.TemporaryDirectory(prefix="areal-check-")
        self._folder = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[str, list[str]] = {}
        if self._is_known():
            return
        (self._folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        with (self._folder / "output").open("wb") as output:
            kept = [str(KeptSources.folder)] if KeptSources.folder else []
            command = [sys.executable, "-m", "areal_core.testing.trial", str(self._folder), *kept]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def problems(self, rows: Mapping[str, Collection[str]]) -> list[str]:
        """Everything that is wrong with the chosen code, once the check has ended; a program that died counts.

        Args:
            rows: the keys of the first rows, by where in the config their data set is chosen.
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
            problems, files, notes, self._asked, self.modules = json.loads(answer.read_text(encoding="utf-8"))
            with suppress(OSError):
                sys.stderr.write(notes)
            if not problems and files:
                self._remember(files)
            return list(problems)
        return [f"checking the components took longer than {DEADLINE_S:g} s: {self._last_words()}"]

    def _lacking(self, rows: Mapping[str, Collection[str]]) -> Iterator[str]:
        given = f"rewards are given {', '.join(REWARD_ARGUMENTS)}, and of a row of"
        for reward, names in self._asked.items():
            for dataset, keys in rows.items():
                if lacking := [name for name in names if name not in keys]:
                    yield f"{reward} asks for {', '.join(lacking)}: {given} {dataset} its {', '.join(keys)}"

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
    """Whether the algorithm encodes rows as they are, or the workflow has a method that looks at them."""
    workflow = resolved.config.workflow
    if resolved.config.algorithm.build().encode is None:
        return workflow is not None and hasattr(workflow.load(), "check_row")
    path = resolved.config.model.path
    return path is not None and is_folder(resolved.base_dir / path)  # else the model is yet to be made


def row_problems(resolved: Resolved, folder: RunFolder) -> Iterator[str]:
    """Why the algorithm's example tokenizer, or the workflow's `check_row`, refuses the first rows; of a data set that
    cannot be read the plan tells."""
    from areal_core.runs.models import load_tokenizer, model_reference
    from areal_core.training.examples import encode_row

    encode = resolved.config.algorithm.build().encode
    try:
        dataset, check = resolved.config.dataset.build(), None
        if encode is None and resolved.config.workflow is not None:
            check = resolved.config.workflow.build().check_row
        tokenizer = None if check else load_tokenizer(model_reference(resolved, folder))
        for index in range(min(len(dataset), FIRST_ROWS)):
            if check is None:
                encode_row(dataset, index, partial(encode, tokenizer=tokenizer))
            elif told := check(dataset[index]):
                raise ConfigError(f"{name_row(dataset, index)}: {told}")
    except Exception as error:  # noqa: BLE001 - a data set is anybody's code
        yield str(getattr(error, "message", error))


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
