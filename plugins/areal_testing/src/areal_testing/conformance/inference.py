"""What every inference engine must do: `areal_core.servers.InferenceEngine` as tests."""

from __future__ import annotations

import asyncio
import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from areal_core.data import FinishReason
from areal_core.engines import ModelReference
from areal_core.errors import RunError
from areal_core.servers import SamplingParameters
from areal_testing.conformance.engine_session import PROMPTS, check_logprobs, request
from areal_testing.conformance.models import CONTEXT, VOCABULARY, make_model, next_token_logprobs
from areal_testing.conformance.weight_updates import WeightUpdates

if TYPE_CHECKING:
    from pathlib import Path

TEMPERATURES = (0.7, 1.0, 1.3)
_BASIC = {"temperature", "max_new_tokens", "min_new_tokens", "stop_token_ids", "greedy"}
_UNUSUAL = {
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.2,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "stop": ("a",),
}


class InferenceEngineSuite(WeightUpdates):
    """Inherit, override `make_engine`; see `EngineSession` for what else may be set."""

    def test_logprobs_are_of_the_tempered_distribution(self, tmp_path: Path) -> None:
        """At three temperatures, for prompts of unequal lengths that are generated together."""
        model = make_model(tmp_path / "model")
        asked = [request(prompt, seed, temperature=t) for t in TEMPERATURES for seed, prompt in enumerate(PROMPTS)]

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                for one, found in zip(asked, await self.answers(engine, asked), strict=True):
                    assert set(found.versions) == {0}, f"the first weights are version 0, not {set(found.versions)}"
                    check_logprobs(one, found, {0: model}, self.tolerance)

        asyncio.run(check())

    def test_tokens_are_drawn_from_the_tempered_distribution(self, tmp_path: Path) -> None:
        """The mean log-probability of many first tokens is minus the entropy of the distribution they come from."""
        model, prompt, draws = make_model(tmp_path / "model"), PROMPTS[0], 300

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                for temperature in TEMPERATURES:
                    asked = [request(prompt, seed, most=1, temperature=temperature) for seed in range(draws)]
                    answers = await self.answers(engine, asked)
                    table = next_token_logprobs(model, prompt, temperature)[-1]
                    drawn = table[[found.output_ids[0] for found in answers]]
                    mean = float((table.exp() * table).sum())
                    spread = math.sqrt(float((table.exp() * (table - mean) ** 2).sum()) / draws)
                    assert abs(float(drawn.mean()) - mean) <= 5 * spread, (
                        f"at temperature {temperature} the mean log-probability of {draws} drawn tokens is "
                        f"{float(drawn.mean()):.3f}, it should be {mean:.3f} with a standard error of {spread:.3f}"
                    )

        asyncio.run(check())

    def test_greedy_takes_the_most_probable_token(self, tmp_path: Path) -> None:
        """Log-probabilities stay those of the tempered distribution; engines may refuse a temperature but 1."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                temperature = 0.7
                try:
                    await engine.generate(request(PROMPTS[0], temperature=temperature, greedy=True))
                except ValueError:
                    temperature = 1.0
                asked = [request(prompt, temperature=temperature, greedy=True) for prompt in PROMPTS]
                for one, found in zip(asked, await self.answers(engine, asked), strict=True):
                    whole = [*one.input_ids, *found.output_ids]
                    table = next_token_logprobs(model, whole, temperature)[len(one.input_ids) - 1 :]
                    best = table[:-1].max(-1).values
                    chosen = table[:-1].gather(1, torch.tensor(found.output_ids)[:, None])[:, 0]
                    assert bool((best - chosen <= self.tolerance).all()), "a token is not the most probable one"
                    check_logprobs(one, found, {0: model}, self.tolerance)

        asyncio.run(check())

    def test_a_stop_token_ends_the_output_and_is_part_of_it(self, tmp_path: Path) -> None:
        """The output up to the first stop token is the same as without one."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                (free,) = await self.answers(engine, [request(PROMPTS[0], 3, greedy=True)])
                assert free.finish_reason == FinishReason.LENGTH, "nothing but the given stop tokens ends an output"
                stop = free.output_ids[6]
                end = free.output_ids.index(stop) + 1
                (stopped,) = await self.answers(engine, [request(PROMPTS[0], 3, greedy=True, stop_token_ids=(stop,))])
                assert stopped.output_ids[:end] == free.output_ids[:end], (
                    "the output ends behind the stop token, which belongs to it: "
                    f"{stopped.output_ids} instead of {free.output_ids[:end]}"
                )
                assert len(stopped.output_ids) <= end, "generation went on behind a stop token"
                assert stopped.finish_reason == FinishReason.STOP

        asyncio.run(check())

    def test_max_new_tokens_is_exact(self, tmp_path: Path) -> None:
        """Of requests that are generated together each has its own."""
        model, lengths = make_model(tmp_path / "model"), (1, 2, 7, 24)

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                answers = await self.answers(engine, [request(PROMPTS[0], most=most) for most in lengths])
                counts = tuple(len(found.output_ids) for found in answers)
                assert counts == lengths, f"outputs of {counts} tokens instead of {lengths}"
                assert {found.finish_reason for found in answers} == {FinishReason.LENGTH}

        asyncio.run(check())

    def test_stop_tokens_are_not_drawn_before_min_new_tokens(self, tmp_path: Path) -> None:
        """Half the vocabulary stops, so that without the rule an early end is all but certain.

        Log-probabilities may be those of the plain distribution, or of the one without the stop tokens. An engine may
        refuse such requests.
        """
        model, stops = make_model(tmp_path / "model"), tuple(range(0, VOCABULARY, 2))
        asked = [request(prompt, 5, min_new_tokens=9, stop_token_ids=stops) for prompt in PROMPTS]

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                try:
                    answers = await self.answers(engine, asked)
                except ValueError as error:
                    pytest.skip(f"the engine refuses min_new_tokens: {error}")
                for one, found in zip(asked, answers, strict=True):
                    early = [place for place, token in enumerate(found.output_ids) if token in stops and place < 9]
                    assert early == [], f"stop tokens at {early} of an output with min_new_tokens 9"
                    assert len(found.output_ids) > 9
                    table = next_token_logprobs(model, [*one.input_ids, *found.output_ids], 1.0)[
                        len(one.input_ids) - 1 :
                    ]
                    without = table[:9].index_fill(1, torch.tensor(stops), -math.inf).log_softmax(-1)
                    drawn = torch.tensor(found.output_ids[:9])[:, None]
                    told = torch.tensor(found.logprobs[:9], dtype=torch.float64)
                    gaps = [float((told - t.gather(1, drawn)[:, 0]).abs().max()) for t in (table[:9], without)]
                    assert min(gaps) <= self.tolerance, f"log-probabilities differ by {min(gaps):.6f}"

        asyncio.run(check())

    def test_a_seed_decides_the_tokens(self, tmp_path: Path) -> None:
        """Where the engine is seeded: the same tokens alone and in company; other seeds give others, everywhere."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                (alone,) = await self.answers(engine, [request(PROMPTS[1], 7)])
                company = [request(prompt, seed) for prompt in PROMPTS for seed in range(5)]
                *_, again = await self.answers(engine, [*company, request(PROMPTS[1], 7)])
                same = again.output_ids == alone.output_ids or not engine.capabilities.seeded
                assert same, "the same seed, weights and prompt gave other tokens"
                siblings = [request(PROMPTS[1], seed, affinity="group") for seed in range(4)]
                drawn = {tuple(found.output_ids) for found in await self.answers(engine, siblings)}
                assert len(drawn) == 4, "different seeds gave the same tokens"

        asyncio.run(check())

    def test_one_after_another_gives_the_same_bits(self, tmp_path: Path) -> None:
        """Where the engine says that it is deterministic."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                if not engine.capabilities.deterministic:
                    pytest.skip("the engine does not say that it is deterministic")
                first = [(await self.answers(engine, [request(p, 2)]))[0] for p in PROMPTS]
                second = [(await self.answers(engine, [request(p, 2)]))[0] for p in PROMPTS]
                bits = [[(f.output_ids, f.logprobs, f.versions) for f in found] for found in (first, second)]
                assert bits[0] == bits[1]

        asyncio.run(check())

    def test_more_requests_than_slots_are_all_answered(self, tmp_path: Path) -> None:
        """They wait for a slot, and nobody is forgotten."""
        model = make_model(tmp_path / "model")
        asked = [request(PROMPTS[number % 4], number, most=1 + number % 5) for number in range(30)]

        async def check() -> None:
            async with self.running(tmp_path, model, slots=3) as engine:
                answers = await self.answers(engine, asked)
                assert [len(found.output_ids) for found in answers] == [one.sampling.max_new_tokens for one in asked]
                check_logprobs(asked[-1], answers[-1], {0: model}, self.tolerance)

        asyncio.run(check())

    def test_a_request_is_told_of_its_place_once_and_not_before(self, tmp_path: Path) -> None:
        """What waits behind long requests is told when one of them has ended."""
        model = make_model(tmp_path / "model")
        told: list[list[bool]] = []

        async def check() -> None:
            async with self.running(tmp_path, model, slots=2) as engine:
                long: list[asyncio.Future[Any]] = []
                had_ended: list[asyncio.Future[bool]] = []

                async def has_one_ended() -> bool:
                    for _ in range(10):  # the answer that made room may be a few turns of the event loop behind
                        await asyncio.sleep(0)
                    return any(one.done() for one in long)

                def ask(seed: int, most: int) -> asyncio.Future[Any]:
                    calls: list[bool] = []
                    told.append(calls)

                    def on_slot_change(has_slot: bool) -> None:
                        calls.append(has_slot)
                        if has_slot and seed >= 2:
                            had_ended.append(asyncio.ensure_future(has_one_ended()))

                    asked = replace(request(PROMPTS[0], seed, most=most), on_slot_change=on_slot_change)
                    return asyncio.ensure_future(engine.generate(asked))

                long += [ask(seed, self.tokens_in_flight) for seed in range(2)]
                waiting = [ask(seed, 3) for seed in range(2, 6)]
                await self.within(asyncio.gather(*long, *waiting), "requests that wait for a place")
                assert told == [[False, True]] * 6, (
                    f"on_slot_change was called with {told} instead of False, then True, each"
                )
                assert all(await asyncio.gather(*had_ended)), "a request was told of a place while others had them all"

        asyncio.run(check())

    def test_a_cancelled_request_frees_its_slot(self, tmp_path: Path) -> None:
        """Long requests fill all slots and a queue; once they are cancelled a short one is served at once."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model, slots=2) as engine:
                await self.answers(engine, [request(PROMPTS[0])])
                long = [
                    asyncio.ensure_future(engine.generate(request(PROMPTS[0], seed, most=CONTEXT - 8)))
                    for seed in range(8)
                ]
                await asyncio.sleep(0.3)
                for task in long:
                    task.cancel()
                ended = await self.within(asyncio.gather(*long, return_exceptions=True), "cancelled requests")
                assert all(isinstance(found, asyncio.CancelledError) for found in ended)
                patience = min(self.patience_s, 10)
                await self.within(engine.generate(request(PROMPTS[0])), "a request behind cancelled ones", patience)

        asyncio.run(check())

    def test_what_cannot_be_served_is_refused(self, tmp_path: Path) -> None:
        """By ValueError, for that request alone; settings that the engine does not honor are never ignored."""
        model = make_model(tmp_path / "model")
        names = {setting.name for setting in fields(SamplingParameters)}

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                honored = engine.capabilities.sampling
                assert honored <= names, f"capabilities.sampling names unknown settings: {honored - names}"
                assert engine.capabilities.update_modes <= {"keep_cache", "recompute"}
                unusual: dict[str, Any] = {name: {name: _UNUSUAL[name]} for name in names - honored - _BASIC}
                bad = {name: request(PROMPTS[0], **setting) for name, setting in unusual.items()}
                bad |= {"length": request(PROMPTS[0], most=CONTEXT), "no prompt": request([])}
                for name, one in bad.items():
                    try:
                        await self.within(engine.generate(one), f"a request with unsupported {name}")
                    except ValueError:
                        continue
                    raise AssertionError(f"a request that cannot be served was answered: {name}")
                await self.answers(engine, [request(PROMPTS[0])])

        asyncio.run(check())

    def test_close_ends_what_runs_and_may_be_called_twice(self, tmp_path: Path) -> None:
        """Nobody waits for ever for an engine that is gone."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                waiting = asyncio.ensure_future(engine.generate(request(PROMPTS[0], most=CONTEXT - 8)))
                await asyncio.sleep(0.2)
                await self.within(engine.close(), "close with a request under way")
                found = await self.within(asyncio.gather(waiting, return_exceptions=True), "a request at close")
                assert isinstance(found[0], BaseException), "a request was answered by an engine that was closed"

        asyncio.run(check())

    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        """Ends the start by RunError."""

        async def check() -> None:
            engine = self.make_engine(tmp_path, update_mode="recompute", slots=2)
            try:
                await self.within(engine.start(ModelReference(str(tmp_path / "nothing"))), "start without a model")
            except RunError:
                return
            finally:
                await self.within(engine.close(), "close")
            raise AssertionError("the engine started without a model")

        asyncio.run(check())
