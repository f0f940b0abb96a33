"""Weights that change while requests are under way."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from areal_core.engines import TensorDescription, WeightUpdate
from areal_core.errors import RunError
from areal_testing.conformance.engine_session import (
    PROMPTS,
    EngineSession,
    answer_unless_stopped,
    check_form,
    check_logprobs,
    request,
)
from areal_testing.conformance.models import FIRST_FORCED, make_constant_model, make_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from areal_core.data import Generation
    from areal_core.servers import GenerationRequest, InferenceEngine

BROADCAST_TIMEOUT = timedelta(seconds=120)
UPDATES = 6
WORKERS = 4


class WeightUpdates(EngineSession):
    """The tests of `update_weights`; part of `InferenceEngineSuite`."""

    def test_every_token_carries_the_version_that_sampled_it(self, tmp_path: Path) -> None:
        """In every mode: versions that force different tokens, updated every few tokens under load."""
        models = [make_constant_model(tmp_path / f"model{v}", v) for v in range(UPDATES + 1)]

        async def check() -> None:
            for mode in self.modes(tmp_path):
                async with self.running(tmp_path, models[0], update_mode=mode) as engine:
                    answers = await self._generate_under_updates(engine, models)
                    for _, found in answers:
                        wrong = [
                            (place, token - FIRST_FORCED, version)
                            for place, (token, version) in enumerate(zip(found.output_ids, found.versions, strict=True))
                            if token != FIRST_FORCED + version
                        ]
                        assert wrong == [], f"{mode}: (place, version that sampled, label): {wrong[:3]}"
                    several = sum(len(set(found.versions)) > 1 for _, found in answers)
                    assert several, f"{mode}: no request of {len(answers)} went on across an update"

        asyncio.run(check())

    def test_recompute_gives_exact_logprobs_across_updates(self, tmp_path: Path) -> None:
        """Each token's log-probability is that of its version's weights on everything before it."""
        models = [make_model(tmp_path / f"model{v}", seed=v) for v in range(UPDATES + 1)]

        async def check() -> None:
            if "recompute" not in self.modes(tmp_path):
                pytest.skip("the engine does not offer the mode recompute")
            async with self.running(tmp_path, models[0], update_mode="recompute") as engine:
                answers = await self._generate_under_updates(engine, models)
                assert any(len(set(found.versions)) > 1 for _, found in answers), "no request crossed an update"
                crossing = sorted(answers, key=lambda answer: -len(set(answer[1].versions)))[:4]
                for one, found in crossing:
                    check_logprobs(one, found, dict(enumerate(models)), self.tolerance)

        asyncio.run(check())

    def test_every_tensor_is_taken_over(self, tmp_path: Path) -> None:
        """After an update in any mode a request is as if the engine had been started with the new weights.

        The same prompt has been served before, so that a cache of prefixes that survives the update shows too.
        """
        models = {v: make_model(tmp_path / f"model{v}", seed=v) for v in (0, 7)}

        async def check() -> None:
            for mode in self.modes(tmp_path):
                async with self.running(tmp_path, models[0], update_mode=mode) as engine:
                    update = partial(engine.update_weights, WeightUpdate(7, models[7]))
                    await self._takes_over(engine, update, models, mode)

        asyncio.run(check())

    async def _takes_over(
        self, engine: InferenceEngine, update: Callable[[], Awaitable[None]], models: dict[int, Path], mode: str
    ) -> None:
        """Answers before an update to version 7, and behind it answers of that version alone."""
        await self.answers(engine, [request(prompt, affinity="same") for prompt in PROMPTS])
        await self.within(update(), "taking over weights")
        asked = [request(prompt, seed, affinity="same") for seed, prompt in enumerate(PROMPTS)]
        for one, found in zip(asked, await self.answers(engine, asked), strict=True):
            assert set(found.versions) == {7}, f"{mode}: labels {set(found.versions)} after version 7"
            check_logprobs(one, found, models, self.tolerance)

    def test_refused_weights_change_nothing(self, tmp_path: Path) -> None:
        """A file that is damaged or of another model is refused by RunError; then all is as before.

        An engine may also stop serving, with RunError. What it may not do is to generate with half of the weights.
        """
        model, good = make_model(tmp_path / "model"), make_model(tmp_path / "good", seed=1)
        bad = _broken_copies(good, tmp_path)
        one = request(PROMPTS[1], 4, greedy=True)

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                (before,) = await self.answers(engine, [one])
                for name, folder in bad.items():
                    try:
                        await self.within(engine.update_weights(WeightUpdate(1, folder)), f"update with {name}")
                    except RunError:
                        pass
                    else:
                        raise AssertionError(f"weights were taken over from a file with {name}")
                    again = request(PROMPTS[1], 4, greedy=True)
                    after = await self.within(answer_unless_stopped(engine, again), "a request after a refusal")
                    if after is None:
                        return
                    assert after.versions == before.versions, f"a refused update changed the label ({name})"
                    assert after.output_ids == before.output_ids, f"a refused update changed weights ({name})"
                    check_logprobs(again, after, {0: model}, self.tolerance)

        asyncio.run(check())

    def test_every_tensor_of_a_broadcast_is_taken_over(self, tmp_path: Path) -> None:
        """As from a folder, where the engine says that it receives broadcasts."""
        models = {v: make_model(tmp_path / f"model{v}", seed=v) for v in (0, 7)}

        async def check() -> None:
            for mode in self.modes(tmp_path):
                async with self.running(tmp_path, models[0], update_mode=mode) as engine:
                    if "core/broadcast" not in engine.capabilities.transports:
                        pytest.skip("the engine does not say that it receives broadcasts")
                    await self._takes_over(engine, partial(broadcast_weights, engine, 7, models[7]), models, mode)

        asyncio.run(check())

    def test_a_head_that_is_left_out_is_missed(self, tmp_path: Path) -> None:
        """By RunError, where it is no copy of the embeddings; else the engine would go on with the former one."""
        from safetensors.torch import load_file, save_file

        model = make_model(tmp_path / "model", architecture="llama")
        tensors = load_file(make_model(tmp_path / "next", architecture="llama", seed=1) / "model.safetensors")
        headless = tmp_path / "headless"
        headless.mkdir()
        save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, headless / "model.safetensors")

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                try:
                    await self.within(engine.update_weights(WeightUpdate(1, headless)), "update without a head")
                except RunError:
                    return
                raise AssertionError("a model with a head of its own was taken over without its head")

        asyncio.run(check())

    async def _generate_under_updates(
        self, engine: InferenceEngine, models: list[Path]
    ) -> list[tuple[GenerationRequest, Generation]]:
        """All that was generated while weights changed under it, each request answered in full."""
        answers: list[tuple[GenerationRequest, Generation]] = []
        is_over = False

        async def work(number: int) -> None:
            for turn in range(1000):
                if is_over:
                    return
                places: list[bool] = []
                one = request(PROMPTS[number % len(PROMPTS)], 100 * number + turn, most=self.tokens_in_flight)
                told = replace(one, on_slot_change=places.append)
                found = await self.within(engine.generate(told), "a request that an update met")
                wanted = [False, True] * max(1, len(places) // 2)
                assert places == wanted, (
                    f"on_slot_change was called with {places}: a place is lost before it is had again"
                )
                check_form(found)
                assert len(found.output_ids) == self.tokens_in_flight, "an update cut a request short"
                assert found.versions == sorted(found.versions), "versions run backwards inside one request"
                answers.append((one, found))

        async def update() -> None:
            nonlocal is_over
            try:
                for version, folder in enumerate(models[1:], 1):
                    await asyncio.sleep(0.03)
                    await self.within(engine.update_weights(WeightUpdate(version, folder)), "update_weights")
                    late = request(PROMPTS[0], most=3)
                    found = await self.within(engine.generate(late), "a request behind an update")
                    assert set(found.versions) == {version}, (
                        f"a new request after an update to {version} got tokens of {set(found.versions)}"
                    )
            finally:
                is_over = True

        workers = [asyncio.ensure_future(work(number)) for number in range(WORKERS)]
        try:
            await update()
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        return answers


async def broadcast_weights(engine: InferenceEngine, version: int, folder: Path) -> None:
    """What the trainer's rank 0 does: agree on a group, join it, and send one tensor after another."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    told = tuple(TensorDescription(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items())
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=BROADCAST_TIMEOUT)
    group = await engine.form_group("127.0.0.1", store.port, "gloo", "")
    assert group is not None, "the engine says that it receives broadcasts, and forms no group"
    for prefix in group.prefixes:
        store = PrefixStore(prefix, store)

    def send() -> None:
        joined: Any = dist.ProcessGroupGloo(store, 0, group.world_size, BROADCAST_TIMEOUT)
        for tensor in tensors.values():
            joined.broadcast([tensor], dist.BroadcastOptions()).wait()

    sending = asyncio.ensure_future(asyncio.to_thread(send))
    await engine.update_weights(WeightUpdate(version, None, told))
    await sending


def _broken_copies(good: Path, folder: Path) -> dict[str, Path]:
    """Copies of a model whose file of weights is wrong, each in another way; the last tensor is the wrong one."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(good / "model.safetensors")
    last = max(tensors)
    variants = {
        "a missing tensor": {name: value for name, value in tensors.items() if name != last},
        "a tensor of another shape": {**tensors, last: torch.zeros(3, 5)},
    }
    made = {}
    for name, content in variants.items():
        made[name] = folder / name.replace(" ", "_")
        made[name].mkdir()
        save_file(content, made[name] / "model.safetensors")
    made["a truncated end"] = folder / "truncated"
    shutil.copytree(good, made["a truncated end"])
    data = (good / "model.safetensors").read_bytes()
    (made["a truncated end"] / "model.safetensors").write_bytes(data[: len(data) * 2 // 3])
    made["no file at all"] = folder / "nothing_here"
    return made
