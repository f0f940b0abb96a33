"""One process against two ranks at both stages of ZeRO, started for real, with gloo."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: see the README of areal-deepspeed", allow_module_level=True)

import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

CONFIGS = {
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero2-buckets": {
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500,
            "allgather_bucket_size": 500,
        }
    },
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "zero3-auto": {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "sub_group_size": 5000,
        },
        "train_batch_size": "auto",
        "gradient_clipping": 0.05,
    },
}


NIGHTLY = ("zero2-buckets", "zero3-auto")
"""Say little more than the others do together."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in CONFIGS]
)
def ranks(request, tmp_path_factory, model_folder, program):
    """What two ranks wrote, and what one process computes of the same."""
    config, folder = CONFIGS[request.param], tmp_path_factory.mktemp("ranks")
    batch = program.make_batch()
    engine, expected = program.learn(model_folder, config, batch)
    expected |= program.others(model_folder, config, batch, engine)
    engine.save(folder / "single")
    engine.close()
    arguments = [str(folder / "store"), str(model_folder), str(folder), json.dumps(config)]
    processes = [
        subprocess.Popen(
            [sys.executable, program.__file__, str(rank), "2", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(2)], expected


def assert_close(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("part", ["gradients", "idle", "hidden"])
def test_ranks_have_the_gradient_of_one(ranks, part):
    """Of the whole batch in different numbers of micro-batches, where a rank has no sequence, and of hidden states."""
    _, results, expected = ranks
    assert max(gradient.abs().max() for gradient in expected[part].values()) > 1e-3
    for result in results:
        assert_close(result[part], expected[part], 1e-5)


@pytest.mark.parametrize("part", ["metrics", "idle_metrics", "clipped"])
def test_ranks_have_the_metrics_of_one(ranks, part):
    _, results, expected = ranks
    assert expected[part]["gradient_norm"] > 0.05
    for result in results:
        assert result[part] == pytest.approx(expected[part], abs=1e-4)


@pytest.mark.parametrize("part", ["outputs", "reference", "critic"])
def test_outputs_of_the_whole_batch_on_every_rank(ranks, part):
    _, results, expected = ranks
    for result in results:
        assert_close(result[part], expected[part], 1e-5)


@pytest.mark.parametrize("part", ["parameters", "average"])
def test_ranks_become_what_one_becomes(ranks, part):
    _, results, expected = ranks
    assert_close(results[0][part], results[1][part], 0)
    assert_close(results[0][part], expected[part], 1e-4)


def test_a_checkpoint_continues_bit_for_bit(ranks):
    for result in ranks[1]:
        assert result["next"] == result["next_again"] == result["next_elsewhere"]
        assert_close(result["then_again"], result["then"], 0)
        assert_close(result["then_elsewhere"], result["then"], 0)


def test_a_checkpoint_of_another_number_of_ranks_is_refused(ranks):
    for result in ranks[1]:
        assert "trainer_processes=1; DeepSpeed needs the same number to load it, but here it is 2" in result["refused"]
        assert "set launcher.trainer_processes to 1" in result["refused"]


def test_skipped_on_all_ranks(ranks):
    for result in ranks[1]:
        assert result["poisoned"]["skipped"] == 1
        assert_close(result["unpoisoned"], result["then"], 0)


def test_export_of_two_ranks(ranks):
    folder, results, _ = ranks
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / "export").named_parameters())
    assert_close({name: p.detach() for name, p in exported.items()}, results[0]["then"], 0)
