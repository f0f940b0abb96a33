"""Tiny vision-language model for tests and examples."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from areal_vision.config import TinyModelSettings

SPECIAL = ["<pad>", "<eos>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<user>"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz? "
CHAT_TEMPLATE = (
    "{% for message in messages %}<user>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PATCH, HIDDEN = 8, 64
PLACES = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "initializer_range": 0.1,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


class TinyModel:
    """A `ModelSource` of a model with random weights in Qwen3-VL's architecture.

    It has a tokenizer of letters and an image processor.

    Args:
        settings: random seed, and size of the attention heads.
    """

    def __init__(self, settings: TinyModelSettings) -> None:
        self._seed, self._head_size = settings.seed, settings.head_size

    def prepare(self, cache: Path) -> Path:
        """Write the model into the cache if it is not there; see `ModelSource.prepare`."""
        folder = cache / "tiny_vision_model" / f"seed-{self._seed}-heads-of-{self._head_size}"
        if not (folder / "config.json").is_file():
            temporary = folder.with_name(f".{folder.name}")
            shutil.rmtree(temporary, ignore_errors=True)
            make_model(temporary, seed=self._seed, head_size=self._head_size)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        return folder


def make_model(folder: Path, *, seed: int = 0, head_size: int = 16) -> Path:
    """Write a model of 0.2 M parameters as a Hugging Face folder, with tokenizer and image processor.

    Args:
        folder: folder to create.
        seed: random seed of the weights.
        head_size: size of the language model's attention heads, 16 or 32.
    """
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    # Only some releases of transformers have type annotations for these.
    build_processor: Any = Qwen2VLImageProcessorPil
    build_config: Any = Qwen3VLConfig
    build_model: Any = Qwen3VLForConditionalGeneration
    places = {f"{name}_token_id": SPECIAL.index(token) for name, token in PLACES.items()}
    config = build_config(text_config=_text(head_size), vision_config=VISION, tie_word_embeddings=True, **places)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model(config)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    build_processor(
        patch_size=PATCH, merge_size=2, temporal_patch_size=2, min_pixels=16 * PATCH**2, max_pixels=64 * PATCH**2
    ).save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """Return a tokenizer with one token for each letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    return build(
        tokenizer_object=letters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="?",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
    )


def _text(head_size: int) -> dict[str, Any]:
    heads = HIDDEN // head_size
    return {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": HIDDEN,
        "initializer_range": 0.1,  # with the default, the model could not tell image features apart
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_size,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [head_size // 4, head_size // 8, head_size // 8],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
