"""The simplest correct inference engine: each token is a forward pass of the whole sequence.

It is far too slow for a run. It shows what the suites expect. The suites' tests derive engines with one fault from it.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import FinishReason, Generation
from areal_core.errors import RunError
from areal_core.servers import InferenceCapabilities, SamplingParameters
from areal_testing.conformance.served import Served

if TYPE_CHECKING:
    from areal_core.engines import ModelReference, WeightUpdate
    from areal_core.servers import GenerationRequest

_OPTIONAL = frozenset({"top_logprobs", "prompt_logprobs"})
_SUPPORTED = {"temperature", "max_new_tokens", "min_new_tokens", "stop_token_ids", "greedy", *_OPTIONAL}


class NaiveEngine(Served):
    """An `InferenceEngine` inside this process, without a cache of keys and values.

    Args:
        slots: number of requests that the engine generates concurrently.
    """

    capabilities = InferenceCapabilities(frozenset({"recompute"}), _OPTIONAL, deterministic=True)

    def __init__(self, slots: int = 8) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._model: Any = None
        self._running: set[asyncio.Future[Generation]] = set()
        self.version = 0

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        from transformers import AutoModelForCausalLM

        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise RunError(f"the model {model.path} cannot be loaded: {error}") from error
        self._model = loaded.eval()

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        if self._model is None:
            raise RunError("the engine is not running")
        self._check(request)
        task = asyncio.ensure_future(self._generate(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await self._await(task)

    async def _await(self, task: asyncio.Future[Generation]) -> Generation:
        """Return the task's result. If the caller is cancelled, the task is cancelled too."""
        return await task

    def _check(self, request: GenerationRequest) -> None:
        longest = self._model.config.max_position_embeddings
        if not request.input_ids:
            raise ValueError("the prompt is empty")
        if len(request.input_ids) + request.sampling.max_new_tokens > longest:
            raise ValueError(f"prompt and output exceed the model's {longest} positions")
        for setting in fields(SamplingParameters):
            if setting.name not in _SUPPORTED and getattr(request.sampling, setting.name) != setting.default:
                raise ValueError(f"this engine does not support {setting.name}")

    async def _generate(self, request: GenerationRequest) -> Generation:
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        tops: list[tuple[list[float], list[int]]] = []
        finish_reason = FinishReason.LENGTH
        request.on_slot_change(False)
        async with self._slots:
            request.on_slot_change(True)
            generator = self._generator(request)
            of_prompt = self._prompt_logprobs(request) if request.sampling.prompt_logprobs else None
            while len(ids) < request.sampling.max_new_tokens and finish_reason is FinishReason.LENGTH:
                await asyncio.sleep(0)
                token, logprob, top = self._draw(request, ids, generator)
                if self._ends(request, token):
                    finish_reason = FinishReason.STOP
                ids.append(token)
                logprobs.append(logprob)
                versions.append(self.version)
                tops.append(top)
        top_logprobs, top_ids = zip(*tops, strict=True)
        return Generation(
            ids,
            logprobs,
            versions,
            finish_reason,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt_logprobs=of_prompt,
        )

    @torch.no_grad()
    def _prompt_logprobs(self, request: GenerationRequest) -> list[float]:
        ids = torch.tensor(request.input_ids)
        table = torch.log_softmax(self._model(input_ids=ids[None]).logits[0].double(), -1)
        return table[:-1].gather(1, ids[1:, None])[:, 0].tolist()

    def _generator(self, request: GenerationRequest) -> torch.Generator:
        return torch.Generator().manual_seed(request.seed)

    def _ends(self, request: GenerationRequest, token: int) -> bool:
        return token in request.sampling.stop_token_ids

    @torch.no_grad()
    def _draw(
        self, request: GenerationRequest, produced: list[int], generator: torch.Generator
    ) -> tuple[int, float, tuple[list[float], list[int]]]:
        """Return a token, its log-probability, and log-probabilities and ids of the likeliest tokens."""
        sampling = request.sampling
        logits = self._model(input_ids=torch.tensor([[*request.input_ids, *produced]]), logits_to_keep=1).logits[0, -1]
        logprobs = torch.log_softmax(logits.double() / sampling.temperature, -1)
        drawable = logprobs.clone()
        if len(produced) < sampling.min_new_tokens and sampling.stop_token_ids:
            drawable[list(sampling.stop_token_ids)] = -torch.inf
        if sampling.greedy:
            token = int(drawable.argmax())
        else:
            token = int(torch.multinomial(drawable.exp(), 1, generator=generator))
        top = logprobs.topk(sampling.top_logprobs)
        return token, float(self._reported(logits, logprobs)[token]), (top.values.tolist(), top.indices.tolist())

    def _reported(self, logits: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return [vocabulary] log-probabilities. The engine reports the value of the drawn token."""
        return logprobs

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`. Running requests draw their next token from the new weights."""
        assert update.path is not None
        tensors = self._read(Path(update.path) / "model.safetensors")
        self._copy_weights(tensors)
        self.version = update.version

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        """Return the file's tensors. Their names and shapes are those of the model.

        Raises:
            RunError: the file is incomplete, or belongs to another model.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        expected = {name: value.shape for name, value in self._model.named_parameters()}
        if {name: value.shape for name, value in tensors.items()} != expected:
            raise RunError(f"{path} does not fit the model")
        return tensors

    @torch.no_grad()
    def _copy_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(tensors[name])

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        for task in self._running:
            task.cancel()
        self._model = None
