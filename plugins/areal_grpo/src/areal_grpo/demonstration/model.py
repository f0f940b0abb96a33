"""Model of the demonstration: a Qwen3 of 0.2 M parameters over characters, which areal itself fine-tunes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Resolved
    from areal_grpo.demonstration.settings import AdditionModelSettings, TaughtModelSettings

SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
CHARACTERS = "0123456789+-*/=(){};.,:?! \nabcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}? {% endfor %}"
    "{% for message in messages %}<{{ 'assistant' if message['role'] == 'assistant' else 'user' }}>"
    "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}<tool_call>"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}</tool_call>"
    "{% endfor %}{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(
    folder: Path,
    *,
    hidden: int = 96,
    layers: int = 2,
    heads: int = 4,
    head_size: int = 32,
    seed: int = 0,
    phrases: Sequence[str] = (),
    experts: int = 0,
) -> Path:
    """Write a character model with random weights as a Hugging Face folder.

    The head size is 32 because vLLM's CPU kernels support no smaller one.

    Args:
        folder: folder to create.
        hidden: size of hidden states.
        layers: number of layers.
        heads: number of attention heads.
        head_size: size of an attention head.
        seed: random seed of the weights.
        phrases: texts that become one token each.
        experts: number of experts of each layer, which is then an MoE of Qwen3-MoE's kind; 0: no MoE.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    # Only some releases of transformers have type annotations for these.
    build_tokenizer: Any = PreTrainedTokenizerFast
    build_model: Any = Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM
    kind: Any = Qwen3MoeConfig if experts else Qwen3Config
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = build_tokenizer(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens(list(phrases))
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_size,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **(_moe(experts) if experts else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _moe(experts: int) -> dict[str, Any]:
    """Return the MoE fields of a config. Two experts are as wide as the MLP of a model without experts."""
    return {
        "num_experts": experts,
        "num_experts_per_tok": min(2, experts),
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    }


class AdditionModel:
    """A `ModelSource` that makes random weights and fine-tunes them with the preset `grpo/addition_lessons`; cached.

    Args:
        settings: length of the fine-tuning, seed and number of experts.
    """

    name = "addition_model"

    def __init__(self, settings: AdditionModelSettings) -> None:
        self._steps = settings.steps
        self._seed = settings.seed
        self._experts = settings.experts

    def find(self, cache: Path) -> Path | None:
        """Return the folder of the fine-tuned model if it is complete, else None; see `ModelResolver.find`."""
        model = cache / self.name / self._key() / "model"
        return model if (model / "config.json").is_file() else None

    def prepare(self, cache: Path) -> Path:
        """Return the folder of the fine-tuned model, after training it if necessary; see `ModelSource.prepare`."""
        from areal_core.programs import execute

        folder = self.find(cache)
        if folder is not None:
            return folder
        trained = cache / self.name / self._key()
        initial = trained.with_name(f"{trained.name}-initial")
        if not initial.is_dir():  # renamed to this name when it is complete
            temporary = trained.with_name(f".{initial.name}")
            shutil.rmtree(temporary, ignore_errors=True)
            self._make(temporary).rename(initial)
        shutil.rmtree(trained, ignore_errors=True)
        resolved = self._lessons(initial)
        minutes = self._steps / 800 * (2 if self._experts else 1)
        print(f"fine-tuning the model once, {self._steps} steps: about {minutes:.1f} minutes on two cores", flush=True)  # noqa: T201
        execute(resolved, run_dir=trained)
        return trained / "model"

    def _make(self, folder: Path) -> Path:
        return make_model(folder, seed=self._seed, experts=self._experts)

    def _key(self) -> str:
        """Return a hash of what affects the fine-tuning: not of the cache's path, the caller or the launcher."""
        config = self._lessons("initial").config
        experts = f" {self._experts} experts" if self._experts else ""
        return hashlib.sha256((config.model_dump_json(exclude={"launcher"}) + experts).encode()).hexdigest()[:16]

    def _lessons(self, initial: Path | str) -> Resolved:
        from areal_core.config import resolve

        overrides = [f"model.path={initial}", f"steps={self._steps}", f"seed={self._seed}", *self._dataset_overrides()]
        return resolve("grpo/addition_lessons", ["grpo"], overrides, environment={})

    def _dataset_overrides(self) -> list[str]:
        """Return config overrides that choose the data set."""
        return [f"dataset.rows={64 * self._steps}"]


class TaughtModel(AdditionModel):
    """A `ModelSource` like `AdditionModel`, fine-tuned on the user's lessons.

    Args:
        settings: the lessons, and phrases that become one token each.
    """

    name = "taught_model"

    def __init__(self, settings: TaughtModelSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def _make(self, folder: Path) -> Path:
        return make_model(folder, seed=self._seed, phrases=self._settings.phrases, experts=self._experts)

    def _key(self) -> str:
        """Return a hash of the fine-tuning. A file of lessons counts by its contents, because each run has a copy."""
        lessons = self._settings.lessons.to_tree()
        module, colon, name = lessons.pop("type").rpartition(":")
        if module.endswith(".py"):
            module = Path(module).read_text(encoding="utf-8")
        excluded = {"lessons"} if self._experts else {"lessons", "experts"}
        content = [module, colon, name, lessons, self._settings.model_dump(mode="json", exclude=excluded)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def _dataset_overrides(self) -> list[str]:
        return [f"dataset={json.dumps(self._settings.lessons.to_tree())}"]
