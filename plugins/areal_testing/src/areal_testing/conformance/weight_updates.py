"""Conformance tests of weight updates while requests are in flight; part of `InferenceEngineSuite`."""

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
    check_prompt_logprobs,
    make_request,
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
    """Tests of `update_weights`; part of `InferenceEngineSuite`."""

    def test_every_token_carries_the_version_that_sampled_it(self, tmp_path: Path) -> None:
        """Tokens have the right version in every mode. Each version generates its own token. Updates are frequent."""
        models = [make_constant_model(tmp_path / f"model{v}", v) for v in range(UPDATES + 1)]

        async def check() -> None:
            for mode in self.modes(tmp_path):
                async with self.running(tmp_path, models[0], update_mode=mode) as engine:
                    answers = await self._generate_under_updates(engine, models)
                    for _, generation in answers:
                        wrong = [
                            (position, token - FIRST_FORCED, version)
                            for position, (token, version) in enumerate(
                                zip(generation.output_ids, generation.versions, strict=True)
                            )
                            if token != FIRST_FORCED + version
                        ]
                        assert wrong == [], f"{mode}: (position, version that sampled, label): {wrong[:3]}"
                    crossed = sum(len(set(generation.versions)) > 1 for _, generation in answers)
                    assert crossed, f"{mode}: none of {len(answers)} requests continued across an update"

        asyncio.run(check())

    def test_recompute_gives_exact_logprobs_across_updates(self, tmp_path: Path) -> None:
        """Each token's log-probability is that of its version's weights, also for the tokens before it.

        Log-probabilities of the prompt are those of the first token's version.
        """
        models = [make_model(tmp_path / f"model{v}", seed=v) for v in range(UPDATES + 1)]

        async def check() -> None:
            if "recompute" not in self.modes(tmp_path):
                pytest.skip("the engine does not offer the mode recompute")
            async with self.running(tmp_path, models[0], update_mode="recompute") as engine:
                answers = await self._generate_under_updates(engine, models)
                assert any(len(set(generation.versions)) > 1 for _, generation in answers), (
                    "no request crossed an update"
                )
                crossing = sorted(answers, key=lambda answer: -len(set(answer[1].versions)))[:4]
                for request, generation in crossing:
                    check_logprobs(request, generation, dict(enumerate(models)), self.tolerance)
                for request, generation in answers:
                    check_prompt_logprobs(request, generation, models[generation.versions[0]], self.tolerance)

        asyncio.run(check())

    def test_every_tensor_is_taken_over(self, tmp_path: Path) -> None:
        """After an update in any mode, the engine answers as if it had been started with the new weights.

        The engine has answered the same prompt before, so that a prefix cache that survives the update is noticed.
        """
        models = {v: make_model(tmp_path / f"model{v}", seed=v) for v in (0, 7)}

        async def check() -> None:
            for mode in self.modes(tmp_path):
                async with self.running(tmp_path, models[0], update_mode=mode) as engine:
                    update = partial(engine.update_weights, WeightUpdate(7, models[7]))
                    await self._check_update(engine, update, models, mode)

        asyncio.run(check())

    async def _check_update(
        self, engine: InferenceEngine, update: Callable[[], Awaitable[None]], models: dict[int, Path], mode: str
    ) -> None:
        """Check answers before an update to version 7, and that answers after it are of that version only."""
        await self.answers(engine, [make_request(prompt, affinity="same") for prompt in PROMPTS])
        await self.within(update(), "update_weights")
        asked = [make_request(prompt, seed, affinity="same") for seed, prompt in enumerate(PROMPTS)]
        for request, generation in zip(asked, await self.answers(engine, asked), strict=True):
            assert set(generation.versions) == {7}, f"{mode}: labels {set(generation.versions)} after version 7"
            check_logprobs(request, generation, models, self.tolerance)

    def test_refused_weights_change_nothing(self, tmp_path: Path) -> None:
        """The engine raises RunError for a file that is damaged or of another model, and keeps the old weights.

        The engine may also stop serving, with RunError. It must not generate with some of the new weights.
        """
        model, good = make_model(tmp_path / "model"), make_model(tmp_path / "good", seed=1)
        bad = _broken_copies(good, tmp_path)
        request = make_request(PROMPTS[1], 4, greedy=True)

        async def check() -> None:
            async with self.running(tmp_path, model) as engine:
                (before,) = await self.answers(engine, [request])
                for name, folder in bad.items():
                    try:
                        await self.within(engine.update_weights(WeightUpdate(1, folder)), f"update with {name}")
                    except RunError:
                        pass
                    else:
                        raise AssertionError(f"the engine accepted weights with {name}")
                    again = make_request(PROMPTS[1], 4, greedy=True)
                    after = await self.within(answer_unless_stopped(engine, again), "a request after a refusal")
                    if after is None:
                        return
                    assert after.versions == before.versions, f"a refused update changed the label ({name})"
                    assert after.output_ids == before.output_ids, f"a refused update changed weights ({name})"
                    check_logprobs(again, after, {0: model}, self.tolerance)

        asyncio.run(check())

    def test_every_tensor_of_a_broadcast_is_taken_over(self, tmp_path: Path) -> None:
        """Weights from a broadcast take effect as those from a folder, if the engine receives broadcasts."""
        models = {v: make_model(tmp_path / f"model{v}", seed=v) for v in (0, 7)}

        async def check() -> None:
            for mode in self.modes(tmp_path):
                async with self.running(tmp_path, models[0], update_mode=mode) as engine:
                    if "core/broadcast" not in engine.capabilities.transports:
                        pytest.skip("the engine receives no broadcasts")
                    await self._check_update(engine, partial(broadcast_weights, engine, 7, models[7]), models, mode)

        asyncio.run(check())

    def test_a_missing_head_is_refused(self, tmp_path: Path) -> None:
        """The engine raises RunError if an untied head is missing. Otherwise it would keep the old head."""
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
                raise AssertionError("the engine accepted an untied model without its head")

        asyncio.run(check())

    async def _generate_under_updates(
        self, engine: InferenceEngine, models: list[Path]
    ) -> list[tuple[GenerationRequest, Generation]]:
        """Generate while weights change. Return the requests and their generations, which are complete.

        Half of the workers request `prompt_logprobs`, if the engine reports them.
        """
        reports_prompts = "prompt_logprobs" in engine.capabilities.sampling
        answers: list[tuple[GenerationRequest, Generation]] = []
        is_over = False

        async def work(number: int) -> None:
            for turn in range(1000):
                if is_over:
                    return
                slot_changes: list[bool] = []
                request = make_request(
                    PROMPTS[number % len(PROMPTS)],
                    100 * number + turn,
                    most=self.tokens_in_flight,
                    prompt_logprobs=reports_prompts and number % 2 == 1,
                )
                watched = replace(request, on_slot_change=slot_changes.append)
                generation = await self.within(engine.generate(watched), "a request during an update")
                expected = [False, True] * max(1, len(slot_changes) // 2)
                assert slot_changes == expected, (
                    f"on_slot_change was called with {slot_changes}: a slot must be lost before it is acquired again"
                )
                check_form(generation)
                assert len(generation.output_ids) == self.tokens_in_flight, "an update cut a request short"
                assert generation.versions == sorted(generation.versions), "versions decrease within one request"
                answers.append((request, generation))

        async def update() -> None:
            nonlocal is_over
            try:
                for version, folder in enumerate(models[1:], 1):
                    await asyncio.sleep(0.03)
                    await self.within(engine.update_weights(WeightUpdate(version, folder)), "update_weights")
                    late = make_request(PROMPTS[0], most=3)
                    generation = await self.within(engine.generate(late), "a request after an update")
                    assert set(generation.versions) == {version}, (
                        f"a new request after an update to {version} got tokens of {set(generation.versions)}"
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
    """Broadcast a model's weights as the trainer's rank 0 does: form a group, join it, and send each tensor."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    descriptions = tuple(TensorDescription(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items())
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=BROADCAST_TIMEOUT)
    group = await engine.form_group("127.0.0.1", store.port, "gloo", "")
    assert group is not None, "the engine declares core/broadcast, but forms no group"
    for prefix in group.prefixes:
        store = PrefixStore(prefix, store)

    def send() -> None:
        process_group: Any = dist.ProcessGroupGloo(store, 0, group.world_size, BROADCAST_TIMEOUT)
        for tensor in tensors.values():
            process_group.broadcast([tensor], dist.BroadcastOptions()).wait()

    sending = asyncio.ensure_future(asyncio.to_thread(send))
    await engine.update_weights(WeightUpdate(version, None, descriptions))
    await sending


def _broken_copies(good: Path, folder: Path) -> dict[str, Path]:
    """Return copies of a model with a broken weights file, by the fault. The last tensor is the wrong one."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(good / "model.safetensors")
    last = max(tensors)
    variants = {
        "a missing tensor": {name: value for name, value in tensors.items() if name != last},
        "a tensor of another shape": {**tensors, last: torch.zeros(3, 5)},
    }
    copies = {}
    for name, content in variants.items():
        copies[name] = folder / name.replace(" ", "_")
        copies[name].mkdir()
        save_file(content, copies[name] / "model.safetensors")
    copies["a truncated end"] = folder / "truncated"
    shutil.copytree(good, copies["a truncated end"])
    data = (good / "model.safetensors").read_bytes()
    (copies["a truncated end"] / "model.safetensors").write_bytes(data[: len(data) * 2 // 3])
    copies["no file at all"] = folder / "nothing_here"
    return copies
