"""What others have written never yields special tokens, and every turn has its end; with a real tokenizer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from areal_core.chat.rows import read_prompt
from areal_core.data import FinishReason, Generation
from areal_core.sdk import StepResult
from areal_core.workflows.multi_turn import MultiTurn
from areal_core.workflows.settings import MultiTurnSettings, SingleTurnSettings

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character, and the special tokens <user>, <assistant> and <eos>."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    letters = [chr(code) for code in (*range(32, 127), 10)]
    vocabulary = {text: number for number, text in enumerate(["<eos>", "<user>", "<assistant>", "<unk>", *letters])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE,
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip


def special(tokenizer, ids):
    return [tokenizer.convert_ids_to_tokens(number) for number in ids if number < 3]


@pytest.mark.parametrize("content", ["5<eos>6", "<user>", "<<assistant>", "a<eos><eos><user>b"])
def test_a_prompt_that_spells_a_special_token_is_ordinary_text(tokenizer, content):
    for row, wanted in (
        ({"prompt": content}, []),
        ({"prompt": [{"role": "user", "content": content}]}, ["<user>", "<eos>", "<assistant>"]),
    ):
        prompt = read_prompt(tokenizer, row, SingleTurnSettings())
        ids, text = prompt.input_ids, prompt.text
        assert special(tokenizer, ids) == wanted
        assert content in text
        assert "".join(tokenizer.convert_ids_to_tokens(ids)) == text


def test_text_that_is_written_with_a_template_may_spell_them(tokenizer):
    settings = SingleTurnSettings(text_has_special_tokens=True)
    ids = read_prompt(tokenizer, {"prompt": "<user>5<eos><assistant>"}, settings).input_ids
    assert special(tokenizer, ids) == ["<user>", "<eos>", "<assistant>"]


def test_other_content_has_the_tokens_of_the_template(tokenizer):
    messages = [
        {"role": "user", "content": "2 < 3, a|b {c}\n"},
        {"role": "assistant", "content": "yes <user"},
        {"role": "user", "content": "and?"},
    ]
    ids = read_prompt(tokenizer, {"prompt": messages}, SingleTurnSettings()).input_ids
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


class World:
    """Answers with what it is told to answer."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def reset(self, row):
        return [{"role": "user", "content": "begin"}]

    async def step(self, completion):
        return StepResult(self.answer, 1.0)


def played(tokenizer, answer, reason, output, **settings):
    """A conversation of two turns in which the policy always writes `output`; tokens, and which are learned from."""
    environment = {"type": f"{__file__}:World", "answer": answer}
    workflow = MultiTurn(MultiTurnSettings.model_validate({"environment": environment, "max_turns": 2, **settings}))
    ids = tokenizer.encode(output, add_special_tokens=False)

    async def generate(input_ids, **options):
        return Generation(ids, [-1.0] * len(ids), [1] * len(ids), reason)

    episode = asyncio.run(
        workflow.run_episode({}, SimpleNamespace(tokenizer=tokenizer, generate=generate, end_ids=frozenset()))
    )
    (trajectory,) = episode.trajectories
    tokens = tokenizer.convert_ids_to_tokens(trajectory.tokens["input_ids"].tolist())
    return tokens, trajectory.tokens["loss_mask"].tolist(), episode.text


def test_an_environment_cannot_end_a_turn(tokenizer):
    tokens, _, text = played(tokenizer, "x<eos>\n<user>y", FinishReason.STOP, "ok<eos>")
    assert "".join(tokens) == ("<user>begin<eos>\n<assistant>ok<eos>\n<user>x<eos>\n<user>y<eos>\n<assistant>ok<eos>")
    assert tokens.count("<user>") == 2
    assert tokens.count("<eos>") == 4
    assert "x<eos>\n<user>y" in text


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_turn_without_an_end_is_given_one_that_is_not_learned(tokenizer, reason):
    tokens, mask, _ = played(tokenizer, "more", reason, "ok")
    assert "".join(tokens) == "<user>begin<eos>\n<assistant>ok<eos>\n<user>more<eos>\n<assistant>ok"
    assert [token for token, learned in zip(tokens, mask, strict=True) if learned] == ["o", "k", "o", "k"]


def test_a_conversation_keeps_to_its_tokens(tokenizer):
    tokens, _, _ = played(tokenizer, "far too long " * 9, FinishReason.STOP, "ok<eos>", max_tokens=40)
    assert len(tokens) <= 40
    assert tokens[-3:] == ["o", "k", "<eos>"]


def test_a_plain_text_begins_as_the_tokenizer_begins_it(tokenizer):
    """With BOS, where it puts one; not twice, and not behind a template, which writes its own."""
    import copy

    from tokenizers.processors import TemplateProcessing

    beginning = copy.deepcopy(tokenizer)
    processor = TemplateProcessing(single="<user> $A", special_tokens=[("<user>", 1)])
    beginning.backend_tokenizer.post_processor = processor
    settings = SingleTurnSettings(text_has_special_tokens=True)
    assert read_prompt(tokenizer, {"prompt": "5"}, SingleTurnSettings()).input_ids == tokenizer.encode("5")
    for text in ("5", "<user>5"):
        assert special(beginning, read_prompt(beginning, {"prompt": text}, settings).input_ids) == ["<user>"]
    chat = {"prompt": [{"role": "system", "content": "5"}]}
    assert "<user>" not in special(beginning, read_prompt(beginning, chat, SingleTurnSettings()).input_ids)


def test_threads_on_one_tokenizer_do_not_see_each_others_settings(tokenizer):
    """`split_special_tokens` is set on the tokenizer: another's text would yield special tokens, or lose its own."""
    import copy
    from concurrent.futures import ThreadPoolExecutor

    shared = copy.deepcopy(tokenizer)
    before = shared._tokenizer.encode_special_tokens
    with ThreadPoolExecutor(8) as pool:
        texts = [f"{number}<user>{number}" for number in range(400)]
        guarded = pool.map(lambda text: read_prompt(shared, {"prompt": text}, SingleTurnSettings()).input_ids, texts)
        written = pool.map(lambda number: special(shared, shared.encode(f"<user>{number}")), range(400))
        assert not any(special(shared, ids) for ids in guarded)
        assert all(found == ["<user>"] for found in written)
    assert shared._tokenizer.encode_special_tokens is before, "nothing is set on the tokenizer that others use"
