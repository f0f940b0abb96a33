"""Files of images, and what becomes of them."""

import asyncio
import base64
import io
import os

import pytest
import torch

from areal_core.data import FinishReason, Generation
from areal_core.messages.workflows import RunGroup
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.episodes import EpisodeError, EpisodeRunner
from areal_core.sdk import RewardScore, RowError, WorkflowContext
from areal_core.servers import SamplingParameters
from areal_testing.fakes import FakeEngine
from areal_vision.config import SquaresSettings, VisionTurnSettings
from areal_vision.files import ImageFile, files_of, open_image, shown_image
from areal_vision.images import ImageReader
from areal_vision.squares import COLORS, Squares, first_letter
from areal_vision.workflow import VisionTurn, expand

pytest.importorskip("PIL")


def test_all_forms_of_an_image_are_the_same_file(tmp_path, image):
    file = image()
    (tmp_path / "one.png").write_bytes(file)
    text = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    for value in ("one.png", tmp_path / "one.png", file, text, {"bytes": file, "path": None}, {"path": "one.png"}):
        assert [each.data for each in files_of(value, tmp_path)] == [file]
    both = files_of(["one.png", text], tmp_path)
    assert both == [ImageFile(f"the image {tmp_path / 'one.png'} (1 of 2)", file), ("the image (2 of 2)", file)]
    assert files_of(None, tmp_path) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("absent.png", "absent.png cannot be read"),
        (7, "is int"),
        ("data:image/png;base64,*", "is not valid base64"),
        ("https://example.com/a.png", "is a URL, which is not downloaded: download it"),
        ("file:///tmp/a.png", "is a URL"),
        ({}, "dict"),
    ],
)
def test_what_is_no_image_is_named(value, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        files_of(value, tmp_path)


def test_patches_of_several_images_stand_one_behind_another(folder, image):
    reader = ImageReader(str(folder))
    small, wide = image(), image(width=64, height=32)
    both, alone = reader.read([small, wide]), reader.read([wide])
    assert both.grid.tolist() == [[1, 4, 4], [1, 4, 8]]
    assert reader.counts(both.grid) == [4, 8]
    assert torch.equal(both.pixels[16:], alone.pixels)
    none = reader.read([])
    assert none.pixels.shape == (0, both.pixels.shape[1])
    assert none.grid.shape == (0, 3)


def test_a_damaged_image_is_named_by_its_place(folder, image):
    with pytest.raises(ValueError, match="image 2 of 2 cannot be read: it is not an image"):
        ImageReader(str(folder)).read([image(), b"no image"])


def test_what_is_no_file_is_not_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # which would be waited for without an end
    for name in ("folder", "pipe"):
        with pytest.raises(ValueError, match=f"{name} is not a file"):
            files_of(name, tmp_path)


def written(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return ImageFile("one", file.getvalue())


def edge(mode="RGB"):
    """Dark on the left, bright on the right."""
    from PIL import Image

    if mode == "I;16":
        return Image.frombytes(mode, (4, 2), (b"\0\0" * 2 + (50_000).to_bytes(2, "little") * 2) * 2)
    image = Image.new(mode, (4, 2))
    image.paste((200, 200, 200)[: len(mode)], (2, 0, 4, 2))
    return image


def test_an_image_is_upright_on_white_and_has_8_bits_and_engines_are_sent_that():
    from PIL import Image, ImageOps

    half = Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    half.putpixel((1, 0), (9, 9, 9, 0))
    changed = [
        (written(edge("I;16")), edge().point(lambda value: value and 195)),
        (written(edge("I;16"), "TIFF"), edge().point(lambda value: value and 195)),
        (written(half), [(0, 0, 0), (255, 255, 255)]),
        (written(half.convert("LA")), [(0, 0, 0), (255, 255, 255)]),
        (written(edge(), transparency=(200, 200, 200)), [(0, 0, 0), (0, 0, 0), (255,) * 3, (255,) * 3] * 2),
        (written(edge(), "GIF", save_all=True, append_images=[half.resize((4, 2))]), edge()),
    ]
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("PNG", "JPEG", "WEBP"):
            turned = written(edge(), kind, exif=exif)
            changed.append((turned, ImageOps.exif_transpose(Image.open(io.BytesIO(turned.data)))))
    for file, wanted in changed:
        image, sent = shown_image(file)
        told = wanted if isinstance(wanted, list) else list(wanted.get_flattened_data())
        assert list(image.get_flattened_data()) == told, file
        plain = Image.open(io.BytesIO(sent))
        assert (plain.format, plain.mode, plain.tobytes()) == ("PNG", "RGB", image.tobytes()), "whoever reads it"
        assert list(open_image(file).get_flattened_data()) == told


def test_a_plain_image_is_sent_as_its_file_also_with_damaged_notes():
    opaque = written(edge().convert("RGBA"))
    for file in (
        *(written(edge(), "JPEG"), written(edge("L")), written(edge(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0"), opaque),
        written(edge(), "MPO", save_all=True, append_images=[edge()]),  # as phones write them
    ):
        assert shown_image(file)[1] == file.data


def test_a_tiff_which_its_reader_turns_is_not_turned_again():
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_image(written(edge(), "TIFF", exif=exif)).size == (2, 4)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_whose_range_nobody_knows_are_refused(mode):
    from PIL import Image

    with pytest.raises(ValueError, match=rf"one has 32-bit values \(mode {mode}\).*save it with 8 or 16 bits"):
        open_image(written(Image.new(mode, (2, 2)), "TIFF"))


def large(colors="1", side=10_000):
    """A file of a few kilobytes that is 300 MB in RGB."""
    from PIL import Image

    file = io.BytesIO()
    Image.new(colors, (side, side)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_is_refused_by_its_size_before_it_is_unpacked(monkeypatch):
    from PIL import ImageFile as decoding

    bomb = ImageFile("bomb", large())
    monkeypatch.setattr(decoding.ImageFile, "load", lambda _: pytest.fail("it is unpacked"))
    with pytest.raises(ValueError, match=r"bomb has 10000 x 10000 pixels; the limit is 50,000,000 .*max_image_pixels"):
        open_image(bomb, VisionTurnSettings().max_image_pixels)
    monkeypatch.undo()
    assert open_image(ImageFile("small", large(side=100)), 10_000).mode == "RGB"


def test_the_first_rows_are_shown_before_a_run(tmp_path, image):
    (tmp_path / "whole.png").write_bytes(image())
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(image()[:-30])
    settings = VisionTurnSettings(folder=tmp_path)
    assert settings.check_row({"prompt": "?", "image": "whole.png"}) == ""
    assert settings.check_row({"prompt": "?", "image": None}) == ""
    for name, words in (("empty", "is empty: repair"), ("cut", "cannot be read: "), ("gone", "No such file")):
        found = settings.check_row({"prompt": "?", "image": f"{name}.png"})
        assert found.startswith(f"has an image that cannot be used: the image {tmp_path / name}.png ")
        assert words in found


def test_a_row_without_its_image_costs_one_attempt_and_names_both(folder, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "cut.png").write_bytes(b"")
    told = []
    runner = EpisodeRunner(
        VisionTurn(VisionTurnSettings(folder=tmp_path)),
        FakeEngine(),
        RewardSum([]),
        AutoTokenizer.from_pretrained(folder),
        max_retries=5,
        on_failure=lambda *words: told.append(words),
    )
    row = {"prompt": "?", "image": "cut.png"}
    with pytest.raises(EpisodeError, match="data row 7"):
        asyncio.run(runner.run(row, RunGroup(3, 7, 0, (1,), SamplingParameters()), 1))
    ((group, sample, attempt, words),) = told
    assert (group, sample, attempt) == (3, 1, 0)
    assert words.startswith(f"data row 7 (counted from 0), sample 1: the image {tmp_path / 'cut.png'} is empty")
    assert "Traceback" not in words


def test_a_row_with_more_images_than_the_context_holds_is_told_what_they_take(folder, tmp_path, image):
    from transformers import AutoTokenizer

    (tmp_path / "one.png").write_bytes(image())
    context = WorkflowContext(AutoTokenizer.from_pretrained(folder), None, None, is_evaluation=False, sample_index=0)
    row = {"prompt": "red?", "image": ["one.png"] * 100}
    with pytest.raises(RowError, match=r"its 100 images take 400 of the 6\d\d tokens .* context has 256: use"):
        asyncio.run(VisionTurn(VisionTurnSettings(folder=tmp_path)).run_episode(row, context))


def test_what_is_shown_of_an_episode_names_its_image_and_what_was_wanted(folder, tmp_path, image):
    from transformers import AutoTokenizer

    (tmp_path / "one.png").write_bytes(image())
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def generate(ids, images):
        assert images == [image()]
        return Generation(tokenizer.encode("b"), [-0.5], [0], FinishReason.STOP)

    async def score(**told):
        return RewardScore(1.0)

    context = WorkflowContext(tokenizer, generate, score, is_evaluation=False, sample_index=0)
    row = {"prompt": "red?", "image": "one.png", "answer": "r"}
    episode = asyncio.run(VisionTurn(VisionTurnSettings(folder=tmp_path)).run_episode(row, context))
    assert episode.text.startswith(f"[the image {tmp_path / 'one.png'}]\n")
    assert episode.text.endswith("red?b\n[wanted: r]")
    del row["answer"]
    assert "wanted" not in asyncio.run(VisionTurn(VisionTurnSettings(folder=tmp_path)).run_episode(row, context)).text


def test_a_model_without_an_image_processor_is_none_for_images(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="has no image processor"):
        ImageReader(str(tmp_path))


def test_places_grow_to_what_their_images_need():
    assert expand([5, 9, 6, 9, 7], 9, [2, 3]) == [5, 9, 9, 6, 9, 9, 9, 7]
    with pytest.raises(ValueError, match="1 image tokens for 2 images"):
        expand([5, 9, 6], 9, [2, 3])


def test_squares_need_both_image_and_question():
    train, held_out = Squares(SquaresSettings()), Squares(SquaresSettings(split="held_out"))
    assert (len(train), len(held_out)) == (2048, 64)
    assert train[5] == train[5]
    assert not {train[i]["image"] for i in range(300)} & {held_out[i]["image"] for i in range(64)}
    for i in range(20):
        row = train[i]
        assert row["answer"] in (COLORS if row["prompt"] == "color?" else ("left", "right"))
        assert first_letter(row["answer"], row["answer"]) == 1.0
        assert first_letter("x", row["answer"]) == first_letter("", row["answer"]) == 0.0
    with pytest.raises(IndexError):
        held_out[64]
