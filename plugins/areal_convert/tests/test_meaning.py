"""A converted config trains as AReaL's does, or what differs is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from conversions import at, changed, converted

from areal_convert.convert import account
from areal_core.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("actor", "algorithm"),
    [
        ({"use_decoupled_loss": False}, {"proximal": "recomputed", "corrections": []}),
        ({"use_decoupled_loss": False, "recompute_logprob": False}, {"proximal": "behavior", "corrections": []}),
        ({"prox_logp_method": "loglinear"}, {"proximal": "interpolated"}),
        ({"reward_norm": None}, {"type": "reinforce_pp", "advantage": {"type": "reinforce_pp"}}),
        ({"reward_norm": {"mean_level": "group", "std_level": None}, "adv_norm": None},
         {"type": "dr_grpo", "advantage": "group_centered"}),
        ({"reward_norm": {"mean_level": "group", "std_level": "batch"}, "adv_norm": None}, {"advantage": "lite_ppo"}),
        ({"use_sapo_loss": True, "use_decoupled_loss": False, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.1},
         {"type": "sapo", "policy_loss": {"temperature_positive": 1.0, "temperature_negative": 1.1}}),
        ({"use_cispo_loss": True, "eps_clip": 1.0, "eps_clip_higher": 4.0},
         {"type": "cispo", "policy_loss": {"clip_low": 1.0, "clip_high": 4.0}}),
        ({"m2_threshold": 0.04},
         {"type": "m2po", "minibatch_transforms": [{"type": "m2po", "threshold": 0.04, "among": "all"}]}),
        ({"c_clip": 3.0}, {"policy_loss": {"clip_low": 0.4, "clip_high": 0.4, "dual_clip": 3.0}}),
        ({"dynamic_sampling": True}, {"type": "dapo", "group_filters": ["zero_variance"]}),
        ({"kl_ctl": 0.001, "reward_norm": None, "discount": 0.9, "gae_lambda": 0.5},
         {"advantage": {"type": "reinforce_pp", "gamma": 0.45},
          "batch_transforms": [{"type": "reward_scaling", "scale": 10.0, "shift": -0.5, "clip": 20.0},
                               {"type": "kl_in_reward", "coefficient": 0.001}]}),
        ({"behav_imp_weight_cap": None}, {"corrections": []}),
        ({"behav_imp_weight_cap": None, "rejection_sampling": {"action": "mask"}},
         {"corrections": [{"type": "token_mask", "low": 0.0, "high": 5.0}]}),
        ({"behav_imp_weight_cap": None, "rejection_sampling": {"action": "clamp"}},
         {"corrections": [{"type": "token_truncate", "cap": 5.0}]}),
        ({"behav_imp_weight_cap": None, "rejection_sampling": {"action": "clamp", "upper": 2.0}},
         {"corrections": [{"type": "token_truncate", "cap": 2.0}]}),
        ({"behav_imp_weight_cap": None, "rejection_sampling": {"upper": 5.0, "lower": 0.5}},
         {"corrections": [{"type": "token_mask", "low": 0.5, "high": 5.0}]}),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_switches(
    actor: dict[str, Any], algorithm: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = changed(actor=actor)
    assert {key: config["algorithm"].get(key) for key in algorithm} == algorithm
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    assert main(["config", "check", str(tmp_path / "my.yaml")]) == 0, capsys.readouterr().err


def test_what_another_correction_would_say_is_named() -> None:
    _, source = changed(actor={"rejection_sampling": {"level": "sequence", "upper": 2.0}, "behav_imp_weight_cap": None})
    lost = account(source)["lost"]
    assert {"actor.rejection_sampling.level", "actor.rejection_sampling.upper"} <= lost.keys()


def test_a_key_that_the_file_leaves_out_means_areals_default() -> None:
    config, source = converted({
        "train_dataset": {"path": "openai/gsm8k", "batch_size": 32}, "gconfig": {}, "rollout": {"backend": "vllm:d1"},
        "actor": {"backend": "fsdp:d1", "optimizer": {}, "use_decoupled_loss": True},
        "critic": {"path": "small", "optimizer": {}},
    })  # fmt: skip
    expected = {
        "seed": 1, "steps": 233, "rollout.group_size": 1, "rollout.max_staleness": 0, "sampling.max_new_tokens": 16384,
        "training.num_minibatches": 4, "train_engine.learning_rate": 1e-3, "train_engine.weight_decay": 0.01,
        "train_engine.warmup_steps": 0, "roles.critic.learning_rate": 1e-3, "algorithm.policy_loss.clip_high": 0.2,
        "algorithm.auxiliary_losses": [{"type": "value_regression", "clip": 0.5}], "algorithm.corrections": [],
        "algorithm.batch_transforms": [{"type": "reward_scaling", "clip": 20.0}],
    }  # fmt: skip
    assert {key: at(config, key) for key in expected} == expected
    found = account(source)
    assert found["by_default"]["actor.optimizer.lr"] == "AReaL's 0.001, train_engine.learning_rate"
    assert {"actor.kl_ctl", "actor.behav_imp_weight_cap", "actor.disable_dropout"} <= found["lost"].keys()


@pytest.mark.parametrize(
    ("actor", "key"),
    [
        ({"kl_ctl": 0.001}, "actor.kl_ctl"),
        ({"kl_ctl": 0.001, "kl_estimator": "k3", "reward_norm": None}, "actor.kl_ctl"),
        ({"kl_ctl": 0.001, "reward_norm": None}, "actor.kl_estimator"),
        ({"reward_norm": None, "adv_norm": None}, "actor.adv_norm"),
        ({"discount": 0.9}, "actor.discount"),
        ({"disable_dropout": False}, "actor.disable_dropout"),
        ({"temperature": 0.7}, "actor.temperature"),
        ({"path": "${oc.env:MODEL}"}, "actor.path"),
        ({"dtype": ["bfloat16"]}, "actor.dtype"),
    ],
)
def test_what_would_train_otherwise_is_lost_and_not_carried(actor: dict[str, Any], key: str) -> None:
    _, source = changed(actor=actor)
    assert key in account(source)["lost"]
    assert key not in source.carried


def test_what_would_train_otherwise_of_other_sections_is_lost() -> None:
    _, source = changed(
        actor={"optimizer": {"type": "sgd"}, "prox_logp_method": "metrics"},
        gconfig={"greedy": True}, tokenizer_path="other", recover={"freq_steps": 0, "freq_epochs": None},
        critic={"path": "small", "ppo_n_minibatches": 3, "dtype": "float32"},
    )  # fmt: skip
    lost = account(source)["lost"].keys()
    assert lost >= {
        "actor.optimizer.type", "gconfig.greedy", "tokenizer_path", "critic.ppo_n_minibatches", "critic.dtype",
    }  # fmt: skip
    assert {"actor.prox_logp_method", "recover.freq_steps"} <= source.carried.keys()
