"""Workflow with images: one prompt, one answer, one score."""

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
    """Asks a row's question with its images; the run's rewards score the answer.

    The chat template decides where the images are; see `prompts.read_shown`. Their patches become the trajectory's
    multimodal fields `patches` and `images`, which training reads.
    """

    def __init__(self, settings: VisionTurnSettings) -> None:
        self._settings = settings

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """Run one episode; see `RolloutWorkflow.run_episode`."""
        settings, tokenizer = self._settings, context.tokenizer
        reader = await asyncio.to_thread(reader_of, tokenizer.name_or_path)
        shown = read_shown(row, settings, settings.image_key)
        conversation = shown.conversation
        files, opened_images = await asyncio.to_thread(self._open, shown.value)
        images = await asyncio.to_thread(reader.cut, opened_images)
        rendered = render_conversation(tokenizer, conversation, add_generation_prompt=True)
        ids, text = encode(tokenizer, rendered)
        opened = template_opening(tokenizer, conversation, rendered)
        prompt = text[: len(text) - len(opened)]
        counts = reader.counts(images.grid)
        input_ids = expand(ids, image_token(tokenizer), counts)
        if reader.context and len(input_ids) >= reader.context:
            raise RowError(
                f"its {len(counts)} images take {sum(counts):,} of the {len(input_ids):,} tokens of its prompt, but "
                f"the model's context has {reader.context:,}: use fewer or smaller images (max_pixels in the model's "
                "preprocessor_config.json limits all of them), or a model with a longer context"
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
        expected = f"\n[wanted: {row['answer']}]" if "answer" in row else ""
        question = f"{names}{prompt}"
        transcript = f"{question}{completion}{expected}"
        return Episode([trajectory], score.value, dict(score.components), text=transcript, prompt=question)

    def _open(self, value: Any) -> tuple[list[ImageFile], list[Image]]:
        """Return the images of a row: the files for the engine, and the decoded images.

        Raises:
            RowError: an image cannot be used.
        """
        try:
            files = files_of(value, self._settings.folder)
            opened = [shown_image(file, self._settings.max_image_pixels) for file in files]
        except ValueError as error:
            raise RowError(str(error)) from error
        reproducible = [ImageFile(file.name, data) for file, (_, data) in zip(files, opened, strict=True)]
        return reproducible, [image for image, _ in opened]


def expand(ids: Sequence[int], image: int, counts: Sequence[int]) -> list[int]:
    """Repeat each image token once for each token that its image takes.

    Args:
        ids: token ids of the prompt, with one image token for each image.
        image: id of the image token.
        counts: number of tokens of each image.

    Raises:
        RowError: the number of image tokens is not the number of images.
    """
    check_places(ids, image, len(counts))
    expanded: list[int] = []
    remaining = iter(counts)
    for token in ids:
        expanded += [token] * next(remaining) if token == image else [token]
    return expanded
