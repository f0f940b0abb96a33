"""A prompt with images, one answer, one score."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from areal_core.chat import answer_text, encode, render_conversation, template_opening
from areal_core.data import Episode, TrajectoryBuilder
from areal_core.sdk import RowError
from areal_vision.files import ImageFile, files_of, shown_image
from areal_vision.images import reader_of
from areal_vision.prompts import check_places, image_token, read_shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

    from areal_core.sdk import WorkflowContext
    from areal_vision.config import VisionTurnSettings


class VisionTurn:
    """Shows the row's images and asks its question; the run's rewards score the answer.

    The images stand in the places that the chat template makes for them; see `prompts.read_shown`. Their patches
    become the trajectory's multimodal fields `patches` and `images`, which training reads.
    """

    def __init__(self, settings: VisionTurnSettings) -> None:
        self._settings = settings

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        settings, tokenizer = self._settings, context.tokenizer
        reader = await asyncio.to_thread(reader_of, tokenizer.name_or_path)
        shown = read_shown(row, settings, settings.image_key)
        conversation = shown.conversation
        files, pictures = await asyncio.to_thread(self._open, shown.value)
        images = await asyncio.to_thread(reader.cut, pictures)
        rendered = render_conversation(tokenizer, conversation, add_generation_prompt=True)
        ids, text = encode(tokenizer, rendered)
        opened = template_opening(tokenizer, conversation, rendered)
        prompt = text[: len(text) - len(opened)]
        counts = reader.counts(images.grid)
        input_ids = expand(ids, image_token(tokenizer), counts)
        if reader.context and len(input_ids) >= reader.context:
            raise RowError(
                f"its {len(counts)} images take {sum(counts):,} of the {len(input_ids):,} tokens of its prompt, and "
                f"the model's context has {reader.context:,}: give it fewer or smaller images (max_pixels in the "
                "model's preprocessor_config.json makes all of them smaller), or take a model with a longer context"
            )
        generation = await context.generate(input_ids, images=[file.data for file in files])
        completion = answer_text(tokenizer, generation.output_ids, context.end_ids, opened)
        score = await context.score(
            prompt=prompt,
            completion=completion,
            completion_ids=generation.output_ids,
            finish_reason=generation.finish_reason,
            prompt_ids=input_ids,
        )
        builder = TrajectoryBuilder()
        builder.add_context(input_ids)
        builder.add_generation(generation)
        multimodal = {"patches": {"pixels": images.pixels.numpy()}, "images": {"grid": images.grid.numpy()}}
        trajectory = builder.build(multimodal=multimodal)
        names = "".join(f"[{file.name}]\n" for file in files)
        wanted = f"\n[wanted: {row['answer']}]" if "answer" in row else ""
        question = f"{names}{prompt}"
        transcript = f"{question}{completion}{wanted}"
        return Episode([trajectory], score.value, dict(score.components), text=transcript, prompt=question)

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


def expand(ids: Sequence[int], image: int, counts: Sequence[int]) -> list[int]:
    """Repeat each image token as often as its image has parts.

    Raises:
        RowError: there is another number of image tokens than of images.
    """
    check_places(ids, image, len(counts))
    expanded: list[int] = []
    left = iter(counts)
    for token in ids:
        expanded += [token] * next(left) if token == image else [token]
    return expanded
