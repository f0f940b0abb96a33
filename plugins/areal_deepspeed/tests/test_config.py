"""A DeepSpeed config that contradicts the run, our settings or the engine is refused, with what to do."""

import json
import os

import pytest

from areal_deepspeed.config import DeepSpeedConfig

ZERO2 = {"zero_optimization": {"stage": 2}}


def problems(written, dtype="float32", **settings):
    return DeepSpeedConfig(config=written, **settings).problems(dtype)


def filled(written, dtype="float32", trains=True, **settings):
    config = DeepSpeedConfig(config=written, **settings)
    assert config.problems(dtype) == []
    return config.document().filled(dtype=dtype, hidden_size=20, total_updates=300, trains=trains)


def zero(stage=2, **keys):
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize(
    ("keys", "dtype", "words"),
    [
        ({"train_batch_size": 32}, "float32", ["train_batch_size: 32", "areal computes it", 'make it "auto"']),
        ({"train_micro_batch_size_per_gpu": 1}, "float32", ["max_tokens_per_microbatch"]),
        ({"gradient_accumulation_steps": 8}, "float32", ["gradient_accumulation_steps: 8"]),
        ({"fp16": {"enabled": True}}, "float32", ["fp16.enabled: true", "loss scaling", "model.dtype: bfloat16"]),
        ({"bf16": {"enabled": True}}, "float32", ["bf16.enabled: true", "model.dtype is float32", "make it false"]),
        ({"bf16": {"enabled": False}}, "bfloat16", ["bf16.enabled: false", "model.dtype is bfloat16", "make it true"]),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "float32", ["`bf16.bf16_master_weights_and_grads`"]),
        ({"zero_optimization": {"stage": 1}}, "float32", ["stage: 1", "use 2 or 3"]),
        ({"zero_optimization": {}}, "float32", ["stage"]),
        (zero(3, zero_quantized_weights=True), "float32", ["zero_quantized_weights: true", "make it false"]),
        (zero(compute_grad_norm=False), "float32", ["compute_grad_norm: false", "make it true"]),
        (zero(round_robin_gradients=True), "float32", ["round_robin_gradients: true", "make it false"]),
        (zero(zenflow={}), "float32", ["zenflow: {}", "remove it"]),
        (zero(offload_optimizer={"super_offload": True}), "float32", ["super_offload: true"]),
        (zero(3, offload_param={"device": "nvme"}), "float32", ['offload_param.device: "nvme"', 'make it "cpu"']),
        ({"optimizer": {"type": "Lamb"}}, "float32", ['optimizer.type: "Lamb"', 'make it "AdamW"']),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "float32", ["adam_w_mode: false"]),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "float32", ["`optimizer.params.amsgrad`"]),
        ({"scheduler": {"type": "OneCycle"}}, "float32", ['scheduler.type: "OneCycle"', "WarmupLR"]),
        ({"scheduler": {"type": ["WarmupLR"]}}, "float32", ["scheduler.type: ["]),
        ({"optimizer": {"name": "Lamb"}}, "float32", ["`optimizer.name`", "does not support"]),
        (zero(elastic_checkpoint=True), "float32", ["elastic_checkpoint: true"]),
        ({"amp": {"enabled": True}}, "float32", ["`amp`", "Precision"]),
        ({"tensor_parallel": {"autotp_size": 2}}, "float32", ["`tensor_parallel`", "sharding of layers"]),
        ({"activation_checkpointing": {}}, "float32", ["activation checkpointing", "settings of the run"]),
        ({"tensorboard": {"enabled": True}}, "float32", ["`tensorboard`", "trackers"]),
        ({"gradient_allreduce_op": "sum"}, "float32", ["`gradient_allreduce_op`"]),
        ({"gradient_cliping": 1.0}, "float32", ["`gradient_cliping`", "does not support"]),
    ],
)
def test_what_would_silently_train_otherwise_is_refused(keys, dtype, words):
    (problem,) = problems({**ZERO2, **keys}, dtype)
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    ("keys", "settings", "word"),
    [
        ({"gradient_clipping": 0.5}, {"max_gradient_norm": 2.0}, "gradient_clipping: 0.5"),
        ({"gradient_clipping": 0.5}, {"max_gradient_norm": None}, "gradient_clipping: 0.5"),
        ({"optimizer": {"params": {"lr": 1e-4}}}, {"learning_rate": 1e-3}, "lr: 0.0001"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, {"betas": (0.8, 0.9)}, "betas: [0.9, 0.95]"),
        ({"optimizer": {"params": {"eps": 1e-6}}}, {"epsilon": 1e-4}, "eps: 1e-06"),
        ({"optimizer": {"params": {"weight_decay": 0.1}}}, {"weight_decay": 0.2}, "weight_decay: 0.1"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, {"warmup_steps": 5}, "num_steps: 9"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1}}}, {"learning_rate": 1e-3}, "max_lr: 1,"),
        ({"scheduler": {"type": "WarmupLR"}}, {"schedule": "cosine"}, "train_engine sets schedule"),
    ],
)
def test_two_values_of_one_thing(keys, settings, word):
    """Refused where both are said; the same value twice, and a value beside a default, are fine."""
    written = {**ZERO2, **keys}
    (problem,) = problems(written, **settings)
    assert word in problem
    assert problems(written) == []


