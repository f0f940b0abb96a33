"""The durable records of a server: sessions, models, checkpoints, and each training call with its result.

A call belongs to a model and has the number that the client gave it, `seq_id`. The first call of a model has number 0
and makes it; each later one follows the one before.

    accepted    a row with the request. A client that sends the call again gets the same future
    executed    the row has the result, in the transaction that makes it visible. A client gets it as often as it asks

The state of a model is its last saved state and the calls since then, so a server that is killed loses nothing: it
loads the state, repeats those calls that had changed it, and continues with the first call without a result.
"""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from areal_core.errors import RunError
from areal_tinker.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, facts TEXT NOT NULL, has_finished INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, facts TEXT NOT NULL, last_request REAL NOT NULL,
    saved INTEGER NOT NULL DEFAULT -1, next INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, path TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL,
    number INTEGER NOT NULL, facts TEXT NOT NULL, time REAL NOT NULL, expires REAL);
CREATE TABLE IF NOT EXISTS calls (
    model TEXT NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL, request BLOB, result BLOB, form TEXT,
    has_failed INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, crashes INTEGER NOT NULL DEFAULT 0,
    crash TEXT NOT NULL DEFAULT '', accepted REAL NOT NULL, finished REAL,
    PRIMARY KEY (model, number));
"""
VERSION: Final = 1
"""Version of these tables. A change of them is a new version."""
_CALL: Final = "model, number, kind, request, attempts, crashes, crash, has_failed, accepted"
KEPT_S: Final = 3600.0
"""Seconds for which a result stays after the state that contains it was saved."""


@dataclass(frozen=True, slots=True)
class Call:
    """A training call.

    Attributes:
        model: identifier of the model.
        number: place among the calls of the model, from 0.
        kind: `create_model`, `forward_backward`, `optim_step`, `save_weights`, `save_weights_for_sampler` or
            `load_weights`.
        request: the body: protobuf for `forward_backward`, otherwise JSON.
        attempts: how often its execution has begun.
        crashes: how often an unexpected error in its execution has ended the server.
        crash: the last of these errors.
        has_failed: whether it was executed and has failed.
        accepted: when it was accepted, in seconds since 1970.
    """

    model: str
    number: int
    kind: str
    request: bytes
    attempts: int = 0
    crashes: int = 0
    crash: str = ""
    has_failed: bool = False
    accepted: float = 0.0

    def is_same(self, kind: str, request: bytes | None) -> bool:
        """Return whether an accepted call of the same number is this one, sent again.

        Args:
            kind: of the accepted call.
            request: its body; None if the journal no longer has it.
        """
        if kind != self.kind or request in (None, self.request):
            return kind == self.kind
        # The SDK gives each attempt to send this call a new number of the sampling session. The first one counts.
        return kind == "save_weights_for_sampler" and _without_session(self.request) == _without_session(request)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the request."""
        body: dict[str, Any] = json.loads(self.request)
        return body


