"""A small language model over bytes for conversations, which clients of Tinker train on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_chat_model(folder: Path, *, seed: int = 0, hidden: int = 96, layers: int = 3) -> Path:
    """Write a Llama with random weights and its tokenizer, and return the folder.

    A token is a byte of UTF-8, so that the model can be trained on any text. It has 4,096 positions and no chat
    template: a client renders conversations itself.

    Args:
        folder: where the files go.
        seed: of the weights.
        hidden: size of a hidden state; a multiple of 8.
        layers: number of layers.

    Example:
        >>> folder = make_chat_model(Path("model"))
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, bos_token="<bos>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
