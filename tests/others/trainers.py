"""Whole trainers of TRL beside areal's learner: a tiny model, the same rows, a few updates with AdamW."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset
from samples import build
from theirs import ON_CPU
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from areal_core.config import Selection, roles_of
from areal_core.config.sections import TrainingSection
from areal_core.data import Episode, FinishReason, Generation, PackedBatch, TrajectoryBuilder
from areal_core.data.packing import pack_group
from areal_core.interfaces import ModelReference, OptimizerSettings
from areal_core.training.learner import Learner
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

UPDATES, PROMPTS, ANSWERS, PAIRS, VOCABULARY = 4, 4, 4, 8, 64
LEARNING_RATE = 2e-3
TEMPLATE = (
    "{% for m in messages %}<im> {{ 'w10' if m['role'] == 'user' else 'w11' }} "
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <end>{% endgeneration %} "
    "{% else %}{{ m['content'] }} <end> {% endif %}{% endfor %}{% if add_generation_prompt %}<im> w11 {% endif %}"
)


@dataclass(frozen=True)
class Trainer:
    """One comparison of whole trainers.

    Attributes:
        component: Kind and name in areal's plugin system of what it is about.
        kind, config: TRL's trainer and its settings.
        theirs: Settings of TRL.
        algorithm, ours: Algorithm of areal and its settings.
        epochs: Updates on each batch; from the second one on, ratios are not 1.
        rows: Kind of rows: a method of `Rows`.
        note, differs: As in `Case`.
    """

    component: str
    kind: Any
    config: Any
    theirs: Mapping[str, Any]
    algorithm: str
    ours: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 1
    rows: str = "answers"
    note: str = ""
    differs: str = ""


@dataclass
class Steps(TrainerCallback):
    """The parameters of TRL's model before the first update and after each."""

    parameters: list[dict[str, torch.Tensor]]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.parameters.append(copied(model))


@dataclass
class Trained:
    """Loss and gradient norm of each update, and the parameters before the first one and after each."""

    losses: list[float]
    norms: list[float]
    parameters: list[dict[str, torch.Tensor]]


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a model's parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_models(folder: Path) -> None:
    """Write a tiny random model, another one, and one with a head of one value, with a tokenizer of 64 words."""
    words = ["<pad>", "<eos>", "<im>", "<end>", *(f"w{number}" for number in range(4, VOCABULARY))]
    words_only = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w63"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=["<im>", "<end>"]
    )
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    description = Qwen2Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        **sizes,
        **tokens,
    )
    for name, seed in (("policy", 3), ("other", 4)):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(description)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)  # or every distribution would be almost uniform
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.manual_seed(5)
    scored = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, dtype=torch.float32)
    scored.save_pretrained(folder / "scores")
    tokenizer.save_pretrained(folder / "scores")


