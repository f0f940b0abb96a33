"""Test stop strings, with a generation and with a running engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from areal_core.data import Generation
from areal_core.data.trajectory import FinishReason
from areal_core.engines import ModelReference
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig
from areal_hf.stop_texts import cut_at_stop
from areal_testing.conformance.models import make_model

if TYPE_CHECKING:
    from pathlib import Path


class Letters:
    """A tokenizer with two letters for each token, so that a stop string may end within a token."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return "".join(chr(97 + token) + chr(98 + token) for token in ids)


@pytest.mark.parametrize(
    ("stop", "kept"),
    [(("de",), 3), (("dx", "ef"), 5), (("f",), 5), (("ab",), 1), (("bc",), 2), (("z",), 6), ((), 6)],
)
def test_the_last_token_completes_the_stop_string(stop: tuple[str, ...], kept: int) -> None:
    ids = [0, 1, 3, 9, 4, 3]  # ab bc de jk ef de
    column = np.arange(8)  # the first two values belong to the prompt
    logprobs, versions = [-float(position) for position in range(6)], [7, 7, 7, 8, 8, 8]
    tops = {"top_ids": [[token, 60 + token] for token in ids], "top_logprobs": [[-1.0, -2.0]] * 6}
    of_prompt = [-0.5]
    whole = Generation(
        ids, logprobs, versions, FinishReason.LENGTH, {"choices": column}, prompt_logprobs=of_prompt, **tops
    )
    cut = cut_at_stop(whole, stop, Letters())
    assert cut.output_ids == ids[:kept]
    assert cut.logprobs == whole.logprobs[:kept]
    assert cut.versions == whole.versions[:kept]
    assert np.array_equal(cut.columns["choices"], column[: 2 + kept])
    assert cut.prompt_logprobs == of_prompt
    assert np.array_equal(cut.top_ids, whole.top_ids[:kept])
    assert np.array_equal(cut.top_logprobs, whole.top_logprobs[:kept])
    assert cut.finish_reason is (FinishReason.LENGTH if kept == 6 else FinishReason.STOP)


def make_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"<{number}>": number for number in range(size)}, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.mark.slow
def test_an_engine_samples_the_same_tokens_up_to_a_stop_string(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    make_tokenizer(folder, 256)

    async def generate() -> list[Any]:
        engine = ServerFleet(HFAdapter(HFConfig(deterministic=True)), tmp_path)
        await engine.start(ModelReference(str(folder)))
        try:
            unlimited = await engine.generate(GenerationRequest("a", [5, 17], SamplingParameters(max_new_tokens=12), 3))
            stop = (f"<{unlimited.output_ids[5]}>",)
            sampling = SamplingParameters(max_new_tokens=12, stop=stop)
            return [unlimited, await engine.generate(GenerationRequest("b", [5, 17], sampling, 3))]
        finally:
            await engine.close()

    unlimited, stopped = asyncio.run(generate())
    count = unlimited.output_ids.index(unlimited.output_ids[5]) + 1
    assert stopped.output_ids == unlimited.output_ids[:count]
    assert stopped.logprobs == unlimited.logprobs[:count]
    assert stopped.finish_reason is FinishReason.STOP
    assert unlimited.finish_reason is FinishReason.LENGTH
