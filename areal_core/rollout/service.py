"""The process of the rollout controller: builds its parts from the config, then answers rank 0 of the trainer.

Requests are answered as they complete, not in order: an evaluation runs while batches are handed out. Publications
are taken one after another.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal_core.errors import ArealError, RunError
from areal_core.interfaces.inference import TensorDescription, WeightUpdate
from areal_core.messages.channel import Channel, ChannelClosed, Message, serve
from areal_core.rollout.probe import probe_weights

if TYPE_CHECKING:
    from areal_core.interfaces.inference import BroadcastReceiver, InferenceEngine, MemorySharer
    from areal_core.rollout.controller import RolloutController
    from areal_core.rollout.evaluation import Evaluator

STATUS_INTERVAL_S = 0.5
LOG_INTERVAL_S = 30.0
LOG_HINT = "see logs/controller.log"
_GROUP_FIELDS = ("address", "port", "backend", "standing")


class RolloutService:
    """Answers the trainer over one channel.

    Args:
        controller: gives batches.
        engine: closed at the end.
        evaluator: runs evaluations; None where the run has none.
        run_dir: where `status/rollout.json` is written for the live view.
    """

    def __init__(
        self, controller: RolloutController, engine: InferenceEngine, evaluator: Evaluator | None, run_dir: Path
    ) -> None:
        self._controller = controller
        self._engine = engine
        self._evaluator = evaluator
        self._status = run_dir / "status" / "rollout.json"
        self._done = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._requests: set[asyncio.Task[None]] = set()

    async def serve(self, socket: Path) -> None:
        """Serve one trainer on `socket` until it says goodbye or dies."""
        server = await serve(socket, self._serve_trainer)
        status = asyncio.ensure_future(self._report_status())
        try:
            await self._done.wait()
        finally:
            status.cancel()
            for request in self._requests:
                request.cancel()
            server.close()
            await self._controller.close()
            await self._engine.close()

    async def _serve_trainer(self, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                if message.kind == "goodbye":
                    channel.post(Message("reply", {"id": message.fields["id"]}))
                    await asyncio.sleep(0)
                    return
                task = asyncio.get_running_loop().create_task(self._answer(channel, message))
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)
        except ChannelClosed:
            return
        finally:
            self._done.set()

    async def _answer(self, channel: Channel, message: Message) -> None:
        handler = getattr(self, f"_on_{message.kind}")
        try:
            fields, payload = await handler(message.fields)
        except ArealError as error:
            fields, payload = {"error": error.message, "hints": list(error.hints)}, b""
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
            traceback.print_exc()
            fields, payload = {"error": f"{message.kind} failed: {error!r:.500}", "hints": [LOG_HINT]}, b""
        channel.post(Message("reply", {"id": message.fields["id"], **fields}, payload))

    async def _on_begin(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The trainer is ready: take its weights over where it publishes some, then begin to admit groups."""
        if fields["version"]:
            await self._publish(fields)
        self._controller.start()
        return {}, b""

    async def _on_state(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        return {"highest_version": self._controller.highest_version}, b""

    async def _on_next_batch(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        batch, metrics = await self._controller.next_batch(fields["step"])
        return {"metrics": metrics}, b"" if batch is None else batch.to_bytes()

    async def _on_publish(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        await self._publish(fields)
        is_waited_for = self._engine.capabilities.broadcast and cast("BroadcastReceiver", self._engine).needs_folder()
        return {"needs_folder": is_waited_for}, b""

    async def _publish(self, fields: dict[str, Any]) -> None:
        async with self._publishing:
            tensors = tuple(TensorDescription(name, dtype, tuple(s)) for name, dtype, s in fields.get("tensors", ()))
            update = WeightUpdate(fields["version"], Path(fields["path"]) if fields["path"] else None, tensors)
            await self._controller.publish(update, fields["trained"])

    async def _on_form_group(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        receiver = cast("BroadcastReceiver", self._engine)
        async with self._publishing:
            group = await receiver.form_group(**{name: fields[name] for name in _GROUP_FIELDS})
        return {"group": None if group is None else asdict(group)}, b""

    async def _on_offer_folder(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        update = WeightUpdate(fields["version"], Path(fields["path"]))
        cast("BroadcastReceiver", self._engine).offer_folder(update)
        return {}, b""

    async def _on_release(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        async with self._publishing:
            await cast("MemorySharer", self._engine).release_memory()
        return {}, b""

    async def _on_probe(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        batch = await probe_weights(self._engine, self._controller.sampling, self._controller.version)
        return {}, batch.to_bytes()

    async def _on_evaluate(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        if self._evaluator is None:
            raise RunError("the config has no evaluation section")
        return {"metrics": await self._evaluator.run()}, b""

    async def _on_commit(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        self._controller.commit(fields["step"], fields["checkpoint"])
        return {}, b""

    async def _on_describe(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        servers = self._engine.describe()
        return {"text": self._controller.describe() + (f"; servers: {servers}" if servers else "")}, b""

    async def _report_status(self) -> None:
        self._status.parent.mkdir(exist_ok=True)
        temporary = self._status.with_suffix(".new")
        while True:
            counts = self._controller.counts
            status = {
                "time": time.time(),
                "running": counts.running,
                "ready": counts.ready,
                "consumed": counts.consumed,
                "version": self._controller.version,
                "text": self._controller.describe(),
                "servers": self._engine.describe(),
            }
            with suppress(OSError):  # the view can do without; a full disk is reported where data is at stake
                temporary.write_text(json.dumps(status))
                temporary.rename(self._status)
            await asyncio.sleep(STATUS_INTERVAL_S)
