"""TRL's arguments as a config of areal: what TRL's user wrote is trained, defaults included, or named in one error."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config import resolve
from areal_core.config.sections import reward_name
from areal_core.config.yaml_text import dump
from areal_core.errors import ConfigError
from areal_core.library.start import _written
from areal_core.trl import GRPOConfig, GRPOTrainer
from areal_core.trl.arguments import HONORED, NO_EFFECT, REFUSED, _Honored

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import RunConfig

pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(64)]
TRL_ONLY = {
    "beta", "cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "delta", "disable_dropout",
    "ds3_gather_for_generation", "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min",
    "entropy_target", "epsilon", "epsilon_high", "generation_batch_size", "generation_kwargs",
    "importance_sampling_level", "log_completions", "log_completions_hub_repo", "log_multimodal",
    "log_unique_prompts", "loss_type", "mask_truncated_completions", "max_completion_length",
    "max_tool_calling_iterations", "min_p", "model_init_kwargs", "multi_objective_aggregation",
    "num_completions_to_print", "num_generations", "num_generations_eval", "num_iterations",
    "off_policy_mask_threshold", "pad_to_multiple_of", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "repetition_penalty", "reward_weights", "router_aux_loss_coef", "sapo_temperature_neg", "sapo_temperature_pos",
    "scale_rewards", "shuffle_dataset", "steps_per_generation", "sync_ref_model", "temperature",
    "top_entropy_quantile", "top_k", "top_p", "transformers_continuous_batching_config", "trust_remote_code",
    "use_adaptive_entropy", "use_bias_correction_kl", "use_transformers_continuous_batching",
    "use_transformers_paged", "use_vllm", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos",
    "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_group_port", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_max_model_length", "vllm_mode", "vllm_model_impl",
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
}  # fmt: skip
"""Arguments of TRL 1.16's GRPOConfig that transformers' TrainingArguments does not have."""
CHANGED_BY_TRL = {"learning_rate", "logging_steps", "gradient_checkpointing", "bf16", "remove_unused_columns"}
"""Arguments of TrainingArguments for which TRL has defaults of its own."""


def right(completions, answer, **kwargs):  # type: ignore[no-untyped-def]
    return [float(one == wanted) for one, wanted in zip(completions, answer, strict=True)]


def short(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [-float(len(one)) for one in completions]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def trainer(*, rewards: Any = right, rows: Any = ROWS, arguments: dict[str, Any], **more: Any) -> GRPOTrainer:
    return GRPOTrainer("model", rewards, GRPOConfig("out", **arguments), rows, **more)


def config(tmp_path: Path, *, rewards: Any = right, **arguments: Any) -> RunConfig:
    """The config that is trained with, read as a run reads it."""
    values = _written(trainer(rewards=rewards, arguments=arguments)._config, tmp_path / "functions")
    (tmp_path / "run.yaml").write_text(dump({**values, "preset": "grpo/defaults"}))
    return resolve("run.yaml", environment={}).config


def problems(**arguments: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        trainer(arguments=arguments)
    return list(caught.value.problems)


@pytest.mark.slow
def test_every_argument_of_trl_and_transformers_is_sorted() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    theirs = {field.name: field.default for field in fields(arguments) if field.init}
    assert (HONORED | NO_EFFECT.keys() | REFUSED.keys()) ^ (theirs.keys() | TRL_ONLY) == set()
    assert len(HONORED) + len(NO_EFFECT) + len(REFUSED) == len(HONORED | NO_EFFECT.keys() | REFUSED.keys())
    ours = {field.name: field.default for field in fields(_Honored)} | {name: one for name, (one, _) in REFUSED.items()}
    shared = (ours.keys() & theirs.keys()) - CHANGED_BY_TRL - {"optim"}
    plain = {name: getattr(theirs[name], "value", theirs[name]) for name in shared}
    assert {name: ours[name] for name in shared} == plain


def test_the_defaults_are_those_of_trl(tmp_path: Path) -> None:
    read = config(tmp_path)
    engine, algorithm = read.train_engine.keywords(), read.algorithm.settings
    assert (read.rollout.batch_size, read.rollout.group_size, read.rollout.max_staleness) == (1, 8, 0)
    assert read.training.updates == 1
    assert read.steps == 3 * 64
    assert read.seed == 42
    assert (read.sampling.temperature, read.sampling.max_new_tokens) == (1.0, 512)
    assert (read.model.path, read.model.dtype) == ("model", "bfloat16")
    assert (engine["learning_rate"], engine["schedule"], engine["warmup_steps"]) == (1e-6, "linear", 0)
    assert (engine["betas"], engine["weight_decay"], engine["max_gradient_norm"]) == ((0.9, 0.999), 0.0, 1.0)
    assert engine["activation_checkpointing"] == "full"
    assert algorithm.advantage.target == "grpo/group_normalized"
    assert algorithm.advantage.keywords() == {"epsilon": 1e-4}
    assert algorithm.policy_loss.keywords() == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert algorithm.loss_aggregation.target == "core/token_mean"
    assert algorithm.corrections == algorithm.regularizers == algorithm.group_filters == []
    assert read.evaluation is None
    assert read.checkpoint.every == 500


def test_batches_updates_and_steps(tmp_path: Path) -> None:
    read = config(
        tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=2, steps_per_generation=4,
        num_iterations=2, max_steps=20, num_generations=4, save_steps=8, save_total_limit=5,
    )  # fmt: skip
    assert (read.rollout.batch_size, read.rollout.group_size) == (16, 4), "64 answers are generated at a time"
    assert (read.training.num_minibatches, read.training.num_epochs) == (2, 2)
    assert read.steps == 5, "20 updates are 5 batches of 4 updates"
    assert (read.checkpoint.every, read.checkpoint.keep) == (2, 5)


def test_the_batch_grows_with_the_processes_of_trl() -> None:
    arguments = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_generations": 4}
    made = trainer(arguments=arguments, num_processes=4)
    assert made._config["rollout"]["batch_size"] == 8 * 4 * 4 / 4
    assert made._config["training"]["num_minibatches"] == 2
    assert "a batch has 128 answers, 4 for each prompt, as TRL's with 4 process(es)" in "".join(made._notes)
    made = trainer(arguments={"generation_batch_size": 64}, num_processes=4)
    assert (made._config["rollout"]["batch_size"], made._config["training"]["num_minibatches"]) == (8, 2)
    with pytest.raises(ConfigError, match=r"must be a multiple of per_device_train_batch_size x num_processes, .* 32"):
        trainer(arguments={"generation_batch_size": 16}, num_processes=4)


@pytest.mark.parametrize(
    ("rows", "arguments", "steps", "note"),
    [
        (64, {"max_steps": 10, "num_iterations": 4}, 3, "12 updates are trained where TRL trains 10"),
        (64, {"max_steps": 12, "num_iterations": 4}, 3, ""),
        (3, {"num_train_epochs": 0.5}, 2, ""),
        (3, {"num_train_epochs": 0.5, "num_iterations": 3}, 2, "6 updates are trained where TRL trains 5"),
        (5, {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_train_epochs": 1}, 3, ""),
        (1, {"per_device_train_batch_size": 64, "num_train_epochs": 2}, 2, ""),
    ],
)
def test_epochs_and_updates_are_rounded_as_in_transformers(
    rows: int, arguments: dict[str, Any], steps: int, note: str
) -> None:
    made = trainer(rows=ROWS[:rows], arguments=arguments)
    assert made._config["steps"] == steps
    assert [one.partition(":")[0] for one in made._notes if "are trained" in one] == ([note] if note else [])


def test_an_epoch_has_the_length_of_the_rows_whatever_max_steps_is() -> None:
    made = trainer(arguments={"max_steps": 200, "save_strategy": "epoch"})
    assert made._config["checkpoint"]["every"] == 64


def test_remote_code_may_be_trusted_in_both_places(tmp_path: Path) -> None:
    options = {"trust_remote_code": True}
    assert config(tmp_path, trust_remote_code=True, model_init_kwargs=options).model.trust_remote_code
    assert config(tmp_path, model_init_kwargs=options).model.trust_remote_code


@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
def test_checkpoints_are_not_written_by_the_clock(tmp_path: Path, strategy: str) -> None:
    checkpoint = config(tmp_path, save_strategy=strategy, save_steps=8).checkpoint
    assert (checkpoint.every, checkpoint.every_s) == ({"no": 0, "steps": 8, "epoch": 64}[strategy], 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"loss_type": "grpo"}, {"loss": "ppo_clip", "aggregation": "sequence_mean"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False},
         {"aggregation": "constant_length", "advantage": "group_centered"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss": "cispo", "aggregation": "token_mean"}),
        ({"loss_type": "sapo"}, {"loss": "sapo", "aggregation": "sequence_mean"}),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"},
         {"loss": "gspo", "aggregation": "constant_length"}),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"},
         {"loss": "gspo", "aggregation": "sequence_mean"}),
        ({"scale_rewards": "batch"}, {"advantage": "lite_ppo"}),
    ],
)  # fmt: skip
def test_losses(tmp_path: Path, arguments: dict[str, Any], expected: dict[str, str]) -> None:
    settings = config(tmp_path, **arguments).algorithm.settings
    chosen = {
        "loss": settings.policy_loss, "aggregation": settings.loss_aggregation, "advantage": settings.advantage,
    }  # fmt: skip
    assert {name: chosen[name].target.partition("/")[2] for name in expected} == expected
    if arguments.get("loss_type") == "cispo":
        assert chosen["loss"].keywords()["clip_high"] == 4.0, "TRL bounds the weight, areal what is above 1"


def test_terms_beside_the_loss(tmp_path: Path) -> None:
    settings = config(
        tmp_path, beta=0.04, use_bias_correction_kl=False, entropy_coef=0.01, delta=3.0, use_vllm=True,
        mask_truncated_completions=True, off_policy_mask_threshold=0.5,
    ).algorithm.settings  # fmt: skip
    found = {one.target.partition("/")[2]: one.keywords() for one in (*settings.regularizers, *settings.corrections)}
    assert found == {
        "reference_kl": {"coefficient": 0.04, "estimator": "k3"},
        "entropy_bonus": {"coefficient": 0.01},
        "opsm": {"threshold": 0.5},
        "sequence_truncate": {"cap": 3.0},
        "product_mask": {"low": 1e-9, "high": 3.0},
    }
    assert settings.policy_loss.keywords()["dual_clip"] == 3.0
    assert [one.target for one in settings.group_filters] == ["grpo/mask_truncated"]


def test_rewards_and_their_weights(tmp_path: Path) -> None:
    read = config(
        tmp_path, rewards=[right, short], reward_weights=[1.0, 0.5], multi_objective_aggregation="normalize_then_sum",
        per_device_train_batch_size=16,
    )  # fmt: skip
    assert [(one.common.name, one.common.weight) for one in read.rewards] == [("right", 1.0), ("short", 0.5)]
    assert read.rewards[0].keywords() == {"function": f"{__file__}:right"}
    assert read.algorithm.settings.advantage.keywords()["weights"] == {"right": 1.0, "short": 0.5}


def test_every_reward_has_a_name_of_its_own(tmp_path: Path) -> None:
    read = config(
        tmp_path, rewards=["models/judge", lambda completions, **_: [0.0], lambda completions, **_: [1.0],
                           functools.partial(short), short, "other/judge"],
        multi_objective_aggregation="normalize_then_sum",
    )  # fmt: skip
    names = ["judge", "reward", "reward_2", "short", "short_2", "judge_2"]
    assert [reward_name(one) for one in read.rewards] == names
    assert read.algorithm.settings.advantage.keywords()["weights"] == dict.fromkeys(names, 1.0)


def test_sampling_that_trl_trains_on_as_it_is(tmp_path: Path) -> None:
    assert not config(tmp_path).sampling.allow_mismatched_sampling
    read = config(tmp_path, top_p=0.9, min_p=0.1).sampling
    assert (read.top_p, read.min_p, read.allow_mismatched_sampling) == (0.9, 0.1, True)


def test_evaluation(tmp_path: Path) -> None:
    made = trainer(arguments={"eval_strategy": "steps", "eval_steps": 5, "num_generations_eval": 2}, eval_dataset=ROWS)
    assert made._config["evaluation"] == {"every": 5, "samples_per_prompt": 2, "at_start": False, "dataset": ROWS}
    assert "evaluation" not in trainer(arguments={}, eval_dataset=ROWS)._config, "TRL's eval_strategy is no"


def test_everything_that_cannot_be_honored_is_named_at_once() -> None:
    found = problems(fp16=True, loss_type="vespo", top_entropy_quantile=0.2, optim="adafactor", num_generation=4)
    assert [line.partition(":")[0].partition("=")[0] for line in found] == [
        "fp16", "top_entropy_quantile", "num_generation", "optim", "loss_type",
    ]  # fmt: skip
    assert "TRL 1.16 has no such argument" in found[2]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"generation_batch_size": 12}, "generation_batch_size"),
        ({"per_device_train_batch_size": 6}, "num_generations"),
        ({"per_device_train_batch_size": 4, "generation_batch_size": 8}, "steps_per_generation"),
        ({"steps_per_generation": 2, "generation_batch_size": 16}, "generation_batch_size"),
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "loss_type"),
        ({"delta": 1.1}, "delta"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate",
          "vllm_importance_sampling_clip_max": None},
         "vllm_importance_sampling_mode"),
        ({"model_init_kwargs": {"revision": "main"}}, "model_init_kwargs"),
        ({"entropy_coef": 0.1, "loss_type": "grpo"}, "entropy_coef"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights"),
        ({"sync_ref_model": True}, "sync_ref_model"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_honored(arguments: dict[str, Any], name: str) -> None:
    assert [line.partition(":")[0].partition("=")[0] for line in problems(**arguments)] == [name]


def test_arguments_that_areal_does_not_map_are_readable_as_in_trl(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = GRPOConfig("out", log_completions=True)
    assert (arguments.push_to_hub, arguments.log_completions, arguments.resume_from_checkpoint) == (False, True, None)
    with pytest.raises(AttributeError, match="has no 'log_completion'"):
        _ = arguments.log_completion
    made = trainer(arguments={})
    made.push_to_hub(dataset_name="rows")
    made.accelerator.print("saved")
    printed = "".join(capfd.readouterr())
    assert "nothing is uploaded: `hf upload OWNER/NAME trainer.run.model`" in printed
    assert "saved" in printed


def test_arguments_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def watches(completions, trainer_state, **kwargs):  # type: ignore[no-untyped-def]
        return [0.0]

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer(object(), watches, train_dataset=iter(ROWS), callbacks=[1], optimizers=(None, None), peft=1)  # type: ignore[arg-type]
    found = [line.partition(":")[0] for line in caught.value.problems]
    assert found == ["max_steps=-1", "model", "reward_funcs", "callbacks", "peft", "WORLD_SIZE"]


@pytest.mark.slow
def test_a_tokenizer_that_was_changed_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("areal_grpo.demonstration.model").make_model(tmp_path / "model", hidden=32, layers=1, heads=2)

    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    tokenizer.pad_token = tokenizer.eos_token
    trainer(arguments={}, processing_class=tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="processing_class: its chat template differs from that of model"):
        trainer(arguments={}, processing_class=tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.eos_token = "7"
    with pytest.raises(ConfigError, match="its chat template, special tokens, vocabulary differs from that of model"):
        trainer(arguments={}, processing_class=tokenizer)


@pytest.mark.slow
def test_a_resume_takes_the_arguments_of_the_script(tmp_path: Path) -> None:
    values = _written(trainer(arguments={})._config, tmp_path / "functions")
    (tmp_path / "run.yaml").write_text(dump({**values, "preset": "grpo/defaults"}))
    folder = tmp_path / "out" / "run-1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolve("run.yaml", environment={}).to_yaml())
    for found in (True, folder):
        with pytest.raises(ConfigError) as caught:
            trainer(arguments={"learning_rate": 5e-6, "max_steps": 300}).train(resume_from_checkpoint=found)
        assert caught.value.hints[0] == "train_engine.learning_rate: 1e-06 -> 5e-06"
        assert "steps" not in caught.value.hints[0]
    with pytest.raises(ConfigError, match=r"rewards cannot change on a resume: the run has \{'right': 1\.0\}"):
        trainer(rewards=short, arguments={}).train(resume_from_checkpoint=folder)


def test_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = trainer(arguments={}, peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    assert made._config["train_engine"]["adapter"] == {"rank": 8, "alpha": 16, "modules": ["q_proj", "v_proj"]}
    with pytest.raises(ConfigError, match=r"peft_config: areal has no equal of lora_dropout=0\.1"):
        trainer(arguments={}, peft_config=peft.LoraConfig(target_modules="all-linear", lora_dropout=0.1))
