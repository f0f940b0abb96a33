"""Adapter for SGLang's HTTP API: `sglang/srt/entrypoints/http_server.py` and `sglang/srt/managers/io_struct.py`."""

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
"""Versions of SGLang with which this adapter was tested."""

SPANS_SINCE = Version("0.5.23")
"""First version that reports which weights sampled which tokens of an answer."""

_LOGPROBS = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "false"}
"""Environment of a server: log-probabilities are those after the temperature, whatever the user's shell has set."""

_ABORTED = 499
"""Error code of a request that was aborted before the scheduler saw it."""

_GREEDY_TOP_P = 1e-9
"""top_p of greedy requests: only the most probable token is left. SGLang's own greedy mode would ignore the temperature
in log-probabilities."""


class SGLangAdapter(HTTPAdapter):
    """Translates requests and weight updates for SGLang servers. See `ServerAdapter` for the methods.

    Args:
        settings: settings of the fleet.

    Attributes:
        moe: the model's MoE layers if servers report routed experts, else None.
    """

    Config = SGLangConfig
    settings: SGLangConfig
    name = "SGLang"
    package = "sglang"
    # `/health` generates a token, which would use released weights, and would delay an update by a second.
    health_path = "/server_info"
    # SGLang prepends the group's name. Then PyTorch's helper prepends it again, with the device.
    group_store_prefixes: Mapping[str, Sequence[str]] = MappingProxyType(
        {"nccl": ("{group}", "{group}/", "cuda/"), "gloo": ("{group}", "{group}/", "cpu/")}
    )

    def __init__(self, settings: SGLangConfig) -> None:
        super().__init__(settings)
        self.moe: MoEShape | None = None
        self._adapted: WeakSet[ServerConnection] = WeakSet()  # connections to servers whose weights are an adapter's
        self._prompts = ImagePrompts("")

    def serve(self, model: ModelReference) -> None:
        """Set the model of the requests.

        Raises:
            RunError: the model takes images and servers load LoRA adapters, or routed experts are requested of a model
                without known MoE layers.
        """
        if self.settings.routed_experts:
            self.moe = MoEShape.read(model.path)
        self._prompts = ImagePrompts(model.path)
        if self._prompts.sees and self.settings.adapter_rank is not None:
            raise RunError(
                "servers of a VLM cannot load LoRA adapters",
                hints=["set train_engine.adapter.sync=merged, and remove inference_engine.adapter_rank"],
            )

    def capabilities(self) -> InferenceCapabilities:
        """See `ServerAdapter.capabilities`. Seeds count only in the deterministic mode, which is a third slower."""
        sampling = {"top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
        sampling |= {"top_logprobs", "prompt_logprobs"}
        return InferenceCapabilities(
            update_modes=frozenset({"keep_cache", "recompute"}),
            sampling=frozenset(sampling | ({"stop"} if self.settings.detokenize else set())),
            seeded=bool(self.settings.options.get("enable_deterministic_inference")),
            transports=self.settings.transports,
            images=True,
        )

    def command(self, model: ModelReference, host: str, port: int, scratch: Path) -> ServerCommand:
        """Return the command of SGLang's launcher with the options that a run needs.

        Raises:
            RunError: the server has a key, and `options` sets `config`.
        """
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
                raise RunError("areal passes the key in SGLang's `config`: move the content of yours to `options`")
            # Every user can read command lines, and SGLang does not read a key from the environment.
            path = scratch / "server-key.yaml"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as key_file:
                key_file.write(json.dumps({"api-key": settings.key}))
            options["config"] = str(path)
        fixed = {"NCCL_CUMEM_ENABLE": "0", "HF_HUB_OFFLINE": "1", **_LOGPROBS}
        if ImagePrompts(model.path).sees:
            options |= images.options_for(model.path)
            fixed |= images.ENVIRONMENT
        program = settings.program or [sys.executable, "-m", "sglang.launch_server"]
        arguments = option_arguments(options | settings.options)
        return ServerCommand([*program, *arguments], {**fixed, **settings.environment})

    async def identify(self, connection: ServerConnection) -> ServerIdentity:
        """Identify the server by `/server_info`.

        Raises:
            ServerRefusedError: it is not an SGLang server of a tested version, or was started without needed options.
        """
        try:
            info = await connection.get("/server_info")
            version = Version(str(info["version"]))
            ranks = int(info.get("tp_size") or 1) * int(info.get("dp_size") or 1)
            context = int(info.get("context_length") or info["max_req_input_len"])
            slots = _slots(info)
        except (RequestRefusedError, InvalidVersion, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefusedError(f"answers, but not as an SGLang server does: {error!r:.200}") from None
        if version not in KNOWN and not self.settings.allow_unknown_version:
            raise ServerRefusedError(
                f"is SGLang {version}; areal-sglang was tested with {KNOWN}: install one of these, or set "
                "allow_unknown_version"
            )
        if self.settings.routed_experts and not info.get("enable_return_routed_experts"):
            raise ServerRefusedError(
                "does not report routed experts, but routed_experts is set: start it with "
                "--enable-return-routed-experts, or with areal serve"
            )
        if int(info.get("tokenizer_worker_num") or 1) > 1:
            raise ServerRefusedError(
                "has several HTTP processes, which pause one after another: a weight update that arrives between two "
                "of them never ends; start it without --tokenizer-worker-num"
            )
        if self._prompts.sees:
            images.check_server(version, info)
        configured_dtype = str(info.get("dtype") or "auto")
        dtype = "" if configured_dtype == "auto" else configured_dtype
        if rank := self.settings.adapter_rank:
            lora.check_rank(info, rank)
        # If a pause keeps the cache, SGLang's overlap scheduler delays the tokens of one forward pass, and labels them
        # with the version that is loaded in the meantime (pause_generation, mode in_place, in scheduler.py of 0.5.23).
        delays_tokens = self.settings.update_mode == "keep_cache" and not info.get("disable_overlap_schedule")
        reports_spans = version >= SPANS_SINCE and not rank and not delays_tokens
        return ServerIdentity(str(version), str(info["model_path"]), context, slots, dtype, ranks, reports_spans)

    async def generate(self, connection: ServerConnection, partial: PartialGeneration) -> AsyncIterator[Chunk]:
        """Stream an answer of `/generate` to token ids. The prompt has one image token an image: SGLang repeats it.

        Raises:
            RequestRefusedError, ServerLostError: the stream contains an error.
            ValueError: the server's prompt has another length, or the answer cannot continue after an image token.
        """
        prompt = self._prompts.place(partial.input_ids, len(partial.images))
        stop_tokens = partial.sampling.stop_token_ids
        resumable = is_resumable(partial.sampling)
        top_count = partial.sampling.top_logprobs
        body = {
            "input_ids": images.collapsed(prompt),
            **({"image_data": list(partial.images)} if partial.images else {}),
            "sampling_params": self._sampling(partial),
            "return_logprob": True,
            "stream": True,
            "rid": partial.name,
            "extra_key": partial.cache_salt,
            **({"top_logprobs_num": top_count} if top_count else {}),
            # SGLang then computes the whole prompt without its prefix cache, and applies no temperature to it.
            **({"logprob_start_len": 0} if partial.sampling.prompt_logprobs else {}),
            **({"return_routed_experts": True} if self.moe is not None else {}),
            **({"lora_path": partial.adapter} if partial.adapter else {}),
        }
        seen, lacks_prompt = 0, partial.sampling.prompt_logprobs
        async for event in connection.post_for_events("/generate", body, EVENTS):
            if event.error is not None:
                if event.error.get("code") == _ABORTED:
                    yield Chunk([], [], "abort")
                    return
                raise_refusal(event.error)
            meta = event.meta_info
            if partial.images and meta.prompt_tokens not in (0, len(partial.input_ids)):
                raise ValueError(
                    f"SGLang makes {meta.prompt_tokens} tokens of a prompt with images that has "
                    f"{len(partial.input_ids)} here: both must use the same preprocessor_config.json"
                )
            ids, logprobs = event.output_ids, [entry.value for entry in meta.output_token_logprobs or ()]
            tops = (meta.output_top_logprobs or []) if top_count else []
            total, reason = meta.completion_tokens, meta.finish_reason
            if reason is not None and reason.type == "abort" and len(ids) != len(logprobs):
                yield Chunk([], [], "abort")  # SGLang had put the request back into the queue: all tokens were sent
                return
            if len(ids) == total and len(ids) > total - seen:  # the event repeats the tokens of earlier events
                ids, logprobs, tops = ids[seen:], logprobs[seen:], tops[seen:]
            seen += len(ids)
            of_prompt = (meta.input_token_logprobs or [])[1:] if lacks_prompt else []  # each event repeats them
            lacks_prompt = lacks_prompt and not of_prompt
            # With an adapter, the reported versions are those of the base model, which never change.
            spans = meta.weight_versions if self.settings.adapter_rank is None else None
            if reason is not None and reason.type == "stop":
                # Raises if the policy wrote an image token after which this request cannot continue. Otherwise
                # `_finish` returns "abort", and the next partial generation has padding in its place.
                self._prompts.is_written(ids, stop_tokens, is_resumable=resumable)
            yield Chunk(
                ids,
                logprobs,
                _finish(reason, stop_tokens),
                None if spans is None else [astuple(span) for span in spans],
                self._columns(meta.routed_experts, len(partial.input_ids) + total),
                [top.token for position in tops for top in position],
                [top.value for position in tops for top in position],
                [entry.value for entry in of_prompt if entry.value is not None],
            )

    def _columns(self, encoded: str | None, tokens: int) -> Mapping[str, Values]:
        """Decode routed experts, base64 of int32. An aborted answer has none."""
        if self.moe is None or encoded is None:
            return {}
        return routed_experts_field(np.frombuffer(b64decode(encoded), np.int32), self.moe, tokens)

    def _sampling(self, partial: PartialGeneration) -> dict[str, Any]:
        sampling: SamplingParameters = partial.sampling
        stops = self._prompts.stops(sampling.stop_token_ids)
        return {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "stop_token_ids": stops,
            "stop": list(sampling.stop) or None,
            "top_p": _GREEDY_TOP_P if sampling.greedy else sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            # This also switches off the request's own stop tokens, so it can be set only if there are none.
            "ignore_eos": not stops,
            "skip_special_tokens": False,
            "sampling_seed": partial.seed & (2**63 - 1),
            # Each event has the log-probabilities of the whole prompt again.
            "stream_interval": sampling.max_new_tokens if sampling.prompt_logprobs else self.settings.stream_interval,
        }

    async def stop(self, connection: ServerConnection, mode: UpdateMode) -> None:
        """Pause with `/pause_generation`: `in_place` keeps the KV cache, `retract` drops it."""
        await connection.post("/pause_generation", {"mode": "in_place" if mode == "keep_cache" else "retract"})

    async def resume(self, connection: ServerConnection) -> None:
        """Resume with `/continue_generation`."""
        await connection.post("/continue_generation")

    async def abort(self, connection: ServerConnection) -> None:
        """Abort all requests with `/abort_request`."""
        await connection.post("/abort_request", {"abort_all": True})

    async def load(self, connection: ServerConnection, folder: Path, label: str, mode: UpdateMode) -> None:
        """Load weights with `/update_weights_from_disk`, or an adapter with SGLang's LoRA routes.

        In keep_cache mode, live requests use the cache, so SGLang cannot flush it.

        Raises:
            UpdateRefusedError: the server refuses the weights, or the folder cannot be read.
        """
        if self.settings.adapter_rank is not None and await lora.load(connection, folder):
            self._adapted.add(connection)
            return
        if connection in self._adapted:
            await lora.drop(connection)
            self._adapted.discard(connection)
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": mode == "recompute"}
        await self._update(connection, "/update_weights_from_disk", body)

    def name_of(self, connection: ServerConnection) -> str:
        """Return the name of the adapter that the server has loaded, or "" if it has none."""
        return lora.NAME if connection in self._adapted else ""

    async def set_label(self, connection: ServerConnection, label: str) -> None:
        """Set the weight version with `/update_weight_version`."""
        await connection.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def join_group(self, connection: ServerConnection, group: WeightGroup, first_rank: int) -> None:
        """Join a process group with `/init_weights_update_group`."""
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
        """Receive weights with `/update_weights_from_distributed`, after `/begin_weight_update`, before its end.

        Raises:
            UpdateRefusedError: the server refuses one of the three requests. Older versions do not have the routes of
                begin and end, and do not need them.
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
        """Start an update with `/begin_weight_update`, if the version has it.

        A server refuses it while an update is open that failed or whose sender was killed. That one is ended first.
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
        """Send the locations of tensors with `/update_weights_from_tensor`. A server that cannot open them ends."""
        from areal_sglang.reading import pickled

        parts = [b64encode(pickled(tensors, memories)).decode() for memories in copies]
        body = {"serialized_named_tensors": parts, "flush_cache": False}
        await self._update(connection, "/update_weights_from_tensor", body)

    async def end_reading(self, connection: ServerConnection, label: str) -> None:
        """End the update with `/end_weight_update`. Further tokens have the weight version `label`."""
        await self._mark(connection, "/end_weight_update")
        await self.set_label(connection, label)

    @staticmethod
    async def _mark(connection: ServerConnection, path: str) -> None:
        try:
            await connection.post(path, {})
        except RequestRefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # older versions do not have this route
                raise UpdateRefusedError(str(error)) from None

    async def leave_group(self, connection: ServerConnection, group: WeightGroup) -> None:
        """Leave a process group with `/destroy_weights_update_group`."""
        await connection.post("/destroy_weights_update_group", {"group_name": group.name})

    async def sleep(self, connection: ServerConnection) -> None:
        """Free weights and cache with `/release_memory_occupation`."""
        # The scheduler drops aborted requests only after their last answer. A release before that would end the server.
        await connection.post("/flush_cache", query={"timeout": "30"}, is_json=False)
        await connection.post("/release_memory_occupation", {})

    async def wake_up(self, connection: ServerConnection) -> None:
        """Allocate the memory again with `/resume_memory_occupation`."""
        await connection.post("/resume_memory_occupation", {})

    @staticmethod
    async def _update(connection: ServerConnection, path: str, body: dict[str, Any]) -> None:
        try:
            answer = await connection.post(path, body, timeout_s=3600)
        except RequestRefusedError as error:
            raise UpdateRefusedError(str(error)) from None
        if not answer.get("success"):
            raise UpdateRefusedError(f"{path}: {str(answer.get('message'))[:300]}")


def _finish(reason: Reason | None, stops: Sequence[int]) -> Literal["stop", "length", "abort"] | None:
    """Return why an answer ended. If a token ended it that is not a stop token of the request, it must continue."""
    if reason is None:
        return None
    if reason.type == "stop" and isinstance(reason.matched, int) and reason.matched not in stops:
        return "abort"
    return reason.type


def _slots(info: dict[str, Any]) -> int:
    """Return the number of concurrent requests: the option of the server, or what fits into its memory."""
    states = info.get("internal_states") or [{}]
    slots = info.get("max_running_requests") or states[0].get("effective_max_running_requests_per_dp")
    return int(slots or 256)
