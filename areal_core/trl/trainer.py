"""TRL's `GRPOTrainer` on a run of areal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping as Section
from collections.abc import Sized
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from areal_core.errors import ConfigError, UsageError
from areal_core.files import ScriptStartsRun, is_importing_a_script
from areal_core.library import Run, train
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.terminal import log
from areal_core.trl.arguments import GRPOConfig
from areal_core.trl.mapping import Mapping, adapter_section, model_section, reward_sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

NAMES: Final = {
    "loss": "train/loss",
    "grad_norm": "train/gradient_norm",
    "learning_rate": "train/learning_rate",
    "entropy": "train/entropy",
    "kl": "train/reference_kl",
    "reward": "reward/all_episodes",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "reward/groups_all_equal",
    "completions/mean_length": "batch/response_length",
    "completions/clipped_ratio": "batch/truncated",
    "eval_reward": "evaluation/reward",
}
"""TRL's names of metrics, and areal's. A log entry has both."""
_UNUSED: Final = {
    "reward_processing_classes": "the tokenizer is that of the reward model's folder",
    "callbacks": "use a tracker or a hook of areal",
    "optimizers": "the optimizer is AdamW, with the schedule of lr_scheduler_type",
    "quantization_config": "areal trains models that are not quantized",
    "tools": "use the workflow multi_turn of areal",
    "rollout_func": "use a workflow of areal",
    "environment_factory": "use the workflow multi_turn of areal",
}
"""Arguments of TRL's trainer that areal has no equal of."""


class TrainOutput(NamedTuple):
    """The result of `GRPOTrainer.train`, with the fields of transformers' class.

    Attributes:
        global_step: optimizer updates so far.
        training_loss: mean of the losses of all steps.
        metrics: the same as `train_loss`.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass
class TrainerState:
    """The part of transformers' `TrainerState` that a finished run has.

    Attributes:
        global_step: optimizer updates so far.
        log_history: an entry per step of areal, with the metrics by TRL's and by areal's names.
    """

    global_step: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)


class GRPOTrainer:
    """TRL's trainer, for scripts of TRL: `from areal_core.trl import GRPOConfig, GRPOTrainer`.

    Generation and training are synchronous, as in TRL. A reward function is called for each answer, with lists of one
    entry, in processes of its own.

    Args:
        model: folder of a Hugging Face model, or its name on the hub.
        reward_funcs: one or several functions of TRL's form, or paths of reward models.
        args: the arguments; by default TRL's.
        train_dataset: rows with a `prompt`; other columns are passed to the rewards.
        eval_dataset: rows for `eval_strategy`.
        peft_config: PEFT's `LoraConfig`, for an adapter.
        processing_class: the model's tokenizer or processor, as its folder has it. Only the padding token may differ.
        num_processes: number of processes that `accelerate launch` would start for the script, normally one per GPU.
            TRL's batch grows with it. areal takes that batch on any number of GPUs.
        unused: further arguments of TRL's trainer, which must be None.

    Attributes:
        args: the arguments.
        state: the part of transformers' `TrainerState` that a finished run has: `global_step`, the number of optimizer
            updates, and `log_history`, an entry per step with the metrics by TRL's and by areal's names.
        run: the `Run`, once it has been started.
        accelerator: `print` and `is_main_process`, which the scripts of TRL use to log.

    Raises:
        ConfigError: areal cannot honor some of the arguments. The hints name all of them.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Iterable[Section[str, Any]] | None = None,
        eval_dataset: Iterable[Section[str, Any]] | None = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        num_processes: int = 1,
        **unused: Any,
    ) -> None:
        if is_importing_a_script():
            raise ScriptStartsRun
        self.args = args or GRPOConfig()
        self.state = TrainerState()
        self.run: Run | None = None
        self.accelerator = SimpleNamespace(print=print, is_main_process=True, is_local_main_process=True)
        self._output_dir = Path(self.args.output_dir or f"{Path(str(model)).name}-GRPO")
        rows = len(train_dataset) if isinstance(train_dataset, Sized) else None
        mapping = Mapping(self.args, rows, has_evaluation=eval_dataset is not None, num_processes=num_processes)
        problems, self._notes, self._updates = mapping.problems, mapping.notes, mapping.updates
        rewards = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else reward_funcs or []
        self._config: dict[str, Any] = {
            **mapping.config,
            "model": model_section(self.args, model, problems),
            "dataset": train_dataset,
            "rewards": reward_sections(rewards, self.args.reward_weights, problems),
        }
        self._config["train_engine"]["adapter"] = adapter_section(peft_config, problems)
        if "evaluation" in self._config:
            self._config["evaluation"]["dataset"] = eval_dataset
        if self._config["algorithm"]["advantage"].get("type") == "gdpo":
            weights = {section["name"]: section["weight"] for section in self._config["rewards"]}
            self._config["algorithm"]["advantage"]["weights"] = weights
        if processing_class is not None and isinstance(model, str):
            problems += _tokenizer_problems(processing_class, model)
        _check(problems, rewards, train_dataset, eval_dataset, unused)

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """Train to the end, below `output_dir`. Each call makes a run folder of its own.

        Args:
            resume_from_checkpoint: True resumes the newest run below `output_dir`; a path names the run folder. The
                arguments of the script apply, such as a larger `max_steps`. The rows and the reward functions are
                those of the run.

        Returns:
            The fields of transformers' `TrainOutput`: `global_step`, the number of optimizer updates; `training_loss`,
            the mean of the losses of all steps; and `metrics`, which has the same as `train_loss`.

        Raises:
            ArealError: the run failed, or the script has changed something that cannot change on a resume.
            KeyboardInterrupt: Ctrl-C has stopped the run, after a checkpoint.
        """
        for note in self._notes:
            log(f"areal_core.trl: {note}")
        if resume_from_checkpoint:
            self.run = Run(self._newest() if resume_from_checkpoint is True else resume_from_checkpoint)
            self.run.resume(**self._changes(self.run.folder))
        else:
            folder = self._output_dir / f"run-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
            self.run = train(self._config, preset="grpo/defaults", run_dir=folder)
        metrics = self.run.metrics
        history = [{**row, **{name: row[own] for name, own in NAMES.items() if own in row}} for row in metrics]
        self.state = TrainerState(len(metrics) * self._updates, history)
        losses = [row["loss"] for row in history if "loss" in row]
        loss = sum(losses) / max(1, len(losses))
        return TrainOutput(self.state.global_step, loss, {"train_loss": loss})

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Copy the trained model into a folder, by default `output_dir`.

        Raises:
            UsageError: nothing has been trained yet.
        """
        if self.run is None:
            raise UsageError("there is no model to save yet", hints=["call trainer.train() first"])
        shutil.copytree(self.run.model, output_dir or self._output_dir, dirs_exist_ok=True)

    def push_to_hub(self, *unused: Any, **named: Any) -> None:
        """Log how to upload the model. An error here would end a script after its training, so there is none."""
        folder = "trainer.run.model" if self.run is None else self.run.model
        log(f"areal_core.trl: nothing is uploaded: `hf upload OWNER/NAME {folder}` uploads the model")

    def _changes(self, folder: Path) -> dict[str, Any]:
        """Return the script's arguments for a resume, which refuses those that cannot change.

        Raises:
            ConfigError: the rewards have other names or weights.
        """
        saved = yaml.safe_load(RunFolder(folder).config.read_text(encoding="utf-8"))
        before, now = (
            {section["name"]: section["weight"] for section in config["rewards"]} for config in (saved, self._config)
        )
        if before != now:
            raise ConfigError(f"rewards cannot change on a resume: the run has {before}, and the script has {now}")
        log("areal_core.trl: the run resumes with the rows and the reward functions that it started with")
        changes = {key: value for key, value in self._config.items() if key not in ("dataset", "rewards")}
        model, started = Path(changes["model"]["path"]), Path(saved["model"]["path"])
        # The run has an absolute path, and for a name on the hub the folder of a commit.
        if not model.is_dir() or (started.is_dir() and started.samefile(model)):
            changes["model"] = {key: value for key, value in changes["model"].items() if key != "path"}
        if "evaluation" in changes:
            changes["evaluation"] = {key: value for key, value in changes["evaluation"].items() if key != "dataset"}
        return changes

    def _newest(self) -> Path:
        runs = sorted(self._output_dir.glob("run-*"))
        if not runs:
            raise UsageError(f"there is no run below {self._output_dir} to resume")
        return runs[-1]


def _tokenizer_problems(given: Any, model: str) -> Iterator[str]:
    """Yield how a tokenizer or processor differs from the one in the model's folder, which areal reads."""
    try:
        own = type(given).from_pretrained(model)
    except (OSError, ValueError, AttributeError) as error:
        yield f"processing_class: {model} has no {type(given).__name__} to compare it with: {error}"
        return
    different = [name for name, part in _parts(given).items() if part != _parts(own)[name]]
    if different:
        yield (
            f"processing_class: its {', '.join(different)} differs from that of {model}, which areal reads: save "
            "it into the model's folder with save_pretrained"
        )


