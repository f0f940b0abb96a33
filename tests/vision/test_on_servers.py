"""Images on true servers: log-probabilities are those of the trainer's model, also over weight updates."""

import asyncio
import itertools
import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES, SIDES, make_family
from vision_rank_program import IMAGE, make_engine

from areal_core.data import PackedBatch, TrajectoryBuilder, shift_to_predictions
from areal_core.engines import ModelReference, WeightUpdate
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_vision.images import ImageReader
from areal_vllm.adapter import VLLMAdapter
from areal_vllm.config import VLLMConfig

# Starting a server takes a minute, and a first run makes its environment.
pytestmark = [pytest.mark.servers, pytest.mark.nightly, pytest.mark.timeout(1800)]
KINDS = {
    "sglang": (SGLangConfig, SGLangAdapter, {"context_length": 256}),
    "vllm": (VLLMConfig, VLLMAdapter, {"max_model_len": 256}),
}
CASES = [(kind, family, "recompute") for kind in KINDS for family in FAMILIES]
CASES += [(kind, "qwen3_vl", "keep_cache") for kind in KINDS]
TEMPERATURE, TOLERANCE, LONG = 1.5, 5e-5, 200
VIDEO = 5
WAIT_S = 900
EXAMPLE = Path(__file__).parents[2] / "examples" / "vision.yaml"


@pytest.fixture
def fleet_of(request, server_environment, tmp_path):
    """Makes a fleet of one true server."""

    def make(kind, update_mode):
        settings, adapter, changes = KINDS[kind]
        program, options = (request.getfixturevalue(f"{kind}_{name}") for name in ("program", "options"))
        own = settings(
            program=program,
            options={**options, **changes},
            environment=server_environment,
            servers=1,
            start_timeout_s=WAIT_S,
            update_mode=update_mode,
            stream_interval=4,
        )
        return ServerFleet(adapter(own), tmp_path)

    return make


def rows_of(model, family, image):
    """Prompts with one image, two of different sizes, none, and one that no whole number of patches fits."""
    reader, found, side = ImageReader(str(model)), [], 4 * SIDES[family]
    for shown in (
        [((250, 0, 0), side, side)],
        [((0, 0, 250), 2 * side, side), ((250, 250, 0), side, 2 * side)],
        [],
        [((0, 250, 0), 3 * side + 3, 2 * side + 5)],
    ):
        files = [image(*each) for each in shown]
        seen, ids = reader.read(files), [6, 20]
        for count in reader.counts(seen.grid):
            ids += [3, *[IMAGE] * count, 4]
        found.append(SimpleNamespace(ids=[*ids, 30, 9], files=files, seen=seen))
    return found


def request_of(row, name, most):
    images = tuple(b64encode(file).decode() for file in row.files)
    sampling = SamplingParameters(temperature=TEMPERATURE, max_new_tokens=most)
    return GenerationRequest(name, row.ids, sampling, sum(map(ord, name)), images=images)


def distances(models, answers):
    """Per answer [T]: how far each token's log-probability is from that of its own version's weights."""
    trajectories = []
    for row, generation in answers:
        builder = TrajectoryBuilder()
        builder.add_context(row.ids)
        builder.add_generation(generation)
        multimodal = {"patches": {"pixels": row.seen.pixels}, "images": {"grid": row.seen.grid}}
        trajectories.append(builder.build(multimodal=multimodal))
    batch = shift_to_predictions(PackedBatch.from_trajectories(trajectories))
    mask, found = batch["loss_mask"], []
    for model in models:
        trainer = make_engine(model)
        trainer._module.temperature = TEMPERATURE
        found.append((trainer.forward(batch, ["logprobs"])["logprobs"] - batch["logprobs"]).abs()[mask])
        trainer.close()
    versions = [generation.versions for _, generation in answers]
    flat = torch.tensor([version % len(models) for each in versions for version in each])
    return torch.stack(found).gather(0, flat[None])[0].split([len(each) for each in versions])


