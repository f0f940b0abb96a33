"""Configs of AReaL's examples, their facts written anew, become valid configs; every key is carried or named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from conversions import CONFIGS, at, changed, converted

from areal_convert.convert import account, convert
from areal_convert.source import Source, read
from areal_core.cli import main
from areal_core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
ALWAYS_LOST = {"train_dataset.max_length", "saver.freq_epochs"}
TWICE = {"actor.adv_norm.mean_level", "actor.adv_norm.std_level"}
ALIKE = {
    "seed": 1,
    "shuffle": True,
    "model.dtype": "bfloat16",
    "dataset.answer_after": "####",
    "rewards": ["rewards/math_verify"],
    "sampling.temperature": 1.0,
    "train_engine.betas": [0.9, 0.999],
    "train_engine.epsilon": 1e-8,
    "train_engine.max_gradient_norm": 1.0,
    "train_engine.schedule": "constant",
    "train_engine.warmup_steps": 0,
    "train_engine.activation_checkpointing": "full",
    "algorithm.proximal": "recomputed",
    "algorithm.loss_aggregation": "token_mean",
    "algorithm.corrections": [{"type": "token_mask", "low": 0.0, "high": 5.0}],
    "algorithm.batch_transforms": [{"type": "reward_scaling", "scale": 10.0, "shift": -0.5, "clip": 20.0}],
    "checkpoint.every_s": 3600,
}
GSM8K = {
    "steps": 290,
    "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "dataset.name": "openai/gsm8k",
    "rollout.batch_size": 256,
    "rollout.group_size": 4,
    "rollout.max_staleness": 2,
    "rollout.max_pending_batches": 2,
    "sampling.max_new_tokens": 1024,
    "training.num_minibatches": 1,
    "train_engine.learning_rate": 1.7e-5,
    "train_engine.weight_decay": 0.017,
    "train_engine.max_tokens_per_microbatch": 10240,
    "algorithm.policy_loss.clip_low": 0.4,
    "algorithm.policy_loss.clip_high": 0.4,
    "inference_engine.type": "sglang",
    "inference_engine.options": {"context_length": 32768, "mem_fraction_static": 0.8},
    "placement": "train=4 generate=tp1x4",
    "evaluation.every": 29,
    "evaluation.dataset.split": "test",
    "checkpoint.every": 29,
}
EXPECTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "grpo": ({"algorithm.type": "grpo", "algorithm.advantage": "group_normalized"}, TWICE),
    "dr_grpo": (
        {
            "algorithm.type": "dr_grpo",
            "algorithm.advantage": "reinforce_pp_baseline",
        },
        set(),
    ),
    "rloo": (
        {
            "algorithm.type": "rloo",
            "algorithm.advantage": "reinforce_pp_baseline",
            "algorithm.policy_loss.type": "ppo_clip",
        },
        set(),
    ),
    "gspo": ({"algorithm.type": "gspo", "algorithm.advantage": "group_normalized"}, TWICE),
    "dapo": (
        {
            "algorithm.type": "dapo",
            "algorithm.policy_loss.clip_low": 0.2,
            "algorithm.policy_loss.clip_high": 0.28,
            "algorithm.group_filters": ["zero_variance"],
            "algorithm.reward_shaping": [
                {"type": "overlong_penalty", "max_length": 4096, "buffer": 512, "factor": 1.0}
            ],
            "model.path": "Qwen/Qwen2.5-1.5B",
            "sampling.max_new_tokens": 4096,
        },
        {"dynamic_bs"} | TWICE,
    ),
    "lora": (
        {
            "steps": 87,
            "model.path": "Qwen/Qwen3-0.6B",
            "train_engine.learning_rate": 1.7e-4,
            "train_engine.adapter": {"rank": 16, "alpha": 16, "modules": "all-linear", "sync": "alone"},
            "inference_engine.type": "vllm",
            "inference_engine.adapter_rank": 16,
            "inference_engine.options": {
                "max_model_len": 32768,
                "gpu_memory_utilization": 0.8,
                "enforce_eager": True,
            },
            "placement": "train=8 generate=tp1x8",
            "launcher.type": "local",
            "evaluation.every": None,
            "evaluation.dataset.split": None,
        },
        TWICE,
    ),
    "ppo": (
        {
            "algorithm.type": "ppo",
            "algorithm.advantage": {"type": "gae", "gamma": 1.0, "gae_lambda": 1.0, "whiten": True},
            "algorithm.auxiliary_losses": [{"type": "value_regression", "clip": 0.5}],
            "roles.critic.path": "Qwen/Qwen2.5-1.5B-Instruct",
            "roles.critic.learning_rate": 1.7e-5,
        },
        set(),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_has_a_counterpart_is_carried_and_what_has_none_is_named(name: str) -> None:
    values, lost = EXPECTED[name]
    config, source = converted(read(CONFIGS / f"{name}.yaml"))
    expected = ALIKE | GSM8K | values
    assert {key: at(config, key) for key in expected} == expected
    assert account(source)["lost"].keys() == ALWAYS_LOST | lost


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_carried_or_named_with_a_reason(name: str) -> None:
    source = converted(read(CONFIGS / f"{name}.yaml"), rows=1000)[1]
    others = account(source)
    keys = [key for part in others.values() for key in part]
    assert len(keys) == len(set(keys))
    assert source.flat.keys() - source.defaults <= set(keys) <= source.flat.keys()
    assert all(words for part in others.values() for words in part.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_is_valid(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its comments name all that was not carried from the file, and the summary what is lost or by default."""
    assert main(["convert", "areal", str(CONFIGS / f"{name}.yaml"), "--rows", "7473"]) == 0
    shown = capsys.readouterr()
    (tmp_path / "my.yaml").write_text(shown.out)
    assert main(["config", "check", str(tmp_path / "my.yaml")]) == 0, capsys.readouterr().err
    source = converted(read(CONFIGS / f"{name}.yaml"), rows=7473)[1]
    found = account(source)
    comments = "".join(line.removeprefix("#").strip() + " " for line in shown.out.splitlines() if line[:1] == "#")
    for part, text in [(part, comments) for part in ("by_default", "lost", "not_needed")] + [
        (part, shown.err) for part in ("by_default", "lost")
    ]:
        assert [key for key in found[part] if f"{key}," not in text and f"{key} -" not in text] == []
    assert ", ".join(f"{len(keys)} {part.replace('_', ' ')}" for part, keys in found.items()) in shown.err


