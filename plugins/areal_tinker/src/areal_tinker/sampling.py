"""Generates with the weights of a sampling session. An inference engine has one set of weights at a time."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from areal_core.engines import WeightUpdate
from areal_core.errors import RunError
from areal_core.processes import start_task
from areal_core.servers import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from areal_core.data import Generation
    from areal_core.servers import InferenceEngine, SamplingParameters


class Sampling:
    """Answers sampling requests, those of one set of weights at a time, in the order of their arrival.

    A request for other weights waits until the running requests have ended, and later requests wait behind it. So a
    sample is always of the weights that its client asked for.

    Args:
        engine: generates; it has the weights of the base model.
        base: folder with these weights.
        loaded: a folder for links to the weights that the engine has. Servers that start later load them from there,
            even if their checkpoint was deleted.
    """

    def __init__(self, engine: InferenceEngine, base: Path, loaded: Path) -> None:
        self._engine = engine
        self._folder = loaded
        shutil.rmtree(loaded, ignore_errors=True)
        self._loaded, self._source = base, base  # the weights, and the folder from which they can be loaded again
        self._versions = {0: base}  # weights of each version
        self._queue: deque[tuple[Path, asyncio.Future[None]]] = deque()
        self._running = 0
        self._is_switching = False
        self._is_resting = False
        self._is_asleep = False
        self._numbers = itertools.count()
        self._name = secrets.token_hex(4)

    async def generate(
        self, weights: Path, prompt: Sequence[int], sampling: SamplingParameters, seeds: Sequence[int]
    ) -> list[Generation]:
        """Return a sample for each seed.

        Args:
            weights: folder of a checkpoint for samplers, or of the base model. It is never written again.
            prompt: token ids.
            sampling: sampling settings.
            seeds: a seed for each sample.

        Raises:
            ValueError: the engine refuses the request.
            RunError: it cannot load the weights, or no server will ever be ready again.
        """
        name = f"{self._name}-{next(self._numbers)}"
        requests = [
            GenerationRequest(f"{name}.{number}", prompt, sampling, seed, affinity=name)
            for number, seed in enumerate(seeds)
        ]
        async with self._using(weights):
            generating = [asyncio.ensure_future(self._engine.generate(request)) for request in requests]
            try:
                answers = await asyncio.gather(*generating)
            finally:
                for task in generating:  # if one has failed, the others are not needed, and must not meet other weights
                    task.cancel()
                await asyncio.wait(generating)
        if any(self._versions.get(version) != weights for answer in answers for version in answer.versions):
            raise RunError("an inference server has answered with other weights than those of the request")
        return answers

    async def rest(self) -> None:
        """Let the engine release its GPU memory. Requests keep their tokens, and wait until `wake`."""
        while self._is_switching:
            await asyncio.sleep(0.01)
        self._is_resting = True
        if not self._is_asleep:
            await self._engine.sleep()
            self._is_asleep = True

    async def wake(self) -> None:
        """Let the engine generate again, if there is something to generate."""
        self._is_resting = False
        if self._running:
            self._is_switching = True
            try:
                await self._load(self._loaded, self._source)
            finally:
                self._is_switching = False
        self._admit()

    @asynccontextmanager
    async def _using(self, weights: Path) -> AsyncIterator[None]:
        """Wait until the engine has the weights, and keep them there in this context."""
        admitted = asyncio.get_running_loop().create_future()
        self._queue.append((weights, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._running -= 1
        self._admit()

    def _admit(self) -> None:
        """Start the requests at the head of the queue, or switch the weights for them."""
        while self._queue and not self._is_switching and not self._is_resting:
            weights, admitted = self._queue[0]
            if admitted.done():  # its client has gone
                self._queue.popleft()
            elif weights == self._loaded and not self._is_asleep:
                self._queue.popleft()
                self._running += 1
                admitted.set_result(None)
            elif self._running:
                return
            else:
                self._is_switching = True
                start_task(self._switch(weights), "switching weights")

    async def _switch(self, weights: Path) -> None:
        try:
            await self._load(weights, weights)
            # All that wait for these weights go first, because each switch costs a load.
            self._queue = deque(sorted(self._queue, key=lambda entry: entry[0] != weights))
        except (RunError, OSError) as error:
            for wanted, admitted in self._queue:
                if wanted == weights and not admitted.done():
                    admitted.set_exception(error)
        finally:
            self._is_switching = False
            self._admit()

    async def _load(self, weights: Path, source: Path) -> None:
        version = max(self._versions) + 1
        self._versions[version] = weights
        folder = self._folder / f"version-{version}"
        shutil.copytree(source, folder, copy_function=_link)
        await self._engine.update_weights(WeightUpdate(version, folder))
        self._loaded, self._source, self._is_asleep = weights, folder, False
        for former in self._folder.iterdir():
            if former != folder:
                shutil.rmtree(former)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
