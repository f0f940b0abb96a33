"""What this plugin supplies, as strings. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Command, Component, Finding, HealthCheck, Preset, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from areal_core.config import RunConfig


@hookimpl
def areal_reward_functions() -> list[Component]:
    """Chosen in a config by `type: outside/brevity`."""
    return [
        Component(
            "brevity",
            "rewards short answers that end by themselves",
            target="areal_outside.rewards:brevity",
            config="areal_outside.config:BrevitySettings",
        )
    ]


@hookimpl
def areal_datasets() -> list[Component]:
    """Chosen by `dataset: outside/doublings`."""
    return [
        Component(
            "doublings",
            "sums of a number and itself",
            target="areal_outside.datasets:Doublings",
            config="areal_outside.config:DoublingsSettings",
        )
    ]


@hookimpl
def areal_workflows() -> list[Component]:
    """Chosen by `workflow: outside/self_check`."""
    return [
        Component(
            "self_check",
            "an answer, a question whether it is right, and a second answer, which is scored",
            target="areal_outside.workflows:SelfCheck",
            config="areal_outside.config:SelfCheckSettings",
        )
    ]


@hookimpl
def areal_advantages() -> list[Component]:
    """Chosen by `algorithm: {advantage: outside/better_or_worse}`."""
    return [
        Component(
            "better_or_worse",
            "1 above the mean of the prompt's answers, -1 below it",
            target="areal_outside.advantages:better_or_worse",
            config="areal_outside.config:BetterOrWorseSettings",
        )
    ]


@hookimpl
def areal_policy_losses() -> list[Component]:
    """Chosen by `algorithm: {policy_loss: outside/capped_reinforce}`."""
    return [
        Component(
            "capped_reinforce",
            "REINFORCE, weighted by the ratio to the proximal policy up to a cap",
            target="areal_outside.policy_losses:capped_reinforce",
            config="areal_outside.config:CappedReinforceSettings",
        )
    ]


@hookimpl
def areal_algorithms() -> list[Component]:
    """Chosen by `algorithm: outside/better`; the core's composition does the work."""
    return [
        Component(
            "better",
            "the advantage and the loss of this plugin together",
            target="areal_core.algorithms.composition:PolicyGradient",
            config="areal_outside.config:BetterSettings",
        )
    ]


@hookimpl
def areal_environments() -> list[Component]:
    """Chosen by `workflow: {type: multi_turn, environment: outside/guess}`."""
    return [
        Component(
            "guess",
            "says whether a number is too small or too large",
            target="areal_outside.environments:Guess",
            config="areal_outside.config:GuessSettings",
        )
    ]


@hookimpl
def areal_group_filters() -> list[Component]:
    """Chosen by `algorithm: {group_filters: [outside/not_solved]}`."""
    return [
        Component(
            "not_solved",
            "drops prompts that are solved",
            target="areal_outside.group_filters:not_solved",
            config="areal_outside.config:NotSolvedSettings",
        )
    ]


@hookimpl
def areal_batch_transforms() -> list[Component]:
    """Chosen by `algorithm: {batch_transforms: [outside/kl_in_reward]}`."""
    return [
        Component(
            "kl_in_reward",
            "a price on the distance from the reference",
            target="areal_outside.batch_transforms:kl_in_reward",
            config="areal_outside.config:KLInRewardSettings",
        )
    ]


@hookimpl
def areal_auxiliary_losses() -> list[Component]:
    """Chosen by `algorithm: {auxiliary_losses: [outside/value]}`."""
    return [
        Component(
            "value",
            "a critic learns to expect the reward",
            target="areal_outside.auxiliary_losses:value",
            config="areal_outside.config:ValueSettings",
        )
    ]


@hookimpl
def areal_example_tokenizers() -> list[Component]:
    """Chosen by `algorithm: {type: finetuning/sft, example_tokenizer: outside/completion}`."""
    return [
        Component(
            "completion",
            "learns the completion, not the prompt",
            target="areal_outside.example_tokenizers:completion",
        )
    ]


@hookimpl
def areal_trackers() -> list[Component]:
    """Chosen by `trackers: [outside/lines]`."""
    return [
        Component(
            "lines",
            "a file with a line for each number",
            target="areal_outside.trackers:Lines",
            config="areal_outside.config:LinesSettings",
        )
    ]


@hookimpl
def areal_presets() -> list[Preset]:
    """`areal run --plugins outside`, or `areal run outside/small`."""
    return [
        Preset(
            "small",
            "a small run",
            path="areal_outside:small.yaml",
            plugins=("grpo", "hf", "fsdp"),
            default=True,
        )
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """`areal outside count`."""
    return [Command("count", "counts its words", target="areal_outside.plugin:count")]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Asked by `areal doctor`."""
    return [HealthCheck("python", "which Python this is", target="areal_outside.plugin:check_python")]


@hookimpl
def areal_configure(config: RunConfig) -> None:
    """Refuse what this plugin cannot watch."""
    if config.steps > 10**9:
        raise ValueError("outside: such a run is too long to be watched")


@hookimpl
def areal_run_started(config: RunConfig, run_dir: Path) -> None:
    """Note how long the run shall be."""
    _note(run_dir, f"steps {config.steps}")


@hookimpl
def areal_step_finished(run_dir: Path, step: int, metrics: Mapping[str, float]) -> Sequence[str]:
    """Say something of steps without a reward."""
    _note(run_dir, f"step {step}")
    return [] if metrics.get("reward/mean") else [f"step {step} has earned nothing"]


@hookimpl
def areal_weights_synced(run_dir: Path, step: int, version: int) -> None:
    """Note the version."""
    _note(run_dir, f"version {version} after step {step}")


@hookimpl
def areal_checkpoint_saved(run_dir: Path, step: int, path: Path) -> None:
    """Note the folder."""
    _note(run_dir, f"checkpoint {path.name} of step {step}")


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str) -> None:
    """Leave a note for whatever waits for the run."""
    _note(run_dir, outcome)


def _note(run_dir: Path, line: str) -> None:
    with (run_dir / "outside.txt").open("a") as file:
        file.write(f"{line}\n")


def count(words: Sequence[str]) -> int:
    """The command."""
    print(len(words))
    return 0


def check_python() -> Finding:
    """The health check."""
    import sys

    return Finding(sys.version_info >= (3, 11), sys.version.split()[0])
