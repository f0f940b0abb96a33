"""Several ranks in every layout equal one process: with gloo on the CPU, or NCCL on GPUs."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_fsdp.parallel.file_names import named_as_in_files

pytestmark = pytest.mark.slow


LAYOUTS = {
    "data2": ("qwen3", 2, {}),
    "moe2": ("qwen3_moe", 2, {}),
    "expert2": ("qwen3_moe", 2, {"parallel": {"expert": 2}, "router_loss": 0.3}),
    "expert2-full": ("qwen3_moe", 2, {"parallel": {"expert": 2}, "activation_checkpointing": "full"}),
    "data4-expert2": ("mixtral", 4, {"parallel": {"expert": 2}}),
    "context2-expert2": ("qwen3_moe", 2, {"parallel": {"context": 2, "expert": 2}}),
    "replicas2-expert2": ("qwen3_moe", 4, {"parallel": {"replicas": 2, "expert": 2}}),
    "replicas2": ("qwen3", 2, {"parallel": {"replicas": 2}}),
    "replicas2-half": ("qwen3", 2, {"parallel": {"replicas": 2}, "optimizer_state_dtype": "bfloat16"}),
    "tensor2": ("qwen3", 2, {"parallel": {"tensor": 2}}),
    "tensor2-compiled": ("qwen3", 2, {"parallel": {"tensor": 2}, "compile": True}),
    "context2": ("qwen3", 2, {"parallel": {"context": 2}}),
    "context2-compiled": (
        "llama",
        2,
        {"parallel": {"context": 2}, "compile": True, "activation_checkpointing": "selective"},
    ),
    "data2-tensor2": ("llama", 4, {"parallel": {"data": 2, "tensor": 2}}),
    "adapter": ("llama", 2, {"adapter": {}}),
    "adapter-context2-compiled": ("qwen3", 2, {"parallel": {"context": 2}, "compile": True, "adapter": {}}),
    "mixers2": ("jamba", 2, {}),
    "mixers2-compiled": ("jamba", 2, {"compile": True, "activation_checkpointing": "full"}),
    "rows2": ("gemma2", 2, {}),
    "tensor2-context2": ("mistral", 4, {"parallel": {"tensor": 2, "context": 2}}),
}
"""A model, how many ranks, and the engine's settings. The head is tied, not tied, and of an odd number of words. An
adapter is that of `adapter_folder`."""


NIGHTLY = set(LAYOUTS) - {"expert2", "data2-tensor2", "context2", "mixers2"}
"""Cases that test little that the others do not."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in LAYOUTS],
)
def ranks(request, tmp_path_factory, model_folder, adapter_folder, program):
    """Return the results of several ranks, which also load a checkpoint of one process."""
    kind, count, settings = LAYOUTS[request.param]
    adapter = {"from_folder": str(adapter_folder(kind))} if "adapter" in settings else None
    settings = {**settings, "adapter": adapter}
    from areal_core.engines import ModelReference, OptimizerSettings
    from areal_core.sdk import ACTOR
    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.engine import FSDPEngine

    folder = tmp_path_factory.mktemp("ranks")
    single = FSDPEngine(FSDPConfig(learning_rate=1e-3, adapter=adapter))
    single.setup(ModelReference(str(model_folder(kind))), ACTOR, OptimizerSettings(100, 0.7))
    for _ in range(2):
        program.train(single, program.make_batch())
    single.save(folder / "single")
    expected = program.parameters_of(single)
    arguments = [str(folder / "store"), str(model_folder(kind)), str(folder), json.dumps(settings)]
    hidden_gpus = {} if torch.cuda.device_count() >= count else {"CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, program.__file__, str(rank), str(count), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **hidden_gpus, "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    results = [torch.load(folder / f"rank{rank}.pt") for rank in range(count)]
    return folder, results, expected


@pytest.fixture
def alone(ranks, request, make_engine, adapter_folder):
    """Return a function that sets up an engine on one rank, with the layout's model and adapter."""
    kind, _, settings = LAYOUTS[request.node.callspec.params["ranks"]]
    adapter = {"from_folder": adapter_folder(kind)} if "adapter" in settings else None
    return partial(make_engine, kind, adapter=adapter, router_loss=settings.get("router_loss", 0.0))


def assert_close(found, wanted, tolerance=1e-6):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def assert_same_metrics(result, metrics):
    """Compare metrics; with context parallelism there is no `router_balance`, which needs whole sequences."""
    expected = {name: value for name, value in metrics.items() if name != "router_balance" or name in result}
    assert result == pytest.approx(expected, abs=1e-6)


def assert_equal(found, wanted):
    assert_close(found, wanted, tolerance=0)


def test_several_ranks_have_the_gradient_of_one_rank(ranks, alone, program, batch):
    _, results, _ = ranks
    gradients, metrics = program.gradients_of(alone(temperature=0.7), batch)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-2
    for result in results:
        assert_close(result["gradients"], gradients)
        assert_same_metrics(result["metrics"], metrics)


def test_a_rank_without_a_sequence(ranks, alone, program, batch):
    _, results, _ = ranks
    engine = alone(temperature=0.7)
    gradients, metrics = program.gradients_of(engine, batch.select([1]))
    for result in results:
        assert_close(result["idle"], gradients)
        assert_same_metrics(result["idle_metrics"], metrics)
        assert_close(result["idle_outputs"], engine.forward(batch.select([1]), program.OUTPUTS), 1e-5)


def test_several_ranks_replay_experts_like_one_rank(ranks, alone, program, batch):
    engine = alone(temperature=0.7)
    for result in ranks[1]:
        assert ("replayed" in result) is bool(engine._routing._routers)
    for (gradients, metrics), outputs in (result["replayed"] for result in ranks[1] if "replayed" in result):
        chosen = program.with_choices(engine, batch, missing=[2, 6])
        wanted, expected = program.gradients_of(engine, chosen)
        assert_close(gradients, wanted)
        assert_same_metrics(metrics, expected)
        assert metrics["router_disagreement"] > 0.1
        assert_close(outputs, engine.forward(chosen, program.OUTPUTS), 1e-5)


def test_several_ranks_compare_engines_like_one_rank(ranks, alone, program, batch):
    """The compared engine is sharded too, and a rank without a sequence takes part in its collectives."""
    from areal_core.sdk import REFERENCE

    engine, other = alone(temperature=0.7), alone(role=REFERENCE, temperature=1.3)
    for key, part in (("compared", batch), ("compared_idle", batch.select([1]))):
        wanted = program.compared(engine, other, part)
        assert float(wanted["column"].max()) > 1e-3
        for result in ranks[1]:
            assert_close(result[key], wanted, 1e-5)


def test_a_loss_that_reads_only_hidden_states(ranks, alone, program, batch):
    """Ranks without a loss run the same collectives, whichever outputs the loss reads."""
    from areal_core.sdk import CRITIC

    asked = ["logprobs", "hidden", "topk:3"]
    for part in (batch, batch.select([1])):
        wanted, _ = program.gradients_of(alone(temperature=0.7), part, program.hidden_loss, asked)
        for result in ranks[1]:
            assert_close(result[f"hidden of {len(part)}"], wanted, 1e-5)
    critic = alone(role=CRITIC, temperature=0.7)
    wanted, _ = program.gradients_of(critic, batch.select([1]), program.hidden_loss, ["values", "hidden"])
    for result in ranks[1]:
        assert_close(result["hidden of a critic"], wanted, 1e-5)


def test_likeliest_tokens_and_squared_probabilities(ranks, alone, program, batch):
    """Also over a vocabulary that is split over ranks, and on a rank without a sequence."""
    outputs = [*program.OUTPUTS, "top_logprobs"]
    for part in (batch, batch.select([1])):
        wanted, metrics = program.gradients_of(
            alone(temperature=0.7), program.with_tops(part), program.top_loss, outputs
        )
        squares = alone(temperature=0.7).forward(part, ["logprobs", "sum_pi_squared"])
        for result in ranks[1]:
            gradients, found = result[f"tops of {len(part)}"]
            assert_close(gradients, wanted, 1e-5)
            assert found["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
            assert_close(result[f"squares of {len(part)}"], squares, 1e-5)


def test_outputs_of_the_whole_batch_on_every_rank(ranks, alone, program, batch):
    _, results, _ = ranks
    wanted = alone(temperature=0.7).forward(batch, program.OUTPUTS)
    for result in results:
        assert_close(result["outputs"], wanted, 1e-5)


def test_other_roles(ranks, alone, program, batch):
    from areal_core.sdk import CRITIC, REFERENCE

    reference = alone(role=REFERENCE, temperature=0.7).forward(batch, program.OUTPUTS)
    critic = alone(role=CRITIC).forward(batch, ["values"])
    for result in ranks[1]:
        assert_close(result["reference"], reference, 1e-5)
        assert_close(result["critic"], critic, 1e-5)


def test_updates_and_checkpoint_continue_bit_for_bit(ranks):
    _, results, _ = ranks
    for result in results:
        assert result["third"] == result["third_again"] == result["third_from_snapshot"]
        assert_equal(result["parameters_again"], result["parameters"])
    for result in results[1:]:
        assert_equal(results[0]["parameters"], result["parameters"])


def test_skipped_on_all_ranks(ranks):
    for result in ranks[1]:
        assert result["poisoned"]["skipped"] == 1
        assert_equal(result["parameters_unpoisoned"], result["parameters_again"])


def test_metrics_that_only_one_rank_has_do_not_hang(ranks):
    """Each rank logs metrics with its own names; all ranks get all metrics, reduced by their kind."""
    first = ranks[1][0]["uneven"]
    assert all(result["uneven"] == first for result in ranks[1])
    for rank in [rank for rank, result in enumerate(ranks[1]) if result["leads"]]:
        assert first[f"mean_of_{rank}"] == 2
        assert first[f"sum_of_{rank}"] >= rank + 1
        assert first[f"sum_of_{rank}"] % (rank + 1) == 0
        assert first[f"maximum_of_{rank}"] == -1 - rank
        assert (first[f"histogram_of_{rank}/below_0"], first[f"histogram_of_{rank}/above"]) == (0.25, 0.75)
    assert first["rows"] == 8


def test_a_rank_without_a_sequence_has_no_metrics_of_its_own(ranks):
    first = ranks[1][0]["uneven_and_idle"]
    assert all(result["uneven_and_idle"] == first for result in ranks[1])
    assert sum(f"sum_of_{rank}" in first for rank in range(len(ranks[1]))) == 1
    assert first["rows"] == 1


def test_units_stay_together_on_a_rank(ranks, alone, program):
    """Both rows of each unit are in one micro-batch of one rank, and the update equals that of one process."""
    units = [unit for result in ranks[1] if result["leads"] for unit in result["units"]]
    assert sorted(units) == [(margin, [int(margin), int(margin) + 4]) for margin in (0.0, 1.0, 2.0, 3.0)]
    assert all(result["units"] for result in ranks[1]), "all ranks have something to do"
    _, seen = program.train_pairs(alone(max_tokens_per_microbatch=60))
    assert sorted(seen) == sorted(units)
    for result in ranks[1]:
        assert (result["pairs"]["rows"], result["pairs"]["tokens"]) == (8, ranks[1][0]["metrics"]["tokens"])


def test_a_checkpoint_loads_on_another_number_of_ranks(ranks, alone, program, batch):
    folder, results, expected = ranks
    for result in results:
        assert_equal(result["from_single"], expected)
    engine = alone(temperature=0.7)
    engine.load(folder / "checkpoint")
    assert int(engine._updates) == results[0]["updates"] > 2
    program.train(engine, batch)
    assert_close(program.parameters_of(engine), results[0]["parameters"], 2e-5)


def test_a_snapshot_written_during_training_equals_a_checkpoint(ranks, alone, program):
    """One process loads the snapshot, which the ranks wrote during an update."""
    folder, _, _ = ranks
    found = []
    for name in ("checkpoint", "snapshot"):
        engine = alone(temperature=0.7)
        engine.load(folder / name)
        found.append(program.parameters_of(engine))
    assert_equal(*found)


def test_export_of_several_ranks(ranks):
    folder, results, _ = ranks
    exported = AutoModelForCausalLM.from_pretrained(folder / "export")
    found = named_as_in_files(exported, ((name, p.detach()) for name, p in exported.named_parameters()))
    assert_equal(dict(found), results[0]["parameters_again"])
