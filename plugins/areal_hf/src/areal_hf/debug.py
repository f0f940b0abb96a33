"""Take one row of the data from its prompt to its loss in this process, and print its tokens.

`breakpoint()` works in your reward, workflow, filters, advantage and loss. The command writes no run folder and starts
no server: transformers samples the answers in this process, instead of the config's inference engine. The updates are
discarded.
"""

from __future__ import annotations

import argparse
from bdb import BdbQuit
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from areal_core.config import resolve
from areal_core.data import FinishReason, Generation, SampledTokens
from areal_core.errors import RunError
from areal_core.programs import add_request_arguments, debug_row, read_request
from areal_core.servers import InferenceCapabilities
from areal_hf.config import HFConfig
from areal_hf.rows import LiveRequest
from areal_hf.scheduler import Scheduler
from areal_hf.server import limits_for, load_model
from areal_hf.stop_texts import cut_at_stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.engines import ModelReference
    from areal_core.servers import GenerationRequest


def main(words: Sequence[str]) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(prog="areal debug", description=__doc__)
    add_request_arguments(parser)
    parser.add_argument(
        "--row", metavar="N", type=int, default=0, help="row of the data set, counted from 0 (default: 0)"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_intermixed_args(words)
    request = read_request(arguments)
    resolved = resolve(request.config, request.plugins, request.overrides, imports=True)
    try:
        debug_row(resolved, arguments.row, Generator)
    except RunError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, BdbQuit):  # `q` was typed at a breakpoint
            return 0
        raise
    return 0


class Generator:
    """An `InferenceClient` in this process. It answers one request at a time."""

    capabilities = InferenceCapabilities(frozenset(), frozenset({"stop", "top_logprobs"}))

    def __init__(self, model: ModelReference, tokenizer: Any) -> None:
        self._tokenizer, loaded = tokenizer, load_model(model, "auto")
        self._scheduler = Scheduler(loaded, limits_for(HFConfig.model_validate({}), loaded), recompute=False)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceClient.generate`."""
        stop, sampling = request.sampling.stop, replace(request.sampling, stop=())
        self._scheduler.add(LiveRequest(0, [*request.input_ids], sampling, request.seed))
        while (outputs := self._scheduler.step()) is None:
            pass
        reason = FinishReason.STOP if outputs.stopped[0] else FinishReason.LENGTH
        columns = outputs.tokens, outputs.logprobs, outputs.versions, outputs.top_ids, outputs.top_logprobs
        generation = Generation.of(SampledTokens(*(column.tolist() for column in columns)), reason)
        return cut_at_stop(generation, stop, self._tokenizer) if stop else generation

    async def close(self) -> None:
        """Do nothing: there is no connection."""
