"""Conformance suite of model sources: they make one loadable folder, once, also after a killed process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 1800.0
"""Timeout for making the model, which may be a download."""
PREPARE = """
import json, pathlib, sys
from areal_testing.conformance import ModelSourceSuite
suite = ModelSourceSuite()
suite.component, suite.settings = sys.argv[1], json.loads(sys.argv[2])
cache = pathlib.Path(sys.argv[3])
cache.mkdir()
suite.make().prepare(cache)
"""


class ModelSourceSuite(ComponentSuite):
    """Tests of a model source. Set `component` (and `settings`).

    Attributes:
        interrupted_after: numbers of files. For each, the test kills a process that makes the model when it has written
            so many files, and makes the model again.
    """

    kind: ClassVar[str] = "models"
    interrupted_after: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def test_the_folder_can_be_loaded(self, tmp_path: Path) -> None:
        """transformers loads the folder: the config, all weights and the tokenizer."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        folder = self.make().prepare(tmp_path)
        assert folder.is_dir(), f"prepare returned {folder}, which is not a folder"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # If files are missing, transformers makes an empty tokenizer for some models and raises no error.
        assert tokenizer("2 + 2 is four")["input_ids"], "the folder's tokenizer gives no tokens: its files are missing"
        size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        assert len(tokenizer) <= size, f"the tokenizer has {len(tokenizer)} tokens, the model {size}"
        load: Any = AutoModelForCausalLM  # only some releases of transformers have types for it
        _, report = load.from_pretrained(folder, output_loading_info=True)
        missing = sorted(report["missing_keys"])
        assert not missing, f"the folder has no weights for {', '.join(missing)}"

    def test_it_is_made_once(self, tmp_path: Path) -> None:
        """A second object, as in a resumed run, returns the same folder and writes no file again."""
        folder = self.make().prepare(tmp_path)
        before = _state(folder)
        assert self.make().prepare(tmp_path) == folder, "the second time it is another folder"
        assert _state(folder) == before, "the second time files were written again"

    def test_a_killed_process_leaves_no_incomplete_model(self, tmp_path: Path) -> None:
        """After a process was killed at any time, the next one makes the complete model."""
        assert self.component, "the killed process makes the model from `component`: set it"
        complete = _contents(self.make().prepare(tmp_path))
        for files in self.interrupted_after:
            cache = tmp_path / f"killed-{files}"
            self._prepare_and_kill(cache, files)
            actual = _contents(self.make().prepare(cache))
            assert actual == complete, f"after a process was killed with {files} files: {actual} instead of {complete}"

    def _prepare_and_kill(self, cache: Path, files: int) -> None:
        """Make the model in a process, and kill it and its children when it has written so many files."""
        command = [sys.executable, "-c", PREPARE, self.component, json.dumps(dict(self.settings)), str(cache)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None and _count_files(cache) < files:
                assert time.monotonic() < deadline, f"prepare did not return within {DEADLINE_S:g} s"
                time.sleep(0.001)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _count_files(folder: Path) -> int:
    """Return the number of files. `os.walk` ignores folders that another process removes meanwhile."""
    return sum(len(names) for _, _, names in os.walk(folder))


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def _contents(folder: Path) -> dict[str, str]:
    """Return the hashes of the model's files by name. Other files, such as locks, may differ."""
    files = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".json", ".jinja", ".model")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}
