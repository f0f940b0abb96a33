"""Checkpoints of clients: `tinker://MODEL/weights/NAME` for training, `.../sampler_weights/NAME` for samplers."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_tinker.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from areal_tinker.journal import Call, Journal
    from areal_tinker.ranks import Ranks

TRAINING: Final = "weights"
SAMPLER: Final = "sampler_weights"
KEPT: Final = 4
"""Unnamed checkpoints for samplers that are kept for each model: those of the last sampling clients."""
LONGEST_TTL_S: Final = 315_360_000
"""Longest time to live of a checkpoint in seconds: ten years, as in the SDK."""
_UNNAMED: Final = "unnamed-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Checkpoints:
    """Checkpoints in a folder of the server.

    A folder is never written twice, so that no reader sees it change: a checkpoint that replaces another one of its
    name has a folder of its own. `sweep` alone removes folders, between two calls.

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
        self._removed: list[Path] = []
        self.base = folder / "base"
        """Folder with the weights of the base model."""

    async def publish_base(self) -> None:
        """Write the weights of the base model for samplers, if they are not there yet."""
        if not self.base.exists():
            await self._work(lambda: self._ranks.call("open", lora=None))
            await self._publish(self.base)

    async def save(self, call: Call) -> dict[str, Any]:
        """Save parameters and optimizer, and return the response."""
        _check_ttl(call)
        name = _checked(call.body.get("path") or f"{call.number:06d}")
        folder = self._place(call, TRAINING, name)
        await self.write(folder)
        return {"type": "save_weights", "path": self._remember(call, TRAINING, name, folder)}

    async def write(self, folder: Path) -> None:
        """Write parameters and optimizer to a folder, which appears complete or not at all."""
        temporary = folder.with_name(f".{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        await self._work(lambda: self._ranks.call("save", folder=str(temporary)))
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was interrupted before it was recorded
        temporary.rename(folder)

    async def publish(self, call: Call) -> dict[str, Any]:
        """Write weights for samplers, and return the response: their path, or the sampling session that uses them."""
        if call.body.get("kind", "snapshot") != "snapshot":
            raise RequestError("this server has no inflight sampling clients; take a snapshot after each optim_step")
        _check_ttl(call)
        asked = call.body.get("path")
        name = _checked(asked) if asked else f"{_UNNAMED}{call.number:06d}"
        if not asked and call.body.get("sampling_session_seq_id") is None:
            raise RequestError("save_weights_for_sampler needs path or sampling_session_seq_id")
        folder = self._place(call, SAMPLER, name)
        await self._publish(folder)
        path = self._remember(call, SAMPLER, name, folder)
        response = {"type": "save_weights_for_sampler"}
        if asked:
            return response | {"path": path}
        self.remove_unnamed(call.model)
        session = call.model.partition(":")[0]
        sampler = f"{session}:sample:{call.body['sampling_session_seq_id']}"
        self._journal.add_sampler(sampler, path)
        return response | {"sampling_session_id": sampler}

    def saved(self, path: str, lora: Mapping[str, Any] | None) -> Path:
        """Return the folder that `save` wrote for a path.

        Args:
            path: of the checkpoint.
            lora: the adapter of the model that loads it.

        Raises:
            RequestError: there is no such checkpoint, or it has another adapter.
        """
        checkpoint = self._find(path, TRAINING)
        theirs = checkpoint["facts"]["model"]["lora_config"]
        for key in ("rank", "train_attn", "train_mlp"):
            if (theirs or {}).get(key) != (lora or {}).get(key):
                raise RequestError(f"{path} has another adapter than the model: {key} differs")
        return Path(checkpoint["folder"])

    def published(self, path: str) -> Path:
        """Return the folder that `publish` wrote for a path.

        Raises:
            RequestError: there is no such checkpoint.
        """
        return Path(self._find(path, SAMPLER)["folder"])

    def facts(self, path: str) -> dict[str, Any]:
        """Return what the journal has of a checkpoint.

        Raises:
            RequestError: there is no such checkpoint.
        """
        checkpoint = self._journal.checkpoint(path)
        if checkpoint is None:
            hint = f"; of unnamed ones the last {KEPT} are kept, so name those that you need"
            raise RequestError(f"there is no checkpoint {path}{hint if _UNNAMED in path else ''}", 404)
        return checkpoint

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Its folder is removed between two calls.

        Raises:
            RequestError: there is no such checkpoint.
        """
        self._removed.append(Path(self.facts(path)["folder"]))
        self._journal.remove_checkpoint(path)

    def sweep(self) -> None:
        """Delete checkpoints whose time to live is over, and remove the folders of deleted ones."""
        for path in self._journal.expired():
            self.delete(path)
        while self._removed:
            shutil.rmtree(self._removed.pop(), ignore_errors=True)

    def remove_unnamed(self, model: str, kept: int = KEPT) -> None:
        """Delete all unnamed checkpoints of a model but the last ones."""
        names = ((checkpoint["path"], checkpoint["name"]) for checkpoint in self._journal.checkpoints(model))
        unnamed = [path for path, name in names if name.startswith(_UNNAMED)]
        for path in unnamed[: max(len(unnamed) - kept, 0)]:
            self.delete(path)

    async def _publish(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        await self._work(lambda: self._ranks.call("publish", folder=str(folder)))

    def _remember(self, call: Call, kind: str, name: str, folder: Path) -> str:
        """Put a checkpoint into the journal, and return its path. The folder of one that it replaces is removed."""
        path = f"tinker://{call.model}/{kind}/{name}"
        replaced = self._journal.checkpoint(path)
        facts = {"user_metadata": call.body.get("user_metadata"), "model": self._journal.model(call.model)}
        self._journal.add_checkpoint(path, call, kind, name, str(folder), facts)
        if replaced is not None and replaced["folder"] != str(folder):
            self._removed.append(Path(replaced["folder"]))
        return path

    def _find(self, path: str, kind: str) -> dict[str, Any]:
        checkpoint = self.facts(path)
        if checkpoint["kind"] != kind:
            use, method = ("training", "save_state") if kind == TRAINING else ("samplers", "save_weights_for_sampler")
            raise RequestError(f"{path} is not a checkpoint for {use}: {method} saves one")
        return checkpoint

    def _place(self, call: Call, kind: str, name: str) -> Path:
        return self._folder / call.model.replace(":", "-") / kind / f"{name}-{call.number}"


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


def _check_ttl(call: Call) -> None:
    ttl_s = call.body.get("ttl_seconds")
    if ttl_s is not None and not 1 <= ttl_s <= LONGEST_TTL_S:
        raise RequestError(f"ttl_seconds is {ttl_s}; it must be from 1 to {LONGEST_TTL_S}, which is ten years")


def _checked(name: str) -> str:
    if name.startswith(_UNNAMED):
        reason = f"names that begin with {_UNNAMED} are the server's"
        raise RequestError(f"a checkpoint cannot be called {name!r:.80}: {reason}")
    if not _NAME.fullmatch(name):
        raise RequestError(f"a checkpoint cannot be called {name!r:.80}; use letters, digits, '.', '_' and '-'")
    return name
