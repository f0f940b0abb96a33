"""Rewards by a trained reward model: loaded in the reward process, or served by `areal serve_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.chat import end_mark, with_begin
from areal_rewards.client import JSONClient
from areal_rewards.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_rewards.config import RewardModelSettings


class ScoringModel:
    """A Hugging Face model with a head of one output, on the CPU or a GPU. It scores a sequence at its last token.

    Args:
        path: folder of the model, or its name on the hub.
        dtype: float32 or bfloat16.
        device: `cpu` or `cuda:N`.

    Attributes:
        tokenizer: tokenizer of the model.
        vocabulary: exclusive upper bound of token ids.

    Raises:
        ConfigError: transformers is not installed.
        ValueError: the model has no head of one output.
    """

    def __init__(self, path: str, dtype: str = "float32", device: str = "cpu") -> None:
        self._torch = load_library("the reward model", "torch", "models")
        transformers = load_library("the reward model", "transformers", "models")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        self._model = load(path, dtype=getattr(self._torch, dtype)).eval()
        heads = [child for _, child in self._model.named_children() if getattr(child, "out_features", 0) == 1]
        if len(heads) != 1:
            raise ValueError(f"the model {path} has no single head of one output, so it is not a reward model")
        self._head = heads[0]
        self._device = device
        self._model.to(device)
        self.vocabulary = int(self._model.get_input_embeddings().num_embeddings)

    def encode(
        self,
        prompt: str,
        completion: str,
        completion_ids: Sequence[int] | None = None,
        prompt_ids: Sequence[int] = (),
        *,
        is_cut: bool = False,
    ) -> list[int]:
        """Return the token ids to score, in the form in which the model was trained on such a conversation.

        Args:
            prompt: text of the prompt, with its template or plain. A begin token is added as this tokenizer adds it.
            completion: text of the answer.
            completion_ids: sampled token ids, end token included, if both models have the same vocabulary. None:
                encode the text, and add the end token unless the answer was cut.
            prompt_ids: token ids of the prompt, if both models have the same vocabulary. Empty: encode the text.
            is_cut: whether the answer has no end token, because it reached its length limit.
        """
        if completion_ids is not None:
            return [*(prompt_ids or with_begin(self.tokenizer, self._ids(prompt))), *completion_ids]
        ids = with_begin(self.tokenizer, self._ids(prompt + completion))
        mark = end_mark(self.tokenizer)
        end = self._ids(mark)[0] if mark and mark in prompt else self.tokenizer.eos_token_id
        return ids if is_cut or end is None or ids[-1:] == [end] else [*ids, end]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return one score for each sequence of token ids.

        If the sequences do not fit into the GPU's memory together, they are scored in two halves.

        Raises:
            torch.OutOfMemoryError: a single sequence does not fit.
        """
        try:
            return self._in_one_pass(sequences)
        except self._torch.OutOfMemoryError:
            if len(sequences) == 1:
                raise
        # After the except clause: there the exception would still hold the memory of the failed pass.
        half = len(sequences) // 2
        return [*self.score(sequences[:half]), *self.score(sequences[half:])]

    def _in_one_pass(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Score sequences in one forward pass, padded on the right."""
        torch = self._torch
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        with torch.no_grad():
            hidden = self._model.base_model(
                input_ids=ids.to(self._device), attention_mask=mask.long().to(self._device), use_cache=False
            )[0]
            last = hidden[torch.arange(len(sequences)), (lengths - 1).to(self._device)]
            return [float(value) for value in self._head(last)[:, 0].float().cpu()]


class RewardModel:
    """Reward that is the score of a reward model, which each reward process loads.

    Args:
        settings: path, number format and device of the model.
    """

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings
        self._model = ScoringModel(str(settings.path), settings.dtype, settings.device)

    def __call__(
        self,
        prompt: str,
        completion: str,
        completion_ids: Sequence[int],
        finish_reason: str = "stop",
        prompt_ids: Sequence[int] = (),
    ) -> float:
        """Return the model's score of the whole conversation, without scaling."""
        sampled = (completion_ids, prompt_ids) if self._settings.same_tokens else (None, ())
        ids = self._model.encode(prompt, completion, *sampled, is_cut=finish_reason == "length")
        (score,) = self._model.score([ids])
        return score


class RemoteRewardModel:
    """Reward that is the score of a reward model served by `areal serve_model`.

    Args:
        settings: address of the server, limits.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        url = f"{settings.address.rstrip('/')}/score"
        self._client = JSONClient("reward model", "remote_reward_model", url, settings)
        self.max_concurrency = settings.max_concurrency

    async def __call__(
        self,
        prompt: str,
        completion: str,
        completion_ids: Sequence[int],
        finish_reason: str = "stop",
        prompt_ids: Sequence[int] = (),
    ) -> float:
        """Return the model's score of the whole conversation, without scaling.

        Raises:
            RuntimeError: all requests to the server failed.
        """
        body: dict[str, Any] = {"prompt": prompt, "completion": completion, "is_cut": finish_reason == "length"}
        if self._settings.same_tokens:
            body |= {"completion_ids": list(completion_ids), "prompt_ids": list(prompt_ids)}
        return await self._client.post(body, self._read)

    async def _read(self, response: Any) -> float:
        return float((await response.json())["score"])
