"""Executes the training calls of all models, each model's in their order, on one training engine.

The engine holds one model. To execute a call of another model, its state is saved, and the other one is brought back:
its saved state is loaded, and the calls since then that had changed it are repeated. A restart of the server is the
same, without the first half.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from areal_core.errors import LostError, RunError
from areal_tinker.errors import RequestError
from areal_tinker.journal import Result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from areal_tinker.checkpoints import Checkpoints
    from areal_tinker.journal import Call, Journal
    from areal_tinker.ranks import Ranks

MOST_CRASHES: Final = 3
"""Unexpected errors in the execution of one call, after which the call fails."""
MOST_ATTEMPTS: Final = 20
"""Executions of one call that ended the server for any reason, after which the call fails."""
EXPIRY_S: Final = 60.0
"""Seconds between two searches for expired checkpoints while there is nothing to do."""
SHORTEST_TURN_S: Final = 1.0
"""Seconds for which a call of another model waits at least while the engine's model has calls."""
TURN_PER_SWITCH: Final = 10.0
"""Length of a turn, as a multiple of the time that it took to bring the model into the engine."""


class Training:
    """The training calls of a server.

    Args:
        journal: has the calls.
        ranks: the training engine.
        checkpoints: folders of checkpoints.
        states: folder for the states of models.
        in_training: entered around work of the engine; frees GPU memory for it where servers share the GPU.
        save_every_s: seconds of work after which the state is saved, which bounds the work that a restart repeats.
    """

    def __init__(
        self,
        journal: Journal,
        ranks: Ranks,
        checkpoints: Checkpoints,
        states: Path,
        in_training: Callable[[Callable[[], Any]], Awaitable[Any]],
        save_every_s: float,
    ) -> None:
        self._journal = journal
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._states = states
        self._work = in_training
        self._save_every_s = save_every_s
        self._active = ""
        self._changed = -1  # number of the last call that changed the state of the active model
        self._worked_s = 0.0  # work since its state was saved
        self._began = 0.0  # when its turn began, by `time.monotonic()`
        self._switch_s = 0.0  # seconds that it took to bring it into the engine
        self._arrived = asyncio.Event()
        self._finished: list[str] = []  # models whose client has finished
        self._done: dict[tuple[str, int], asyncio.Event] = {}

    def submit(self, call: Call) -> None:
        """Accept a call. It is executed when those before it are.

        Raises:
            RequestError: the model has another call of this number.
        """
        self._journal.accept(call)
        self._arrived.set()

    async def result(self, model: str, number: int, timeout_s: float) -> Result | None:
        """Return the result of a call; None if there is none within a time.

        Raises:
            RequestError: there is no such call.
        """
        found = self._journal.result(model, number)
        if found is None:
            event = self._done.setdefault((model, number), asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), timeout_s)
            except TimeoutError:
                return None
            found = self._journal.result(model, number)
        return found

    def drop(self, models: Sequence[str]) -> None:
        """Let the states of models whose client has finished be removed after the current call."""
        self._finished += models
        self._arrived.set()

    async def run(self) -> None:
        """Execute calls as they come. Does not return.

        Raises:
            LostError: something failed that is not the fault of a call. The driver starts the server again.
        """
        try:
            while True:
                self._arrived.clear()
                self._sweep()
                call = self._next()
                if call is not None:
                    await self._complete(call)
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), EXPIRY_S)
        except (sqlite3.Error, OSError) as error:
            traceback.print_exc()
            raise LostError(f"the server cannot keep its records: {type(error).__name__}: {error}") from error

    async def _complete(self, call: Call) -> None:
        """Execute a call and keep its result."""
        result = await self._execute(call)
        if not self._journal.has_call(call):
            return  # its client has finished
        is_saved = call.kind == "load_weights" and not result.has_failed
        former = self._journal.saved(call.model)
        self._journal.finish(call, result, is_saved=is_saved)
        if is_saved:
            self._remove_state(call.model, former)
        if event := self._done.pop((call.model, call.number), None):
            event.set()
        if self._worked_s > self._save_every_s and call.kind == "optim_step":
            await self._save_state()

    def _sweep(self) -> None:
        """Remove what finished clients have left, and folders of deleted checkpoints. Nothing else removes folders."""
        while self._finished:
            model = self._finished.pop()
            if self._active == model:
                self._active = ""
            shutil.rmtree(self._states / model.replace(":", "-"), ignore_errors=True)
            self._checkpoints.remove_unnamed(model, kept=0)
        self._checkpoints.sweep()

    def _next(self) -> Call | None:
        """Return the call to execute: of the active model, unless another model's has waited for its turn."""
        waiting = self._journal.waiting()
        own = next((call for call in waiting if call.model == self._active), None)
        other = next((call for call in waiting if call.model != self._active), None)
        turn_s = max(SHORTEST_TURN_S, TURN_PER_SWITCH * self._switch_s)
        if own is None or (other is not None and time.monotonic() - self._began > turn_s):
            return other or own
        return own

    async def _execute(self, call: Call) -> Result:
        if call.crashes >= MOST_CRASHES or call.attempts >= MOST_ATTEMPTS:
            times = f"{call.crashes} times: {call.crash}" if call.crash else f"{call.attempts} times"
            return Result.failure(f"{call.kind} has ended the server {times}; see trainer-0.log", is_of_user=False)
        self._journal.begin(call)
        began = time.monotonic()
        try:
            await self._activate(call.model)
            return await getattr(self, f"_{call.kind}")(call)
        except RequestError as error:
            return Result.failure(error.message, is_of_user=True)
        except LostError:
            raise
        except RunError as error:
            return Result.failure("; ".join([error.message, *error.hints]), is_of_user=False)
        except Exception as error:
            # The engine's state is unknown, and other ranks may wait in a collective: the driver starts all again.
            described = f"{type(error).__name__}: {error}"
            self._journal.crashed(call, described)
            traceback.print_exc()
            raise LostError(f"{call.kind} of model {call.model} raised {described}") from error
        finally:
            self._worked_s += time.monotonic() - began

    # The calls, by kind.

    async def _create_model(self, call: Call) -> Result:
        return Result.of({"type": "create_model", "model_id": call.model})

    async def _refused(self, call: Call) -> Result:
        raise RequestError(call.body["error"])

    async def _forward_backward(self, call: Call) -> Result:
        content = await self._work(lambda: self._ranks.call("forward", call.request))
        return Result(content, "application/x-protobuf")

    async def _optim_step(self, call: Call) -> Result:
        metrics = await self._step(call)
        self._changed = call.number
        return Result.of({"type": "optim_step", "metrics": metrics})

    async def _save_weights(self, call: Call) -> Result:
        return Result.of(await self._checkpoints.save(call))

    async def _save_weights_for_sampler(self, call: Call) -> Result:
        return Result.of(await self._checkpoints.publish(call))

    async def _load_weights(self, call: Call) -> Result:
        path, optimizer = call.body["path"], call.body["optimizer"]
        folder = self._checkpoints.saved(path, self._journal.model(call.model)["lora_config"])
        await self._work(lambda: self._ranks.call("load", folder=str(folder), optimizer=optimizer))
        self._changed = call.number
        # The state is saved with the call, which is never repeated: its checkpoint may be replaced or deleted.
        await self._checkpoints.write(self._folder(call.model, call.number))
        return Result.of({"type": "load_weights", "path": path, "model_id": call.model})

    async def _step(self, call: Call) -> dict[str, float]:
        adam = call.body.get("adam_params")
        metrics: dict[str, float] = await self._work(lambda: self._ranks.call("step", adam=adam))
        return metrics

    # The state of the model in the engine.

    async def _activate(self, model: str) -> None:
        """Bring a model into the engine, if it is not there."""
        if model == self._active:
            return
        began = time.monotonic()
        if self._active:
            try:
                await self._save_state()
            except (RunError, OSError) as error:  # not the fault of the call
                raise LostError(f"the state of model {self._active} cannot be saved: {error}") from error
            self._active = ""
        saved = self._journal.saved(model)
        calls = self._journal.since(model, saved)
        folder = str(self._folder(model, saved)) if saved >= 0 else None
        lora = self._journal.model(model)["lora_config"]
        await self._work(lambda: self._ranks.call("open", lora=lora, folder=folder))
        self._changed, self._worked_s = saved, 0.0
        if calls:
            _log(f"model {model}: state of call {saved}, repeating {len(calls)} calls")
        repeating = time.monotonic()
        for call in calls:
            await self._repeat(call)
        self._worked_s = time.monotonic() - repeating
        self._active, self._began = model, time.monotonic()
        self._switch_s = self._began - began

    async def _repeat(self, call: Call) -> None:
        """Let an executed call change the state again, as it did."""
        if call.kind == "optim_step" and call.has_failed:
            await self._work(lambda: self._ranks.call("forget"))
        elif call.has_failed:
            return
        elif call.kind == "optim_step":
            await self._step(call)
            self._changed = call.number
        elif call.kind == "forward_backward":
            await self._work(lambda: self._ranks.call("keep", call.request))

    async def _save_state(self) -> None:
        """Save the state of the active model, and let the journal drop the requests that led to it."""
        model, number = self._active, self._changed
        former = self._journal.saved(model)
        if number > former:
            await self._checkpoints.write(self._folder(model, number))
            self._journal.mark_saved(model, number)
            self._remove_state(model, former)
        self._worked_s = 0.0

    def _remove_state(self, model: str, number: int) -> None:
        if number >= 0:
            shutil.rmtree(self._folder(model, number), ignore_errors=True)

    def _folder(self, model: str, number: int) -> Path:
        return self._states / model.replace(":", "-") / f"call-{number:08d}"


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
