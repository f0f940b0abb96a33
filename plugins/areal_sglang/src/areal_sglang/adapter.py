"""SGLang's HTTP interface: `sglang/srt/entrypoints/http_server.py` and `sglang/srt/managers/io_struct.py`."""

from __future__ import annotations

import json
import os
import sys
from base64 import b64decode, b64encode
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import numpy as np
from msgspec.structs import astuple
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from areal_core.errors import RunError
from areal_core.models import ImagePrompts, MoEShape, routed_experts_field
from areal_core.servers import (
    Chunk,
    HTTPAdapter,
    InferenceCapabilities,
    OptionValue,
    RequestRefusedError,
    ServerCommand,
    ServerIdentity,
    ServerRefusedError,
    UpdateRefusedError,
    is_resumable,
    option_arguments,
    raise_refusal,
)
from areal_sglang import graphs, images, lora
from areal_sglang.config import SGLangConfig
from areal_sglang.events import EVENTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.data import Values
    from areal_core.engines import ModelReference, SharedMemory, TensorDescription
    from areal_core.servers import PartialGeneration, SamplingParameters, ServerConnection, UpdateMode, WeightGroup
    from areal_sglang.events import Reason

KNOWN = SpecifierSet(">=0.5.17,<0.5.24")
"""Versions whose interface was read and tried."""

SPANS_SINCE = Version("0.5.23")
"""From here on an answer says which of its tokens were sampled by which weights."""

_LOGPROBS = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "false"}
"""Log-probabilities after the temperature, whatever the user's shell says."""

_ABORTED = 499
"""What is said of a request that was aborted before the scheduler had seen it."""

_EVERYTHING = 1e-9
"""As nucleus: only the most probable token is left. With SGLang's own greedy mode log-probabilities would not be those
of the temperature."""


