"""A training engine for frozen roles whose model is behind an address, such as a teacher on other machines."""

from __future__ import annotations

import asyncio
import json
import math
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal_core.errors import RunError
from areal_core.servers import RequestRefusedError, ServerConnection, ServerLostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.data import Metric, PackedBatch
    from areal_core.engines import ModelReference, OptimizerSettings, TrainEngine
    from areal_core.sdk import LossSpec, Role
    from areal_finetuning.config import ServedSettings


class ServedEngine:
    """Asks servers for the log-probabilities of given tokens; see `ServedSettings`.

    See `areal_core.engines.TrainEngine` for the contract of each method. Rank 0 asks, and sends the other ranks what it
    got.

        roles: {teacher: {type: finetuning/served, addresses: ["http://host:30000"]}}

    Args:
        settings: the role's section of the config.
    """

    def __init__(self, settings: ServedSettings) -> None:
        self._settings = settings
        self._role = ""

    def setup(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        """Check that the role is frozen and has log-probabilities, and that every server scores a token.

        Raises:
            RunError: the role trains, follows another one, or scores sequences; or a server does not answer as it must.
        """
        del model
        if role.changes or role.head != "vocabulary":
            raise RunError(
                f"the engine finetuning/served has a frozen model with a head of the vocabulary, and the role "
                f"'{role.name}' {'changes' if role.changes else 'has another head'}",
                hints=[f"choose another engine for roles.{role.name}, such as fsdp/fsdp"],
            )
        if settings.temperature != 1:
            raise RunError(
                f"servers score tokens at temperature 1, not {settings.temperature}: set sampling.temperature=1"
            )
        self._role = role.name
        self._on_all_ranks([[1, 2]] * len(self._settings.addresses), list(range(len(self._settings.addresses))))

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return `logprobs`, [T] float32 on the CPU; 0 at the last position of a sequence, which predicts nothing.

        Raises:
            RunError: another output is asked for, a server is lost or refuses, or it scores other tokens.
        """
        if others := sorted({*outputs} - {"logprobs"}):
            raise RunError(
                f"the servers of the role '{self._role}' compute logprobs, not {', '.join(others)}",
                hints=["choose finetuning/distill and not gkd, or an engine that has the model, such as fsdp/fsdp"],
            )
        sequences = [ids.tolist() for ids in torch.split(batch["input_ids"], batch.lengths.tolist())]
        values = self._on_all_ranks(sequences, self._places(batch))
        return {"logprobs": torch.tensor([value for row in values for value in row], dtype=torch.float32)}

    def _places(self, batch: PackedBatch) -> list[int]:
        """Return the place of each sequence's server in `addresses`."""
        column, count = self._settings.chosen_by, len(self._settings.addresses)
        if column is None:
            return [0] * len(batch)
        if column not in batch:
            raise RunError(f"chosen_by of the role '{self._role}' is {column}, but the batch has no such column")
        places: list[float] = batch[column].tolist()
        for place in places:
            if math.isnan(place) or int(place) != place or not 0 <= place < count:
                raise RunError(
                    f"{column} is {place} for a sequence, but role '{self._role}' has the addresses 0 to {count - 1}"
                )
        return [int(place) for place in places]

    def _on_all_ranks(self, sequences: list[list[int]], places: list[int]) -> list[list[float]]:
        """Ask on rank 0, and return its result, or raise its error, on every rank; collective."""
        found: dict[str, Any] = {}
        several = dist.is_initialized() and dist.get_world_size() > 1
        if not several or dist.get_rank() == 0:
            try:
                found["values"] = asyncio.run(self._ask_for_all(sequences, places))
            except RunError as error:
                found |= {"problem": error.message, "hints": list(error.hints)}
        if several:
            found = json.loads(_from_rank_0(json.dumps(found).encode()))
        if "problem" in found:
            raise RunError(found["problem"], hints=found["hints"])
        values: list[list[float]] = found["values"]
        return values

    async def _ask_for_all(self, sequences: list[list[int]], places: list[int]) -> list[list[float]]:
        settings = self._settings
        key = os.environ.get(settings.api_key_variable or "", "")
        connections = [ServerConnection(each, key, settings.timeout_s) for each in settings.addresses]
        limits = [asyncio.Semaphore(settings.max_concurrent_requests) for _ in connections]

        try:
            names = [await self._model_at(connection) for connection in connections]

            async def ask(ids: list[int], place: int) -> list[float]:
                async with limits[place]:
                    return await self._ask(connections[place], names[place], ids)

            return await asyncio.gather(*(ask(*each) for each in zip(sequences, places, strict=True)))
        finally:
            for connection in connections:
                connection.close()

    async def _model_at(self, connection: ServerConnection) -> str:
        """Return the name of the model in requests to a server; empty where the protocol has none."""
        if self._settings.protocol != "openai" or self._settings.served_model is not None:
            return self._settings.served_model or ""
        try:
            listed = [str(model["id"]) for model in (await connection.get("/v1/models"))["data"]]
        except (RequestRefusedError, ServerLostError, KeyError, TypeError) as error:
            raise self._problem(connection, f"does not list its models: {error!r}") from error
        if len(listed) != 1:
            raise self._problem(connection, f"lists the models {', '.join(listed)}: set served_model to one of them")
        return listed[0]

    async def _ask(self, connection: ServerConnection, name: str, ids: list[int]) -> list[float]:
        """Return the log-probability of each next token, and 0 at the end; [len(ids)]."""
        if len(ids) < 2:
            return [0.0] * len(ids)
        settings = self._settings
        path, body = _request(settings.protocol, name, ids)
        for attempt in range(settings.attempts):
            try:
                answer = await connection.post(path, body)
                break
            except RequestRefusedError as error:
                raise self._problem(connection, f"refused {len(ids)} tokens: {error}") from error
            except ServerLostError as error:
                if attempt + 1 == settings.attempts:
                    raise self._problem(connection, f"was lost {settings.attempts} times: {error}") from error
                await asyncio.sleep(2**attempt)
        try:
            return _logprobs(settings.protocol, answer, ids)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise self._problem(connection, f"did not score the given tokens: {error!r}") from error

    def _problem(self, connection: ServerConnection, text: str) -> RunError:
        return RunError(
            f"the server {connection.address} of the role '{self._role}' {text}",
            hints=[
                "check roles.*.addresses and protocol, and that the server scores prompts (prompt log-probabilities)"
            ],
        )

    def train(self, works: Sequence[LossSpec]) -> dict[str, Metric]:
        """Raise RunError: the model is frozen."""
        raise RunError(f"the model of the role '{self._role}' is behind an address and cannot be trained")

    def update_ema(self, source: TrainEngine, decay: float) -> None:
        """Raise RunError: the model is frozen."""
        raise RunError(f"the model of the role '{self._role}' is behind an address and follows no other")

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing: the parameters are elsewhere."""
        return iter(())

    def named_meta_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing: the parameters are elsewhere."""
        return iter(())

    def save(self, folder: Path) -> None:
        """Write nothing: a checkpoint has no frozen roles."""

    def load(self, folder: Path) -> None:
        """Read nothing: a checkpoint has no frozen roles."""

    def export(self, folder: Path) -> None:
        """Raise RunError: the parameters are elsewhere."""
        raise RunError(f"the model of the role '{self._role}' is behind an address and cannot be exported")

    def close(self) -> None:
        """Do nothing: connections end with each forward pass."""


def _from_rank_0(payload: bytes) -> bytes:
    """Return the bytes of rank 0 on every rank; collective."""
    size = torch.tensor([len(payload)])
    dist.broadcast(size, 0)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return buffer.numpy().tobytes()


def _request(protocol: str, model: str, ids: list[int]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request that scores `ids` and generates one token, which is not used."""
    if protocol == "sglang":
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        return "/generate", {
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}
    return "/v1/completions", body


def _logprobs(protocol: str, answer: Mapping[str, Any], ids: list[int]) -> list[float]:
    """Return the log-probability of each next token, and 0 at the end, from a server's answer; [len(ids)].

    Raises:
        ValueError: the answer is about other tokens.
    """
    if protocol == "sglang":
        scored = answer["meta_info"]["input_token_logprobs"]
        tokens, values = [each[1] for each in scored], [each[0] for each in scored]
        if tokens != ids:
            raise ValueError(f"it scored {len(tokens)} other tokens than the {len(ids)} given ones")
    else:
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        if len(values) not in (len(ids), len(ids) + 1):  # the given tokens, and the one that was generated
            raise ValueError(f"it scored {len(values)} tokens, not the {len(ids)} given ones and a generated one")
        values = values[: len(ids)]
    numbers = [float(value) for value in values[1:]]
    if any(math.isnan(number) or number > 1e-3 for number in numbers):
        raise ValueError("a log-probability is positive or not a number")
    return [*numbers, 0.0]
