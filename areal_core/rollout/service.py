"""The rollout controller's end of the messages: answers rank 0 of the trainer, and requests that the driver forwards.

Requests are answered as they complete, not in order: an evaluation runs while batches are handed out. Weight syncs run
one after another.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task
from areal_core.errors import ArealError, LostError, RunError
from areal_core.interfaces.inference import WeightUpdate
from areal_core.messages import rollouts as messages
from areal_core.rollout.logprob_check import check_answers
from areal_core.runtime.rpc import Done, Failed, Peer, PeerClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from areal_core.interfaces.inference import InferenceEngine
    from areal_core.rollout.controller import RolloutController
    from areal_core.rollout.evaluation import Evaluator


class RolloutService:
    """Answers the trainer over one connection.

    Args:
        controller: makes batches.
        engine: generates.
        evaluator: runs evaluations; None if the run has none.
        audit: compares the ledger with the trainer's state, and returns what `areal audit --json` writes.
    """

    def __init__(
        self,
        controller: RolloutController,
        engine: InferenceEngine,
        evaluator: Evaluator | None,
        audit: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._controller = controller
        self._engine = engine
        self._evaluator = evaluator
        self._audit = audit
        self._syncing = asyncio.Lock()
        self._answers: dict[type, Callable[[Any], Awaitable[Any]]] = {
            messages.AskResumePoint: self._resume_point,
            messages.Begin: self._begin,
            messages.NextBatch: self._next_batch,
            messages.SyncWeights: self._sync,
            messages.ReadTensors: self._read_tensors,
            messages.SkipSync: self._skip_sync,
            messages.Unread: self._leave_out,
            messages.FormGroup: self._form_group,
            messages.OfferFolder: self._offer_folder,
            messages.Sleep: self._sleep,
            messages.LogprobCheck: self._check_logprobs,
            messages.Evaluate: self._evaluate,
            messages.Commit: self._commit,
            messages.AuditLedger: self._audit_ledger,
        }
        self.done = asyncio.Event()
        """Set once the trainer has said goodbye or has died."""
        self.is_lost = False
        """Whether the trainer has died."""

    async def serve_trainer(self, peer: Peer) -> None:
        """Answer the trainer until it says goodbye or dies."""
        requests: set[asyncio.Task[None]] = set()
        try:
            while True:
                message, number = await peer.receive_request()
                if isinstance(message, messages.Goodbye):
                    peer.reply(number, Done())
                    return
                task = start_task(self._reply(peer, message, number), f"answer to {type(message).__name__}")
                requests.add(task)
                task.add_done_callback(requests.discard)
        except PeerClosed:
            self.is_lost = True
        finally:
            for request in requests:
                request.cancel()
            self.done.set()

    async def answer(self, message: Any) -> Any:
        """Return the reply to a request. A message that this service does not know goes to the engine."""
        handler = self._answers.get(type(message), self._engine.answer)
        try:
            return await handler(message)
        except ArealError as error:
            return Failed(error.message, error.hints, isinstance(error, LostError))

    async def _reply(self, peer: Peer, message: Any, number: int) -> None:
        peer.reply(number, await self.answer(message))

    async def _resume_point(self, _: messages.AskResumePoint) -> messages.ResumePoint:
        return self._controller.resume_point

    async def _begin(self, _: messages.Begin) -> Done:
        self._controller.start()
        return Done()

    async def _next_batch(self, request: messages.NextBatch) -> messages.Manifest | messages.FolderNeeded:
        return await self._controller.next_batch(request.step)

    async def _sync(self, request: messages.SyncWeights) -> messages.Synced:
        async with self._syncing:
            update = WeightUpdate(request.version, request.folder, request.tensors)
            await self._controller.sync(update, request.trained)
        return messages.Synced(self._engine.needs_folder())

    async def _read_tensors(self, request: messages.ReadTensors) -> messages.Readers:
        async with self._syncing:
            gpus = await self._engine.read_tensors(request.version, request.tensors)
        return messages.Readers(tuple(gpus))

    async def _leave_out(self, request: messages.Unread) -> Done:
        self._engine.leave_out(request.names)
        return Done()

    async def _skip_sync(self, request: messages.SkipSync) -> Done:
        async with self._syncing:
            await self._controller.skip_sync(request.trained)
        return Done()

    async def _form_group(self, request: messages.FormGroup) -> messages.GroupFormed:
        async with self._syncing:
            return messages.GroupFormed(
                await self._engine.form_group(request.address, request.port, request.backend, request.current_group)
            )

    async def _offer_folder(self, request: messages.OfferFolder) -> Done:
        self._engine.offer_folder(WeightUpdate(request.version, request.folder))
        return Done()

    async def _sleep(self, _: messages.Sleep) -> Done:
        async with self._syncing:
            await self._engine.sleep()
        return Done()

    async def _check_logprobs(self, _: messages.LogprobCheck) -> messages.LogprobCheckAnswers:
        controller = self._controller
        settings = controller.sampling, controller.version, controller.vocabulary
        return messages.LogprobCheckAnswers(await check_answers(self._engine, *settings))

    async def _evaluate(self, _: messages.Evaluate) -> messages.Evaluated:
        if self._evaluator is None:
            raise RunError("the config has no evaluation section")
        return messages.Evaluated(await self._evaluator.run(self._controller.section))

    async def _commit(self, request: messages.Commit) -> Done:
        await self._controller.commit(request.step, request.folder)
        return Done()

    def status(self) -> str:
        """Return one line with the state of the groups, the servers and the running evaluation."""
        evaluation = self._evaluator.progress if self._evaluator is not None else ""
        return "; ".join(filter(None, [self._controller.describe(), self._engine.describe(), evaluation]))

    async def _audit_ledger(self, _: messages.AuditLedger) -> messages.Audited:
        return messages.Audited(await self._audit())
