"""A prompt with images, one answer, one score."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from areal_core.data.trajectory import Episode, TrajectoryBuilder
from areal_core.interfaces import RowError
from areal_core.workflows.prompts import apply_template
from areal_vision.files import ImageFile, files_of, shown_image
from areal_vision.images import reader_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

    from areal_core.interfaces import WorkflowContext
    from areal_vision.config import VisionTurnSettings


class VisionTurn:
    """Shows the row's images and asks its question; the run's rewards score the answer.

    The images stand in front of the question, in the places that the chat template makes for them. Their patches
    become the trajectory's multimodal fields `patches` and `images`, which training reads.
    """

    def __init__(self, settings: VisionTurnSettings) -> None:
        self._settings = settings

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        settings, tokenizer = self._settings, context.tokenizer
        reader = await asyncio.to_thread(reader_of, tokenizer.name_or_path)
        files, opened = await asyncio.to_thread(self._open, row[settings.image_key])
        images = await asyncio.to_thread(reader.cut, opened)
        content = [*({"type": "image"} for _ in files), {"type": "text", "text": row[settings.prompt_key]}]
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        ids, prompt = apply_template(tokenizer, [*system, {"role": "user", "content": content}])
        counts = reader.counts(images.grid)
        input_ids = expand(ids, image_token(tokenizer), counts)
        if reader.context and len(input_ids) >= reader.context:
            raise RowError(
                f"its {len(counts)} images take {sum(counts):,} of the {len(input_ids):,} tokens of its prompt, and "
                f"the model's context has {reader.context:,}: give it fewer or smaller images (max_pixels in the "
                "model's preprocessor_config.json makes all of them smaller), or take a model with a longer context"
            )
        generation = await context.generate(input_ids, images=[file.data for file in files])
        completion = tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        score = await context.score(
            prompt=prompt,
            completion=completion,
            completion_ids=generation.output_ids,
            finish_reason=generation.finish_reason,
        )
        builder = TrajectoryBuilder()
        builder.add_context(input_ids)
        builder.add_generation(generation)
        multimodal = {"patches": {"pixels": images.pixels.numpy()}, "images": {"grid": images.grid.numpy()}}
        trajectory = builder.build(multimodal=multimodal)
        shown = "".join(f"[{file.name}]\n" for file in files)
        wanted = f"\n[wanted: {row['answer']}]" if "answer" in row else ""
        text = f"{shown}{prompt}{completion}{wanted}"
        return Episode([trajectory], score.value, dict(score.components), text=text)

    def _open(self, value: Any) -> tuple[list[ImageFile], list[Image]]:
        """What a row has as its images: files as engines are sent them, and what is in them.

        Raises:
            RowError: one of them cannot be shown, today or tomorrow.
        """
        try:
            files = files_of(value, self._settings.folder)
            shown = [shown_image(file, self._settings.max_image_pixels) for file in files]
        except ValueError as error:
            raise RowError(str(error)) from error
        sent = [ImageFile(file.name, data) for file, (_, data) in zip(files, shown, strict=True)]
        return sent, [image for image, _ in shown]


def image_token(tokenizer: Any) -> int:
    """The id that stands for a part of an image.

    Raises:
        ValueError: the tokenizer has none.
    """
    spelling = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
    found = tokenizer.convert_tokens_to_ids(spelling)
    if found is None or found == tokenizer.unk_token_id:
        raise ValueError(f"the tokenizer has no image token '{spelling}', so the model is none for images")
    return int(found)


def expand(ids: Sequence[int], image: int, counts: Sequence[int]) -> list[int]:
    """Repeat each image token as often as its image has parts.

    Raises:
        ValueError: there is another number of image tokens than of images.
    """
    places = [place for place, token in enumerate(ids) if token == image]
    if len(places) != len(counts):
        raise ValueError(
            f"the chat template wrote {len(places)} places for {len(counts)} images: it must write one image token "
            "for each part of a message that is {'type': 'image'}"
        )
    expanded: list[int] = []
    left = iter(counts)
    for token in ids:
        expanded += [token] * next(left) if token == image else [token]
    return expanded
