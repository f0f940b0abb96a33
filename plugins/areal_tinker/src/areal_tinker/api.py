"""The HTTP interface, as the SDK 0.38 uses it: paths, bodies and answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError
from tinker import types

from areal_core.errors import RunError
from areal_core.servers import SamplingParameters
from areal_tinker.checkpoints import describe, when
from areal_tinker.errors import RequestError
from areal_tinker.journal import Call
from areal_tinker.wire import read_forward_backward, write_samples

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from areal_core.servers import InferenceEngine
    from areal_tinker.checkpoints import Checkpoints
    from areal_tinker.journal import Journal, Result
    from areal_tinker.sampling import Sampling
    from areal_tinker.training import Training

Form = TypeVar("Form", bound=BaseModel)
PREFIX: Final = "/api/v1"
LARGEST_BODY: Final = 256 << 20
"""Bytes of the largest request. The SDK splits a batch into requests of 5 MB."""
INVALID: Final = 422
"""HTTP status of a JSON object that is not a request of the SDK."""
POLL_S: Final = 20.0
"""Seconds for which a request for a result waits; the SDK asks again after 408, and gives up a request after 45 s."""
KEPT_S: Final = 300.0
"""Seconds for which finished samples wait for their client."""
SAMPLE: Final = "sample:"
"""Prefix of the identifiers of sampling requests."""
FLAGS: Final = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
    # The SDK's other transport, httpx, often leaves an answer unread in its socket until a timeout of 45 s: the first
    # step of the cookbook's supervised recipe took 46 s.
    "use_pyqwest_transport": True,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
}
"""Optional parts of the protocol; the SDK asks for them when it connects."""


class Model:
    """The base model, as clients know it.

    Attributes:
        names: names by which clients may ask for it; the first is the one that is listed.
        tokenizer: the folder or the name on the hub from which clients load the tokenizer.
        longest: largest number of tokens in a sequence.
        vocabulary: number of token ids.
        end_ids: tokens that end an answer if the client names none.
        has_adapters: whether the server trains LoRA adapters.
    """

    def __init__(
        self,
        names: list[str],
        tokenizer: str,
        longest: int,
        vocabulary: int,
        end_ids: tuple[int, ...],
        *,
        has_adapters: bool,
    ) -> None:
        self.names = names
        self.tokenizer = tokenizer
        self.longest = longest
        self.vocabulary = vocabulary
        self.end_ids = end_ids
        self.has_adapters = has_adapters

    def check(self, name: str) -> None:
        """Raise `RequestError` if the server does not have this model."""
        if name not in self.names:
            raise RequestError(f"this server has no model '{name}'; it has '{self.names[0]}'", 404)


class API:
    """Handlers of requests.

    Args:
        model: the base model.
        journal: what is remembered.
        training: executes training calls.
        checkpoints: the checkpoints.
        sampling: answers sampling requests.
        engine: what `sampling` generates with.
        key: what clients must send; empty: nothing.
    """

    def __init__(
        self,
        model: Model,
        journal: Journal,
        training: Training,
        checkpoints: Checkpoints,
        sampling: Sampling,
        engine: InferenceEngine,
        key: str,
    ) -> None:
        self._model = model
        self._journal = journal
        self._training = training
        self._checkpoints = checkpoints
        self._sampling = sampling
        self._engine = engine
        self._key = key
        self._samples: dict[str, asyncio.Task[bytes]] = {}

    def application(self) -> web.Application:
        """Return the application with all routes."""
        application = web.Application(middlewares=[self._guard], client_max_size=LARGEST_BODY)
        add = application.router
        for path, handler in {
            "/client/config": self._config,
            "/client/dynamic_config": self._nothing,
            "/create_session": self._create_session,
            "/session_heartbeat": self._heartbeat,
            "/telemetry": self._telemetry,
            "/sessions/{session}/finish": self._finish,
            "/create_model": self._create_model,
            "/get_info": self._get_info,
            "/forward_backward": self._forward_backward,
            "/optim_step": self._call_of(types.OptimStepRequest, "optim_step"),
            "/save_weights": self._call_of(types.SaveWeightsRequest, "save_weights"),
            "/save_weights_for_sampler": self._call_of(types.SaveWeightsForSamplerRequest, "save_weights_for_sampler"),
            "/load_weights": self._load_weights,
            "/create_sampling_session": self._create_sampling_session,
            "/asample": self._sample,
            "/retrieve_future": self._retrieve,
            "/cancel_future": self._cancel,
            "/weights_info": self._weights_info,
        }.items():
            add.add_post(PREFIX + path, handler)
        for path, handler in {
            "/healthz": self._health,
            "/get_server_capabilities": self._capabilities,
            "/samplers/{sampler}": self._sampler,
            "/training_runs": self._training_runs,
            "/training_runs/{run}": self._training_run,
            "/training_runs/{run}/checkpoints": self._checkpoints_of,
            "/checkpoints": self._all_checkpoints,
        }.items():
            add.add_get(PREFIX + path, handler)
        add.add_delete(PREFIX + "/training_runs/{run}/checkpoints/{checkpoint:.+}", self._delete_checkpoint)
        return application

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the key, and turn errors into answers that the SDK shows."""
        try:
            if self._key and not hmac.compare_digest(request.headers.get("X-API-Key", "").encode(), self._key.encode()):
                raise RequestError("the key is wrong: set TINKER_API_KEY to the key of this server", 401)
            return await handler(request)
        except RequestError as error:
            return web.json_response({"detail": error.message}, status=error.status)
        except RunError as error:
            return web.json_response({"detail": error.message}, status=503)
        except web.HTTPRequestEntityTooLarge:
            message = f"a request has more than {LARGEST_BODY >> 20} MiB; send the data in several requests"
            return web.json_response({"detail": message}, status=413)
        except web.HTTPException as error:
            return web.json_response(
                {"detail": f"{request.method} {request.path}: {error.reason}"}, status=error.status
            )

    # Starting.

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _config(self, _: web.Request) -> web.Response:
        return web.json_response(FLAGS)

    async def _nothing(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _telemetry(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "accepted"})

    async def _capabilities(self, _: web.Request) -> web.Response:
        facts = {"max_context_length": self._model.longest, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [{"model_name": self._model.names[0], **facts}]})

    async def _create_session(self, request: web.Request) -> web.Response:
        body = await _object(request)
        identifier = str(uuid.uuid4())
        self._journal.add_session(
            identifier, {name: body.get(name) for name in ("tags", "user_metadata", "sdk_version")}
        )
        return web.json_response({"type": "create_session", "session_id": identifier})

    async def _finish(self, request: web.Request) -> web.Response:
        self._training.drop(self._journal.finish_session(request.match_info["session"]))
        return web.json_response({})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._check_session((await _read(request, types.SessionHeartbeatRequest)).session_id)
        return web.json_response({"type": "session_heartbeat"})

    def _check_session(self, session: str) -> None:
        if not self._journal.has_session(session):
            raise RequestError(f"there is no session {session}, or it has finished; make a new ServiceClient", 410)

    # Training calls.

    async def _create_model(self, request: web.Request) -> web.Response:
        body = await _read(request, types.CreateModelRequest)
        self._check_session(body.session_id)
        self._model.check(body.base_model)
        if not isinstance(body.optimizer_config, types.AdamOptimizerConfig):
            raise RequestError(f"this server has no optimizer '{body.optimizer_config.type}', only AdamW")
        model = f"{body.session_id}:train:{body.model_seq_id}"
        lora = body.lora_config.model_dump() if body.lora_config is not None and self._model.has_adapters else None
        self._add_model(model, body.session_id, lora, body.user_metadata)
        return self._submit(_call(model, 0, "create_model", body))

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = await _read(request, types.LoadWeightsRequest)
        if body.model_id is not None:
            self._journal.model(body.model_id)
            return self._submit(_call(body.model_id, _number(body.seq_id), "load_weights", body))
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError("load_weights needs model_id, or session_id and model_seq_id")
        self._check_session(body.session_id)
        model = f"{body.session_id}:train:{body.model_seq_id}"
        saved = self._checkpoints.facts(body.path)["facts"]["model"]
        self._add_model(model, body.session_id, saved["lora_config"], body.user_metadata)
        return self._submit(_call(model, 0, "load_weights", body))

    def _add_model(self, model: str, session: str, lora: Any, metadata: Any) -> None:
        facts = {
            "base_model": self._model.names[0],
            "lora_config": lora,
            "user_metadata": metadata,
            "made": time.time(),
        }
        self._journal.add_model(model, session, facts)

    async def _forward_backward(self, request: web.Request) -> web.Response:
        if "protobuf" not in request.content_type:
            raise RequestError(
                f"forward_backward is sent as application/x-protobuf, not as {request.content_type}", 415
            )
        content = await request.read()
        message = read_forward_backward(content)
        self._journal.model(message.model_id)
        return self._submit(Call(message.model_id, _number(message.seq_id), "forward_backward", content))

    def _call_of(self, form: type[Any], kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def submit(request: web.Request) -> web.Response:
            try:
                body = await _read(request, form)
            except RequestError as error:
                if error.status == INVALID and (refused := _refused(await _object(request), error)):
                    self._journal.model(refused.model)
                    return self._submit(refused)
                raise
            self._journal.model(body.model_id)
            return self._submit(_call(body.model_id, _number(body.seq_id), kind, body))

        return submit

    def _submit(self, call: Call) -> web.Response:
        self._training.submit(call)
        return web.json_response({"request_id": f"{call.model}:{call.number}", "model_id": call.model})

    async def _retrieve(self, request: web.Request) -> web.Response:
        identifier = (await _read(request, types.FutureRetrieveRequest)).request_id
        if identifier.startswith(SAMPLE):
            return await self._retrieve_sample(identifier)
        model, _, number = identifier.rpartition(":")
        if not number.isdigit():
            raise RequestError(f"there is no request {identifier}", 404)
        result = await self._training.result(model, int(number), POLL_S)
        return _try_again() if result is None else _response(result)

    # Samples.

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        body = await _read(request, types.CreateSamplingSessionRequest)
        self._check_session(body.session_id)
        if body.model_path is not None:
            self._checkpoints.published(body.model_path)
        elif body.base_model is not None:
            self._model.check(body.base_model)
        else:
            raise RequestError("a sampling session needs model_path or base_model")
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self._journal.add_sampler(sampler, body.model_path)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _sampler(self, request: web.Request) -> web.Response:
        sampler = request.match_info["sampler"]
        path = self._journal.sampler(sampler)
        return web.json_response({"sampler_id": sampler, "base_model": self._model.names[0], "model_path": path})

    async def _sample(self, request: web.Request) -> web.Response:
        body = await _read(request, types.SampleRequest)
        if body.sampling_session_id is not None:
            path = self._journal.sampler(body.sampling_session_id)
        else:
            path = body.model_path
            if path is None:
                self._model.check(str(body.base_model))
        weights = self._checkpoints.base if path is None else self._checkpoints.published(path)
        prompt, sampling = self._prompt(body), self._sampling_of(body)
        given = body.sampling_params.seed
        first = secrets.randbits(62) if given is None else given
        seeds = [_seed(first, number) for number in range(body.num_samples)]

        async def sample() -> bytes:
            generations = await self._sampling.generate(weights, prompt, sampling, seeds)
            return write_samples(generations, len(prompt), has_prompt_logprobs=bool(body.prompt_logprobs))

        identifier = SAMPLE + uuid.uuid4().hex
        task = self._samples[identifier] = asyncio.ensure_future(sample())
        task.add_done_callback(
            lambda _: asyncio.get_running_loop().call_later(KEPT_S, self._samples.pop, identifier, None)
        )
        return web.json_response(
            {"request_id": identifier, "sample_sequence_ids": [f"{identifier}.{n}" for n in range(body.num_samples)]}
        )

    def _prompt(self, body: types.SampleRequest) -> list[int]:
        unserved = {
            "topk_prompt_logprobs": body.topk_prompt_logprobs,
            "target_prompt_logprobs": body.target_prompt_logprobs,
            "prompt_alt_tokens_k": body.prompt_alt_tokens_k,
            "prompt_logprobs_last_n": body.prompt_logprobs_last_n,
        }
        if asked := [name for name, value in unserved.items() if value]:
            raise RequestError(f"this server does not serve {', '.join(asked)}")
        if any(not isinstance(chunk, types.EncodedTextChunk) for chunk in body.prompt.chunks):
            raise RequestError("prompt has a chunk that is no text; this server takes text alone")
        prompt = body.prompt.to_ints()
        if not prompt:
            raise RequestError("prompt has no tokens")
        if any(not 0 <= token < self._model.vocabulary for token in prompt):
            raise RequestError(f"prompt has a token outside of the model's vocabulary of {self._model.vocabulary}")
        if len(prompt) >= self._model.longest:
            raise RequestError(f"prompt has {len(prompt)} tokens, and the model's limit is {self._model.longest}")
        if not 1 <= body.num_samples <= 4096:
            raise RequestError(f"num_samples is {body.num_samples}; it must be from 1 to 4096")
        return prompt

    def _sampling_of(self, body: types.SampleRequest) -> SamplingParameters:
        """Return the sampling settings of a request.

        Raises:
            RequestError: the engine does not serve one of them.
        """
        asked = body.sampling_params
        texts: tuple[str, ...] = ()
        ids = self._model.end_ids
        if asked.stop is not None:
            stops = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop)
            texts = tuple(stop for stop in stops if isinstance(stop, str))
            ids = tuple(stop for stop in stops if isinstance(stop, int))
        if any(not 0 <= stop < self._model.vocabulary for stop in ids) or "" in texts:
            raise RequestError("stop has a token that the model does not have, or an empty text")
        if asked.top_k < -1 or asked.temperature < 0:
            raise RequestError(
                f"temperature is {asked.temperature:g} and top_k {asked.top_k}: at least 0, and -1 or more"
            )
        if asked.max_tokens is not None and asked.max_tokens < 1:
            raise RequestError(f"max_tokens is {asked.max_tokens}; it must be at least 1")
        room = self._model.longest - body.prompt.length
        is_greedy = asked.temperature == 0
        settings: Mapping[str, Any] = {
            "temperature": 1.0 if is_greedy else asked.temperature,
            "greedy": is_greedy,
            "max_new_tokens": room if asked.max_tokens is None else min(room, asked.max_tokens),
            "stop_token_ids": ids,
            "stop": texts,
            "top_k": max(asked.top_k, 0),
            "top_p": asked.top_p,
            "top_logprobs": body.topk_sample_logprobs,
            "prompt_logprobs": bool(body.prompt_logprobs),
        }
        sampling = SamplingParameters(**settings)
        try:
            sampling.check()
        except ValueError as error:
            raise RequestError(str(error)) from None
        if unserved := sampling.unsupported(self._engine.capabilities.sampling):
            raise RequestError(f"the inference engine of this server does not serve {', '.join(unserved)}")
        return sampling

    async def _retrieve_sample(self, identifier: str) -> web.Response:
        task = self._samples.get(identifier)
        if task is None:  # 410: the SDK sends the request again
            raise RequestError(f"the sampling request {identifier} was lost with a restart of the server", 410)
        await asyncio.wait({task}, timeout=POLL_S)
        if not task.done():
            return _try_again()
        if task.cancelled():
            raise RequestError(f"the sampling request {identifier} was cancelled", 404)
        error = task.exception()
        if error is None:
            return web.Response(body=task.result(), content_type="application/x-protobuf")
        if not isinstance(error, (ValueError, RunError, RequestError, OSError)):
            raise error
        category = "server" if isinstance(error, (RunError, OSError)) else "user"
        return web.json_response({"error": str(error), "category": category})

    async def _cancel(self, request: web.Request) -> web.Response:
        task = self._samples.get(str((await _object(request)).get("request_id")))
        if task is not None:
            task.cancel()
        return web.json_response({})

    # Lists.

    async def _get_info(self, request: web.Request) -> web.Response:
        model = (await _read(request, types.GetInfoRequest)).model_id
        facts = self._journal.model(model)
        name, lora = facts["base_model"], facts["lora_config"]
        return web.json_response(
            {
                "type": "get_info",
                "model_id": model,
                "model_data": {"model_name": name, "tokenizer_id": self._model.tokenizer},
                "model_name": name,
                "is_lora": lora is not None,
                "lora_rank": None if lora is None else lora["rank"],
            }
        )

    async def _weights_info(self, request: web.Request) -> web.Response:
        model = self._checkpoints.facts(str((await _object(request)).get("tinker_path")))["facts"]["model"]
        lora = model["lora_config"]
        facts = {"is_lora": lora is not None, "lora_rank": None if lora is None else lora["rank"]}
        trained = {f"train_{part}": lora[f"train_{part}"] for part in ("attn", "mlp", "unembed")} if lora else {}
        return web.json_response({"base_model": model["base_model"], **facts, **trained})

    async def _training_runs(self, request: web.Request) -> web.Response:
        runs = [self._describe(model, facts) for model, facts in self._journal.models().items()]
        listed, cursor = _page(request, runs[::-1])
        return web.json_response({"training_runs": listed, "cursor": cursor})

    async def _training_run(self, request: web.Request) -> web.Response:
        model = request.match_info["run"]
        return web.json_response(self._describe(model, self._journal.model(model)))

    def _describe(self, model: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        lora = facts["lora_config"]
        found = [describe(each) for each in self._journal.checkpoints(model)]
        last = {
            kind: next((each for each in found[::-1] if each["checkpoint_type"] == kind), None)
            for kind in ("training", "sampler")
        }
        return {
            "training_run_id": model,
            "base_model": facts["base_model"],
            "model_owner": "",
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora["rank"],
            "last_request_time": when(facts["last_request"]),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": facts["user_metadata"],
        }

    async def _checkpoints_of(self, request: web.Request) -> web.Response:
        model = request.match_info["run"]
        self._journal.model(model)
        return web.json_response({"checkpoints": [describe(each) for each in self._journal.checkpoints(model)]})

    async def _all_checkpoints(self, request: web.Request) -> web.Response:
        listed, cursor = _page(request, [describe(each) for each in self._journal.checkpoints()])
        return web.json_response({"checkpoints": listed, "cursor": cursor})

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        self._checkpoints.delete(f"tinker://{request.match_info['run']}/{request.match_info['checkpoint']}")
        return web.json_response({})


async def _object(request: web.Request) -> dict[str, Any]:
    """Return the body as a JSON object. Raises `RequestError`."""
    content = await request.read()
    try:
        body = json.loads(content or b"{}")
    except ValueError:
        raise RequestError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


async def _read(request: web.Request, form: type[Form]) -> Form:
    """Return the body as a request of the SDK. Raises `RequestError`."""
    try:
        return form.model_validate(await _object(request))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise RequestError(f"the request is not a {form.__name__} of the SDK: {faults}", INVALID) from None


def _refused(body: Mapping[str, Any], error: RequestError) -> Call | None:
    """Return a call that fails, for a request that is invalid but has its number: the client counts it as a call."""
    model, number = body.get("model_id"), body.get("seq_id")
    if not isinstance(model, str) or not isinstance(number, int) or number < 1:
        return None
    return Call(model, number, "refused", json.dumps({"error": error.message}).encode())


def _seed(first: int, number: int) -> int:
    """Return the seed of one sample of a request: requests with other seeds share none."""
    return int.from_bytes(hashlib.blake2b(f"{first}.{number}".encode(), digest_size=7).digest())


def _call(model: str, number: int, kind: str, body: BaseModel) -> Call:
    return Call(model, number, kind, body.model_dump_json().encode())


def _number(seq_id: int | None) -> int:
    if seq_id is None or seq_id < 1:
        raise RequestError(f"seq_id is {seq_id}; it counts the calls of a model from 1")
    return seq_id


def _response(result: Result) -> web.Response:
    return web.Response(body=result.content, content_type=result.form)


def _try_again() -> web.Response:
    return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)


def _page(request: web.Request, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the rows that a request with `limit` and `offset` asks for, and the cursor of the response."""
    try:
        limit, offset = int(request.query.get("limit", "20")), int(request.query.get("offset", "0"))
    except ValueError:
        raise RequestError("limit and offset must be integers") from None
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}
