"""Checkpoints of clients: `tinker://MODEL/weights/NAME` for training, `.../sampler_weights/NAME` for samplers."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from areal_tinker.errors import RequestError
from areal_tinker.ranks import remove

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from areal_tinker.journal import Call, Journal
    from areal_tinker.ranks import Ranks

TRAINING: Final = "weights"
SAMPLER: Final = "sampler_weights"
KEPT: Final = 4
"""Unnamed checkpoints for samplers that are kept for each model: those of the last sampling clients."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Checkpoints:
    """Checkpoints in a folder of the server.

    Args:
        journal: remembers them.
        ranks: the training engine, with the model of the call.
        folder: where they are written.
        in_training: as in `Training`.
    """

    def __init__(
        self,
        journal: Journal,
        ranks: Ranks,
        folder: Path,
        in_training: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._journal = journal
        self._ranks = ranks
        self._folder = folder
        self._work = in_training

    async def publish_base(self) -> None:
        """Write the weights of the base model for samplers. The engine has a new model, which begins as its base."""
        if not self.base.exists():
            await self._publish(self.base)

    @property
    def base(self) -> Path:
        """Folder with the weights of the base model."""
        return self._folder / "base"

    async def save(self, call: Call) -> dict[str, Any]:
        """Save parameters and optimizer, and return the response."""
        name = _checked(call.body.get("path") or f"{call.number:06d}")
        path, folder = self._place(call.model, TRAINING, name)
        temporary = folder.with_name(f".{name}")
        remove(temporary)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        await self._work(lambda: self._ranks.call("save", folder=str(temporary)))
        remove(folder)
        temporary.rename(folder)
        self._remember(call, path, TRAINING, name)
        return {"type": "save_weights", "path": path}

    async def publish(self, call: Call) -> dict[str, Any]:
        """Write weights for samplers, and return the response: their path, or the sampling session that uses them."""
        if call.body.get("kind", "snapshot") != "snapshot":
            raise RequestError("this server has no inflight sampling clients; take a snapshot after each optim_step")
        given = call.body.get("path")
        name = _checked(given) if given else f"unnamed-{call.number:06d}"
        path, folder = self._place(call.model, SAMPLER, name)
        await self._publish(folder)
        self._remember(call, path, SAMPLER, name)
        response = {"type": "save_weights_for_sampler"}
        if given:
            return response | {"path": path}
        self.remove_unnamed(call.model)
        session = call.model.partition(":")[0]
        sampler = f"{session}:sample:{call.body['sampling_session_seq_id']}"
        self._journal.add_sampler(sampler, path)
        return response | {"sampling_session_id": sampler}

    def saved(self, path: str) -> Path:
        """Return the folder that `save` wrote for a path."""
        return self._find(path, TRAINING)

    def published(self, path: str) -> Path:
        """Return the folder that `publish` wrote for a path; an empty path: that of the base model.

        Raises:
            RequestError: there is no such checkpoint.
        """
        return self._find(path, SAMPLER) if path else self.base

    def facts(self, path: str) -> dict[str, Any]:
        """Return what the journal has of a checkpoint.

        Raises:
            RequestError: there is no such checkpoint.
        """
        found = next((each for each in self._journal.checkpoints() if each["path"] == path), None)
        if found is None:
            dropped = f"; of unnamed ones the last {KEPT} are kept, so name those that you need" * ("/unnamed-" in path)
            raise RequestError(f"there is no checkpoint {path}{dropped}", 404)
        return found

    def delete(self, path: str) -> None:
        """Delete a checkpoint.

        Raises:
            RequestError: there is no such checkpoint.
        """
        facts = self.facts(path)
        self._journal.remove_checkpoint(path)
        remove(self._place(facts["model"], facts["kind"], facts["name"])[1])

    def remove_expired(self) -> None:
        """Delete checkpoints whose time to live is over."""
        for each in self._journal.checkpoints():
            if each["expires"] is not None and each["expires"] < time.time():
                self.delete(each["path"])

    def remove_unnamed(self, model: str, kept: int = KEPT) -> None:
        """Delete all unnamed checkpoints of a model but the last ones."""
        unnamed = [each["path"] for each in self._journal.checkpoints(model) if each["name"].startswith("unnamed-")]
        for path in unnamed[: len(unnamed) - kept]:
            self.delete(path)

    async def _publish(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        await self._work(lambda: self._ranks.call("publish", folder=str(folder)))

    def _remember(self, call: Call, path: str, kind: str, name: str) -> None:
        facts = {"user_metadata": call.body.get("user_metadata"), "model": self._journal.model(call.model)}
        self._journal.add_checkpoint(path, call.model, kind, name, facts, call.body.get("ttl_seconds"))

    def _find(self, path: str, kind: str) -> Path:
        facts = self.facts(path)
        if facts["kind"] != kind:
            wanted = (
                "training: save_state saves one" if kind == TRAINING else "samplers: save_weights_for_sampler saves one"
            )
            raise RequestError(f"{path} is not a checkpoint for {wanted}")
        return self._place(facts["model"], kind, facts["name"])[1]

    def _place(self, model: str, kind: str, name: str) -> tuple[str, Path]:
        return f"tinker://{model}/{kind}/{name}", self._folder / model.replace(":", "-") / kind / name


def describe(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint as the SDK reads it."""
    expires = checkpoint["expires"]
    return {
        "checkpoint_id": f"{checkpoint['kind']}/{checkpoint['name']}",
        "checkpoint_type": "training" if checkpoint["kind"] == TRAINING else "sampler",
        "time": when(checkpoint["time"]),
        "tinker_path": checkpoint["path"],
        "user_metadata": checkpoint["facts"]["user_metadata"],
        "expires_at": None if expires is None else when(expires),
    }


def when(seconds: float) -> str:
    """Return a time in seconds since 1970 as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise RequestError(f"a checkpoint cannot be called {name!r:.80}; use letters, digits, '.', '_' and '-'")
    return name
