from pathlib import Path

import pytest
import torch

from areal_core.config import resolve, select
from areal_core.config.sections import TrainingSection
from areal_core.data import PackedBatch, Ragged
from areal_core.training.context import BatchContext

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


PARTS = """
class Rows:
    def __init__(self): ...
class Engine:
    def __init__(self): ...
    def setup(self, model, role, settings): self.rate = settings.learning_rate
"""
RUN = """
plugins: [finetuning]
steps: 1
model: {path: tiny}
dataset: parts.py:Rows
train_engine: parts.py:Engine
"""


def pytest_configure():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def build():
    """A function that makes a component as a config does, from its kind, its name and its settings."""

    def build(kind, name, **keys):
        return select(kind, {"type": f"finetuning/{name}", **keys}).build()

    return build


@pytest.fixture(scope="session")
def make_tokenizer():
    """A function from a chat template to a tokenizer: one token a character, and the special ones in angle brackets."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")

    def make(template=TEMPLATE, **keys):
        special = ["<pad>", "<eos>", "<system>", "<user>", "<assistant>", "<tool>"]
        letters = [chr(code) for code in (*range(32, 127), 10)]
        vocabulary = {text: number for number, text in enumerate([*special, "<unk>", *letters])}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        model.decoder = tokenizers.decoders.Fuse()
        keys = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", **keys}
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=model, chat_template=template, additional_special_tokens=special[2:], **keys
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture
def pairs():
    """Four shifted pairs in float64: sequences of other lengths, prompts masked out, one answer without a token."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([5, 9, 3, 7, 6, 4, 8, 2])
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.6
    mask[lengths.cumsum(0) - 1] = False
    mask[-2:] = False
    tokens = {
        "input_ids": torch.randint(9, (total,), generator=generator),
        "loss_mask": mask,
        "reference_logprobs": -2 * torch.rand(total, generator=generator, dtype=torch.float64),
    }
    sequences = {
        "is_chosen": torch.tensor([True, False, True, False, True, False, False, True]),
        "margin": torch.tensor([0.5, 0.0, 0.0, 0.5, 2.0, 2.0, 1.0, 1.0]),
        "group_id": torch.tensor([3, 1, 1, 3, 8, 8, 5, 5]),
    }
    batch = PackedBatch(Ragged(lengths, tokens), sequences)
    return batch.with_units(torch.tensor([0, 1, 1, 0, 2, 2, 3, 3]))


@pytest.fixture
def one_update():
    """A function from an algorithm and a prepared batch to the work of its only update."""

    def one_update(algorithm, batch, **training):
        return [
            work for works in algorithm.updates(batch, BatchContext(TrainingSection(**training), {})) for work in works
        ]

    return one_update


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that resolves a config with these overrides."""
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS)
    Path("run.yaml").write_text(RUN)
    return lambda *overrides: resolve("run.yaml", overrides=overrides, environment={}).config