def _parts(given: Any) -> dict[str, Any]:
    """Return what areal needs of a tokenizer or processor. It pads nothing, so the padding token does not count."""
    tokenizer = getattr(given, "tokenizer", given)
    return {
        "chat template": getattr(given, "chat_template", None),
        "special tokens": {**tokenizer.special_tokens_map, "pad_token": None},
        "vocabulary": tokenizer.get_vocab(),
    }


def _check(
    problems: list[str], rewards: Sequence[Any], train_dataset: Any, eval_dataset: Any, unused: dict[str, Any]
) -> None:
    """Raise `ConfigError` with everything that areal cannot honor."""
    for name, value in unused.items():
        if name not in _UNUSED:
            problems.append(f"{name}: TRL's trainer has no such argument")
        elif value is not None and value != (None, None):
            problems.append(f"{name}: {_UNUSED[name]}")
    if not rewards:
        problems.append("reward_funcs: is required")
    if train_dataset is None:
        problems.append("train_dataset: is required")
    if isinstance(eval_dataset, Section):
        problems.append("eval_dataset: areal evaluates on one data set")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problems.append(
            "WORLD_SIZE: start the script with `python`, not `accelerate launch`: areal starts its processes. "
            f"GRPOTrainer(num_processes={os.environ['WORLD_SIZE']}) keeps the batch of TRL"
        )
    if problems:
        raise ConfigError(
            f"areal cannot do {len(problems)} thing(s) that this script of TRL asks for",
            hints=problems,
            problems=problems,
        )
