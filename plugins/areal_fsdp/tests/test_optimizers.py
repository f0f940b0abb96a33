"""Optimizers that a config chooses: Muon, torchao's AdamW with 8 bits, and one from a file."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal_core.config import select
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import ACTOR
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.optimizer import make_optimizers, set_rate, step
from areal_fsdp.parallel.gradients import gradient_norm
from areal_fsdp.parallel.mesh import Ranks

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def config_of(optimizer, **settings):
    return select(
        "train_engines", {"type": "fsdp/fsdp", "learning_rate": 0.01, "optimizer": optimizer, **settings}
    ).settings


def parameters_of_a_layer():
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (5, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.layers.0.mlp.up_proj.bias": (6,),
        "model.layers.0.mixer.A_log": (6, 4),
        "model.layers.0.experts.gate_up_proj": (2, 6, 4),
        "model.layers.1.mlp.down_proj.lora_A.weight": (2, 6),
        "model.norm.weight": (4,),
        "lm_head.weight": (5, 4),
    }
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def orthogonalized(matrix, iterations):
    """Newton-Schulz in float64, by its formula: X ← a X + (b X Xᵀ + c (X Xᵀ)²) X."""
    x = matrix.double() / matrix.double().norm()
    x = x.T if len(x) > x.shape[1] else x
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if len(matrix) > matrix.shape[1] else x


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest():
    parameters = parameters_of_a_layer()
    first, second = make_optimizers(parameters, config_of("muon"))
    taken = [{id(p) for group in o.param_groups for p in group["params"]} for o in (first, second)]
    of_muon = [name for name, p in parameters.items() if id(p) in taken[0]]
    assert of_muon == ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.lora_A.weight"]
    assert len(taken[1]) == len(parameters) - 2
    assert (type(first), type(second)) == (torch.optim.Muon, torch.optim.AdamW)


def test_muon_is_its_formula():
    """The iteration rounds to bfloat16; the formula does not, so the digits of bfloat16 agree."""
    parameters = {f"layers.0.{i}.weight": torch.nn.Parameter(torch.randn(*s)) for i, s in enumerate([(6, 4), (4, 9)])}
    config = config_of({"type": "muon", "momentum": 0.9, "iterations": 4}, weight_decay=0.1, max_gradient_norm=None)
    optimizers = make_optimizers(parameters, config)
    set_rate(optimizers, 0.05)
    momenta, values = ([p.detach().double() * f for p in parameters.values()] for f in (0, 1))
    for _ in range(3):
        for place, parameter in enumerate(parameters.values()):
            parameter.grad = torch.randn_like(parameter)
            momenta[place] = 0.9 * momenta[place] + 0.1 * parameter.grad
            look_ahead = 0.1 * parameter.grad + 0.9 * momenta[place]
            size = 0.05 * 0.2 * math.sqrt(max(parameter.shape))
            values[place] = values[place] * (1 - 0.05 * 0.1) - size * orthogonalized(look_ahead, 4)
        step(optimizers, torch.tensor(1.0), None, None)
    for parameter, value in zip(parameters.values(), values, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, atol=3e-3, rtol=0)
    for momentum, state in zip(momenta, optimizers[0].state.values(), strict=True):
        torch.testing.assert_close(state["momentum_buffer"].double(), momentum, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [1, torch.nan, 0])
def test_a_step_clips_and_skips_with_any_optimizer(scale):
    parameters = {"layers.0.weight": torch.nn.Parameter(torch.randn(3, 4)), "bias": torch.nn.Parameter(torch.randn(3))}
    optimizers = make_optimizers(parameters, config_of("muon"))
    before = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: torch.randn_like(p) * scale for name, p in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone()
    norm = gradient_norm([p.grad for p in parameters.values()], Ranks())
    step(optimizers, norm, 0.5, None)
    assert all(p.grad is None for p in parameters.values())
    assert all(torch.equal(p, before[name]) is (scale != 1) for name, p in parameters.items())
    momentum = optimizers[0].state[parameters["layers.0.weight"]]["momentum_buffer"]
    wanted = 0.05 * gradients["layers.0.weight"] * 0.5 / norm if scale == 1 else torch.zeros(3, 4)
    torch.testing.assert_close(momentum, wanted, rtol=1e-4, atol=1e-6)


SGD = """
import torch

def complete(parameters, settings, *, momentum: float = 0.5):
    optimizer = torch.optim.SGD(parameters.values(), lr=settings.learning_rate, momentum=momentum)
    for parameter in parameters.values():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return [optimizer]

def late(parameters, settings):
    return [torch.optim.SGD(parameters.values(), lr=settings.learning_rate, momentum=0.5)]

