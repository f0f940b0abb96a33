"""From a row to what the chat template is given, and the images that stand in it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from areal_core.chat import IMAGE_KEYS, Conversation, prompt_of
from areal_core.sdk import RowError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from areal_core.chat import Message, PromptSettings

TEXT_PLACEHOLDER: Final = "<image>"
"""A placeholder inside a text, as many public data sets have it."""
_SOURCES: Final = ("image", "image_url", "url", "path", "bytes", "base64", "source")
"""Keys of a part that name its own image."""
_IGNORED: Final = frozenset({"type", "detail", "text"})


class Shown(NamedTuple):
    """A conversation whose images are parts `{"type": "image"}`, and the images in order, each as a row names it."""

    conversation: Conversation
    images: list[Any]

    @property
    def value(self) -> Any:
        """The images as a row names them: one alone, or a list."""
        return self.images[0] if len(self.images) == 1 else self.images


def read_shown(row: Mapping[str, Any], settings: PromptSettings, image_key: str | None = None) -> Shown:
    """Return what a row shows to the model.

    A prompt as text becomes a user message with the row's images in front. In a prompt as messages, a part that is an
    image has its own data, or is a placeholder. The row's images take the places of the placeholders in order; so do
    `<image>` in the text of a user, where there are no such parts.

    Args:
        row: of the data set.
        settings: of the prompt; the chat template is always applied.
        image_key: key of the row's images; None for `image` or `images`.

    Raises:
        RowError: the prompt cannot be used, or there is another number of placeholders than of images.
    """
    asked = prompt_of(row, settings, images=True)
    assert isinstance(asked, Conversation)  # the template is always applied
    key, given = _images_of(row, image_key)
    messages = _with_parts(asked.messages)
    is_text = isinstance(row[settings.prompt_key], str)
    if is_text and given and not any(True for _ in _image_parts(messages)):
        last = messages[-1]
        parts = [*({"type": "image"} for _ in given), {"type": "text", "text": last["content"]}]
        messages = [*messages[:-1], {**last, "content": parts}]
    own = [_own_image(part, f"'{settings.prompt_key}'") for part in _image_parts(messages)]
    if not key and not own:
        raise RowError(
            f"has no '{_keys(image_key)[0]}'; it has {', '.join(row)}: set workflow.image_key, or correct the data"
        )
    if (places := own.count(None)) != len(given):
        where = f"'{key}' has {len(given)}" if key else f"the row has none (no {' and no '.join(_keys(image_key))})"
        raise RowError(
            f"'{settings.prompt_key}' has {places} places for images of the row, and {where}: write one part "
            "{'type': 'image'} for each image, or set workflow.image_key"
        )
    left = iter(given)
    images = [next(left) if image is None else image for image in own]
    return Shown(asked.with_messages(_without_data(messages)), images)


def _keys(image_key: str | None) -> Sequence[str]:
    return IMAGE_KEYS if image_key is None else (image_key,)


def _images_of(row: Mapping[str, Any], image_key: str | None) -> tuple[str, list[Any]]:
    """Return the key of the row's images, empty if there is none, and the images."""
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
    """Return messages in which placeholders in the text of users are parts, unless some message has parts already."""
    if any(True for _ in _image_parts(messages)):
        return list(messages)
    return [_with_own_parts(message) for message in messages]


def _with_own_parts(message: Message) -> Message:
    content = message["content"]
    if message["role"] != "user" or not isinstance(content, str) or TEXT_PLACEHOLDER not in content:
        return message
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(TEXT_PLACEHOLDER)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def _image_parts(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if isinstance(message["content"], list):
            yield from (part for part in message["content"] if part["type"] == "image")


def _own_image(part: Mapping[str, Any], where: str) -> Any:
    """Return the image that a part names itself, as a row names one; None for a placeholder."""
    named = [key for key in _SOURCES if part.get(key) not in (None, "", b"")]
    if unknown := sorted(part.keys() - _IGNORED - set(_SOURCES)):
        raise RowError(f"{where}: a part that is an image has {', '.join(unknown)}, which is not understood: remove it")
    if set(named) == {"bytes", "path"}:
        return {"bytes": part["bytes"], "path": part["path"]}
    if len(named) > 1:
        raise RowError(f"{where}: a part names its image in {' and in '.join(named)}: leave one of them")
    if not named:
        return None
    value = part[named[0]]
    if named[0] == "base64":
        return f"data:image;base64,{value}"
    if named[0] == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if named[0] == "source" and isinstance(value, Mapping):
        value = f"data:image;base64,{value['data']}" if "data" in value else value.get("url")
    if not isinstance(value, str | bytes | Mapping):
        raise RowError(f"{where}: the image of a part is {value!r:.40}; it must be a path, base64 or bytes")
    return value


def _without_data(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose images are placeholders alone, as chat templates read them."""
    return [
        {**message, "content": [part if part["type"] != "image" else {"type": "image"} for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def image_token(tokenizer: Any) -> int:
    """Return the id that stands for a part of an image.

    Raises:
        ValueError: the tokenizer has none.
    """
    spelling = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
    found = tokenizer.convert_tokens_to_ids(spelling)
    if found is None or found == tokenizer.unk_token_id:
        raise ValueError(f"the tokenizer has no image token '{spelling}', so the model is none for images")
    return int(found)


def check_places(ids: Sequence[int], image: int, count: int) -> None:
    """Refuse a prompt with another number of image tokens than of images.

    Args:
        ids: the prompt, with one image token for each image.
        image: the image token; see `image_token`.
        count: how many images there are.

    Raises:
        RowError: the numbers differ.
    """
    if (places := list(ids).count(image)) != count:
        raise RowError(
            f"the chat template wrote {places} places for {count} images: it must write one image token for each part "
            "of a message that is {'type': 'image'}"
        )