class Rows:
    """Rows for all updates, from a fixed seed."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(7)

    def text(self, low: int, high: int) -> str:
        return " ".join(f"w{number}" for number in self._ids(low, high))

    def pairs(self) -> list[dict[str, Any]]:
        return [
            {
                "prompt": f"{self.text(2, 6)} ",
                "chosen": self.text(1, 9),
                "rejected": self.text(1, 9),
                "margin": float(np.round(self._random.random(), 2)),
            }
            for _ in range(UPDATES * PAIRS)
        ]

    def labels(self) -> list[dict[str, Any]]:
        return [{**row, "label": bool(self._random.random() < 0.5)} for row in self.completions()]

    def completions(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{self.text(2, 6)} ", "completion": self.text(1, 9)} for _ in range(UPDATES * PAIRS)]

    def messages(self, turns: int = 3) -> list[dict[str, Any]]:
        lengths = self._random.integers(1, turns + 1, UPDATES * PAIRS)
        return [{"messages": [message for _ in range(length) for message in self._turn()]} for length in lengths]

    def exchanges(self) -> list[dict[str, Any]]:
        return self.messages(turns=1)

    def _turn(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text(1, 6)}, {"role": "assistant", "content": self.text(1, 6)}]

    def answers(self) -> list[tuple[list[int], list[Answer]]]:
        """Return prompts with their answers, of several turns with tokens of tools between them."""
        return [
            (self._ids(2, 6), [self._answer(number % PROMPTS == 0) for _ in range(ANSWERS)])
            for number in range(UPDATES * PROMPTS)
        ]

    def _answer(self, is_right: bool) -> Answer:
        turns = [(self._ids(1, 5), True)]
        for _ in range(self._random.integers(0, 3)):
            turns += [(self._ids(1, 3), False), (self._ids(1, 5), True)]
        has_ended = bool(self._random.random() < 0.7)
        if has_ended:
            turns[-1][0].append(1)
        reward = 1.0 if is_right else float(np.round(self._random.normal(), 3))
        return Answer(turns, has_ended, reward, float(np.round(self._random.normal(), 3)))

    def _ids(self, low: int, high: int) -> list[int]:
        return self._random.integers(4, 60, self._random.integers(low, high)).tolist()


@dataclass(frozen=True)
class Answer:
    """An answer: its turns with whether the model wrote them, and two rewards."""

    turns: list[tuple[list[int], bool]]
    has_ended: bool
    first: float
    second: float

    def episode(self, prompt: list[int], named: bool) -> Episode:
        """Return the answer for areal."""
        builder = TrajectoryBuilder()
        builder.add_context(prompt)
        reason = FinishReason.STOP if self.has_ended else FinishReason.LENGTH
        for ids, is_sampled in self.turns:
            if is_sampled:
                builder.add_generation(Generation(ids, [-1.0] * len(ids), [0] * len(ids), reason))
            else:
                builder.add_context(ids)
        rewards = {"first": self.first, "second": self.second} if named else {}
        return Episode([builder.build()], self.first, rewards)


BASE = {
    **ON_CPU,
    "learning_rate": LEARNING_RATE,
    "per_device_train_batch_size": PAIRS,
    "gradient_accumulation_steps": 1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "gradient_checkpointing": False,
    "max_steps": UPDATES,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 1,
}


def in_order(kind: Any) -> Any:
    """Return a trainer that takes the rows in their order."""

    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def their_run(case: Trainer, folder: Path, rows: Any) -> Trained:
    """Train with TRL's trainer."""
    path = "scores" if case.kind is RewardTrainer else "policy"
    automatic = AutoModelForSequenceClassification if case.kind is RewardTrainer else AutoModelForCausalLM
    model = automatic.from_pretrained(folder / path, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(folder / "other", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / path)
    steps = Steps([copied(model)])
    parts: dict[str, Any] = {"model": model, "processing_class": tokenizer, "callbacks": [steps]}
    settings = {**BASE, "output_dir": str(folder / "output"), **case.theirs}
    if case.rows == "answers":
        kind, texts = (
            case.kind,
            {" ".join(f"w{number}" for number in prompt): row for row in rows for prompt in row[:1]},
        )
        settings |= {
            "per_device_train_batch_size": PROMPTS * ANSWERS,
            "num_generations": ANSWERS,
            "max_completion_length": 24,
            "shuffle_dataset": False,
        }
        names = ("first", "second") if "reward_weights" in settings else ("first",)
        parts |= {
            "reward_funcs": [_reward(texts, name) for name in names],
            "rollout_func": _rollout(texts),
            "train_dataset": Dataset.from_list([{"prompt": text} for text in texts]),
        }
    else:
        kind = in_order(case.kind)
        settings["max_length"] = 128
        parts["train_dataset"] = Dataset.from_list(rows)
        frozen = {DPOTrainer: "ref_model", KTOTrainer: "ref_model", GKDTrainer: "teacher_model"}
        parts |= {frozen[case.kind]: other} if case.kind in frozen else {}
    trainer = kind(args=case.config(**settings), **parts)
    if settings.get("beta") and case.rows == "answers":
        trainer.ref_model.load_state_dict(other.state_dict())
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return Trained([log["loss"] for log in logs], [log["grad_norm"] for log in logs], steps.parameters)


def _rollout(texts: Mapping[str, Any]) -> Any:
    """Return the function that TRL generates with: it gives each prompt its answers."""

    def rollout(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        result: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        for number, text in enumerate(prompts):
            prompt, answers = texts[text]
            turns = answers[number % ANSWERS].turns
            ids = [token for tokens, _ in turns for token in tokens]
            result["prompt_ids"].append(prompt)
            result["completion_ids"].append(ids)
            result["logprobs"].append([-1.0] * len(ids))
            result["env_mask"].append([int(is_sampled) for tokens, is_sampled in turns for _ in tokens])
        return result

    return rollout


def _reward(texts: Mapping[str, Any], name: str) -> Any:
    def reward(prompts: Sequence[str], **_: Any) -> list[float]:
        return [getattr(texts[text][1][number % ANSWERS], name) for number, text in enumerate(prompts)]

    reward.__name__ = name
    return reward


def our_run(case: Trainer, folder: Path, rows: Any) -> Trained:
    """Train with areal's learner and its engine."""
    component, settings = build("algorithms", case.algorithm, **case.ours)
    roles = roles_of(Selection("algorithms", case.algorithm, settings), case.epochs)
    engines = {}
    for name, role in roles.items():
        configured = FSDPConfig(
            learning_rate=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, max_tokens_per_microbatch=60
        )
        engines[name] = FSDPEngine(configured)
        path = {"actor": "policy", "reward": "scores"}.get(name, "other")
        engines[name].setup(ModelReference(str(folder / path)), role, OptimizerSettings(UPDATES, 1.0))
    for engine in engines.values():
        engine.compare_with(engines)
    algorithm = component(settings)
    learning = engines[next(iter(roles))]
    trained = Trained([], [], [copied(learning._module.model)])
    update = learning.train

    def watched(works: Any) -> Any:
        metrics = update(works)
        trained.losses.append(float(metrics["loss"].values))
        trained.norms.append(float(metrics["gradient_norm"].values))
        trained.parameters.append(copied(learning._module.model))
        return metrics

    learning.train = watched  # type: ignore[method-assign]
    section = TrainingSection(num_epochs=case.epochs)
    learner = Learner(SimpleNamespace(training=section, seed=0), algorithm, roles, engines)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "policy")
    for step in range(UPDATES // case.epochs):
        batch = (
            _answers(case, algorithm, rows, step) if case.rows == "answers" else _rows(algorithm, rows, step, tokenizer)
        )
        learner.learn(batch, step, step, {})
    return trained


def _answers(case: Trainer, algorithm: Any, rows: Any, step: int) -> PackedBatch:
    groups = []
    for number in range(PROMPTS * step, PROMPTS * (step + 1)):
        prompt, answers = rows[number]
        episodes = [answer.episode(prompt, "reward_weights" in case.theirs) for answer in answers]
        for group_filter in algorithm.group_filters:
            episodes = group_filter(episodes)
        columns = pack_group(number, (number, 0), ANSWERS, dict(enumerate(episodes)))
        groups.append(PackedBatch.from_columns(columns))
    return PackedBatch.concatenate(groups)


def _rows(algorithm: Any, rows: Any, step: int, tokenizer: Any) -> PackedBatch:
    encoded = [algorithm.encode(row, tokenizer) for row in rows[PAIRS * step : PAIRS * (step + 1)]]
    units = torch.tensor([number for number, sequences in enumerate(encoded) for _ in sequences])
    batch = PackedBatch.from_trajectories([sequence for sequences in encoded for sequence in sequences])
    batch = batch.with_sequences(group_id=units, episode_id=torch.arange(len(batch)))
    return batch.with_units(units) if len(batch) > len(encoded) else batch


def compared(case: Trainer, folder: Path) -> dict[str, float]:
    """Return the largest differences between both runs, and the largest change of a parameter."""
    rows = getattr(Rows(), case.rows)()
    theirs, ours = their_run(case, folder, rows), our_run(case, folder, rows)
    assert len(theirs.losses) == len(ours.losses) == UPDATES, "a run has another number of updates"
    names = theirs.parameters[0].keys() & ours.parameters[0].keys()
    assert names == theirs.parameters[0].keys(), f"parameters have other names: {sorted(ours.parameters[0])[:3]}"
    first, last = theirs.parameters[0], theirs.parameters[-1]
    return {
        "loss": max(abs(one - other) for one, other in zip(theirs.losses, ours.losses, strict=True)),
        "norm": max(abs(one - other) for one, other in zip(theirs.norms, ours.norms, strict=True)),
        "parameters": max(
            float((one[name] - other[name]).abs().max())
            for one, other in zip(theirs.parameters, ours.parameters, strict=True)
            for name in names
        ),
        "moved": max(float((last[name] - first[name]).abs().max()) for name in names),
    }


def grpo(component: str, theirs: Mapping[str, Any], algorithm: str = "grpo/grpo", **more: Any) -> Trainer:
    """Return a comparison with `GRPOTrainer`, without importance weights: answers are sampled on policy."""
    ours = {"advantage": {"type": "grpo/group_normalized", "epsilon": 1e-4}, "corrections": [], **more.pop("ours", {})}
    kind, config = more.pop("kind", (GRPOTrainer, GRPOConfig))
    return Trainer(component, kind, config, {"beta": 0.0, **theirs}, algorithm, ours, **more)


def tuning(name: str, kind: Any, config: Any, rows: str, theirs: Mapping[str, Any], **more: Any) -> Trainer:
    """Return a comparison of fine-tuning."""
    return Trainer(f"algorithms finetuning/{name}", kind, config, theirs, f"finetuning/{name}", rows=rows, **more)


TWICE: dict[str, Any] = {"num_iterations": 2}
LITE = {
    "theirs": {"loss_type": "dapo", "scale_rewards": "batch"},
    "algorithm": "grpo/lite_ppo",
    "ours": {"advantage": {"type": "grpo/lite_ppo", "epsilon": 1e-4}},
}
EVERY_ANSWER = "TRL distills the last answer of a conversation alone; here all answers of a row are learned."
TRAINERS = [
    grpo(
        "algorithms grpo/grpo",
        {"loss_type": "grpo", **TWICE},
        ours={"loss_aggregation": "core/sequence_mean"},
        epochs=2,
        note="loss_aggregation: core/sequence_mean, and corrections: [] here and below.",
    ),
    grpo(
        "algorithms grpo/dapo",
        {"loss_type": "dapo", "epsilon_high": 0.28, **TWICE},
        "grpo/dapo",
        ours={"group_filters": []},
        epochs=2,
        note="TRL trains on groups whose rewards are all equal, too. Compared without the filter.",
    ),
    grpo(
        "algorithms grpo/dr_grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none", **TWICE},
        "grpo/dr_grpo",
        ours={"advantage": "grpo/group_centered", "loss_aggregation": {"type": "core/constant_length", "length": 24}},
        epochs=2,
    ),
    grpo(
        "algorithms grpo/gspo",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
            **TWICE,
        },
        "grpo/gspo",
        epochs=2,
    ),
    grpo(
        "algorithms grpo/gmpo",
        {"epsilon": 0.4, "epsilon_high": 0.4, **TWICE},
        "grpo/gmpo",
        kind=(GMPOTrainer, GMPOConfig),
        epochs=2,
    ),
    grpo(
        "algorithms grpo/cispo",
        {"loss_type": "cispo", "epsilon_high": 5.0, **TWICE},
        "grpo/cispo",
        epochs=2,
        note="TRL's epsilon_high is the largest weight itself: 1 + clip_high.",
    ),
    grpo("algorithms grpo/sapo", {"loss_type": "sapo", **TWICE}, "grpo/sapo", epochs=2),
    grpo("algorithms grpo/lite_ppo", **LITE),
    grpo("advantages grpo/lite_ppo", **LITE),
    grpo(
        "advantages grpo/gdpo",
        {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.3]},
        ours={"advantage": {"type": "grpo/gdpo", "epsilon": 1e-4, "weights": {"second": 0.3}}},
    ),
    grpo(
        "group_filters grpo/mask_truncated",
        {"loss_type": "dapo", "mask_truncated_completions": True},
        ours={"group_filters": ["grpo/mask_truncated"]},
    ),
    grpo(
        "regularizers grpo/reference_kl",
        {"loss_type": "dapo", "beta": 0.3},
        ours={"regularizers": [{"type": "grpo/reference_kl", "coefficient": 0.3}]},
    ),
    tuning("sft", SFTTrainer, SFTConfig, "completions", {}),
    tuning(
        "sft",
        SFTTrainer,
        SFTConfig,
        "messages",
        {"assistant_only_loss": True},
        note="Conversations of several turns, with TRL's assistant_only_loss.",
    ),
    tuning("dpo", DPOTrainer, DPOConfig, "pairs", {"beta": 0.3}, ours={"beta": 0.3}),
    tuning(
        "ipo",
        DPOTrainer,
        DPOConfig,
        "pairs",
        {"beta": 0.3, "loss_type": "ipo"},
        ours={"beta": 0.3, "length_normalized": True},
        note="TRL divides log-ratios by the length, as the authors' experiments did: length_normalized: true.",
    ),
    tuning(
        "simpo",
        CPOTrainer,
        CPOConfig,
        "pairs",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
        ours={"beta": 2.0, "gamma": 1.0},
    ),
    tuning(
        "orpo",
        ORPOTrainer,
        ORPOConfig,
        "pairs",
        {"beta": 0.3},
        ours={"weight": 0.3},
        differs="TRL averages the likelihood of chosen answers over all tokens of prompts and answers of the batch; "
        "here it is the paper's mean over each answer.",
    ),
    tuning(
        "reward_model",
        RewardTrainer,
        RewardConfig,
        "pairs",
        {"center_rewards_coefficient": 0.05},
        ours={"centering": 0.05},
        note="With margins and centering.",
    ),
    tuning(
        "kto",
        KTOTrainer,
        KTOConfig,
        "labels",
        {"beta": 0.3, "desirable_weight": 1.2},
        ours={"beta": 0.3, "desirable_weight": 1.2},
        differs="Sequences with another row's answer, on which the KL is estimated, are cut to the longest one here.",
    ),
    *(
        tuning(
            "gkd",
            GKDTrainer,
            GKDConfig,
            rows,
            {"beta": 0.3, "lmbda": 0.0},
            ours={"beta": 0.3, "example_tokenizer": "finetuning/conversations"},
            note="Rows of one question and one answer.",
            differs=differs,
        )
        for rows, differs in (("exchanges", ""), ("messages", EVERY_ANSWER))
    ),
]