def test_json_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", "areal", str(CONFIGS / "grpo.yaml"), "--json", "-o", str(tmp_path / "my.json")]
    assert main(words) == 0
    assert capsys.readouterr().out == ""
    found = json.loads((tmp_path / "my.json").read_text())
    assert found["config"]["rollout"]["group_size"] == 4
    assert found["carried"]["gconfig.n_samples"] == "rollout.group_size"
    assert "saver.freq_epochs" in found["lost"]
    assert main([*words[:-1], str(tmp_path / "nowhere" / "my.json")]) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 3\nmodel: {path: x}\n", "no section actor, rollout, gconfig, train_dataset"),
        ("train_dataset: {}\ngconfig: {}\nrollout: {}\nactor: {}\n", "train_dataset.batch_size"),
        ("- a\n", "not a config of AReaL's"),
        ("a: [", "not valid YAML"),
        ("a: 1\na: 2\n", "'a' occurs twice"),
    ],
)
def test_another_file_is_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.yaml").write_text(text)
    assert main(["convert", "areal", str(tmp_path / "other.yaml")]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "missing.yaml")


def test_unknown_keys_and_other_classes_are_named() -> None:
    config, source = changed(
        surprise={"a": 1}, workflow="mine.Flow", actor={"dtype": "float16", "eps_clip": "${nowhere}"}
    )
    lost = account(source)["lost"]
    assert lost["surprise.a"] == "areal has nothing of this name"
    assert "from-areal" in lost["workflow"]
    assert "dtype" not in config["model"]
    assert lost["actor.dtype"]
    assert "clip_low" not in config["algorithm"].get("policy_loss", {})


def test_every_setting_of_areals_classes_is_known() -> None:
    """Of generation, actor, optimizer, micro-batches, FSDP and rollout, as AReaL's command line has them."""
    settings = {
        "actor": "reward_clip mask_no_eos_with_zero log_agent_stats attn_impl pad_to_maximum grad_reduce_dtype offload"
        " enable_tree_training _version request_timeout setup_timeout is_critic temperature",
        "actor.fsdp": "wrap_policy memory_efficient_load optim_step_prefetch_layers offload_params",
        "actor.mb_spec": "n_mbs granularity n_mbs_divisor packing_algorithm",
        "actor.optimizer": "offload initial_loss_scale min_loss_scale loss_scale_window hysteresis min_lr_ratio",
        "rollout": "request_timeout request_retries setup_timeout pause_grace_period routing_strategy agent.mode"
        " check_trajectory_format return_routed_experts",
        "gconfig": "max_tokens ignore_eos use_beam_search top_p top_k stop stop_token_ids frequency_penalty",
    }
    source = Source(read(CONFIGS / "grpo.yaml"))
    source.flat |= {f"{section}.{name}": 1 for section, names in settings.items() for name in names.split()}
    convert(source)
    assert [key for key, words in account(source)["lost"].items() if "nothing of this name" in words] == []


