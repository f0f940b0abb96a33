"""The hook specifications: every place where areal asks its plugins something or tells them something.

*Registration hooks* return records (strings) and are asked before a config is validated. *Event hooks* observe a run.
Nothing that happens for every token or every sample is a hook: that is a method of a Protocol in
`areal_core.interfaces`. No parameter has a default value, because pluggy would hand plugins the default instead of
the value; wrappers are refused, because then the error of one plugin would look like another's.
"""
# A specification is its signature and its documentation; pluggy never calls it, so it has no body.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.plugins.records import Command, Component, HealthCheck, Preset

# --- registration: what a plugin supplies -----------------------------------------------------------------------


@hookspec
def areal_train_engines() -> Iterable[Component]:
    """Training engines: they hold the parameters and take the optimizer steps.

    Supplies: `Component` records; each leads to a class that satisfies `areal_core.interfaces.TrainEngine`.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_inference_engines() -> Iterable[Component]:
    """Inference engines: they generate tokens and label each with the version that sampled it.

    Supplies: `Component` records; each leads to a class that satisfies `areal_core.interfaces.InferenceEngine`.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_workflows() -> Iterable[Component]:
    """Workflows: how one episode is played, from a prompt to its trajectories.

    Supplies: `Component` records; each leads to a class that satisfies `areal_core.interfaces.RolloutWorkflow`.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_environments() -> Iterable[Component]:
    """Environments: the worlds that answer a policy's turns in a workflow of several turns.

    Supplies: `Component` records; each leads to a class that satisfies `areal_core.interfaces.Environment`.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_agents() -> Iterable[Component]:
    """Agents: programs that talk to a language model over HTTP and know nothing of training.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Agent` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_tools() -> Iterable[Component]:
    """Tools: typed functions that the policy may call.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Tool` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_sandboxes() -> Iterable[Component]:
    """Sandboxes: where code that nobody has read may run.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Sandbox` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_reward_functions() -> Iterable[Component]:
    """Reward functions: what an answer is worth.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Reward` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_datasets() -> Iterable[Component]:
    """Data sets: where prompts and their answers come from.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Dataset` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_algorithms() -> Iterable[Component]:
    """Algorithms: named compositions of stages, advantage, corrections, loss and aggregation.

    Supplies: `Component` records; each leads to a class that satisfies `areal_core.interfaces.Algorithm`.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_advantages() -> Iterable[Component]:
    """Advantages: from the rewards of a whole batch to a number for every token.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Advantage` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_policy_losses() -> Iterable[Component]:
    """Policy losses: pure functions of packed tensors, one value for every token.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.PolicyLoss` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_corrections() -> Iterable[Component]:
    """Corrections for data that older weights have sampled: weights and masks for every token.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Correction` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_aggregations() -> Iterable[Component]:
    """Aggregations: how the values of tokens become the one number that is minimised.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Aggregation` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_regularisers() -> Iterable[Component]:
    """Regularisers: terms that are added to the loss of each token.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Regulariser` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_objectives() -> Iterable[Component]:
    """Objectives: what an update learns beside the policy, such as a critic.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Objective` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_group_stages() -> Iterable[Component]:
    """Group stages: they filter and shape finished prompt groups before they are trained on.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.GroupStage` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_stages() -> Iterable[Component]:
    """Stages: they compute columns of a batch in the trainer, before the advantages or before an update.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Stage` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_encoders() -> Iterable[Component]:
    """Encoders: from a row of a data set to the sequences that are learnt from.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.Encoder` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_models() -> Iterable[Component]:
    """Models: they make or fetch a model folder that every engine can open.

    Supplies: `Component` records; each leads to what `areal_core.interfaces.ModelSource` describes.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_launchers() -> Iterable[Component]:
    """Launchers: they start the processes of a run. They watch nothing: processes report to the driver.

    Supplies: `Component` records; each leads to a class that satisfies `areal_core.interfaces.Launcher`.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_trackers() -> Iterable[Component]:
    """Trackers: where metrics go beside the run folder's own file.

    Supplies: `Component` records; each leads to a class that satisfies `areal_core.interfaces.Tracker`.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_presets() -> Iterable[Preset]:
    """Presets: complete configs that ship inside the plugin.

    Supplies: `Preset` records; each leads to YAML beside a module.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_commands() -> Iterable[Command]:
    """Commands: `areal PLUGIN COMMAND ...`.

    Supplies: `Command` records; each leads to a function of the remaining words that returns the exit code.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


@hookspec
def areal_health_checks() -> Iterable[HealthCheck]:
    """Health checks: questions about the machine, asked by `areal doctor`.

    Supplies: `HealthCheck` records; each leads to a function that returns None, a line or a `Finding`.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that needs a config.
    How often: once for every loaded plugin.
    Exception: the plugin counts as broken and the program ends with exit code 2, naming it.
    """


# --- events: what happens in a run ----------------------------------------------------------------------------


@hookspec
def areal_configure(config: RunConfig) -> None:
    """The config is resolved, complete and checked.

    When: after every check has passed and before any process is started, never with `--dry-run`.
    Process: the one that launched the run.
    How often: once.
    Exception: ends the program with exit code 2; nothing has started.
    """


@hookspec
def areal_run_started(config: RunConfig, run_dir: Path) -> None:
    """A run begins, or goes on after a resume.

    When: after the run folder is written and before the other processes are started.
    Process: the one that launched the run.
    How often: once; a resume is a new start.
    Exception: ends the run with exit code 1.
    """


@hookspec
def areal_step_finished(run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
    """A training step is over and its metrics are final.

    When: after the optimizer updates of a batch, beside generation.
    Process: trainer rank 0.
    How often: once for every step.
    Exception: is logged with the plugin's name; the plugin hears no further events and the run goes on.
    """


@hookspec
def areal_weights_published(run_dir: Path, step: int, version: int) -> None:
    """The engines generate with new weights.

    When: when every engine has confirmed this version.
    Process: trainer rank 0.
    How often: once for every publication.
    Exception: is logged with the plugin's name; the plugin hears no further events and the run goes on.
    """


@hookspec
def areal_checkpoint_saved(run_dir: Path, step: int, path: Path) -> None:
    """A checkpoint is committed: from now on a resume starts here.

    When: after the commit, never for a checkpoint that is still provisional.
    Process: trainer rank 0.
    How often: once for every checkpoint.
    Exception: is logged with the plugin's name; the plugin hears no further events and the run goes on.
    """


@hookspec
def areal_run_finished(run_dir: Path, outcome: str, signal: int) -> None:
    """The run is over: `outcome` is done, interrupted or failed; `signal` asked it to stop, 0 where none did.

    When: when every other process of the run has ended.
    Process: the one that launched the run.
    How often: once, unless the process was killed.
    Exception: is logged with the plugin's name; the outcome of the run stays.
    """
