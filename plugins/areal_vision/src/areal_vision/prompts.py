"""Find the images of a row and put them into its conversation. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from areal_core.chat import IMAGE_KEYS, Conversation, prompt_of
from areal_core.sdk import RowError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from areal_core.chat import Message, PromptSettings

TEXT_PLACEHOLDER: Final = "<image>"
"""Placeholder inside a text, as many public data sets write it."""
_SOURCES: Final = ("image", "image_url", "url", "path", "bytes", "base64", "source")
"""Keys of an image part that hold the image."""
_IGNORED: Final = frozenset({"type", "detail", "text"})


class Shown(NamedTuple):
    """A conversation in which each image is a part `{"type": "image"}`, and the images in order, as in the row."""

    conversation: Conversation
    images: list[Any]

    @property
    def value(self) -> Any:
        """The images in the form of a row: a single one, or a list."""
        return self.images[0] if len(self.images) == 1 else self.images


def read_shown(row: Mapping[str, Any], settings: PromptSettings, image_key: str | None = None) -> Shown:
    """Return the conversation and the images of a row.

    A prompt that is text becomes a user message with the row's images in front. In a prompt of messages, an image part
    has its own image or is a placeholder. The row's images replace the placeholders in order. If there are no image
    parts, `<image>` in the text of users is a placeholder, too.

    Args:
        row: row of the data set.
        settings: settings of the prompt. The chat template is always applied.
        image_key: key of the row's images; None: `image` or `images`.

    Raises:
        RowError: the prompt cannot be used, or the number of placeholders is not the number of the row's images.
    """
    conversation = prompt_of(row, settings, images=True)
    assert isinstance(conversation, Conversation)  # the template is always applied
    key, row_images = _images_of(row, image_key)
    messages = _with_parts(conversation.messages)
    is_text = isinstance(row[settings.prompt_key], str)
    if is_text and row_images and not any(True for _ in _image_parts(messages)):
        last = messages[-1]
        parts = [*({"type": "image"} for _ in row_images), {"type": "text", "text": last["content"]}]
        messages = [*messages[:-1], {**last, "content": parts}]
    part_images = [_own_image(part, f"'{settings.prompt_key}'") for part in _image_parts(messages)]
    if not key and not part_images:
        raise RowError(
            f"has no '{_keys(image_key)[0]}'; it has {', '.join(row)}: set workflow.image_key, or correct the data"
        )
    count = part_images.count(None)
    if count != len(row_images):
        where = f"'{key}' has {len(row_images)}" if key else f"the row has no {' and no '.join(_keys(image_key))}"
        raise RowError(
            f"'{settings.prompt_key}' has {count} placeholders for images, but {where}: write one part "
            "{'type': 'image'} for each image, or set workflow.image_key"
        )
    remaining = iter(row_images)
    images = [next(remaining) if image is None else image for image in part_images]
    return Shown(conversation.with_messages(_without_data(messages)), images)


def _keys(image_key: str | None) -> Sequence[str]:
    return IMAGE_KEYS if image_key is None else (image_key,)


def _images_of(row: Mapping[str, Any], image_key: str | None) -> tuple[str, list[Any]]:
    """Return the key of the row's images, or an empty string, and the images."""
    present = [key for key in _keys(image_key) if key in row]
    if len(filled := [key for key in present if row[key] is not None]) > 1:
        raise RowError(f"has images in {' and '.join(map(repr, filled))}: set workflow.image_key to one of them")
    if not present:
        return "", []
    key = (filled or present)[0]
    value = row[key]
    value = value.tolist() if hasattr(value, "tolist") else value
    listed = list(value) if isinstance(value, list | tuple) else [value]
    return key, [image for image in listed if image is not None]


def _with_parts(messages: Sequence[Message]) -> list[Message]:
    """Turn `<image>` in the text of users into image parts, unless a message already has image parts."""
    if any(True for _ in _image_parts(messages)):
        return list(messages)
    return [_with_own_parts(message) for message in messages]


def _with_own_parts(message: Message) -> Message:
    content = message["content"]
    if message["role"] != "user" or not isinstance(content, str) or TEXT_PLACEHOLDER not in content:
        return message
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(TEXT_PLACEHOLDER)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _image_parts(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if isinstance(message["content"], list):
            yield from (part for part in message["content"] if part["type"] == "image")


def _own_image(part: Mapping[str, Any], where: str) -> Any:
    """Return the image that a part holds, in the form of a row; None for a placeholder."""
    sources = [key for key in _SOURCES if part.get(key) not in (None, "", b"")]
    if unknown := sorted(part.keys() - _IGNORED - set(_SOURCES)):
        raise RowError(f"{where}: an image part has unknown keys {', '.join(unknown)}: remove them")
    if set(sources) == {"bytes", "path"}:
        return {"bytes": part["bytes"], "path": part["path"]}
    if len(sources) > 1:
        raise RowError(f"{where}: an image part has its image in {' and in '.join(sources)}: keep one of them")
    if not sources:
        return None
    value = part[sources[0]]
    if sources[0] == "base64":
        return f"data:image;base64,{value}"
    if sources[0] == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if sources[0] == "source" and isinstance(value, Mapping):
        value = f"data:image;base64,{value['data']}" if "data" in value else value.get("url")
    if not isinstance(value, str | bytes | Mapping):
        raise RowError(f"{where}: an image part holds {value!r:.40}; it must be a path, base64 or bytes")
    return value


def _without_data(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with bare placeholders as image parts, as chat templates expect them."""
    return [
        {**message, "content": [part if part["type"] != "image" else {"type": "image"} for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def image_token(tokenizer: Any) -> int:
    """Return the id of the tokenizer's image token.

    Raises:
        ValueError: the tokenizer has none.
    """
    spelling = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
    token = tokenizer.convert_tokens_to_ids(spelling)
    if token is None or token == tokenizer.unk_token_id:
        raise ValueError(f"the tokenizer has no image token '{spelling}', so the model is not a vision-language model")
    return int(token)


def check_places(ids: Sequence[int], image: int, count: int) -> None:
    """Check that a prompt has as many image tokens as images.

    Args:
        ids: token ids of the prompt, with one image token for each image.
        image: id of the image token; see `image_token`.
        count: number of images.

    Raises:
        RowError: the numbers differ.
    """
    found = list(ids).count(image)
    if found != count:
        raise RowError(
            f"the chat template wrote {found} image tokens for {count} images: it must write one for each part of a "
            "message that is {'type': 'image'}"
        )
