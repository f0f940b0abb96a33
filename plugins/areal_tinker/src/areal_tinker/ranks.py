"""The training engine on all ranks. Rank 0 sends commands; every rank executes them in the same order."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import ValidationError
from transformers import AutoConfig

from areal_core.engines import AdamWSettings, OptimizerSettings, SteerableEngine, broadcast_bytes, write_weights_folder
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_tinker.errors import RequestError
from areal_tinker.losses import Terms, find_loss, total
from areal_tinker.wire import read_batch, read_forward_backward, settings_of, write_outputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.config import RunConfig, Selection
    from areal_core.data import PackedBatch
    from areal_core.engines import ModelReference, TrainEngine

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_END: Final = b""


class Rank:
    """The training engine of one rank, with the passes since its last update.

    A backward pass is made with the update, not when the client asks for it: `forward_backward` computes the loss, and
    `optim_step` the gradient of all losses since the step before. So gradients need not survive anything, and every
    training engine can serve. It costs a third more time than a backward pass alone.

    Args:
        config: of the server.
        model: the base model.
    """

    def __init__(self, config: RunConfig, model: ModelReference) -> None:
        self._config = config
        self._model = model
        self._engine: TrainEngine | None = None
        self._lora: Mapping[str, Any] | None = None
        self._is_fresh = False
        self._losses: list[LossSpec] = []
        described = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).get_text_config()
        self.vocabulary = int(described.vocab_size)
        limit = getattr(described, "max_position_embeddings", None) or 1 << 20
        self.longest = min(int(limit), config.train_engine.keywords().get("max_tokens_per_microbatch", int(limit)))

    def open(self, lora: Mapping[str, Any] | None, folder: str | None = None) -> None:
        """Begin with a new model, or with a saved one.

        Args:
            lora: `lora_config` of the client.
            folder: where `save` has written the model; None for a new one.
        """
        self._losses.clear()
        if self._engine is None or self._lora != lora or not (self._is_fresh or folder):
            chosen = with_lora(self._config.train_engine, lora)
            self.close()
            engine: TrainEngine = chosen.build()
            if not _is_steerable(engine):
                raise RunError(f"{chosen.reference} cannot serve Tinker clients: its optimizer is not set from outside")
            engine.setup(self._model, ACTOR, OptimizerSettings(total_updates=1, temperature=1.0))
            self._engine, self._lora = engine, lora
        self._is_fresh = folder is None
        if folder is not None:
            self._opened().load(Path(folder))

    def forward(self, body: bytes) -> bytes:
        """Compute a pass, and keep it for the next update unless it is forward only. Return its result."""
        loss, learns = self._read(body)
        logprobs = self._opened().forward(loss.batch, ["logprobs"])["logprobs"]
        result = loss.loss(loss.batch, {"logprobs": logprobs})
        if learns:
            self._losses.append(loss)
        return write_outputs(logprobs, loss.batch.lengths.tolist(), float(result.loss))

    def keep(self, body: bytes) -> None:
        """Keep a pass for the next update without computing it, unless it is forward only."""
        loss, learns = self._read(body)
        if learns:
            self._losses.append(loss)

    def forget(self) -> None:
        """Drop the passes since the last update."""
        self._losses.clear()

    def step(self, adam: Mapping[str, float] | None) -> dict[str, float]:
        """Make an update on all passes since the last one, and drop them. Return its metrics.

        Raises:
            RequestError: there was no pass, a setting is out of its range, or the gradient is not finite. The
                parameters stay as they were, and the passes are dropped.
        """
        losses, self._losses = self._losses, []
        if not losses:
            raise RequestError("optim_step needs a forward_backward since the last optim_step")
        if adam is None:
            raise RequestError("optim_step needs adam_params: this server has AdamW alone")
        try:
            settings = AdamWSettings(
                learning_rate=adam["learning_rate"],
                betas=(adam["beta1"], adam["beta2"]),
                epsilon=adam["eps"],
                weight_decay=adam["weight_decay"],
                max_gradient_norm=adam["grad_clip_norm"] or None,
            )
        except (TypeError, ValueError) as error:
            raise RequestError(f"adam_params: {error}") from None
        engine: Any = self._opened()
        engine.set_optimizer(settings)
        self._is_fresh = False
        metrics = engine.train(losses)
        if float(metrics["skipped"].values):
            raise RequestError("the gradient is not finite, so optim_step has changed nothing; check the data")
        return {"grad_norm": float(metrics["gradient_norm"].values), "loss:sum": float(metrics["loss"].values)}

    def save(self, folder: str) -> None:
        """Write parameters and optimizer."""
        self._opened().save(Path(folder))

    def load(self, folder: str, *, optimizer: bool) -> None:
        """Read what `save` wrote, with the optimizer's state or without it. Passes before are dropped."""
        self._is_fresh = False
        engine: Any = self._opened()
        engine.load(Path(folder))
        if not optimizer:
            engine.reset_optimizer()
        self._losses.clear()

    def publish(self, folder: str) -> None:
        """Write the weights for inference engines."""
        write_weights_folder(self._opened(), Path(folder))

    def close(self) -> None:
        """Free the model."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _opened(self) -> TrainEngine:
        assert self._engine is not None, "open comes first"
        return self._engine

    def _read(self, body: bytes) -> tuple[LossSpec, bool]:
        """Return the loss of a pass, and whether it is learned from."""
        message = read_forward_backward(body)
        batch = read_batch(message, self.vocabulary, self.longest)
        function, settings = find_loss(message.loss_fn), settings_of(message)
        names = [name for name in batch.tokens.values if name not in {"input_ids", "targets"}]

        def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            inputs = {name: part[name] for name in names}
            return LossResult(
                total(function, Terms(outputs["logprobs"], inputs, settings, part.tokens.row_index, len(part)))
            )

        return LossSpec(ACTOR.name, batch, ("logprobs",), loss), not message.forward_only


def _is_steerable(engine: object) -> bool:
    return isinstance(engine, SteerableEngine)


def with_lora(engine: Selection, lora: Mapping[str, Any] | None) -> Selection:
    """Return a training engine with the adapter that a client asks for, if the server trains adapters.

    Raises:
        RequestError: the adapter would have no matrices.
    """
    adapter = getattr(engine.settings, "adapter", None)
    if adapter is None or lora is None:
        return engine
    modules = [*(_ATTENTION if lora["train_attn"] else ()), *(_MLP if lora["train_mlp"] else ())]
    if not modules:
        raise RequestError("lora_config needs train_attn or train_mlp: the embedding and the head get no adapter here")
    trains_all = lora["train_attn"] and lora["train_mlp"]
    changes: dict[str, Any] = {"rank": lora["rank"], "modules": "all-linear" if trains_all else modules}
    if lora.get("seed") is not None:
        changes["seed"] = lora["seed"]
    settings: Any = engine.settings
    try:
        chosen = type(adapter).model_validate(adapter.model_dump() | changes)
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
        raise RequestError(f"lora_config: {faults}") from None
    return replace(engine, settings=settings.model_copy(update={"adapter": chosen}))


class Ranks:
    """Sends commands from rank 0 to all ranks, itself among them.

    Args:
        rank: the engine of this rank.
        shares_gpu: whether inference servers use the same GPU in the time between commands.
    """

    def __init__(self, rank: Rank, *, shares_gpu: bool = False) -> None:
        self.rank = rank
        self._shares_gpu = shares_gpu

    def call(self, name: str, body: bytes | None = None, **arguments: Any) -> Any:
        """Execute a method of `Rank` on all ranks, and return the result of rank 0.

        Args:
            name: name of the method.
            body: its first argument, if that is bytes.
            arguments: its other arguments, which JSON can encode.

        Raises:
            RequestError, RunError: the same on all ranks, which continue.
        """
        header = json.dumps([name, body is not None, arguments]).encode()
        broadcast_bytes(struct.pack("<I", len(header)) + header + (body or b""))
        return self._execute(name, body, arguments)

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        broadcast_bytes(_END)

    def follow(self) -> None:
        """Execute the commands of rank 0 until it ends. On every rank but 0."""
        while payload := broadcast_bytes(b""):
            (size,) = struct.unpack_from("<I", payload)
            name, has_body, arguments = json.loads(payload[4 : 4 + size])
            try:
                self._execute(name, payload[4 + size :] if has_body else None, arguments)
            except (RequestError, RunError):
                continue  # rank 0 has the same error, and reports it

    def _execute(self, name: str, body: bytes | None, arguments: Mapping[str, Any]) -> Any:
        method = getattr(self.rank, name)
        try:
            return method(**arguments) if body is None else method(body, **arguments)
        finally:
            if self._shares_gpu:
                torch.cuda.empty_cache()  # the servers take their memory back