def test_steps_need_to_know_the_rows() -> None:
    tree = read(CONFIGS / "boba.yaml")
    config, source = converted(tree)
    assert "steps" not in config
    assert "--rows" in account(source)["lost"]["total_train_epochs"]
    config, _ = converted(tree, rows=1000)
    assert (config["steps"], config["rollout"]["max_pending_batches"], config["rollout"]["max_staleness"]) == (
        310,
        3,
        4,
    )


@pytest.mark.parametrize(
    ("text", "placement", "parallel"),
    [
        ("sglang:d8|fsdp:d8", "train=8 generate=tp1x8 colocated", None),
        ("vllm.d2t4+d8c2", "train=16 generate=tp4x2", {"context": 2}),
        ("sglang[rollout]:d4t2+fsdp[actor]:(attn:d4t2c2|ffn:d2t4e2)", "train=16 generate=tp2x4",
         {"tensor": 2, "context": 2, "expert": 2}),
    ],
)  # fmt: skip
def test_allocations(text: str, placement: str, parallel: dict[str, int] | None) -> None:
    config, source = changed(allocation_mode=text)
    assert config["placement"] == placement
    assert at(config, "train_engine.parallel") == parallel
    assert source.carried["allocation_mode"] == "placement"
    assert config["inference_engine"].get("memory_saver", False) == ("|fsdp" in text)


def test_a_backend_for_each_engine() -> None:
    config, source = changed(rollout={"backend": "vllm:d2t4"}, actor={"backend": "fsdp:d4c2"})
    assert config["placement"] == "train=8 generate=tp4x2"
    assert config["train_engine"]["parallel"] == {"context": 2}
    assert {"rollout.backend", "actor.backend"} <= source.carried.keys()
    assert "allocation_mode" in account(source)["lost"]


def test_a_tracker() -> None:
    config, _ = changed(stats_logger={"wandb": {"mode": "online", "project": "gsm8k"}})
    assert config["trackers"] == [{"type": "trackers/wandb", "mode": "online", "project": "gsm8k"}]


def test_an_allocation_that_areal_has_not_is_named() -> None:
    config, source = changed(allocation_mode="sglang:d4+megatron:d2p2")
    assert config["placement"] == "train=4 generate=tp1x4"
    assert "pipeline" in account(source)["lost"]["allocation_mode"]
    _, source = changed(allocation_mode="sglang:d4+megatron:d4")
    assert "fsdp engine" in account(source)["lost"]["allocation_mode"]
    config, source = changed(allocation_mode="mystery")
    assert config["inference_engine"] == {"type": "hf"}
    assert account(source)["lost"]["allocation_mode"]


def test_warmup_counts_updates_and_freq_counts_whichever_comes_first() -> None:
    optimizer = {**read(CONFIGS / "grpo.yaml")["actor"]["optimizer"], "warmup_steps_proportion": 0.1}
    config, _ = changed(actor={"optimizer": optimizer, "ppo_n_minibatches": 4}, recover={"freq_steps": 10})
    assert config["train_engine"]["warmup_steps"] == 29 * 4
    assert config["checkpoint"]["every"] == 10


def test_an_interpolation_of_itself_ends() -> None:
    _, source = changed(a="${b}", b="${a}")
    assert account(source)["lost"]["a"] == "its value is not in the file"


@pytest.mark.parametrize("value", [None, "abc", "12", -3, 0, float("nan"), [], {"a": 1}, True])
def test_a_value_of_another_kind_is_named_and_never_a_traceback(value: object) -> None:
    tree = read(CONFIGS / "ppo.yaml")
    keys = [(section, key) for section, part in tree.items() if isinstance(part, dict) for key in part]
    for section, key in [*keys, *((key, "") for key in tree)]:
        if (section, key) not in {("train_dataset", "batch_size"), ("train_dataset", "")}:  # `read` refuses
            broken = {**tree, section: {**tree[section], key: value} if key else value}
            source = Source(broken, 7473)
            convert(source)
            found = account(source)
            known = {**found["carried"], **found["by_default"], **found["lost"], **found["not_needed"]}
            assert [name for name in source.flat if name not in known and name not in source.defaults] == []


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    assert main(["convert", "areal", str(CONFIGS / "grpo.yaml"), "-o", str(tmp_path / "mine.yaml")]) == 2
    assert "File exists" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "mine"
