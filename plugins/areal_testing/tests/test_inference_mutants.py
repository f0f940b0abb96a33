"""Test the suite of inference engines: a correct engine passes, and each broken one fails its test."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import TCPStore

from areal_core.data import FinishReason, Generation
from areal_core.errors import RunError
from areal_core.interfaces.inference import BroadcastGroup
from areal_testing.conformance import InferenceEngineSuite
from areal_testing.conformance.naive import NaiveEngine

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread():
    """More threads only slow such small models down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestNaiveEngine(InferenceEngineSuite):
    """Tests of the engine from which every mutant derives."""

    tokens_in_flight = 48

    def make_engine(self, folder, *, update_mode, slots):
        return NaiveEngine(slots)


def changed(output, ids=None, logprobs=None, versions=None):
    """Return a generation with some lists replaced."""
    kept = ids or output.output_ids, logprobs or output.logprobs, versions or output.versions
    return Generation(*kept, output.finish_reason)


def cut(output, count):
    """Return a generation with only its first tokens."""
    kept = output.output_ids[:count], output.logprobs[:count], output.versions[:count]
    return Generation(*kept, output.finish_reason)


class LogprobsBeforeTemperature(NaiveEngine):
    def _reported(self, logits, logprobs):
        return torch.log_softmax(logits.double(), -1)


class LogprobsOfTruncatedDistribution(NaiveEngine):
    """Reports log-probabilities of the 5 most probable tokens only, as servers with top-k by default do."""

    def _reported(self, logits, logprobs):
        kept = logprobs.topk(5).indices
        truncated = torch.full_like(logprobs, -30.0)
        truncated[kept] = torch.log_softmax(logprobs[kept], -1)
        return truncated


class OffByOneLogprobs(NaiveEngine):
    """Reports the previous token's log-probability for each token."""

    async def _generate(self, request):
        output = await super()._generate(request)
        return changed(output, logprobs=[*output.logprobs[:1], *output.logprobs[:-1]])


class IgnoredTemperature(NaiveEngine):
    """Draws at temperature 1, but reports log-probabilities at the request's temperature."""

    def _draw(self, request, produced, generator):
        plain = replace(request, sampling=replace(request.sampling, temperature=1.0))
        token, _, top = super()._draw(plain, produced, generator)
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([[*request.input_ids, *produced]])).logits[0, -1]
        return token, float(torch.log_softmax(logits.double() / request.sampling.temperature, -1)[token]), top


class TopsOfThePositionBefore(NaiveEngine):
    """Reports the likeliest tokens of the previous position for each token."""

    async def _generate(self, request):
        output = await super()._generate(request)
        tops = {name: np.roll(getattr(output, name), 1, 0) for name in ("top_ids", "top_logprobs")}
        return Generation(output.output_ids, output.logprobs, output.versions, output.finish_reason, **tops)


class TopsRenormalized(NaiveEngine):
    """Reports probabilities of the likeliest tokens that add up to 1."""

    async def _generate(self, request):
        output = await super()._generate(request)
        if not request.sampling.top_logprobs:
            return output
        tops = {"top_ids": output.top_ids, "top_logprobs": torch.tensor(output.top_logprobs).log_softmax(-1).numpy()}
        return Generation(output.output_ids, output.logprobs, output.versions, output.finish_reason, **tops)


class TopsLeftOut(NaiveEngine):
    """Offers likeliest tokens and reports none."""

    async def _generate(self, request):
        return await super()._generate(replace(request, sampling=replace(request.sampling, top_logprobs=0)))


class PromptLogprobsAfterTemperature(NaiveEngine):
    @torch.no_grad()
    def _prompt_logprobs(self, request):
        ids = torch.tensor(request.input_ids)
        table = torch.log_softmax(self._model(input_ids=ids[None]).logits[0] / request.sampling.temperature, -1)
        return table[:-1].gather(1, ids[1:, None])[:, 0].tolist()


class PromptLogprobsOfTheTokenBefore(NaiveEngine):
    def _prompt_logprobs(self, request):
        values = super()._prompt_logprobs(request)
        return values[-1:] + values[:-1]


