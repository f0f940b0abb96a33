"""The suite of inference engines passes a correct engine and catches each of these broken ones where it should."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

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
    """More only slow such small models down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestNaiveEngine(InferenceEngineSuite):
    """The engine that every mutant below is derived from."""

    tokens_in_flight = 48

    def make_engine(self, folder, *, update_mode, slots):
        return NaiveEngine(slots)


def changed(output, ids=None, logprobs=None, versions=None):
    """A generation with something else said of it."""
    kept = ids or output.output_ids, logprobs or output.logprobs, versions or output.versions
    return Generation(*kept, output.finish_reason)


def cut(output, count):
    """The first tokens of a generation."""
    kept = output.output_ids[:count], output.logprobs[:count], output.versions[:count]
    return Generation(*kept, output.finish_reason)


class LogprobsBeforeTemperature(NaiveEngine):
    def _reported(self, logits, logprobs):
        return torch.log_softmax(logits.double(), -1)


class LogprobsOfTruncatedDistribution(NaiveEngine):
    """Renormalized over what may be drawn, as servers do whose top-k is on by default."""

    def _reported(self, logits, logprobs):
        kept = logprobs.topk(5).indices
        lifted = torch.full_like(logprobs, -30.0)
        lifted[kept] = torch.log_softmax(logprobs[kept], -1)
        return lifted


class OffByOneLogprobs(NaiveEngine):
    """Each token gets the log-probability of the one before it."""

    async def _generate(self, request):
        output = await super()._generate(request)
        return changed(output, logprobs=[*output.logprobs[:1], *output.logprobs[:-1]])


class IgnoredTemperature(NaiveEngine):
    """Draws at temperature 1 and reports what it should have drawn from."""

    def _draw(self, request, produced, generator):
        plain = replace(request, sampling=replace(request.sampling, temperature=1.0))
        token, _ = super()._draw(plain, produced, generator)
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([[*request.input_ids, *produced]])).logits[0, -1]
        return token, float(torch.log_softmax(logits.double() / request.sampling.temperature, -1)[token])


class VersionReadAtTheEnd(NaiveEngine):
    async def _generate(self, request):
        output = await super()._generate(request)
        return changed(output, versions=[self.version] * len(output))


class VersionReadAtTheStart(NaiveEngine):
    async def _generate(self, request):
        version = self.version
        output = await super()._generate(request)
        return changed(output, versions=[version] * len(output))


class LostCancel(NaiveEngine):
    async def _wait(self, task):
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
        more = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens + 1)
        return await super()._generate(replace(request, sampling=more))


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


class HalfTakenWeights(NaiveEngine):
    """One tensor, a norm of 64 numbers, stays as it was."""

    def _take_over(self, tensors):
        kept = self._model.model.norm.weight.detach().clone()
        super()._take_over({**tensors, "model.norm.weight": kept})


class RefusedButChanged(NaiveEngine):
    """Copies tensor by tensor and notices the misfit half-way."""

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

    async def _wait(self, task):
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
        whole = sum(found == version for found in output.versions)
        return cut(output, whole)


class UpdateThatReturnsTooEarly(NaiveEngine):
    async def update_weights(self, update):
        asyncio.get_running_loop().call_later(0.3, self._later, update)

    def _later(self, update):
        if self._model is not None:
            self._take_over(self._read(update.path / "model.safetensors"))
            self.version = update.version


class UnknownSettingsIgnored(NaiveEngine):
    def _check(self, request):
        plain = replace(request.sampling, top_p=1.0, top_k=0, min_p=0.0)
        super()._check(replace(request, sampling=plain))


class CloseLeavesRequestsWaiting(NaiveEngine):
    async def close(self):
        self._model = self._model and None

    async def _generate(self, request):
        while self._model is not None and len(request.input_ids) + 50 < request.sampling.max_new_tokens:
            await asyncio.sleep(0.01)
        if self._model is None:
            await asyncio.Event().wait()
        return await super()._generate(request)


class OneRequestForgotten(NaiveEngine):
    async def _generate(self, request):
        if self._slots.locked() and request.seed % 10 == 9:
            await asyncio.Event().wait()
        return await super()._generate(request)


class TellsOfPlacesAtOnce(NaiveEngine):
    async def generate(self, request):
        request.on_slot_change(False)
        request.on_slot_change(True)
        return await super().generate(replace(request, on_slot_change=lambda has_slot: None))


class TellsOfPlacesTwice(NaiveEngine):
    def _generator(self, request):
        request.on_slot_change(True)
        return super()._generator(request)


class TellsOfNoPlace(NaiveEngine):
    async def generate(self, request):
        return await super().generate(replace(request, on_slot_change=lambda has_slot: None))


