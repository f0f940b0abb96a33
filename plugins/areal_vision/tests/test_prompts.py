"""What a row shows to the model: its conversation, with images in their places."""

import asyncio
import base64

import pytest

from areal_core.data import FinishReason, Generation
from areal_core.sdk import RewardScore, RowError, WorkflowContext
from areal_vision.config import VisionTurnSettings
from areal_vision.prompts import read_shown
from areal_vision.workflow import VisionTurn

pytest.importorskip("PIL")

TEMPLATE = (
    "{% if tools %}[tools {% for tool in tools %}{{ tool.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% if m.name is defined %}({{ m.name }}){% endif %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is not defined or enable_thinking %}<think>"
    "{% endif %}{% endif %}"
)
IMAGE = {"type": "image"}
TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}


def text(words):
    return {"type": "text", "text": words}


def user(*content):
    return [{"role": "user", "content": list(content)}]


def url(file):
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = TEMPLATE
    loaded.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "[", "]", "<think>", "(", ")"]})
    return loaded


A, B = b"a", b"b"
FORMS = {
    "text": ({"prompt": "red?", "image": A}, [IMAGE, text("red?")], [A]),
    "text and several images": ({"prompt": "red?", "image": [A, B]}, [IMAGE, IMAGE, text("red?")], [A, B]),
    "a column of another usual name": ({"prompt": "red?", "images": [A]}, [IMAGE, text("red?")], [A]),
    "a place in the text": ({"prompt": "is <image> red?", "image": A}, [text("is "), IMAGE, text(" red?")], [A]),
    "a place in a message's text": (
        {"prompt": [{"role": "user", "content": "<image>red?"}], "image": A}, [IMAGE, text("red?")], [A],
    ),
    "placeholders": (
        {"prompt": user(text("is "), IMAGE, text("like "), IMAGE), "images": [A, B]},
        [text("is "), IMAGE, text("like "), IMAGE], [A, B],
    ),
    "placeholders with nulls of a table": (
        {"prompt": user({"type": "image", "text": None, "image": None}, {**text("red?"), "image": None}), "image": A},
        [IMAGE, text("red?")], [A],
    ),
    "a part with its own path": (
        {"prompt": user({"type": "image", "image": "a.png"}, text("red?"))}, [IMAGE, text("red?")], ["a.png"],
    ),
    "OpenAI's parts": (
        {"prompt": user({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, text("red?"))},
        [IMAGE, text("red?")], ["a.png"],
    ),
    "the parts of OpenAI's responses": (
        {"prompt": user({"type": "input_image", "image_url": "a.png"}, {"type": "input_text", "text": "red?"})},
        [IMAGE, text("red?")], ["a.png"],
    ),
    "Anthropic's parts": (
        {"prompt": user({"type": "image", "source": {"type": "base64", "media_type": "x", "data": "YQ=="}}, text("?"))},
        [IMAGE, text("?")], ["data:image;base64,YQ=="],
    ),
    "a part as data sets of the hub store it": (
        {"prompt": user({"type": "image", "image": {"bytes": A, "path": None}}, text("?"))},
        [IMAGE, text("?")], [{"bytes": A, "path": None}],
    ),
    "bytes and path in the part": (
        {"prompt": user({"type": "image", "bytes": A, "path": "x"}, text("?"))},
        [IMAGE, text("?")], [{"bytes": A, "path": "x"}],
    ),
    "own images between placeholders": (
        {"prompt": user(IMAGE, {"type": "image", "path": "c.png"}, IMAGE), "image": [A, B]},
        [IMAGE, IMAGE, IMAGE], [A, "c.png", B],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_one_conversation(form):
    row, content, images = FORMS[form]
    shown = read_shown(row, VisionTurnSettings())
    assert [dict(message) for message in shown.conversation.messages] == [{"role": "user", "content": content}]
    assert shown.images == images


def test_a_row_without_images_is_text():
    for row in ({"prompt": "red?", "image": None}, {"prompt": "red?", "images": []}):
        shown = read_shown(row, VisionTurnSettings())
        assert (list(shown.conversation.messages), shown.images) == ([{"role": "user", "content": "red?"}], [])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": user(IMAGE, text("?")), "image": [A, B]}, "'prompt' has 1 placeholders .*'image' has 2"),
        ({"prompt": user(text("?")), "image": A}, "'prompt' has 0 placeholders .*'image' has 1"),
        ({"prompt": user(IMAGE, text("?"))}, "has 1 placeholders .*the row has no image and no images"),
        ({"prompt": "is <image> or <image> red?", "image": A}, "has 2 placeholders .*'image' has 1"),
        ({"prompt": "<image>?", "image": None}, "has 1 placeholders .*'image' has 0"),
        ({"prompt": "red?"}, "has no 'image'; it has prompt: set workflow.image_key"),
        ({"prompt": user(text("red?"))}, "has no 'image'"),
        ({"prompt": "red?", "image": A, "images": [B]}, "has images in 'image' and 'images': set workflow.image_key"),
        ({"prompt": user({"type": "image", "min_pixels": 4}), "image": A}, "has unknown keys min_pixels: remove"),
        ({"prompt": user({"type": "image", "image": "a", "url": "b"})}, "has its image in image and in url"),
        ({"prompt": user({"type": "image", "image": 7})}, "holds 7; it must be a path"),
        ({"prompt": "", "image": A}, "'prompt' is empty"),
        ({"prompt": '[{"role": "user", "content": "?"}]', "image": A}, "holds a whole conversation"),
        ({"prompt": 7, "image": A}, "'prompt' is a number"),
        ({"question": "?", "image": A}, "has no 'prompt'; it has question, image: set workflow.prompt_key"),
        ({"prompt": [*user(IMAGE), {"role": "assistant", "content": "?"}], "image": A}, "ends with a turn of the assi"),
    ],
)
def test_what_cannot_be_shown_names_field_and_remedy(row, words):
    with pytest.raises(RowError, match=words):
        read_shown(row, VisionTurnSettings())
    assert VisionTurnSettings().check_row(row) != ""


def played(tokenizer, row, tmp_path, **settings):
    """Play a row; return what was generated from, the images, and what the reward got."""
    seen = {}

    async def generate(ids, images):
        seen.update(ids=list(ids), images=images)
        return Generation(tokenizer.encode("b", add_special_tokens=False), [-0.5], [0], FinishReason.STOP)

    async def score(**arguments):
        seen["arguments"] = arguments
        return RewardScore(1.0)

    context = WorkflowContext(tokenizer, generate, score, is_evaluation=False, sample_index=0)
    workflow = VisionTurn(VisionTurnSettings(folder=tmp_path, **settings))
    seen["episode"] = asyncio.run(workflow.run_episode(row, context))
    return seen


def test_an_episode_has_tools_a_system_message_and_template_arguments(tokenizer, tmp_path, image):
    row = {"prompt": "red?", "image": image(), "tools": [TOOL]}
    seen = played(tokenizer, row, tmp_path, system="be brief", chat_template_kwargs={"enable_thinking": False})
    assert seen["arguments"]["prompt"] == (
        "[tools zoom ][system]be brief<|im_end|>[user]<|vision_start|><|image_pad|><|vision_end|>red?<|im_end|>"
        "[assistant]"
    )
    assert seen["arguments"]["prompt_ids"] == seen["ids"]
    assert seen["ids"].count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 4
    assert seen["arguments"]["completion"] == "b"
    row |= {"chat_template_kwargs": {"enable_thinking": True}, "system": "be long"}
    seen = played(tokenizer, row, tmp_path, system="be brief", chat_template_kwargs={"enable_thinking": False})
    assert "[system]be long" in seen["arguments"]["prompt"]
    assert seen["arguments"]["prompt"].endswith("[assistant]")
    assert seen["arguments"]["completion"] == "<think>b"


def test_all_ways_to_give_an_image_are_the_same_tokens_and_files(tokenizer, tmp_path, image):
    file = image()
    (tmp_path / "a.png").write_bytes(file)
    rows = [
        {"prompt": "red?", "image": {"bytes": file, "path": None}},
        {"prompt": "<image>red?", "image": "a.png"},
        {"prompt": user(IMAGE, text("red?")), "images": [file]},
        {"prompt": user({"type": "image_url", "image_url": {"url": url(file)}}, text("red?"))},
    ]
    first, *others = [played(tokenizer, row, tmp_path) for row in rows]
    assert first["images"] == [file]
    for other in others:
        assert (other["ids"], other["images"]) == (first["ids"], first["images"])


def test_a_text_that_spells_the_image_token_makes_no_place(tokenizer, tmp_path, image):
    seen = played(tokenizer, {"prompt": "<|image_pad|>?", "image": image()}, tmp_path)
    assert seen["ids"].count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 4


def test_what_the_template_leaves_out_is_found_before_a_run(tokenizer, folder, image):
    from transformers import AutoTokenizer

    settings = VisionTurnSettings()
    row = {"prompt": user(IMAGE, text("red?")), "image": image(), "tools": [TOOL]}
    assert settings.check_row(row, tokenizer) == ""
    plain = AutoTokenizer.from_pretrained(folder)
    assert "the chat template shows no tools" in settings.check_row(row, plain)
    plain.chat_template = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[-1].text }}{% endfor %}"
    )
    del row["tools"]
    assert "wrote 0 image tokens for 1 images" in settings.check_row(row, plain)
    assert settings.check_row({"prompt": "?", "image": b"no image"}, tokenizer).startswith(
        "has an image that cannot be used: "
    )
