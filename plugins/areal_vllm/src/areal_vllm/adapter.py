"""Adapter for vLLM's HTTP API: `vllm/entrypoints/scale_out/token_in_token_out` and `vllm/entrypoints/rl/online`."""

from __future__ import annotations

import asyncio
import os
import sys
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import msgspec
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
    ServerLostError,
    ServerRefusedError,
    Span,
    UpdateRefusedError,
    is_resumable,
    option_arguments,
    raise_refusal,
)
from areal_vllm import images, lora
from areal_vllm.config import VLLMConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from areal_core.data import Values
    from areal_core.engines import ModelReference, TensorDescription
    from areal_core.servers import PartialGeneration, ServerConnection, UpdateMode, WeightGroup

KNOWN = SpecifierSet(">=0.32,<0.33")
"""Versions of vLLM with which this adapter was tested."""

WORKER = Path(__file__).parent / "worker"
"""Folder that is added to the server's import path. It has one module, which needs only vLLM."""


class _TopLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprob(msgspec.Struct):
    logprob: float
    top_logprobs: list[_TopLogprob] = []

    def likeliest(self, count: int) -> list[_TopLogprob]:
        """Return the likeliest tokens, of a request for one more.

        vLLM lists the sampled token first and cuts the list off behind it. So the last one may be missing if the
        sampled token is not among them, and one more has to be requested.
        """
        if len(self.top_logprobs) != count + 1:
            raise ServerLostError(f"sent {len(self.top_logprobs)} likeliest tokens where {count + 1} were asked for")
        return sorted(self.top_logprobs, key=lambda entry: -entry.logprob)[:count]


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    weight_versions: list[Span] | None
    finish_reason: Literal["stop", "length", "abort"] | None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    routed_experts: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None

    def logprobs_of_prompt(self) -> list[float]:
        """Return the prompt's log-probabilities; empty if there are none. The entry of the first token is null."""
        return [entry.logprob for entries in self.prompt_logprobs or () for entry in (entries or {}).values()]


_GENERATE = "/inference/v1/generate"
_LONGEST_ANSWER_S = 3600.0
"""Timeout of an answer that is not streamed. The fleet's health checks detect a dead server earlier."""
_EVENTS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Event)