class PromptLogprobsOfUncachedTokens(NaiveEngine):
    """Reports none for the tokens that an earlier prompt has in common with this one."""

    _seen: tuple[list[int], ...] = ()

    def _prompt_logprobs(self, request):
        ids = request.input_ids
        shared = (sum(a == b for a, b in zip(ids, seen, strict=False)) for seen in self._seen)
        values = super()._prompt_logprobs(request)[max(shared, default=0) :]
        self._seen = (*self._seen, ids)
        return values


class PromptLogprobsLeftOut(NaiveEngine):
    """Offers log-probabilities of prompts and reports none."""

    async def _generate(self, request):
        return await super()._generate(replace(request, sampling=replace(request.sampling, prompt_logprobs=False)))


class PromptLogprobsOfTheFirstWeights(NaiveEngine):
    """Does not compute the log-probabilities of a prompt again after an update."""

    def _prompt_logprobs(self, request):
        known = self.__dict__.setdefault("_known", {})
        return known.setdefault(tuple(request.input_ids), super()._prompt_logprobs(request))


class VersionReadAtTheEnd(NaiveEngine):
    async def _generate(self, request):
        output = await super()._generate(request)
        return changed(output, versions=[self.version] * len(output))


class VersionReadAtTheStart(NaiveEngine):
    async def _generate(self, request):
        version = self.version
        output = await super()._generate(request)
        return changed(output, versions=[version] * len(output))


class IgnoredCancellation(NaiveEngine):
    async def _await(self, task):
        return await asyncio.shield(task)


class StopTokenLeftOut(NaiveEngine):
    async def _generate(self, request):
        output = await super()._generate(request)
        return cut(output, len(output) - (output.finish_reason is FinishReason.STOP))


class StopTokenOverrun(NaiveEngine):
    def _ends(self, request, token):
        return False


class IgnoredMaxNewTokens(NaiveEngine):
    async def _generate(self, request):
        sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens + 1)
        return await super()._generate(replace(request, sampling=sampling))


class IgnoredMinNewTokens(NaiveEngine):
    async def _generate(self, request):
        return await super()._generate(replace(request, sampling=replace(request.sampling, min_new_tokens=0)))


class IgnoredGreedy(NaiveEngine):
    async def _generate(self, request):
        return await super()._generate(replace(request, sampling=replace(request.sampling, greedy=False)))


class IgnoredSeed(NaiveEngine):
    def _generator(self, request):
        if not hasattr(self, "_shared"):
            self._shared = torch.Generator().manual_seed(0)
        return self._shared


class OneSeedForAll(NaiveEngine):
    def _generator(self, request):
        return torch.Generator().manual_seed(0)


class IncompleteUpdate(NaiveEngine):
    """Does not update one tensor, a norm with 64 numbers."""

    def _copy_weights(self, tensors):
        kept = self._model.model.norm.weight.detach().clone()
        super()._copy_weights({**tensors, "model.norm.weight": kept})


class RefusedButChanged(NaiveEngine):
    """Copies tensors one by one, and notices only then that one does not fit."""

    def _read(self, path):
        try:
            return super()._read(path)
        except RunError:
            if path.exists() and path.stat().st_size > 1000 and "truncated" not in str(path):
                parameters = dict(self._model.named_parameters())
                with torch.no_grad():
                    for name, value in load_file(path).items():
                        if name in parameters and parameters[name].shape == value.shape:
                            parameters[name].copy_(value)
            raise


class RefusedButLabeled(NaiveEngine):
    async def update_weights(self, update):
        self.version = update.version
        await super().update_weights(update)


class MisfitIgnored(NaiveEngine):
    def _read(self, path):
        try:
            return super()._read(path)
        except RunError:
            return {name: value.detach() for name, value in self._model.named_parameters()}


class RequestsLostAtAnUpdate(NaiveEngine):
    async def update_weights(self, update):
        for task in list(self._running):
            task.cancel()
        await super().update_weights(update)

    async def _await(self, task):
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and not asyncio.current_task().cancelling():
                await asyncio.Event().wait()
            raise


class RequestsCutAtAnUpdate(NaiveEngine):
    async def _generate(self, request):
        version = self.version
        output = await super()._generate(request)
        whole = sum(sampled == version for sampled in output.versions)
        return cut(output, whole)