class SGLangAdapter(HTTPAdapter):
    """Speaks to SGLang servers. See `ServerAdapter` for the methods.

    Args:
        settings: of the fleet.

    Attributes:
        moe: of the model, where servers shall tell which experts tokens went through.
    """

    Config = SGLangConfig
    settings: SGLangConfig
    name = "SGLang"
    package = "sglang"
    # `/health` generates a token: it would read weights that were given away, and holds an update up for a second.
    health_path = "/server_info"
    # SGLang puts the group's name in front; then PyTorch's helper puts it again, and the device.
    group_store_prefixes: Mapping[str, Sequence[str]] = MappingProxyType(
        {"nccl": ("{group}", "{group}/", "cuda/"), "gloo": ("{group}", "{group}/", "cpu/")}
    )

    def __init__(self, settings: SGLangConfig) -> None:
        super().__init__(settings)
        self.moe: MoEShape | None = None
        self._adapted: WeakSet[ServerConnection] = WeakSet()  # to servers whose weights are an adapter's by now
        self._prompts = ImagePrompts("")

    def serve(self, model: ModelReference) -> None:
        """Requests are for this model.

        Raises:
            RunError: it sees, and servers are to take adapters by themselves; or it shall tell which experts tokens
                went through, and has none that are known.
        """
        if self.settings.routed_experts:
            self.moe = MoEShape.read(model.path)
        self._prompts = ImagePrompts(model.path)
        if self._prompts.sees and self.settings.adapter_rank is not None:
            raise RunError(
                "an adapter by itself cannot be synced to servers of a VLM",
                hints=["set train_engine.adapter.sync=merged, and leave inference_engine.adapter_rank out"],
            )

    def capabilities(self) -> InferenceCapabilities:
        """Everything that SGLang samples with; its seeds count only in a mode that costs a third of its speed."""
        sampling = {"top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
        return InferenceCapabilities(
            update_modes=frozenset({"keep_cache", "recompute"}),
            sampling=frozenset(sampling | ({"stop"} if self.settings.detokenize else set())),
            seeded=bool(self.settings.options.get("enable_deterministic_inference")),
            transports=self.settings.transports,
            images=True,
        )

    def command(self, model: ModelReference, host: str, port: int, scratch: Path) -> ServerCommand:
        """SGLang's own start, with the options that a run needs."""
        settings = self.settings
        options: dict[str, OptionValue] = {
            "model_path": model.path,
            "host": host,
            "port": port,
            "dtype": model.dtype,
            "tp_size": settings.tensor_parallel,
            "dp_size": settings.data_parallel,
            "incremental_streaming_output": True,
            "skip_tokenizer_init": not settings.detokenize,
            "skip_server_warmup": True,
            "trust_remote_code": model.trust_remote_code,
            "enable_memory_saver": settings.memory_saver,
            "enable_return_routed_experts": settings.routed_experts,
            **graphs.options_for({name.replace("-", "_"): value for name, value in settings.options.items()}),
        }
        if settings.adapter_rank is not None:
            options |= lora.options_for(settings.adapter_rank)
        if settings.key:
            if "config" in settings.options:
                raise RunError("the key reaches SGLang by its own `config`: write what that says into `options`")
            # Everybody can read a command line, and SGLang reads no environment.
            path = scratch / "server-key.yaml"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as key_file:
                key_file.write(json.dumps({"api-key": settings.key}))
            options["config"] = str(path)
        fixed = {"NCCL_CUMEM_ENABLE": "0", "HF_HUB_OFFLINE": "1", **_LOGPROBS}
        if ImagePrompts(model.path).sees:
            options |= images.options_for(model.path)
            fixed |= images.ENVIRONMENT
        program = settings.program or [sys.executable, "-m", "sglang.launch_server"]
        words = option_arguments(options | settings.options)
        return ServerCommand([*program, *words], {**fixed, **settings.environment})

    async def identify(self, connection: ServerConnection) -> ServerIdentity:
        """From `/server_info`."""
        try:
            told = await connection.get("/server_info")
            version = Version(str(told["version"]))
            ranks = int(told.get("tp_size") or 1) * int(told.get("dp_size") or 1)
            context = int(told.get("context_length") or told["max_req_input_len"])
            slots = _slots(told)
        except (RequestRefusedError, InvalidVersion, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefusedError(f"answers, but not as an SGLang server does: {error!r:.200}") from None
        if version not in KNOWN and not self.settings.allow_unknown_version:
            raise ServerRefusedError(
                f"is SGLang {version}; areal-sglang was tested with {KNOWN}: install one of these, or set "
                "allow_unknown_version"
            )
        if self.settings.routed_experts and not told.get("enable_return_routed_experts"):
            raise ServerRefusedError(
                "does not tell which experts tokens went through, and routed_experts is set: start it with "
                "--enable-return-routed-experts, or with areal serve"
            )
        if int(told.get("tokenizer_worker_num") or 1) > 1:
            raise ServerRefusedError(
                "has several HTTP processes, which learn of a pause one after another: an update of the weights that "
                "comes between never ends; start it without --tokenizer-worker-num"
            )
        if self._prompts.sees:
            images.check_server(version, told)
        dtype = str(told.get("dtype") or "auto")
        named = "" if dtype == "auto" else dtype
        if rank := self.settings.adapter_rank:
            lora.check_room(told, rank)
        # SGLang's overlap scheduler holds back the tokens of one forward pass when a pause keeps the cache, and labels
        # them with the version that is loaded meanwhile (pause_generation, mode in_place, in scheduler.py of 0.5.23).
        holds_tokens_back = self.settings.update_mode == "keep_cache" and not told.get("disable_overlap_schedule")
        spans = version >= SPANS_SINCE and not rank and not holds_tokens_back
        return ServerIdentity(str(version), str(told["model_path"]), context, slots, named, ranks, spans)

    async def generate(self, connection: ServerConnection, partial: PartialGeneration) -> AsyncIterator[Chunk]:
        """`/generate` with token ids, streamed. SGLang repeats the image token of each image by itself."""
        prompt, named = self._prompts.place(partial.input_ids, len(partial.images)), partial.sampling.stop_token_ids
        resumable = is_resumable(partial.sampling)
        body = {
            "input_ids": images.collapsed(prompt),
            **({"image_data": list(partial.images)} if partial.images else {}),
            "sampling_params": self._sampling(partial),
            "return_logprob": True,
            "stream": True,
            "rid": partial.name,
            "extra_key": partial.cache_salt,
            **({"return_routed_experts": True} if self.moe is not None else {}),
            **({"lora_path": partial.adapter} if partial.adapter else {}),
        }
        seen = 0
        async for event in connection.post_for_events("/generate", body, EVENTS):
            if event.error is not None:
                if event.error.get("code") == _ABORTED:
                    yield Chunk([], [], "abort")
                    return
                raise_refusal(event.error)
            told = event.meta_info
            if partial.images and told.prompt_tokens not in (0, len(partial.input_ids)):
                raise ValueError(
                    f"SGLang makes {told.prompt_tokens} tokens of a prompt with images that has "
                    f"{len(partial.input_ids)} here: both must use the same preprocessor_config.json"
                )
            ids, logprobs = event.output_ids, [entry.value for entry in told.output_token_logprobs or ()]
            total = told.completion_tokens
            if told.finish_reason is not None and told.finish_reason.type == "abort" and len(ids) != len(logprobs):
                yield Chunk([], [], "abort")  # it had been put back into the queue: all its tokens were told before
                return
            if len(ids) == total and len(ids) > total - seen:  # everything so far, and not only what is new
                ids, logprobs = ids[seen:], logprobs[seen:]
            seen += len(ids)
            # With an adapter they are the base's, which never changes.
            spans = told.weight_versions if self.settings.adapter_rank is None else None
            reason = told.finish_reason
            if reason is not None and reason.type == "stop":
                self._prompts.is_written(
                    ids, named, is_resumable=resumable
                )  # then the next partial generation has padding for it
            yield Chunk(
                ids,
                logprobs,
                _finish(reason, named),
                None if spans is None else [astuple(span) for span in spans],
                self._columns(told.routed_experts, len(partial.input_ids) + total),
            )

    def _columns(self, told: str | None, tokens: int) -> Mapping[str, Values]:
        """From base64 of int32; an answer that was aborted has none."""
        if self.moe is None or told is None:
            return {}
        return routed_experts_field(np.frombuffer(b64decode(told), np.int32), self.moe, tokens)

    def _sampling(self, partial: PartialGeneration) -> dict[str, Any]:
        sampling: SamplingParameters = partial.sampling
        return {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "stop_token_ids": (stops := self._prompts.stops(sampling.stop_token_ids)),
            "stop": list(sampling.stop) or None,
            "top_p": _EVERYTHING if sampling.greedy else sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            # This switches off the request's own stop tokens as well, so it can be set only where there are none.
            "ignore_eos": not stops,
            "skip_special_tokens": False,
            "sampling_seed": partial.seed & (2**63 - 1),
            "stream_interval": self.settings.stream_interval,
        }

    async def stop(self, connection: ServerConnection, mode: UpdateMode) -> None:
        """`in_place` leaves keys and values where they are, `retract` drops them."""
        await connection.post("/pause_generation", {"mode": "in_place" if mode == "keep_cache" else "retract"})

    async def resume(self, connection: ServerConnection) -> None:
        """`/continue_generation`."""
        await connection.post("/continue_generation")

    async def abort(self, connection: ServerConnection) -> None:
        """`/abort_request` for all."""
        await connection.post("/abort_request", {"abort_all": True})

    async def load(self, connection: ServerConnection, folder: Path, label: str, mode: UpdateMode) -> None:
        """`/update_weights_from_disk`. With live requests in it the cache cannot be flushed, and need not be. Of an
        adapter, SGLang's own routes."""
        if self.settings.adapter_rank is not None and await lora.load(connection, folder):
            self._adapted.add(connection)
            return
        if connection in self._adapted:
            await lora.drop(connection)
            self._adapted.discard(connection)
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": mode == "recompute"}
        await self._update(connection, "/update_weights_from_disk", body)

    def name_of(self, connection: ServerConnection) -> str:
        """The adapter's, where the server has been given one."""
        return lora.NAME if connection in self._adapted else ""

    async def set_label(self, connection: ServerConnection, label: str) -> None:
        """`/update_weight_version`."""
        await connection.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def join_group(self, connection: ServerConnection, group: WeightGroup, first_rank: int) -> None:
        """`/init_weights_update_group`."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": first_rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._update(connection, "/init_weights_update_group", body)

    async def receive(
        self,
        connection: ServerConnection,
        group: WeightGroup,
        tensors: Sequence[TensorDescription],
        label: str,
        mode: UpdateMode,
    ) -> None:
        """`/update_weights_from_distributed`, between `/begin_weight_update` and `/end_weight_update`.

        Raises:
            UpdateRefusedError: the server refuses one of the three. Versions without the two marks need none.
        """
        await self.begin_reading(connection)
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group.name,
            "weight_version": label,
            "flush_cache": mode == "recompute",
        }
        await self._update(connection, "/update_weights_from_distributed", body)
        await self._mark(connection, "/end_weight_update")

    async def begin_reading(self, connection: ServerConnection) -> None:
        """`/begin_weight_update`, where the version knows it: what is read comes behind it.

        An update that failed, or whose sender was killed, is still open on the server, and it refuses another. That is
        ended first.
        """
        try:
            await self._mark(connection, "/begin_weight_update")
        except UpdateRefusedError as refused:
            try:
                await self._mark(connection, "/end_weight_update")
                await self._mark(connection, "/begin_weight_update")
            except UpdateRefusedError:
                raise refused from None

    async def read(
        self,
        connection: ServerConnection,
        tensors: Sequence[TensorDescription],
        copies: Sequence[Sequence[SharedMemory]],
    ) -> None:
        """`/update_weights_from_tensor`. Memory that cannot be opened ends the server."""
        from areal_sglang.reading import pickled

        parts = [b64encode(pickled(tensors, memories)).decode() for memories in copies]
        body = {"serialized_named_tensors": parts, "flush_cache": False}
        await self._update(connection, "/update_weights_from_tensor", body)

    async def end_reading(self, connection: ServerConnection, label: str) -> None:
        """`/end_weight_update`: all tensors have been read, and further tokens carry `label`."""
        await self._mark(connection, "/end_weight_update")
        await self.set_label(connection, label)

    @staticmethod
    async def _mark(connection: ServerConnection, path: str) -> None:
        try:
            await connection.post(path, {})
        except RequestRefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # older versions have no such path, and need neither mark
                raise UpdateRefusedError(str(error)) from None

    async def leave_group(self, connection: ServerConnection, group: WeightGroup) -> None:
        """`/destroy_weights_update_group`."""
        await connection.post("/destroy_weights_update_group", {"group_name": group.name})

    async def sleep(self, connection: ServerConnection) -> None:
        """`/release_memory_occupation`: weights and cache."""
        # What was aborted leaves the scheduler a moment after its last answer; a release before that would end it.
        await connection.post("/flush_cache", query={"timeout": "30"}, is_json=False)
        await connection.post("/release_memory_occupation", {})

    async def wake_up(self, connection: ServerConnection) -> None:
        """`/resume_memory_occupation`."""
        await connection.post("/resume_memory_occupation", {})

    @staticmethod
    async def _update(connection: ServerConnection, path: str, body: dict[str, Any]) -> None:
        try:
            told = await connection.post(path, body, timeout_s=3600)
        except RequestRefusedError as error:
            raise UpdateRefusedError(str(error)) from None
        if not told.get("success"):
            raise UpdateRefusedError(f"{path}: {str(told.get('message'))[:300]}")


def _finish(reason: Reason | None, stops: Sequence[int]) -> Literal["stop", "length", "abort"] | None:
    """Why an answer ended; one that a token ended which the request does not name has to go on."""
    if reason is None:
        return None
    if reason.type == "stop" and isinstance(reason.matched, int) and reason.matched not in stops:
        return "abort"
    return reason.type


def _slots(told: dict[str, Any]) -> int:
    """Requests that run at once: what was asked for, or what the server found room for."""
    states = told.get("internal_states") or [{}]
    found = told.get("max_running_requests") or states[0].get("effective_max_running_requests_per_dp")
    return int(found or 256)