class VLLMAdapter(HTTPAdapter):
    """Translates requests and weight updates for vLLM servers. See `ServerAdapter` for the methods.

    Args:
        settings: settings of the fleet.

    Attributes:
        moe: the model's MoE layers if servers report routed experts, else None.
    """

    Config = VLLMConfig
    settings: VLLMConfig
    name = "vLLM"
    package = "vllm"
    group_store_prefixes: Mapping[str, Sequence[str]] = MappingProxyType({"nccl": ("{group}",), "gloo": ("{group}",)})

    def __init__(self, settings: VLLMConfig) -> None:
        super().__init__(settings)
        self.moe: MoEShape | None = None
        self._adapted: WeakSet[ServerConnection] = WeakSet()  # connections to servers whose weights are an adapter's
        self._prompts = ImagePrompts("")
        self._encoder: images.PatchEncoder | None = None

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
        if self._prompts.sees:
            self._encoder = images.PatchEncoder(model)

    def capabilities(self) -> InferenceCapabilities:
        """See `ServerAdapter.capabilities`. Log-probabilities are those after top_p, top_k and min_p."""
        sampling = {"top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
        sampling |= {"top_logprobs", "prompt_logprobs"}
        return InferenceCapabilities(
            update_modes=frozenset({"keep_cache", "recompute"}),
            sampling=frozenset(sampling | ({"stop"} if self.settings.detokenize else set())),
            transports=self.settings.transports,
            images=True,
        )

    def command(self, model: ModelReference, host: str, port: int, scratch: Path) -> ServerCommand:
        """Return the command of vLLM's API server with the options that a run needs."""
        settings = self.settings
        options: dict[str, OptionValue] = {
            "model": model.path,
            "host": host,
            "port": port,
            "dtype": model.dtype,
            "tensor_parallel_size": settings.tensor_parallel,
            "data_parallel_size": settings.data_parallel,
            "enable_scale_out": True,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "stream_interval": settings.stream_interval,
            "worker_extension_cls": "areal_weights.WeightExtension",
            "weight_transfer_config": '{"backend": "areal"}',
            "skip_tokenizer_init": not settings.detokenize,
            "trust_remote_code": model.trust_remote_code,
            "enable_sleep_mode": settings.sleep_mode,
            "enable_return_routed_experts": settings.routed_experts,
        }
        if ImagePrompts(model.path).sees:  # vLLM's image processor needs a tokenizer
            options |= {**images.OPTIONS, "skip_tokenizer_init": False}
        if settings.adapter_rank is not None:
            options |= lora.options_for(settings.adapter_rank)
        program = settings.program or [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        path = os.pathsep.join(filter(None, (str(WORKER), os.environ.get("PYTHONPATH"))))
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # enables the routes of weight updates
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **({} if settings.adapter_rank is None else {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}),
            "PYTHONPATH": path,
            **settings.environment,
        }
        if settings.key:
            environment["VLLM_API_KEY"] = settings.key  # every user can read command lines
        return ServerCommand([*program, *option_arguments(options | settings.options)], environment)

    async def identify(self, connection: ServerConnection) -> ServerIdentity:
        """Identify the server by `/version`, `/v1/models` and `/server_info`.

        Raises:
            ServerRefusedError: it is not a vLLM server of a tested version, or was started without needed options.
        """
        try:
            version = Version(str((await connection.get("/version"))["version"]))
            model = (await connection.get("/v1/models"))["data"][0]
        except (RequestRefusedError, InvalidVersion, LookupError, TypeError) as error:
            raise ServerRefusedError(f"answers, but not as a vLLM server does: {error!r:.200}") from None
        if version not in KNOWN and not self.settings.allow_unknown_version:
            raise ServerRefusedError(
                f"is vLLM {version}; areal-vllm was tested with {KNOWN}: install one of these, or set "
                "allow_unknown_version"
            )
        try:
            config = (await connection.get("/server_info?config_format=json"))["vllm_config"]
            logprobs = config["model_config"]["logprobs_mode"]
            parallel = config["parallel_config"]
            ranks = int(parallel["tensor_parallel_size"]) * int(parallel["data_parallel_size"])
            dtype = str(config["model_config"]["dtype"]).removeprefix("torch.")
            slots = int(config["scheduler_config"]["max_num_seqs"])
            context = int(model["max_model_len"])
        except RequestRefusedError:
            raise ServerRefusedError(
                "offers no weight updates: start it with VLLM_SERVER_DEV_MODE=1, or with areal serve"
            ) from None
        except (LookupError, TypeError, ValueError) as error:
            raise ServerRefusedError(f"has an unknown form of /server_info: {error!r:.200}") from None
        if logprobs != "processed_logprobs":
            raise ServerRefusedError(
                "reports log-probabilities before temperature: start it with --logprobs-mode processed_logprobs"
            )
        reports_experts = (config.get("aux_output_config") or {}).get("enable_return_routed_experts")
        if self.settings.routed_experts and not reports_experts:
            raise ServerRefusedError(
                "does not report routed experts, but routed_experts is set: start it with "
                "--enable-return-routed-experts, or with areal serve"
            )
        if self._prompts.sees:
            images.check_settings(config)
        if rank := self.settings.adapter_rank:
            lora.check_rank(config, rank)
        # A request that started with a cached prefix with an image does not have the patches. vLLM ended when it
        # recomputed the keys of such a request after an update. So requests of a VLM end before an update.
        reports_spans = not rank and not self._prompts.sees
        return ServerIdentity(str(version), str(model["root"]), context, slots, dtype, ranks, reports_spans)

    async def generate(self, connection: ServerConnection, partial: PartialGeneration) -> AsyncIterator[Chunk]:
        """Stream an answer of `/inference/v1/generate` to token ids.

        vLLM streams no `prompt_logprobs`. An answer with them comes as a whole when it is complete.

        Raises:
            RequestRefusedError, ServerLostError: the stream contains an error.
            ValueError: images do not fit the prompt, or the answer cannot continue after an image token.
        """
        prompt = self._prompts.place(partial.input_ids, len(partial.images))
        resumable = is_resumable(partial.sampling)
        image_fields: dict[str, Any] = {}
        if partial.images and self._encoder is not None:
            image_fields["features"] = await asyncio.to_thread(self._encoder.features, partial.images, prompt.places)
        body = {
            "request_id": partial.name,
            "token_ids": prompt.input_ids,
            **image_fields,
            "sampling_params": self._sampling(partial),
            "stream": not partial.sampling.prompt_logprobs,
            "cache_salt": partial.cache_salt,
            **({"model": partial.adapter} if partial.adapter else {}),
        }
        seen, top_count = 0, partial.sampling.top_logprobs
        if body["stream"]:
            events = connection.post_for_events(_GENERATE, body, _EVENTS)
        else:
            events = _whole_answer(connection, body)
        async for event in events:
            if event.error is not None:
                raise_refusal(event.error)
            for choice in event.choices:
                spans, reason = choice.weight_versions, choice.finish_reason
                if self.settings.adapter_rank is not None:
                    spans = None  # they are those of the base model, which never change
                output_ids, stop_tokens = choice.token_ids or [], partial.sampling.stop_token_ids
                seen += len(output_ids)
                if reason == "stop" and self._prompts.is_written(output_ids, stop_tokens, is_resumable=resumable):
                    reason = "abort"  # the next partial generation has padding in place of the image token
                entries = (choice.logprobs.content if choice.logprobs else None) or []
                tops = [top for entry in entries for top in entry.likeliest(top_count)] if top_count else []
                yield Chunk(
                    output_ids,
                    [entry.logprob for entry in entries],
                    reason,
                    None if spans is None else [astuple(span) for span in spans],
                    self._columns(choice.routed_experts, len(partial.input_ids) + seen),
                    [top.token_id for top in tops],
                    [top.logprob for top in tops],
                    event.logprobs_of_prompt(),
                )

    def _columns(self, encoded: str | None, tokens: int) -> Mapping[str, Values]:
        """Decode routed experts, a numpy file in base64. An aborted answer has none."""
        if self.moe is None or encoded is None:
            return {}
        return routed_experts_field(np.load(BytesIO(b64decode(encoded)), allow_pickle=False), self.moe, tokens)

    def _sampling(self, partial: PartialGeneration) -> dict[str, Any]:
        sampling = partial.sampling
        if sampling.greedy and sampling.temperature != 1:
            raise ValueError("vLLM reports log-probabilities of greedy requests only at temperature 1")
        return {
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "stop_token_ids": self._prompts.stops(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            # Only the request's stop tokens end it. The run's settings already include the model's own.
            "ignore_eos": True,
            "seed": partial.seed & (2**63 - 1),
            "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,  # see `_Logprob.likeliest`
            "detokenize": bool(sampling.stop),
            # 0 adds no other tokens. vLLM computes such a prompt without its prefix cache, and applies no temperature.
            **({"prompt_logprobs": 0} if sampling.prompt_logprobs else {}),
        }

    async def stop(self, connection: ServerConnection, mode: UpdateMode) -> None:
        """Pause with `/pause`, which keeps requests and the KV cache. `load` decides whether the cache is dropped."""
        await connection.post("/pause", query={"mode": "keep", "clear_cache": "false"})

    async def resume(self, connection: ServerConnection) -> None:
        """Resume with `/resume`."""
        await connection.post("/resume")

    async def abort(self, connection: ServerConnection) -> None:
        """Abort all requests with `/abort_requests`."""
        await connection.post("/abort_requests", {})

    async def load(self, connection: ServerConnection, folder: Path, label: str, mode: UpdateMode) -> None:
        """Load weights with the engine of `worker/areal_weights.py`, or an adapter with vLLM's LoRA routes.

        Raises:
            UpdateRefusedError: the server refuses the weights, or the folder cannot be read.
        """
        if self.settings.adapter_rank is not None and await lora.load(connection, folder):
            self._adapted.add(connection)
            return
        if connection in self._adapted:
            await lora.drop(connection)
            self._adapted.discard(connection)
        await self._update(connection, {"folder": str(folder)}, label, mode)

    def name_of(self, connection: ServerConnection) -> str:
        """Return the name of the adapter that the server has loaded, or "" if it has none."""
        return lora.NAME if connection in self._adapted else ""

    async def set_label(self, connection: ServerConnection, label: str) -> None:
        """Set the weight version with `/update_weight_version`."""
        await connection.post("/update_weight_version", {"new_version": label})

    async def join_group(self, connection: ServerConnection, group: WeightGroup, first_rank: int) -> None:
        """Join a process group with `/init_weight_transfer_engine`, instead of any earlier group."""
        info = {
            "name": group.name,
            "address": group.address,
            "port": group.port,
            "first_rank": first_rank,
            "world_size": group.world_size,
            "backend": group.backend,
        }
        await connection.post("/init_weight_transfer_engine", {"init_info": info})

    async def receive(
        self,
        connection: ServerConnection,
        group: WeightGroup,
        tensors: Sequence[TensorDescription],
        label: str,
        mode: UpdateMode,
    ) -> None:
        """Receive weights with the same routes. The engine receives each tensor from rank 0 of the group.

        Raises:
            UpdateRefusedError: the server refuses the weights.
        """
        descriptions = [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in tensors]
        await self._update(connection, {"group": group.name, "tensors": descriptions}, label, mode)

    async def leave_group(self, connection: ServerConnection, group: WeightGroup) -> None:
        """Leave the process group with `/shutdown_weight_transfer_engine`."""
        await connection.post("/shutdown_weight_transfer_engine")

    async def sleep(self, connection: ServerConnection) -> None:
        """Free weights and cache with `/sleep`, level 2."""
        await connection.post("/reset_prefix_cache")
        await connection.post("/sleep", query={"level": "2"})

    async def wake_up(self, connection: ServerConnection) -> None:
        """Allocate the memory again with `/wake_up`."""
        await connection.post("/wake_up")

    async def _update(self, connection: ServerConnection, info: dict[str, Any], label: str, mode: UpdateMode) -> None:
        try:
            await connection.post("/start_weight_update", timeout_s=3600)
            await connection.post("/update_weights", {"update_info": info}, timeout_s=3600)
            await connection.post("/finish_weight_update", {"weight_version": label}, timeout_s=3600)
            if self._prompts.sees:  # cached embeddings of images are those of the old vision tower
                await connection.post("/reset_encoder_cache")
            # vLLM recomputes the KV cache of a live request only if it puts the request back into the queue.
            # In keep_cache, new requests have another cache salt, so they never use an old block.
            if mode == "recompute":
                answer = await connection.post("/reset_prefix_cache", query={"reset_running_requests": "true"})
                if not answer["success"]:
                    raise UpdateRefusedError("the server could not reset its prefix cache")
        except RequestRefusedError as error:
            raise UpdateRefusedError(str(error)) from None


async def _whole_answer(connection: ServerConnection, body: dict[str, Any]) -> AsyncIterator[_Event]:
    """Yield the answer to a request without `stream`, which has the form of a single event.

    Raises:
        RequestRefusedError, ServerLostError: see `ServerConnection.post`. Or the answer has another form.
    """
    answer = await connection.post(_GENERATE, body, timeout_s=_LONGEST_ANSWER_S)
    try:
        yield msgspec.convert(answer, _Event)
    except msgspec.ValidationError as error:
        raise ServerLostError(f"{_GENERATE} was answered in an unknown form: {error}") from None