class UpdateThatReturnsTooEarly(NaiveEngine):
    async def update_weights(self, update):
        asyncio.get_running_loop().call_later(0.3, self._later, update)

    def _later(self, update):
        if self._model is not None:
            self._copy_weights(self._read(update.path / "model.safetensors"))
            self.version = update.version


class UnknownSettingsIgnored(NaiveEngine):
    def _check(self, request):
        sampling = replace(request.sampling, top_p=1.0, top_k=0, min_p=0.0)
        super()._check(replace(request, sampling=sampling))


class CloseLeavesRequestsWaiting(NaiveEngine):
    async def close(self):
        self._model = self._model and None

    async def _generate(self, request):
        while self._model is not None and len(request.input_ids) + 50 < request.sampling.max_new_tokens:
            await asyncio.sleep(0.01)
        if self._model is None:
            await asyncio.Event().wait()
        return await super()._generate(request)


class LostRequest(NaiveEngine):
    async def _generate(self, request):
        if self._slots.locked() and request.seed % 10 == 9:
            await asyncio.Event().wait()
        return await super()._generate(request)


class ReportsASlotImmediately(NaiveEngine):
    async def generate(self, request):
        request.on_slot_change(False)
        request.on_slot_change(True)
        return await super().generate(replace(request, on_slot_change=lambda has_slot: None))


class ReportsASlotTwice(NaiveEngine):
    def _generator(self, request):
        request.on_slot_change(True)
        return super()._generator(request)


class ReportsNoSlot(NaiveEngine):
    async def generate(self, request):
        return await super().generate(replace(request, on_slot_change=lambda has_slot: None))


class ReportsASlotAfterAnUpdate(NaiveEngine):
    """Reports a slot after an update, without reporting before that it was lost."""

    async def _generate(self, request):
        self._requests = [*getattr(self, "_requests", []), request]
        try:
            return await super()._generate(request)
        finally:
            self._requests.remove(request)

    async def update_weights(self, update):
        await super().update_weights(update)
        for request in self._requests:
            request.on_slot_change(True)


class BroadcastEngine(NaiveEngine):
    """Receives broadcasts too, as rank 1 of 2. It is correct."""

    capabilities = replace(NaiveEngine.capabilities, transports=frozenset({"core/broadcast"}))

    async def form_group(self, address, port, backend, current_group):
        def join():
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
            return dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))

        self._group = asyncio.ensure_future(asyncio.to_thread(join))
        return BroadcastGroup("group", 2, (), is_new=True)

    async def update_weights(self, update):
        if update.path is not None:
            return await super().update_weights(update)
        group = await self._group

        def receive():
            tensors = {tensor.name: torch.empty(tensor.shape) for tensor in update.tensors}
            for tensor in tensors.values():
                group.broadcast([tensor], dist.BroadcastOptions()).wait()
            return tensors

        self._copy_weights(await asyncio.to_thread(receive))
        self.version = update.version


class IncompleteBroadcast(BroadcastEngine):
    """Does not update one tensor of a broadcast, like an adapter that does not send its name to the server."""

    def _copy_weights(self, tensors):
        kept = self._model.model.norm.weight.detach().clone()
        super()._copy_weights({**tensors, "model.norm.weight": kept})


class HeadMayBeMissing(NaiveEngine):
    """Takes every head for a tied one."""

    def _read(self, path):
        tensors = load_file(path)
        head = dict(self._model.named_parameters()).get("lm_head.weight")
        return super()._read(path) if head is None else {"lm_head.weight": head.detach(), **tensors}


def test_an_engine_that_receives_broadcasts_passes(tmp_path):
    class Suite(TestNaiveEngine):
        def make_engine(self, folder, *, update_mode, slots):
            return BroadcastEngine(slots)

    Suite().test_every_tensor_of_a_broadcast_is_taken_over(tmp_path)