def _without_session(request: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(request).items() if name != "sampling_session_seq_id"}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call.

    Attributes:
        content: the body of the response.
        form: its media type.
        has_failed: whether it is an error. A call that has failed has not changed the model; an `optim_step` that has
            failed drops the passes before it.
    """

    content: bytes
    form: str
    has_failed: bool = False

    @staticmethod
    def of(value: Mapping[str, Any]) -> Result:
        """Return a JSON object as a result."""
        return Result(json.dumps(value).encode(), "application/json")

    @staticmethod
    def failure(message: str, *, is_of_user: bool) -> Result:
        """Return an error, which the SDK raises in the client."""
        body = {"error": message, "category": "user" if is_of_user else "server"}
        return Result(json.dumps(body).encode(), "application/json", has_failed=True)


class Journal:
    """The SQLite database of a server. A method that writes returns when the disk has it.

    Args:
        path: the file; it is made if it does not exist.

    Raises:
        RunError: another version of this plugin has written the file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = sqlite3.connect(path, isolation_level=None)
        self._rows.execute("PRAGMA journal_mode=WAL")
        self._rows.execute("PRAGMA synchronous=FULL")
        (version,) = self._rows.execute("PRAGMA user_version").fetchone()
        is_new = self._rows.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone() == (0,)
        if not is_new and version != VERSION:
            raise RunError(
                f"{path} was written by another version of areal-tinker", hints=["name a new folder: --run-dir DIR"]
            )
        self._rows.executescript(_TABLES)
        self._rows.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        """Close the file."""
        self._rows.close()

    # Sessions and samplers.

    def add_session(self, identifier: str, facts: Mapping[str, Any]) -> None:
        """Remember a session of a client."""
        self._rows.execute("INSERT INTO sessions (id, facts) VALUES (?, ?)", (identifier, json.dumps(facts)))

    def has_session(self, identifier: str) -> bool:
        """Return whether a session exists and has not finished."""
        return self._one("SELECT 1 FROM sessions WHERE id = ? AND NOT has_finished", identifier) is not None

    def finish_session(self, identifier: str) -> list[str]:
        """Record that a client has finished, and drop the calls of its models. Return these models."""
        models = [model for (model,) in self._rows.execute("SELECT id FROM models WHERE session = ?", (identifier,))]
        with self._transaction():
            self._rows.execute("UPDATE sessions SET has_finished = 1 WHERE id = ?", (identifier,))
            self._rows.executemany("DELETE FROM calls WHERE model = ?", [(model,) for model in models])
        return models

    def add_sampler(self, identifier: str, path: str | None) -> None:
        """Remember a sampling session and the checkpoint whose weights it uses; None: those of the base model.

        Raises:
            RequestError: the session exists with another checkpoint.
        """
        self._rows.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?)", (identifier, path))
        if self.sampler(identifier) != path:
            raise RequestError(f"the sampling session {identifier} uses another checkpoint")

    def sampler(self, identifier: str) -> str | None:
        """Return the path of the checkpoint of a sampling session; None: the base model.

        Raises:
            RequestError: there is no such session.
        """
        row = self._one("SELECT path FROM samplers WHERE id = ?", identifier)
        if row is None:
            raise RequestError(f"there is no sampling session {identifier}", 404)
        path: str | None = row[0]
        return path

    # Models.

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the facts of all models by identifier, in the order in which they were made."""
        rows = self._rows.execute("SELECT id, facts, last_request FROM models ORDER BY rowid")
        return {identifier: json.loads(facts) | {"last_request": last} for identifier, facts, last in rows}

    def model(self, identifier: str) -> dict[str, Any]:
        """Return the facts of a model.

        Raises:
            RequestError: there is no such model.
        """
        row = self._one("SELECT facts, last_request FROM models WHERE id = ?", identifier)
        if row is None:
            raise RequestError(f"there is no model {identifier}", 404)
        facts: dict[str, Any] = json.loads(row[0]) | {"last_request": row[1]}
        return facts

    def add_model(self, identifier: str, session: str, facts: Mapping[str, Any]) -> None:
        """Remember a model, unless it is known."""
        values = (identifier, session, json.dumps(facts), time.time())
        self._rows.execute(
            "INSERT OR IGNORE INTO models (id, session, facts, last_request) VALUES (?, ?, ?, ?)", values
        )

    # Calls.

    def accept(self, call: Call) -> None:
        """Keep a call until it is executed. The same call a second time changes nothing.

        Raises:
            RequestError: the model has another call of this number, or its client has finished.
        """
        finished = self._one(
            "SELECT 1 FROM models JOIN sessions ON sessions.id = models.session WHERE models.id = ? AND has_finished",
            call.model,
        )
        if finished:
            raise RequestError(f"the session of model {call.model} has finished; make a new ServiceClient", 410)
        row = self._one("SELECT kind, request FROM calls WHERE model = ? AND number = ?", call.model, call.number)
        if row is None:
            values = (call.model, call.number, call.kind, call.request, time.time())
            self._rows.execute(
                "INSERT INTO calls (model, number, kind, request, accepted) VALUES (?, ?, ?, ?, ?)", values
            )
            self._rows.execute("UPDATE models SET last_request = ? WHERE id = ?", (time.time(), call.model))
        elif not call.is_same(row[0], row[1]):
            message = f"seq_id {call.number} of model {call.model} was used for another request, {row[0]}"
            raise RequestError(f"{message}; each call of a model needs a number of its own")

    def waiting(self) -> list[Call]:
        """Return the next call of each model, if the client has sent it; the one that has waited longest first."""
        columns = ", ".join(f"calls.{column}" for column in _CALL.split(", "))
        rows = self._rows.execute(
            f"SELECT {columns} FROM models JOIN calls ON calls.model = models.id AND calls.number = models.next "
            "WHERE result IS NULL ORDER BY accepted"
        )
        return [Call(*row) for row in rows]

    def has_call(self, call: Call) -> bool:
        """Return whether a call is still there; `finish_session` removes them."""
        return self._one("SELECT 1 FROM calls WHERE model = ? AND number = ?", call.model, call.number) is not None

    def begin(self, call: Call) -> None:
        """Count an attempt to execute a call."""
        self._rows.execute(
            "UPDATE calls SET attempts = attempts + 1 WHERE model = ? AND number = ?", (call.model, call.number)
        )

    def crashed(self, call: Call, error: str) -> None:
        """Count an unexpected error in the execution of a call, before the server ends."""
        self._rows.execute(
            "UPDATE calls SET crashes = crashes + 1, crash = ? WHERE model = ? AND number = ?",
            (error, call.model, call.number),
        )

    def finish(self, call: Call, result: Result, *, is_saved: bool = False) -> None:
        """Keep the result of a call.

        Args:
            call: the call.
            result: its result.
            is_saved: whether the state after the call is saved. This is recorded in the same transaction.
        """
        with self._transaction():
            self._rows.execute(
                "UPDATE calls SET result = ?, form = ?, has_failed = ?, finished = ? WHERE model = ? AND number = ?",
                (result.content, result.form, result.has_failed, time.time(), call.model, call.number),
            )
            self._rows.execute("UPDATE models SET next = ? WHERE id = ?", (call.number + 1, call.model))
            if is_saved:
                self._mark_saved(call.model, call.number)

    def result(self, model: str, number: int) -> Result | None:
        """Return the result of a call; None as long as it has none.

        Raises:
            RequestError: there is no such call, or its result was removed.
        """
        row = self._one("SELECT result, form, has_failed FROM calls WHERE model = ? AND number = ?", model, number)
        if row is None:
            raise RequestError(f"there is no call {number} of model {model}", 404)
        if row[1] == "":
            raise RequestError(f"the result of call {number} of model {model} was removed after {KEPT_S:g} s", 404)
        return None if row[0] is None else Result(bytes(row[0]), row[1], bool(row[2]))

    def saved(self, model: str) -> int:
        """Return the number of the last call in a model's saved state; -1 if no state is saved."""
        (number,) = self._one("SELECT saved FROM models WHERE id = ?", model) or (-1,)
        return int(number)

    def since(self, model: str, number: int) -> list[Call]:
        """Return the executed calls of a model after one."""
        rows = self._rows.execute(
            f"SELECT {_CALL} FROM calls WHERE model = ? AND number > ? AND result IS NOT NULL ORDER BY number",
            (model, number),
        )
        return [Call(*row) for row in rows]

    def mark_saved(self, model: str, number: int) -> None:
        """Record that the state after a call is saved. Requests up to it, and old results, are removed."""
        with self._transaction():
            self._mark_saved(model, number)

    def _mark_saved(self, model: str, number: int) -> None:
        self._rows.execute("UPDATE models SET saved = ? WHERE id = ?", (number, model))
        done = "model = ? AND number <= ?"
        self._rows.execute(f"UPDATE calls SET request = NULL WHERE {done}", (model, number))
        self._rows.execute(
            f"UPDATE calls SET result = x'', form = '' WHERE {done} AND finished < ?",
            (model, number, time.time() - KEPT_S),
        )

    # Checkpoints that clients name.

    def add_checkpoint(
        self, path: str, call: Call, kind: str, name: str, folder: str, facts: Mapping[str, Any]
    ) -> None:
        """Remember a checkpoint; one of the same path is replaced.

        Args:
            path: as clients name it.
            call: the call that has made it.
            kind: second part of the path.
            name: last part of the path.
            folder: where it is.
            facts: what else the server knows of it, for JSON.
        """
        now, ttl_s = time.time(), call.body.get("ttl_seconds")
        expires = None if ttl_s is None else now + ttl_s
        values = (path, call.model, kind, name, folder, call.number, json.dumps(facts), now, expires)
        self._rows.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def remove_checkpoint(self, path: str) -> None:
        """Forget a checkpoint."""
        self._rows.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def checkpoint(self, path: str) -> dict[str, Any] | None:
        """Return a checkpoint as `checkpoints` does; None if there is none."""
        return next(iter(self._checkpoints("path = ?", path)), None)

    def checkpoints(self, model: str | None = None) -> list[dict[str, Any]]:
        """Return the checkpoints of a model, or of all models: all columns by name. Those of a model are in order."""
        return self._checkpoints("?1 IS NULL OR model = ?1", model)

    def expired(self) -> list[str]:
        """Return the paths of checkpoints whose time to live is over."""
        rows = self._rows.execute("SELECT path FROM checkpoints WHERE expires < ?", (time.time(),))
        return [path for (path,) in rows]

    def _checkpoints(self, condition: str, value: str | None) -> list[dict[str, Any]]:
        names = ("path", "model", "kind", "name", "folder", "number", "facts", "time", "expires")
        rows = self._rows.execute(
            f"SELECT {', '.join(names)} FROM checkpoints WHERE {condition} ORDER BY model, number", (value,)
        )
        return [dict(zip(names, row, strict=True)) | {"facts": json.loads(row[6])} for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Make several changes in this context together, or none of them."""
        self._rows.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._rows.execute("COMMIT")
        except BaseException:
            if self._rows.in_transaction:
                self._rows.execute("ROLLBACK")
            raise

    def _one(self, statement: str, *values: Any) -> Any:
        return self._rows.execute(statement, values).fetchone()