def test_the_same_value_twice_is_no_contradiction():
    written = {**ZERO2, "gradient_clipping": 1.0, "optimizer": {"params": {"lr": 2e-5, "betas": [0.8, 0.9]}}}
    assert problems(written, max_gradient_norm=1.0, learning_rate=2e-5, betas=(0.8, 0.9)) == []


def test_auto_is_filled():
    written = {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9], "eps": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto"}},
    }
    found = filled(written, "bfloat16", learning_rate=1e-4, warmup_steps=7, max_gradient_norm=None)
    assert "auto" not in json.dumps(found)
    zero = found["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (400, 360)
    assert zero["stage3_param_persistence_threshold"] == 200
    assert found["bf16"]["enabled"] is True
    assert found["fp16"] == {"enabled": False}
    assert found["gradient_clipping"] == 0.0
    params = {"total_num_steps": 300, "warmup_max_lr": 1e-4, "warmup_num_steps": 7}
    assert found["scheduler"] == {"type": "WarmupDecayLR", "params": params}
    assert "scheduler" not in filled(written, "bfloat16", trains=False)
    settings = DeepSpeedConfig(config=written, epsilon=1e-6).document().settings
    assert (settings.learning_rate, settings.betas, settings.epsilon) == (None, (0.8, 0.9), 1e-6)


def test_a_schedule_knows_our_rate_and_the_run():
    """Of DeepSpeed's own, WarmupDecayLR ends its warm-up at 0.001."""
    for kind, named in {
        "WarmupLR": {"warmup_max_lr": 2e-5},
        "WarmupDecayLR": {"warmup_max_lr": 2e-5, "total_num_steps": 300},
        "WarmupCosineLR": {"total_num_steps": 300},
    }.items():
        found = filled({**ZERO2, "scheduler": {"type": kind}}, learning_rate=2e-5)["scheduler"]
        assert found == {"type": kind, "params": {**named, "warmup_num_steps": 1}}
    params = {"warmup_max_lr": 0.5, "warmup_num_steps": 9}
    document = DeepSpeedConfig(config={**ZERO2, "scheduler": {"type": "WarmupLR", "params": params}}).document()
    assert (document.settings.learning_rate, document.settings.warmup_steps) == (0.5, 9)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**ZERO2, "gradient_clipping": 0.25}))
    assert filled(path)["gradient_clipping"] == 0.25


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "cannot be read"),
        ('{"bf16": {}, "bf16": {}}', "'bf16' occurs twice"),
        ('{"bf16": }', "cannot be read .*: name a JSON file"),
        ("[1]", "is not a JSON object"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, word):
    path = tmp_path / "zero.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=word):
        DeepSpeedConfig(config=path).document()


def test_a_pipe_is_not_waited_for_and_no_nesting_is_a_traceback(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text('{"a":' * 100_000)
    for name, words in (("pipe", "there is no such file"), ("deep", "cannot be read")):
        (problem,) = DeepSpeedConfig(config=tmp_path / name).problems("float32")
        assert words in problem


def test_a_written_config_means_the_same(tmp_path):
    """A run writes every setting out and reads it again: what nobody chose contradicts nothing."""
    written = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
    written["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    settings = DeepSpeedConfig.model_validate({"config": written})
    again = DeepSpeedConfig.model_validate(json.loads(settings.model_dump_json()))
    assert settings.problems("float32") == again.problems("float32") == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizer": "Lamb"}, "`optimizer`: 'Lamb', but it must be an object"),
        ({"optimizer": {"params": [1]}}, "`optimizer.params`: [1]"),
        ({"fp16": True}, "`fp16`: True"),
        ({"optimizer": {"params": {"lr": -1}}}, "optimizer.params.lr: -1: Input should be greater than 0"),
        ({"optimizer": {"params": {"lr": "fast"}}}, "optimizer.params.lr: 'fast'"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: nan"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}, "warmup_num_steps: -1"),
    ],
)
def test_what_no_config_can_mean_is_refused(changed, words):
    """Once, also beside settings of ours that say something else."""
    (told,) = problems({**ZERO2, **changed}, learning_rate=1e-3)
    assert words in told
