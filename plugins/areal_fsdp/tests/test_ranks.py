"""One process against two ranks, started for real: gloo on the CPU, NCCL where there are two GPUs."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, model_folder, program):
    """What two ranks wrote, after one process left a checkpoint for them."""
    from areal_core.interfaces import ACTOR, ModelReference, OptimizerSettings
    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.engine import FSDPEngine

    folder = tmp_path_factory.mktemp("ranks")
    single = FSDPEngine(FSDPConfig(learning_rate=1e-3))
    single.setup(ModelReference(str(model_folder())), ACTOR, OptimizerSettings(100, 0.7))
    for _ in range(2):
        program.train(single, program.make_batch())
    single.save(folder / "single")
    expected = program.parameters_of(single)
    arguments = [str(folder / "store"), str(model_folder()), str(folder)]
    hidden_gpus = {} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, program.__file__, str(rank), "2", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **hidden_gpus, "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=270)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    results = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    return folder, results, expected


def assert_close(found, wanted, tolerance=1e-6):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def assert_equal(found, wanted):
    assert_close(found, wanted, tolerance=0)


def test_two_ranks_have_the_gradient_of_one(ranks, make_engine, program, batch):
    _, results, _ = ranks
    gradients, metrics = program.gradients_of(make_engine(temperature=0.7), batch)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-2
    for result in results:
        assert_close(result["gradients"], gradients)
        assert result["metrics"] == pytest.approx(metrics, abs=1e-6)


def test_a_rank_without_a_sequence(ranks, make_engine, program, batch):
    _, results, _ = ranks
    engine = make_engine(temperature=0.7)
    gradients, metrics = program.gradients_of(engine, batch.select([1]))
    for result in results:
        assert_close(result["idle"], gradients)
        assert result["idle_metrics"] == pytest.approx(metrics, abs=1e-6)
        assert_close(result["idle_outputs"], engine.forward(batch.select([1]), program.OUTPUTS), 1e-5)


def test_two_ranks_compare_as_one_does(ranks, make_engine, program, batch):
    """The other engine is sharded too, and a rank without a sequence takes part in its collectives."""
    from areal_core.interfaces import REFERENCE

    engine, other = make_engine(temperature=0.7), make_engine(role=REFERENCE, temperature=1.3)
    for key, part in (("compared", batch), ("compared_idle", batch.select([1]))):
        wanted = program.compared(engine, other, part)
        assert float(wanted["column"].max()) > 1e-3
        for result in ranks[1]:
            assert_close(result[key], wanted, 1e-5)


def test_a_loss_of_hidden_states_alone(ranks, make_engine, program, batch):
    """Ranks with nothing to learn go through the same collectives, whichever outputs the loss reads."""
    from areal_core.interfaces import CRITIC

    asked = ["logprobs", "hidden", "topk:3"]
    for part in (batch, batch.select([1])):
        wanted, _ = program.gradients_of(make_engine(temperature=0.7), part, program.hidden_loss, asked)
        for result in ranks[1]:
            assert_close(result[f"hidden of {len(part)}"], wanted, 1e-5)
    critic = make_engine(role=CRITIC, temperature=0.7)
    wanted, _ = program.gradients_of(critic, batch.select([1]), program.hidden_loss, ["values", "hidden"])
    for result in ranks[1]:
        assert_close(result["hidden of a critic"], wanted, 1e-5)


def test_outputs_of_the_whole_batch_on_every_rank(ranks, make_engine, program, batch):
    _, results, _ = ranks
    wanted = make_engine(temperature=0.7).forward(batch, program.OUTPUTS)
    for result in results:
        assert_close(result["outputs"], wanted, 1e-5)


def test_other_roles(ranks, make_engine, program, batch):
    from areal_core.interfaces import CRITIC, REFERENCE

    reference = make_engine(role=REFERENCE, temperature=0.7).forward(batch, program.OUTPUTS)
    critic = make_engine(role=CRITIC).forward(batch, ["values"])
    for result in ranks[1]:
        assert_close(result["reference"], reference, 1e-5)
        assert_close(result["critic"], critic, 1e-5)


def test_updates_and_checkpoint_continue_bit_for_bit(ranks):
    _, results, _ = ranks
    for result in results:
        assert result["third"] == result["third_again"] == result["third_from_snapshot"]
        assert_equal(result["parameters_again"], result["parameters"])
    assert_equal(results[0]["parameters"], results[1]["parameters"])


def test_skipped_on_all_ranks(ranks):
    for result in ranks[1]:
        assert result["poisoned"]["skipped"] == 1
        assert_equal(result["parameters_unpoisoned"], result["parameters_again"])


def test_metrics_that_only_one_rank_has_hang_nobody(ranks):
    """Each rank logs under names of its own; all of them are known on both, put together by their kind."""
    first, second = (result["uneven"] for result in ranks[1])
    assert first == second
    for rank in range(2):
        assert first[f"mean_of_{rank}"] == 2
        assert first[f"sum_of_{rank}"] >= rank + 1
        assert first[f"sum_of_{rank}"] % (rank + 1) == 0
        assert first[f"maximum_of_{rank}"] == -1 - rank
        assert (first[f"histogram_of_{rank}/below_0"], first[f"histogram_of_{rank}/above"]) == (0.25, 0.75)
    assert first["rows"] == 8


def test_a_rank_without_a_sequence_has_no_metrics_of_its_own(ranks):
    first, second = (result["uneven_and_idle"] for result in ranks[1])
    assert first == second
    assert sum(f"sum_of_{rank}" in first for rank in range(2)) == 1
    assert first["rows"] == 1


def test_units_stay_together_on_a_rank(ranks, make_engine, program):
    """Both rows of each unit are on one rank, in one micro-batch, and nothing of the update depends on that."""
    units = [unit for result in ranks[1] for unit in result["units"]]
    assert sorted(units) == [(margin, [int(margin), int(margin) + 4]) for margin in (0.0, 1.0, 2.0, 3.0)]
    assert all(result["units"] for result in ranks[1]), "both ranks have something to do"
    _, alone = program.train_pairs(make_engine(max_tokens_per_microbatch=60))
    assert sorted(alone) == sorted(units)
    for result in ranks[1]:
        assert (result["pairs"]["rows"], result["pairs"]["tokens"]) == (8, ranks[1][0]["metrics"]["tokens"])


def test_checkpoint_of_one_loads_on_two_and_back(ranks, make_engine, program, batch):
    folder, results, expected = ranks
    for result in results:
        assert_equal(result["from_single"], expected)
    engine = make_engine(temperature=0.7)
    engine.load(folder / "checkpoint")
    assert int(engine._updates) == 2
    program.train(engine, batch)
    assert_close(program.parameters_of(engine), results[0]["parameters"], 2e-5)


def test_a_snapshot_that_two_ranks_wrote_while_they_trained_is_their_checkpoint(ranks, make_engine, program):
    """Loaded by one, after an update of the two that ran beside the writing."""
    folder, _, _ = ranks
    found = []
    for name in ("checkpoint", "snapshot"):
        engine = make_engine(temperature=0.7)
        engine.load(folder / name)
        found.append(program.parameters_of(engine))
    assert_equal(*found)


def test_export_of_two_ranks(ranks):
    folder, results, _ = ranks
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / "export").named_parameters())
    assert_equal({name: p.detach() for name, p in exported.items()}, results[0]["parameters_again"])
