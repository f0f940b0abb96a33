"""A DeepSpeed config that contradicts the run, our settings or the engine is refused, with what to do."""

import json
import os

import pytest

from areal_deepspeed.config import DeepSpeedConfig
from areal_deepspeed.refusals import refusals

ZERO2 = {"zero_optimization": {"stage": 2}}


def problems(written, dtype="float32", **settings):
    return list(refusals(DeepSpeedConfig(config=written, **settings).document(), dtype))


def filled(written, dtype="float32", trains=True, **settings):
    document = DeepSpeedConfig(config=written, **settings).document()
    assert list(refusals(document, dtype)) == []
    return document.filled(dtype=dtype, hidden_size=20, total_updates=300, trains=trains)


@pytest.mark.parametrize(
    ("keys", "dtype", "words"),
    [
        ({"train_batch_size": 32}, "float32", ["fixes train_batch_size at 32", '"auto"']),
        ({"train_micro_batch_size_per_gpu": 1}, "float32", ["max_tokens_per_microbatch"]),
        ({"gradient_accumulation_steps": 8}, "float32", ["gradient_accumulation_steps at 8"]),
        ({"fp16": {"enabled": True}}, "float32", ["enables fp16", "model.dtype: bfloat16"]),
        ({"amp": {"enabled": True}}, "float32", ["enables amp"]),
        ({"bf16": {"enabled": True}}, "float32", ["bf16.enabled: true", "model.dtype is float32", "dtype: bfloat16"]),
        ({"bfloat16": {"enabled": False}}, "bfloat16", ["bf16.enabled: false", "set model.dtype: float32"]),
        ({"bf16": {"immediate_grad_update": True}}, "float32", ["bf16.immediate_grad_update"]),
        ({"zero_optimization": {"stage": 1}}, "float32", ["stage: 1", "take 2"]),
        ({"zero_optimization": {}}, "float32", ["stage: None"]),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "float32", ["zero_quantized_weights"]),
        ({"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, "float32", ["sub_group_size", "nothing fills"]),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
            "float32",
            ["offload_param.device is nvme", "take cpu or none"],
        ),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "float32", ["is for stage 3"]),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 0.3}}}, "float32", ["has `ratio`"]),
        ({"optimizer": {"type": "Lamb"}}, "float32", ["optimizer Lamb", "take AdamW"]),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "float32", ["adam_w_mode is false"]),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "float32", ["`amsgrad`"]),
        ({"scheduler": {"type": "OneCycle"}}, "float32", ["scheduler OneCycle", "WarmupLR"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}}, "float32", ["`total_num_steps`"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "auto"}}}, "float32", ["nothing fills"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1}}}, "float32", ["warmup_max_lr is 1"]),
        ({"tensor_parallel": {"autotp_size": 2}}, "float32", ["`tensor_parallel`", "fsdp/fsdp"]),
        ({"activation_checkpointing": {}}, "float32", ["train_engine.activation_checkpointing: true"]),
        ({"tensorboard": {"enabled": True}}, "float32", ["`tensorboard`", "trackers"]),
        ({"gradient_allreduce_op": "sum"}, "float32", ["summed over ranks"]),
        ({"compression_training": {}}, "float32", ["`compression_training`", "does not know"]),
    ],
)
def test_what_is_refused(keys, dtype, words):
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
    params = {"total_num_steps": 300, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 7}
    assert found["scheduler"] == {"type": "WarmupDecayLR", "params": params}
    assert "scheduler" not in filled(written, "bfloat16", trains=False)
    document = DeepSpeedConfig(config=written, epsilon=1e-6).document()
    assert document.optimizer_settings() == {"lr": 1e-5, "betas": (0.8, 0.9), "eps": 1e-6}


def test_what_auto_became_is_told():
    written = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 9},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    document = DeepSpeedConfig(config=written, learning_rate=0.25, epsilon=1e-6).document()
    found = document.became(document.filled(dtype="bfloat16", hidden_size=20, total_updates=3, trains=True))
    assert found == (
        "zero_optimization.reduce_bucket_size=400, optimizer.params.lr=0.25, bf16.enabled=True, gradient_clipping=1.0"
    )
    assert DeepSpeedConfig(config=ZERO2).document().became({}) == ""


def test_a_file_is_read(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**ZERO2, "gradient_clipping": 0.25}))
    assert filled(path)["gradient_clipping"] == 0.25


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "cannot be read"),
        ('{"bf16": {}, "bf16": {}}', "'bf16' stands twice"),
        ('{"bf16": }', "is no JSON"),
        ("[1]", "holds no JSON object"),
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
    for name, words in (("pipe", "it is not a file"), ("deep", "is no JSON")):
        (problem,) = DeepSpeedConfig(config=tmp_path / name).check(None)
        assert words in problem


def test_a_written_config_means_the_same(tmp_path):
    """A run writes every setting out and reads it again: what nobody chose contradicts nothing."""
    written = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
    written["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    settings = DeepSpeedConfig.model_validate({"config": written})
    again = DeepSpeedConfig.model_validate(json.loads(settings.model_dump_json()))
    assert [*refusals(settings.document(), "float32")] == [*refusals(again.document(), "float32")] == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizer": "Lamb"}, "`optimizer`: 'Lamb', and it must be an object"),
        ({"optimizer": {"params": [1]}}, "`optimizer.params`: [1]"),
        ({"scheduler": {"type": ["WarmupLR"]}}, "`scheduler.type`"),
        ({"fp16": True}, "`fp16`: True"),
        ({"optimizer": {"params": {"lr": -1}}}, "optimizer.params.lr: -1: Input should be greater than 0"),
        ({"optimizer": {"params": {"lr": "fast"}}}, "optimizer.params.lr: 'fast'"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: nan"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": "maybe"}}, "overlap_comm: 'maybe', and it must be true or"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": -5}},
            "bucket_size: -5, and it must be a whole number",
        ),
        (
            {"zero_optimization": {"stage": 2, "sub_group_size": "1 GB"}},
            "sub_group_size: '1 GB', and it must be a whole",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": 5}}},
            "zero_optimization.offload_optimizer.pin_memory: 5, and it must be true or false",
        ),
    ],
)
def test_what_no_config_can_mean_is_refused(changed, words):
    """Once, also beside settings of ours that say something else."""
    settings = DeepSpeedConfig.model_validate({"config": {**ZERO2, **changed}, "learning_rate": 1e-3})
    told = [*refusals(settings.document(), "float32")]
    assert [words in each for each in told] == [True], told
