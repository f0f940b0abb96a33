"""A batch with images, and what one of two ranks does with it: python vision_rank_program.py MODEL FOLDER RANK."""

import io
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from areal_core.data import FinishReason, Generation, PackedBatch, TrajectoryBuilder, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_vision.images import ImageReader

IMAGE = 2
SEQUENCES = (((32, 32),), ((64, 32), (32, 64)), (), ((32, 32),), (), ())
"""Sizes of the images of each sequence."""


def make_image(color=(200, 30, 40), width=32, height=32):
    """The file of an image with an edge in it."""
    from PIL import Image

    image = Image.new("RGB", (width, height), (10, 10, 10))
    image.paste(color, (width // 3, 0, width, height // 2))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_batch(folder):
    """Trajectories with one, two and no images; the policy has written an image token in one of them."""
    reader, draw, trajectories = ImageReader(str(folder)), torch.Generator().manual_seed(2), []
    for number, sizes in enumerate(SEQUENCES):
        seen, ids = reader.read([make_image((40 * number, 200, 90), *size) for size in sizes]), [6, 20]
        for count in reader.counts(seen.grid):
            ids += [3, *[IMAGE] * count, 4]
        builder = TrajectoryBuilder()
        builder.add_context([*ids, 30, 31, 9])
        written = torch.randint(7, 34, (5 + number,), generator=draw).tolist()
        if number == 3:
            written[2] = IMAGE
        count = len(written)
        builder.add_generation(Generation(written, [-1.0] * count, [0] * count, FinishReason.STOP))
        multimodal = {"patches": {"pixels": seen.pixels}, "images": {"grid": seen.grid}}
        trajectories.append(builder.build(multimodal=multimodal))
    batch = shift_to_predictions(PackedBatch.from_trajectories(trajectories))
    return batch.with_tokens(weights=batch["loss_mask"] * torch.randn(batch.token_count, generator=draw))


def parts_of(batch):
    """What transformers is asked of each sequence: its image tokens without an image are padding."""
    found = []
    for each in batch.to_trajectories():
        ids = torch.tensor(each.tokens["input_ids"])
        grid, pixels, targets, weights = map(
            torch.from_numpy,
            (
                each.multimodal["images"]["grid"],
                each.multimodal["patches"]["pixels"],
                each.tokens["targets"],
                each.tokens["weights"],
            ),
        )
        needed = int((grid.prod(-1) // 4).sum())
        ids[(ids == IMAGE) & ((ids == IMAGE).cumsum(0) > needed)] = 0
        found.append((ids, grid, pixels, targets, weights))
    return found


def loss_of(batch, outputs):
    return LossResult(-(batch["weights"] * outputs["logprobs"]).sum())


def make_engine(folder, **settings):
    engine = FSDPEngine(FSDPConfig(**{"learning_rate": 1e-3, "max_tokens_per_microbatch": 24, **settings}))
    engine.setup(ModelReference(str(folder)), ACTOR, OptimizerSettings(10, 1.0, shows_images=True))
    return engine


def train(engine, batch, *, keeps=True):
    """The gradients of one update by name; the update is left out if `keeps`."""
    found, update = {}, engine._update

    def keep(rate):
        for name, gradient in zip(engine._parameters, engine._gradients(), strict=True):
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name] = whole.detach().to("cpu", copy=True)
        engine._optimizers[0].zero_grad()
        return {}

    if keeps:
        engine._update = keep
    engine.train([LossSpec("actor", batch, ["logprobs"], loss_of)])
    engine._update = update
    return found


def main():
    model, folder, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    engine = make_engine(model)
    found = {"gradients": train(engine, make_batch(model))}
    engine.close()
    try:
        make_engine(model, parallel={"context": 2})
    except RunError as error:
        found["refused"] = str(error)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