class TellsOfPlacesAgainAfterAnUpdate(NaiveEngine):
    """As if every update took the places away, and nobody said so."""

    async def _generate(self, request):
        self._asked = [*getattr(self, "_asked", []), request]
        try:
            return await super()._generate(request)
        finally:
            self._asked.remove(request)

    async def update_weights(self, update):
        await super().update_weights(update)
        for request in self._asked:
            request.on_slot_change(True)


class BroadcastEngine(NaiveEngine):
    """Receives broadcasts too, as rank 1 of two: nothing is wrong with it."""

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
            tensors = {one.name: torch.empty(one.shape) for one in update.tensors}
            for tensor in tensors.values():
                group.broadcast([tensor], dist.BroadcastOptions()).wait()
            return tensors

        self._take_over(await asyncio.to_thread(receive))
        self.version = update.version


class HalfTakenBroadcast(BroadcastEngine):
    """As with an adapter that leaves a parameter out of what it tells its server to load."""

    def _take_over(self, tensors):
        kept = self._model.model.norm.weight.detach().clone()
        super()._take_over({**tensors, "model.norm.weight": kept})


class HeadMayBeMissing(NaiveEngine):
    """Takes every model's head for a tied one."""

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
PLACES = "test_a_request_is_told_of_its_place_once_and_not_before"
REFUSED = "test_refused_weights_change_nothing"
MUTANTS = [
    (LogprobsBeforeTemperature, LOGPROBS, "a plain forward pass"),
    (LogprobsOfTruncatedDistribution, LOGPROBS, "a plain forward pass"),
    (OffByOneLogprobs, LOGPROBS, "a plain forward pass"),
    (IgnoredTemperature, "test_tokens_are_drawn_from_the_tempered_distribution", "at temperature 0.7 the mean"),
    (VersionReadAtTheEnd, LABELS, "version that sampled, label"),
    (VersionReadAtTheStart, LABELS, "version that sampled, label"),
    (LostCancel, "test_a_cancelled_request_frees_its_slot", "a request behind cancelled ones did not end"),
    (StopTokenLeftOut, STOP, "behind the stop token, which belongs to it"),
    (StopTokenOverrun, STOP, "went on behind a stop token"),
    (IgnoredMaxNewTokens, "test_max_new_tokens_is_exact", "instead of \\(1, 2, 7, 24\\)"),
    (IgnoredMinNewTokens, "test_stop_tokens_are_not_drawn_before_min_new_tokens", "stop tokens at"),
    (IgnoredGreedy, "test_greedy_takes_the_most_probable_token", "not the most probable"),
    (IgnoredSeed, "test_a_seed_decides_the_tokens", "the same seed, weights and prompt gave other"),
    (OneSeedForAll, "test_a_seed_decides_the_tokens", "different seeds gave the same"),
    (HalfTakenWeights, "test_every_tensor_is_taken_over", "a plain forward pass"),
    (HalfTakenWeights, "test_recompute_gives_exact_logprobs_across_updates", "a plain forward pass"),
    (HalfTakenBroadcast, "test_every_tensor_of_a_broadcast_is_taken_over", "a plain forward pass"),
    (HeadMayBeMissing, "test_a_head_that_is_left_out_is_missed", "taken over without its head"),
    (RefusedButChanged, REFUSED, "changed weights"),
    (RefusedButLabeled, REFUSED, "changed the label"),
    (MisfitIgnored, REFUSED, "taken over from a file with a missing tensor"),
    (RequestsLostAtAnUpdate, LABELS, "a request that an update met did not end"),
    (RequestsCutAtAnUpdate, LABELS, "cut a request short"),
    (UpdateThatReturnsTooEarly, "test_every_tensor_is_taken_over", "labels .0(, 7)?. after version 7"),
    (UnknownSettingsIgnored, "test_what_cannot_be_served_is_refused", "was answered: (top|min)"),
    (CloseLeavesRequestsWaiting, "test_close_ends_what_runs_and_may_be_called_twice", "a request at close did not"),
    (TellsOfPlacesAtOnce, PLACES, "was told of a place while others had them all"),
    (TellsOfPlacesTwice, PLACES, "instead of False, then True, each"),
    (TellsOfNoPlace, PLACES, "instead of False, then True, each"),
    (TellsOfPlacesAgainAfterAnUpdate, LABELS, "a place is lost before it is had again"),
    (OneRequestForgotten, "test_more_requests_than_slots_are_all_answered", "30 requests did not end"),
]


@pytest.mark.parametrize(("mutant", "test", "words"), MUTANTS, ids=lambda value: getattr(value, "__name__", "of"))
def test_a_mutant_fails_the_test_that_is_meant_to_catch_it(mutant, test, words, tmp_path):
    class Suite(TestNaiveEngine):
        patience_s = 3 if "did not" in words else 60

        def make_engine(self, folder, *, update_mode, slots):
            return mutant(slots)

    with pytest.raises(AssertionError, match=words):
        getattr(Suite(), test)(tmp_path)
