"""Conformance suite of inference engines (`areal_core.servers.InferenceEngine`)."""

from __future__ import annotations

import asyncio
import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from areal_core.data import FinishReason
from areal_core.engines import ModelReference, WeightUpdate
from areal_core.errors import RunError
from areal_core.servers import SamplingParameters
from areal_testing.conformance.engine_session import PROMPTS, check_logprobs, check_prompt_logprobs, make_request
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
    "top_logprobs": 2,
    "prompt_logprobs": True,
}
LONG_PROMPT = [token for number in range(150) for token in (5 + number % 50, 7 + number % 13)]
"""A prompt of several blocks of a server's prefix cache."""


class InferenceEngineSuite(WeightUpdates):
    """Tests of an inference engine. Override `make_engine`; see `EngineSession` for the attributes that may be set."""

    def test_logprobs_are_of_the_tempered_distribution(self, tmp_path: Path) -> None:
        """Log-probabilities match a plain forward pass at three temperatures, for concurrent prompts of all lengths."""
        model = make_model(tmp_path / "model")
        requests = [
            make_request(prompt, seed, temperature=t) for t in TEMPERATURES for seed, prompt in enumerate(PROMPTS)
        ]

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                for request, generation in zip(requests, await self.answers(engine, requests), strict=True):
                    assert set(generation.versions) == {0}, (
                        f"the first weights are version 0, not {set(generation.versions)}"
                    )
                    check_logprobs(request, generation, {0: model}, self.tolerance)

        asyncio.run(check())

    def test_top_logprobs_are_those_of_the_tempered_distribution(self, tmp_path: Path) -> None:
        """The likeliest tokens of each position match a plain forward pass, in descending order, for several K."""
        model = make_model(tmp_path / "model")
        requests = [
            make_request(prompt, seed, temperature=t, top_logprobs=seed)
            for t in TEMPERATURES
            for seed, prompt in enumerate(PROMPTS)
        ]

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                if "top_logprobs" not in engine.capabilities.sampling:
                    pytest.skip("the engine does not report likeliest tokens")
                for request, generation in zip(requests, await self.answers(engine, requests), strict=True):
                    check_logprobs(request, generation, {0: model}, self.tolerance)

        asyncio.run(check())

    def test_prompt_logprobs_are_those_of_the_whole_distribution_at_temperature_1(self, tmp_path: Path) -> None:
        """Log-probabilities of the prompt match a plain forward pass, whatever the request's temperature and top-p.

        Each prompt is in the engine's prefix cache when siblings request them, and again after a weight update. An
        engine may refuse a temperature other than 1.
        """
        models = [make_model(tmp_path / f"model{v}", seed=v) for v in range(2)]
        prompts = (*PROMPTS, LONG_PROMPT, [*LONG_PROMPT[:-1], 9])  # the last two differ in one token

        async def check() -> None:
            async with self.running(tmp_path, models[0]) as engine:
                if "prompt_logprobs" not in engine.capabilities.sampling:
                    pytest.skip("the engine does not report log-probabilities of prompts")
                truncated = {"top_p": 0.5} if "top_p" in engine.capabilities.sampling else {}
                settings = [{}, truncated, {"temperature": 0.7}]
                try:
                    await engine.generate(make_request(PROMPTS[0], temperature=0.7, prompt_logprobs=True))
                except ValueError:
                    settings.remove({"temperature": 0.7})
                for version, model in enumerate(models):
                    if version:
                        await self.within(engine.update_weights(WeightUpdate(version, model)), "update_weights")
                    await self.answers(engine, [make_request(prompt, most=2) for prompt in prompts])
                    requests = [make_request(prompt, most=2, affinity="siblings") for prompt in prompts]
                    requests += [
                        make_request(prompt, seed, most=2, affinity="siblings", prompt_logprobs=True, **chosen)
                        for prompt in prompts
                        for seed, chosen in enumerate(settings)
                    ]
                    for request, generation in zip(requests, await self.answers(engine, requests), strict=True):
                        assert set(generation.versions) == {version}
                        check_prompt_logprobs(request, generation, model, self.tolerance)

        asyncio.run(check())

    def test_tokens_are_drawn_from_the_tempered_distribution(self, tmp_path: Path) -> None:
        """The mean log-probability of many first tokens is minus the entropy of the distribution they come from."""
        model, prompt, draws = make_model(tmp_path / "model"), PROMPTS[0], 300

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                for temperature in TEMPERATURES:
                    requests = [make_request(prompt, seed, most=1, temperature=temperature) for seed in range(draws)]
                    answers = await self.answers(engine, requests)
                    table = next_token_logprobs(model, prompt, temperature)[-1]
                    drawn = table[[generation.output_ids[0] for generation in answers]]
                    mean = float((table.exp() * table).sum())
                    spread = math.sqrt(float((table.exp() * (table - mean) ** 2).sum()) / draws)
                    assert abs(float(drawn.mean()) - mean) <= 5 * spread, (
                        f"at temperature {temperature} the mean log-probability of {draws} drawn tokens is "
                        f"{float(drawn.mean()):.3f}, it should be {mean:.3f} with a standard error of {spread:.3f}"
                    )

        asyncio.run(check())

    def test_greedy_takes_the_most_probable_token(self, tmp_path: Path) -> None:
        """Greedy output has the most probable tokens. Log-probabilities are still those of the tempered distribution.

        An engine may refuse greedy requests with a temperature other than 1.
        """
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                temperature = 0.7
                try:
                    await engine.generate(make_request(PROMPTS[0], temperature=temperature, greedy=True))
                except ValueError:
                    temperature = 1.0
                requests = [make_request(prompt, temperature=temperature, greedy=True) for prompt in PROMPTS]
                for request, generation in zip(requests, await self.answers(engine, requests), strict=True):
                    whole = [*request.input_ids, *generation.output_ids]
                    table = next_token_logprobs(model, whole, temperature)[len(request.input_ids) - 1 :]
                    best = table[:-1].max(-1).values
                    chosen = table[:-1].gather(1, torch.tensor(generation.output_ids)[:, None])[:, 0]
                    assert bool((best - chosen <= self.tolerance).all()), "a token is not the most probable one"
                    check_logprobs(request, generation, {0: model}, self.tolerance)

        asyncio.run(check())

    def test_a_stop_token_ends_the_output_and_is_part_of_it(self, tmp_path: Path) -> None:
        """The output ends with the first stop token, and is the same up to there as without stop tokens."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                (free,) = await self.answers(engine, [make_request(PROMPTS[0], 3, greedy=True)])
                assert free.finish_reason == FinishReason.LENGTH, "an output ended early without stop tokens"
                stop = free.output_ids[6]
                end = free.output_ids.index(stop) + 1
                (stopped,) = await self.answers(
                    engine, [make_request(PROMPTS[0], 3, greedy=True, stop_token_ids=(stop,))]
                )
                assert stopped.output_ids[:end] == free.output_ids[:end], (
                    f"the output must end with the stop token: {stopped.output_ids} instead of {free.output_ids[:end]}"
                )
                assert len(stopped.output_ids) <= end, "generation continued after a stop token"
                assert stopped.finish_reason == FinishReason.STOP

        asyncio.run(check())

    def test_max_new_tokens_is_exact(self, tmp_path: Path) -> None:
        """Concurrent requests each get their own number of tokens."""
        model, lengths = make_model(tmp_path / "model"), (1, 2, 7, 24)

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                answers = await self.answers(engine, [make_request(PROMPTS[0], most=most) for most in lengths])
                counts = tuple(len(generation.output_ids) for generation in answers)
                assert counts == lengths, f"outputs of {counts} tokens instead of {lengths}"
                assert {generation.finish_reason for generation in answers} == {FinishReason.LENGTH}

        asyncio.run(check())

    def test_tokens_are_shown_once_and_in_their_order(self, tmp_path: Path) -> None:
        """What `GenerationRequest.on_tokens` gets adds up to the answer. An engine may show nothing."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                shown: list[list[int]] = [[], [], []]
                requests = [
                    replace(make_request(prompt, most=24), on_tokens=seen.extend)
                    for prompt, seen in zip(PROMPTS, shown, strict=False)
                ]
                for seen, generation in zip(shown, await self.answers(engine, requests), strict=True):
                    assert seen in ([], generation.output_ids), "on_tokens got other tokens than the answer has"

        asyncio.run(check())

    def test_stop_tokens_are_not_drawn_before_min_new_tokens(self, tmp_path: Path) -> None:
        """No stop token is drawn before `min_new_tokens`. Half of the vocabulary are stop tokens.

        Log-probabilities may be those of the plain distribution, or of the one without the stop tokens. An engine may
        refuse such requests.
        """
        model, stops = make_model(tmp_path / "model"), tuple(range(0, VOCABULARY, 2))
        requests = [make_request(prompt, 5, min_new_tokens=9, stop_token_ids=stops) for prompt in PROMPTS]

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                try:
                    answers = await self.answers(engine, requests)
                except ValueError as error:
                    pytest.skip(f"the engine refuses min_new_tokens: {error}")
                for request, generation in zip(requests, answers, strict=True):
                    early = [
                        position
                        for position, token in enumerate(generation.output_ids)
                        if token in stops and position < 9
                    ]
                    assert early == [], f"stop tokens at {early} of an output with min_new_tokens 9"
                    assert len(generation.output_ids) > 9
                    table = next_token_logprobs(model, [*request.input_ids, *generation.output_ids], 1.0)[
                        len(request.input_ids) - 1 :
                    ]
                    without = table[:9].index_fill(1, torch.tensor(stops), -math.inf).log_softmax(-1)
                    drawn = torch.tensor(generation.output_ids[:9])[:, None]
                    reported = torch.tensor(generation.logprobs[:9], dtype=torch.float64)
                    gaps = [float((reported - t.gather(1, drawn)[:, 0]).abs().max()) for t in (table[:9], without)]
                    assert min(gaps) <= self.tolerance, f"log-probabilities differ by {min(gaps):.6f}"

        asyncio.run(check())

    def test_a_seed_decides_the_tokens(self, tmp_path: Path) -> None:
        """A seeded engine draws the same tokens alone and among other requests. Other seeds give other tokens."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                (alone,) = await self.answers(engine, [make_request(PROMPTS[1], 7)])
                company = [make_request(prompt, seed) for prompt in PROMPTS for seed in range(5)]
                *_, again = await self.answers(engine, [*company, make_request(PROMPTS[1], 7)])
                is_same = again.output_ids == alone.output_ids or not engine.capabilities.seeded
                assert is_same, "the same seed, weights and prompt gave other tokens"
                siblings = [make_request(PROMPTS[1], seed, affinity="group") for seed in range(4)]
                drawn = {tuple(generation.output_ids) for generation in await self.answers(engine, siblings)}
                assert len(drawn) == 4, "different seeds gave the same tokens"

        asyncio.run(check())

    def test_repeated_requests_give_the_same_bits(self, tmp_path: Path) -> None:
        """A deterministic engine gives bit-identical answers if requests come one at a time."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                if not engine.capabilities.deterministic:
                    pytest.skip("the engine does not declare that it is deterministic")
                first = [(await self.answers(engine, [make_request(p, 2)]))[0] for p in PROMPTS]
                second = [(await self.answers(engine, [make_request(p, 2)]))[0] for p in PROMPTS]
                bits = [[(f.output_ids, f.logprobs, f.versions) for f in generation] for generation in (first, second)]
                assert bits[0] == bits[1]

        asyncio.run(check())

    def test_more_requests_than_slots_are_all_answered(self, tmp_path: Path) -> None:
        """Requests beyond the number of slots wait, and all are answered."""
        model = make_model(tmp_path / "model")
        requests = [make_request(PROMPTS[number % 4], number, most=1 + number % 5) for number in range(30)]

        async def check() -> None:
            async with self.running(tmp_path, model, slots=3) as engine:
                answers = await self.answers(engine, requests)
                assert [len(generation.output_ids) for generation in answers] == [
                    request.sampling.max_new_tokens for request in requests
                ]
                check_logprobs(requests[-1], answers[-1], {0: model}, self.tolerance)

        asyncio.run(check())

    def test_on_slot_change_reports_a_slot_once(self, tmp_path: Path) -> None:
        """A request that waits behind long requests gets its slot only after one of them has ended."""
        model = make_model(tmp_path / "model")
        calls_by_request: list[list[bool]] = []

        async def check() -> None:
            async with self.running(tmp_path, model, slots=2) as engine:
                long: list[asyncio.Future[Any]] = []
                had_ended: list[asyncio.Future[bool]] = []

                async def has_long_request_ended() -> bool:
                    for _ in range(10):  # the answer that freed the slot may arrive a few turns of the event loop later
                        await asyncio.sleep(0)
                    return any(future.done() for future in long)

                def ask(seed: int, most: int) -> asyncio.Future[Any]:
                    calls: list[bool] = []
                    calls_by_request.append(calls)

                    def on_slot_change(has_slot: bool) -> None:
                        calls.append(has_slot)
                        if has_slot and seed >= 2:
                            had_ended.append(asyncio.ensure_future(has_long_request_ended()))

                    watched = replace(make_request(PROMPTS[0], seed, most=most), on_slot_change=on_slot_change)
                    return asyncio.ensure_future(engine.generate(watched))

                long += [ask(seed, self.tokens_in_flight) for seed in range(2)]
                waiting = [ask(seed, 3) for seed in range(2, 6)]
                await self.within(asyncio.gather(*long, *waiting), "requests that wait for a slot")
                assert calls_by_request == [[False, True]] * 6, (
                    f"on_slot_change was called with {calls_by_request} instead of False, then True, for each request"
                )
                assert all(await asyncio.gather(*had_ended)), "a request got a slot while long requests held them all"

        asyncio.run(check())

    def test_a_cancelled_request_frees_its_slot(self, tmp_path: Path) -> None:
        """Long requests fill all slots and the queue. After they are cancelled, a short one is answered immediately."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model, slots=2) as engine:
                await self.answers(engine, [make_request(PROMPTS[0])])
                long = [
                    asyncio.ensure_future(engine.generate(make_request(PROMPTS[0], seed, most=CONTEXT - 8)))
                    for seed in range(8)
                ]
                await asyncio.sleep(0.3)
                for task in long:
                    task.cancel()
                results = await self.within(asyncio.gather(*long, return_exceptions=True), "cancelled requests")
                assert all(isinstance(result, asyncio.CancelledError) for result in results)
                patience = min(self.patience_s, 10)
                await self.within(engine.generate(make_request(PROMPTS[0])), "a request after cancelled ones", patience)

        asyncio.run(check())

    def test_unsupported_requests_are_refused(self, tmp_path: Path) -> None:
        """The engine raises ValueError for that request only. It never ignores a setting that it does not support."""
        model = make_model(tmp_path / "model")
        names = {setting.name for setting in fields(SamplingParameters)}

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                supported = engine.capabilities.sampling
                assert supported <= names, f"capabilities.sampling names unknown settings: {supported - names}"
                assert engine.capabilities.update_modes <= {"keep_cache", "recompute"}
                unusual: dict[str, Any] = {name: {name: _UNUSUAL[name]} for name in names - supported - _BASIC}
                bad = {name: make_request(PROMPTS[0], **setting) for name, setting in unusual.items()}
                bad |= {"length": make_request(PROMPTS[0], most=CONTEXT), "no prompt": make_request([])}
                for name, request in bad.items():
                    try:
                        await self.within(engine.generate(request), f"a request with unsupported {name}")
                    except ValueError:
                        continue
                    raise AssertionError(f"the engine answered a request with unsupported {name}")
                await self.answers(engine, [make_request(PROMPTS[0])])

        asyncio.run(check())

    def test_close_ends_running_requests_and_may_be_called_twice(self, tmp_path: Path) -> None:
        """`close` ends requests that run, so that no caller waits forever."""
        model = make_model(tmp_path / "model")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                waiting = asyncio.ensure_future(engine.generate(make_request(PROMPTS[0], most=CONTEXT - 8)))
                await asyncio.sleep(0.2)
                await self.within(engine.close(), "close with a request in flight")
                results = await self.within(asyncio.gather(waiting, return_exceptions=True), "a request at close")
                assert isinstance(results[0], BaseException), "a closed engine answered a request"

        asyncio.run(check())

    def test_a_missing_model_is_an_error(self, tmp_path: Path) -> None:
        """`start` raises RunError if the model's folder does not exist."""

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