async def _served(fleet, model, models, rows):
    """Answers before all updates, over some, and behind them."""
    await fleet.start(model)

    async def ask(name, most):
        asked = [request_of(row, f"{name}-{place}", most) for place, row in enumerate(rows)]
        return list(zip(rows, await asyncio.gather(*map(fleet.generate, asked)), strict=True))

    async def update(version):
        await fleet.update_weights(WeightUpdate(version, models[version % 2]))

    try:
        before = await ask("before", 24)
        crossing = asyncio.ensure_future(ask("crossing", LONG))
        for version in itertools.count(1):
            await asyncio.sleep(0.3)
            await update(version)
            if crossing.done() and version % 2:
                return before, await crossing, await ask("after", 24)
    finally:
        await fleet.close()


@pytest.mark.parametrize(("kind", "family", "mode"), CASES)
def test_log_probabilities_are_those_of_the_trainer(kind, family, mode, fleet_of, image, tmp_path):
    models = [make_family(tmp_path / f"model{seed}", family, seed=seed) for seed in range(2)]
    rows = rows_of(models[0], family, image)
    model = ModelReference(str(models[0]), "float32")
    served = asyncio.run(asyncio.wait_for(_served(fleet_of(kind, mode), model, models, rows), 2 * WAIT_S))
    before, crossing, after = served
    assert {version for _, each in before for version in each.versions} == {0}
    assert len({version for _, each in after for version in each.versions}) == 1
    met = [set(each.versions) for _, each in crossing]
    assert max(map(len, met)) > 1, "no request was met by an update"
    written = [bool({IMAGE, VIDEO} & set(each.output_ids[:-1])) for _, each in crossing]
    assert any(written), "the policy wrote no image token, behind which generation goes on"
    exact = [*before, *after, *(crossing if mode == "recompute" else [])]
    for (row, generation), gap in zip(exact, distances(models, exact), strict=True):
        message = f"{len(row.files)} images, versions {set(generation.versions)}"
        assert gap.max() < TOLERANCE, f"{message}: {gap}"


def test_an_update_that_forgets_any_one_tensor_shows(image, tmp_path):
    """So that the test above sees every tensor: each changes some log-probability by far more than it allows."""
    from transformers import AutoModelForImageTextToText

    for family in FAMILIES:
        folders = [make_family(tmp_path / f"{family}{seed}", family, seed=seed) for seed in range(2)]
        old, new = (AutoModelForImageTextToText.from_pretrained(folder) for folder in folders)
        row = rows_of(folders[0], family, image)[1]
        ids = torch.tensor([[*row.ids, *range(7, 27)]])
        asked = {"pixel_values": row.seen.pixels, "image_grid_thw": row.seen.grid}
        asked |= {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
        with torch.no_grad():
            right = new(**asked).logits.log_softmax(-1)[0, len(row.ids) :]
            for name, tensor in new.named_parameters():
                kept = tensor.clone()
                tensor.copy_(old.get_parameter(name))
                gap = (new(**asked).logits.log_softmax(-1)[0, len(row.ids) :] - right).abs().max()
                tensor.copy_(kept)
                # Softmax does not see what is added to all keys alike.
                assert gap > 20 * TOLERANCE or name.endswith(("k_proj.bias", "qkv.bias")), f"{family} {name}: {gap}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_images_runs_on_servers(kind, request, server_environment, tmp_path):
    """By its YAML, with staleness: weights change while images are looked at."""
    program, options = (request.getfixturevalue(f"{kind}_{name}") for name in ("program", "options"))
    changes = dict.fromkeys(KINDS[kind][2], 128)
    own = {"program": program, "options": {**options, **changes}, "environment": server_environment}
    words = [f"inference_engine.{name}={json.dumps(value)}" for name, value in own.items()]
    words += [f"inference_engine.type={kind}", "inference_engine.max_concurrent_requests=16", "steps=3"]
    words += ["rollout.batch_size=2", "rollout.group_size=4", "evaluation.limit=2", "weight_sync.logprob_check_every=1"]
    words += ['model.source={"type": "vision/tiny_model", "head_size": 32}', "sampling.max_new_tokens=8"]
    words += ["rollout.max_staleness=0", f"run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "areal_core", "run", str(EXAMPLE), "--plugins", kind, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/behavior_difference" in line]
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert max(line["train/behavior_difference"] for line in trained) < TOLERANCE
    assert max(line["logprob_check/difference_max"] for line in trained) < TOLERANCE