LOGPROBS = "test_logprobs_are_of_the_tempered_distribution"
LABELS = "test_every_token_carries_the_version_that_sampled_it"
STOP = "test_a_stop_token_ends_the_output_and_is_part_of_it"
SLOTS = "test_on_slot_change_reports_a_slot_once"
REFUSED = "test_refused_weights_change_nothing"
TOPS = "test_top_logprobs_are_those_of_the_tempered_distribution"
PROMPT = "test_prompt_logprobs_are_those_of_the_whole_distribution_at_temperature_1"
MUTANTS = [
    (LogprobsBeforeTemperature, LOGPROBS, "a plain forward pass"),
    (LogprobsOfTruncatedDistribution, LOGPROBS, "a plain forward pass"),
    (OffByOneLogprobs, LOGPROBS, "a plain forward pass"),
    (TopsOfThePositionBefore, TOPS, "a plain forward pass"),
    (TopsRenormalized, TOPS, "a plain forward pass"),
    (TopsLeftOut, TOPS, "were requested for each"),
    (PromptLogprobsAfterTemperature, PROMPT, "\\(temperature 0.7\\) differ by"),
    (PromptLogprobsOfTheTokenBefore, PROMPT, "a plain forward pass"),
    (PromptLogprobsOfUncachedTokens, PROMPT, "prompt_logprobs instead of"),
    (PromptLogprobsLeftOut, PROMPT, "lacks the prompt_logprobs"),
    (PromptLogprobsOfTheFirstWeights, PROMPT, "a plain forward pass"),
    (IgnoredTemperature, "test_tokens_are_drawn_from_the_tempered_distribution", "at temperature 0.7 the mean"),
    (VersionReadAtTheEnd, LABELS, "version that sampled, label"),
    (VersionReadAtTheStart, LABELS, "version that sampled, label"),
    (IgnoredCancellation, "test_a_cancelled_request_frees_its_slot", "a request after cancelled ones did not end"),
    (StopTokenLeftOut, STOP, "must end with the stop token"),
    (StopTokenOverrun, STOP, "continued after a stop token"),
    (IgnoredMaxNewTokens, "test_max_new_tokens_is_exact", "instead of \\(1, 2, 7, 24\\)"),
    (IgnoredMinNewTokens, "test_stop_tokens_are_not_drawn_before_min_new_tokens", "stop tokens at"),
    (IgnoredGreedy, "test_greedy_takes_the_most_probable_token", "not the most probable"),
    (IgnoredSeed, "test_a_seed_decides_the_tokens", "the same seed, weights and prompt gave other"),
    (OneSeedForAll, "test_a_seed_decides_the_tokens", "different seeds gave the same"),
    (IncompleteUpdate, "test_every_tensor_is_taken_over", "a plain forward pass"),
    (IncompleteUpdate, "test_recompute_gives_exact_logprobs_across_updates", "a plain forward pass"),
    (IncompleteBroadcast, "test_every_tensor_of_a_broadcast_is_taken_over", "a plain forward pass"),
    (HeadMayBeMissing, "test_a_missing_head_is_refused", "without its head"),
    (RefusedButChanged, REFUSED, "changed weights"),
    (RefusedButLabeled, REFUSED, "changed the label"),
    (MisfitIgnored, REFUSED, "accepted weights with a missing tensor"),
    (RequestsLostAtAnUpdate, LABELS, "a request during an update did not end"),
    (RequestsCutAtAnUpdate, LABELS, "cut a request short"),
    (UpdateThatReturnsTooEarly, "test_every_tensor_is_taken_over", "labels .0(, 7)?. after version 7"),
    (UnknownSettingsIgnored, "test_unsupported_requests_are_refused", "answered a request with unsupported (top|min)"),
    (
        CloseLeavesRequestsWaiting,
        "test_close_ends_running_requests_and_may_be_called_twice",
        "a request at close did not",
    ),
    (ReportsASlotImmediately, SLOTS, "got a slot while long requests held them all"),
    (ReportsASlotTwice, SLOTS, "instead of False, then True, for each"),
    (ReportsNoSlot, SLOTS, "instead of False, then True, for each"),
    (ReportsASlotAfterAnUpdate, LABELS, "a slot must be lost before it is acquired again"),
    (LostRequest, "test_more_requests_than_slots_are_all_answered", "30 requests did not end"),
]


@pytest.mark.parametrize(("mutant", "test", "message"), MUTANTS, ids=lambda value: getattr(value, "__name__", "of"))
def test_a_broken_engine_fails_its_test(mutant, test, message, tmp_path):
    class Suite(TestNaiveEngine):
        patience_s = 3 if "did not" in message else 60

        def make_engine(self, folder, *, update_mode, slots):
            return mutant(slots)

    with pytest.raises(AssertionError, match=message):
        getattr(Suite(), test)(tmp_path)
