"""What a source of models must do: one folder that can be loaded, made once, whoever was killed while making it."""

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
"""For making the model, which may be a download."""
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
    """Set `component` (and `settings`).

    Attributes:
        interrupted_after: a process that prepares is killed when so many files are there, and another one prepares.
    """

    kind: ClassVar[str] = "models"
    interrupted_after: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def test_the_folder_can_be_loaded(self, tmp_path: Path) -> None:
        """By transformers: config, every weight, tokenizer."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        folder = self.make().prepare(tmp_path)
        assert folder.is_dir(), f"prepare returned {folder}, which is not a folder"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # Of some models transformers makes one without a word out of nothing.
        assert tokenizer("2 + 2 is four")["input_ids"], "the folder's tokenizer knows no text: its files are missing"
        size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        assert len(tokenizer) <= size, f"the tokenizer has {len(tokenizer)} tokens, the model {size}"
        load: Any = AutoModelForCausalLM  # some releases of transformers have types for it, some have not
        _, told = load.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"], f"the folder has no weights for {', '.join(sorted(told['missing_keys']))}"

    def test_it_is_made_once(self, tmp_path: Path) -> None:
        """By a second object, as a run that is resumed has, nothing is written again."""
        folder = self.make().prepare(tmp_path)
        before = _state(folder)
        assert self.make().prepare(tmp_path) == folder, "the second time it is another folder"
        assert _state(folder) == before, "the second time files were written again"

    def test_one_that_was_killed_leaves_nothing_that_is_taken_for_a_model(self, tmp_path: Path) -> None:
        """Whatever it had written by then."""
        assert self.component, "a process that is killed makes the model by the name in `component`"
        whole = _contents(self.make().prepare(tmp_path))
        for files in self.interrupted_after:
            cache = tmp_path / f"killed-{files}"
            self._prepare_and_kill(cache, files)
            found = _contents(self.make().prepare(cache))
            assert found == whole, f"after one that was killed behind {files} files: {found} in place of {whole}"

    def _prepare_and_kill(self, cache: Path, files: int) -> None:
        """End the process that prepares, and all that it started, once so many files are there."""
        words = [sys.executable, "-c", PREPARE, self.component, json.dumps(dict(self.settings)), str(cache)]
        process = subprocess.Popen(words, start_new_session=True)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None and _count_files(cache) < files:
                assert time.monotonic() < deadline, f"prepare has not come back within {DEADLINE_S:g} s"
                time.sleep(0.001)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _count_files(folder: Path) -> int:
    """Count files while another process writes and removes folders, which `os.walk` passes over."""
    return sum(len(names) for _, _, names in os.walk(folder))


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def _contents(folder: Path) -> dict[str, str]:
    """The files that make up the model, and what is in them."""
    files = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".json", ".jinja", ".model")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}