def partial(parameters, settings):
    return [torch.optim.SGD(list(parameters.values())[1:], lr=settings.learning_rate)]
"""


def test_an_optimizer_of_a_file_trains(tmp_path, monkeypatch, program, batch, model_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sgd.py").write_text(SGD)
    for name, problem in {
        "complete": "",
        "late": "creates its state in the first",
        "partial": "each parameter once",
    }.items():
        engine = FSDPEngine(config_of(f"sgd.py:{name}"))
        try:
            if problem:
                with pytest.raises(RunError, match=problem):
                    train(engine, program, batch, model_folder("qwen3"))
            else:
                first, last = train(engine, program, batch, model_folder("qwen3"))
                assert last < first
        finally:
            engine.close()


@pytest.fixture(scope="session")
def folder_for(tmp_path_factory, model_folder):
    """Return a function from an optimizer to a model; quantized moments need matrices of 4,096 elements a rank."""

    def folder_for(name):
        if name != "adamw_8bit":
            return model_folder("llama")
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, num_hidden_layers=2, max_position_embeddings=64))
        folder = tmp_path_factory.mktemp("wide")
        model.save_pretrained(folder)
        return folder

    return folder_for


def train(engine, program, batch, folder, updates=10, dtype="float32"):
    engine.setup(ModelReference(str(folder), dtype), ACTOR, OptimizerSettings(100, 1.0))
    losses = [program.train(engine, batch)["loss"] for _ in range(updates)]
    return losses[0], losses[-1]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"offload_optimizer": True}, "offload_optimizer works only with the engine's own AdamW"),
        ({"offload_parameters": True}, "offload_parameters works only with the engine's own AdamW"),
        ({"optimizer_state_dtype": "bfloat16"}, "optimizer_state_dtype is for the engine's own AdamW"),
        ({"parallel": {"tensor": 2}}, "needs matrices that are divided by rows"),
    ],
)
def test_settings_of_adamw_are_refused(settings, problem):
    assert any(problem in text for text in config_of("muon", **settings)._problems_of_optimizer())


def test_8_bits_need_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(RunError, match="needs torchao, which cannot be imported") as caught:
        make_optimizers(parameters_of_a_layer(), config_of("adamw_8bit"))
    assert "pip install 'areal-fsdp[torchao]'" in caught.value.hints


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [None, {"rank": 4}])
@pytest.mark.parametrize("name", ["muon", pytest.param("adamw_8bit", marks=needs_torchao)])
def test_a_checkpoint_and_a_snapshot_continue_bit_for_bit(name, adapter, dtype, program, batch, folder_for, tmp_path):
    folder = folder_for(name)

    def make():
        engine = FSDPEngine(config_of(name, adapter=adapter, learning_rate=1e-3))
        first, last = train(engine, program, batch, folder, 3, dtype)
        assert last < first
        return engine

    engine, other = make(), make()
    size = engine.snapshot_size()
    write = engine.snapshot()
    for _ in range(2):  # the snapshot is of before
        program.train(engine, batch)
    write(tmp_path / "snapshot")
    wanted = program.parameters_of(engine)
    program.train(other, batch)
    other.load(tmp_path / "snapshot")
    for _ in range(2):
        program.train(other, batch)
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in program.parameters_of(other).items())
    trained = sum(p.numel() for p in engine._parameters.values())
    most = 4 + 2.1 if name == "adamw_8bit" and adapter is None else 4 + 8
    assert 4 * trained < size < most * trained + 20_000
    engine.close()
    other.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", pytest.param("adamw_8bit", marks=needs_torchao)])
def test_two_ranks_learn_as_one(name, folder_for, tmp_path):
    """Muon's iteration in bfloat16 rounds differently with sharded matrices; both ranks have the same parameters."""
    folder = folder_for(name)
    program_file = Path(__file__).with_name("optimizer_rank_program.py")
    hidden_gpus = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program_file), str(rank), str(tmp_path), str(folder), name],
            stderr=subprocess.PIPE,
            text=True,
            env={**hidden_gpus, "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert all(torch.equal(tensor, second["parameters"][key]) for key, tensor in first["parameters"].items())
    assert all(torch.equal(tensor, first["again"][key]) for key, tensor in first["parameters"].items())
    single = torch.load(tmp_path / "single.pt")
    moved = {key: (tensor - single["before"][key]).norm() for key, tensor in single["parameters"].items()}
    for key, tensor in first["parameters"].items():
        assert (tensor - single["parameters"][key]).norm() < 0.05 * moved[key] + 1e-5, key
        assert (tensor - single["again"][key]).norm() < 0.05 * moved[key] + 1e-5, key
