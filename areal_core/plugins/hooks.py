"""The hook specifications: every function that a plugin may implement with `@hookimpl`.

    registration hooks   say what a plugin supplies, as records                `areal_reward_functions`, ...
    additions            new kinds of records and new hooks, for other plugins  `areal_add_kinds`, `areal_add_hooks`
    event hooks          observe a run, add metrics to its steps, stop it       `areal_step_finished`, ...

areal calls a hook through pluggy. Plugins register in the order of their names, the core first. As always in pluggy,
the plugin that registered last is called first; `tryfirst`, `trylast` and `wrapper=True` change that. Take only the
arguments that you need, by their names and without a default: pluggy would pass the default instead of the value.

Nothing that happens for each token or each sample is a hook. Such code is a method of an interface
(`areal_core.sdk`, `.engines`, `.servers`, `.launchers`).
"""
# A specification is a signature with documentation. pluggy never calls it, so it has no body.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from types import ModuleType

    from pluggy import HookRelay
    from pydantic import BaseModel

    from areal_core.plugins.records import Command, Component, HealthCheck, Kind, Preset

# --- registration: what a plugin supplies ---------------------------------------------------------------------


@hookspec
def areal_train_engines() -> Iterable[Component]:
    """Supply training engines, which hold a model in a role on each rank: `areal_core.engines.TrainEngine`.

        @hookimpl
        def areal_train_engines():
            return [
                Component(
                    "shards",
                    "trains with my own sharding",
                    target="areal_shards.engine:ShardsEngine",
                    config="areal_shards.config:ShardsSettings",
                )
            ]

    A config chooses it with `train_engine: {type: shards/shards}`.

    Returns: a `Component` for each training engine. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_inference_engines() -> Iterable[Component]:
    """Supply inference engines: an `areal_core.servers.ServerAdapter` or `InferenceEngine` each.

        @hookimpl
        def areal_inference_engines():
            return [
                Component(
                    "quick",
                    "generates with my own server",
                    target="areal_quick.adapter:QuickAdapter",
                    config="areal_quick.config:QuickSettings",
                )
            ]

    A config chooses it with `inference_engine: {type: quick/quick}`.

    Returns: a `Component` for each inference engine. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_workflows() -> Iterable[Component]:
    """Supply workflows, which run episodes: `areal_core.sdk.RolloutWorkflow`.

        @hookimpl
        def areal_workflows():
            return [
                Component(
                    "debate",
                    "two answers and a verdict",
                    target="areal_debate.workflows:Debate",
                    config="areal_debate.config:DebateSettings",
                )
            ]

    A config chooses it with `workflow: {type: debate/debate}`.

    Returns: a `Component` for each workflow. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_environments() -> Iterable[Component]:
    """Supply environments of multi-turn workflows: `areal_core.sdk.Environment`.

        @hookimpl
        def areal_environments():
            return [
                Component(
                    "maze",
                    "a maze in words",
                    target="areal_maze.environments:Maze",
                    config="areal_maze.config:MazeSettings",
                )
            ]

    A config chooses it with `workflow: {type: multi_turn, environment: maze/maze}`.

    Returns: a `Component` for each environment. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_agents() -> Iterable[Component]:
    """Supply agents, which run an episode against an endpoint of the policy: `areal_core.sdk.Agent`.

        @hookimpl
        def areal_agents():
            return [Component("solver", "solves exercises with LangChain", target="areal_solver.agents:solve")]

    A config chooses it with `workflow: {type: agents/agent, agent: solver/solver}`.

    Returns: a `Component` for each agent. `target` is a function or a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_tools() -> Iterable[Component]:
    """Supply tools, which the policy may call: `areal_core.sdk.Tool`.

        @hookimpl
        def areal_tools():
            return [Component("multiply", "multiplies two numbers", target="areal_sums.tools:multiply")]

    A config chooses it with `workflow: {type: agents/tools, tools: [sums/multiply]}`.

    Returns: a `Component` for each tool. `target` is a function with annotations and a docstring.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_sandboxes() -> Iterable[Component]:
    """Supply sandboxes, which run commands that may be malicious: `areal_core.sdk.Sandbox`.

        @hookimpl
        def areal_sandboxes():
            return [
                Component(
                    "cloud",
                    "runs commands in a cloud",
                    target="areal_cloud.sandboxes:Cloud",
                    config="areal_cloud.config:CloudSettings",
                )
            ]

    A config chooses it with `rewards: [{type: sandboxes/unit_tests, sandbox: cloud/cloud}]`.

    Returns: a `Component` for each sandbox. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_reward_functions() -> Iterable[Component]:
    """Supply reward functions, each of which scores one answer: `areal_core.sdk.Reward`.

        @hookimpl
        def areal_reward_functions():
            return [
                Component(
                    "brevity",
                    "rewards short answers",
                    target="areal_shortest.rewards:brevity",
                    config="areal_shortest.config:BrevitySettings",
                )
            ]

    A config chooses it with `rewards: [{type: shortest/brevity}]`.

    Returns: a `Component` for each reward function. `target` is a function or a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_datasets() -> Iterable[Component]:
    """Supply data sets, which have a length and rows by index: `areal_core.sdk.Dataset`.

        @hookimpl
        def areal_datasets():
            return [
                Component(
                    "riddles",
                    "riddles and their answers",
                    target="areal_riddles.datasets:Riddles",
                    config="areal_riddles.config:RiddlesSettings",
                )
            ]

    A config chooses it with `dataset: {type: riddles/riddles}`.

    Returns: a `Component` for each data set. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_algorithms() -> Iterable[Component]:
    """Supply algorithms, which turn a batch into losses: `areal_core.sdk.Algorithm`.

        @hookimpl
        def areal_algorithms():
            return [
                Component(
                    "better",
                    "my own policy gradient",
                    target="areal_better.algorithms:Better",
                    config="areal_better.config:BetterSettings",
                )
            ]

    A config chooses it with `algorithm: {type: better/better}`.

    Returns: a `Component` for each algorithm. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_reward_shaping() -> Iterable[Component]:
    """Supply reward shaping, which changes the rewards of a group: `areal_core.sdk.RewardShaping`.

        @hookimpl
        def areal_reward_shaping():
            return [Component("ranked", "replaces rewards by their ranks", target="areal_ranks.shaping:ranked")]

    A config chooses it with `algorithm: {reward_shaping: [ranks/ranked]}`.

    Returns: a `Component` for each reward shaping. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_group_filters() -> Iterable[Component]:
    """Supply group filters, which drop or shorten a finished group: `areal_core.sdk.GroupFilter`.

        @hookimpl
        def areal_group_filters():
            return [Component("not_solved", "drops groups that are solved", target="areal_ranks.filters:not_solved")]

    A config chooses it with `algorithm: {group_filters: [ranks/not_solved]}`.

    Returns: a `Component` for each group filter. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_batch_transforms() -> Iterable[Component]:
    """Supply batch transforms, which add fields to a batch: `areal_core.sdk.BatchTransform`.

        @hookimpl
        def areal_batch_transforms():
            return [
                Component(
                    "surprise",
                    "a reward for each surprising token",
                    target="areal_surprise.transforms:surprise",
                )
            ]

    A config chooses it with `algorithm: {batch_transforms: [surprise/surprise]}`.

    Returns: a `Component` for each batch transform. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_advantages() -> Iterable[Component]:
    """Supply advantages, which turn rewards into the weight of each token: `areal_core.sdk.Advantage`.

        @hookimpl
        def areal_advantages():
            return [
                Component(
                    "centered",
                    "the reward minus the group's mean",
                    target="areal_better.advantages:centered",
                )
            ]

    A config chooses it with `algorithm: {advantage: better/centered}`.

    Returns: a `Component` for each advantage. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_policy_losses() -> Iterable[Component]:
    """Supply policy losses, one number for each token: `areal_core.sdk.PolicyLoss`.

        @hookimpl
        def areal_policy_losses():
            return [
                Component(
                    "clipped",
                    "a loss with my own clipping",
                    target="areal_better.losses:clipped",
                    config="areal_better.config:ClippedSettings",
                )
            ]

    A config chooses it with `algorithm: {policy_loss: better/clipped}`.

    Returns: a `Component` for each policy loss. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_corrections() -> Iterable[Component]:
    """Supply corrections for the distance between sampler and learner: `areal_core.sdk.Correction`.

        @hookimpl
        def areal_corrections():
            return [
                Component(
                    "near_only",
                    "masks tokens whose policy has moved far",
                    target="areal_better.corrections:near_only",
                )
            ]

    A config chooses it with `algorithm: {corrections: [better/near_only]}`.

    Returns: a `Component` for each correction. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_regularizers() -> Iterable[Component]:
    """Supply regularizers, which add a term to each token's loss: `areal_core.sdk.Regularizer`.

        @hookimpl
        def areal_regularizers():
            return [
                Component(
                    "stay_close",
                    "a penalty on the distance to the reference",
                    target="areal_better.regularizers:stay_close",
                )
            ]

    A config chooses it with `algorithm: {regularizers: [better/stay_close]}`.

    Returns: a `Component` for each regularizer. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_auxiliary_losses() -> Iterable[Component]:
    """Supply auxiliary losses, which train another role in the same update: `areal_core.sdk.AuxiliaryLoss`.

        @hookimpl
        def areal_auxiliary_losses():
            return [Component("regression", "a critic's squared error", target="areal_better.critics:regression")]

    A config chooses it with `algorithm: {auxiliary_losses: [better/regression]}`.

    Returns: a `Component` for each auxiliary loss. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_loss_aggregations() -> Iterable[Component]:
    """Supply loss aggregations, which give each token its share: `areal_core.sdk.LossAggregation`.

        @hookimpl
        def areal_loss_aggregations():
            return [
                Component(
                    "square_root_length",
                    "long answers count by the root of their length",
                    target="areal_better.aggregations:square_root",
                )
            ]

    A config chooses it with `algorithm: {loss_aggregation: better/square_root_length}`.

    Returns: a `Component` for each loss aggregation. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_example_tokenizers() -> Iterable[Component]:
    """Supply example tokenizers of fine-tuning, which encode a row: `areal_core.sdk.ExampleTokenizer`.

        @hookimpl
        def areal_example_tokenizers():
            return [
                Component(
                    "completion_only",
                    "learns the completion of each row",
                    target="areal_rows.tokenizers:completion_only",
                )
            ]

    A config chooses it with `algorithm: {type: finetuning/sft, example_tokenizer: rows/completion_only}`.

    Returns: a `Component` for each example tokenizer. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_models() -> Iterable[Component]:
    """Supply model sources, which create or download a model: `areal_core.engines.ModelSource`.

        @hookimpl
        def areal_models():
            return [
                Component(
                    "pinned",
                    "a model of the hub at one revision",
                    target="areal_pinned.models:Pinned",
                    config="areal_pinned.config:PinnedSettings",
                )
            ]

    A config chooses it with `model: {source: {type: pinned/pinned}}`.

    Returns: a `Component` for each model source. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_weight_transports() -> Iterable[Component]:
    """Supply weight transports, which send weights to servers: `areal_core.engines.WeightTransport`.

        @hookimpl
        def areal_weight_transports():
            return [Component("rdma", "copies weights by RDMA", target="areal_rdma.transports:Rdma")]

    A config chooses it with `weight_sync: {transport: rdma/rdma}`.

    Returns: a `Component` for each weight transport. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_launchers() -> Iterable[Component]:
    """Supply launchers, which start the processes of a run: `areal_core.launchers.Launcher`.

        @hookimpl
        def areal_launchers():
            return [
                Component(
                    "pods",
                    "one pod for each process",
                    target="areal_pods.launchers:PodLauncher",
                    config="areal_pods.config:PodSettings",
                )
            ]

    A config chooses it with `launcher: {type: pods/pods}`.

    Returns: a `Component` for each launcher. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_trackers() -> Iterable[Component]:
    """Supply trackers, which receive the metrics of each step: `areal_core.sdk.Tracker`.

        @hookimpl
        def areal_trackers():
            return [Component("lines", "writes a text file", target="areal_lines.trackers:Lines")]

    A config chooses it with `trackers: [lines/lines]`.

    Returns: a `Component` for each tracker. `target` is a class.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_presets() -> Iterable[Preset]:
    """Supply presets, which are complete configs in the package.

        @hookimpl
        def areal_presets():
            return [Preset("small", "a small run", path="areal_shortest:small.yaml", plugins=("hf", "fsdp"))]

    `areal run shortest/small` runs it.

    Returns: a `Preset` for each.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_commands() -> Iterable[Command]:
    """Supply commands of the terminal.

        @hookimpl
        def areal_commands():
            return [Command("count", "counts its arguments", target="areal_shortest.commands:count")]

    `areal shortest count ...` calls it.

    Returns: a `Command` for each. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_health_checks() -> Iterable[HealthCheck]:
    """Supply health checks of the machine or of a model, which `areal doctor` runs.

        @hookimpl
        def areal_health_checks():
            return [HealthCheck("compiler", "a C compiler is installed", target="areal_shortest.health:check_compiler")]

    Returns: a `HealthCheck` for each. `target` is a function.
    When: while plugins are loaded, before the config is validated.
    Process: every process of a run, and every command that reads a config.
    How often: once, and again when a further plugin is loaded. Return the same records each time.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


# --- additions: kinds and hooks that other plugins implement --------------------------------------------------


@hookspec
def areal_add_kinds() -> Iterable[Kind]:
    """Add kinds of records, which other plugins supply and settings choose from.

        SCHEDULES = Kind("curriculum_schedules", "schedule")


        @hookimpl
        def areal_add_kinds():
            return [SCHEDULES]

    A kind's name begins with the name of its plugin, here `curriculum`. Its hook is `areal_curriculum_schedules`, which
    `areal_add_hooks` specifies. Settings declare a field with `component(SCHEDULES)`.

    Returns: a `Kind` for each.
    When: first of all hooks of a plugin, while it is loaded.
    Process: every process of a run, and every command that reads a config.
    How often: once.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


@hookspec
def areal_add_hooks() -> ModuleType | type | Iterable[ModuleType | type]:
    """Add hooks, which other plugins implement, as `pytest_addhooks` does.

        @hookimpl
        def areal_add_hooks():
            from areal_curriculum import hooks

            return hooks

    The module has a function for each hook, marked with `@hookspec` from `areal_core.plugins`:

        @hookspec
        def areal_curriculum_stage_changed(stage: int) -> None: ...

    A hook's name begins with `areal_` and the name of its plugin, so that areal loads this plugin before one that
    implements the hook. To call it, take the argument `hook` of an event hook. It has the hooks of all loaded plugins:
    `hook.areal_curriculum_stage_changed(stage=2)`. areal does not catch the exceptions of such a call.

    Returns: a module, a class, or a list of them.
    When: first of all hooks of a plugin, while it is loaded.
    Process: every process of a run, and every command that reads a config.
    How often: once.
    Exception: the plugin counts as broken; the program ends with exit code 2 and names it.
    """


# --- events: what happens in a run ----------------------------------------------------------------------------
# `config` is the `areal_core.config.RunConfig`. This package knows it only as a model, because a config names plugins.


@hookspec
def areal_configure(hook: HookRelay, config: BaseModel) -> None:
    """Check a config, or prepare for it. The config is complete, and every other check has passed.

        @hookimpl
        def areal_configure(config):
            if config.steps > 10_000:
                raise ValueError("this license ends after 10,000 steps")

    Returns: nothing.
    When: before any process is started; never with `--dry-run`.
    Process: the driver, which is `areal run`.
    How often: once.
    Exception: the program ends with exit code 2. Nothing has started.
    """


@hookspec
def areal_run_started(hook: HookRelay, config: BaseModel, run_dir: Path) -> None:
    """Begin to observe a run that starts or resumes.

        @hookimpl
        def areal_run_started(config, run_dir):
            (run_dir / "owner.txt").write_text(getpass.getuser())

    Returns: nothing.
    When: after the run folder is written, before the other processes are started.
    Process: the driver, which is `areal run`.
    How often: once for each `areal run`, a resume included.
    Exception: the run ends with exit code 1.
    """


@hookspec
def areal_add_metrics(
    hook: HookRelay, run_dir: Path, step: int, metrics: Mapping[str, float]
) -> Mapping[str, float] | None:
    """Add metrics to a training step.

        @hookimpl
        def areal_add_metrics(metrics):
            if "batch/tokens" in metrics:  # not at step 0
                return {"tokens_per_reward": metrics["batch/tokens"] / max(metrics["reward/mean"], 1e-6)}

    The names get the plugin's name in front, here `shortest/tokens_per_reward`, so that they cannot overwrite a metric
    of the run. They are part of the step's line in `metrics.jsonl`, and trackers get them.

    Returns: numbers by name; None for nothing.
    When: before the line of a step is written. Training waits, so do nothing slow. With an evaluation: after it.
    Process: trainer rank 0, in the thread that trains.
    How often: once for each step, and for step 0 if it is evaluated.
    Exception: is logged with the plugin's name; the plugin gets no further events, and the run continues.
    """


@hookspec
def areal_should_stop(hook: HookRelay, run_dir: Path, step: int, metrics: Mapping[str, float]) -> str | None:
    """Stop the run by returning a reason.

        @hookimpl
        def areal_should_stop(metrics):
            if metrics.get("evaluation/reward", 0.0) > 0.95:
                return "the task is solved"

    All ranks stop after the same step. A checkpoint is committed, the model is exported, and `areal run` ends with exit
    code 0. The log and `areal status` show the reason. `areal run --resume` continues the run.

    Returns: the reason as one line; None or an empty text to continue.
    When: after the line of a step is written. Training waits, so do nothing slow. With an evaluation: after it.
    Process: trainer rank 0, in the thread that trains.
    How often: once for each step, and for step 0 if it is evaluated.
    Exception: is logged with the plugin's name; the plugin gets no further events, and the run continues.
    """


@hookspec
def areal_step_finished(
    hook: HookRelay, run_dir: Path, step: int, metrics: Mapping[str, float]
) -> Iterable[str] | None:
    """Observe a training step whose metrics are final.

        @hookimpl
        def areal_step_finished(step, metrics):
            if metrics["train/gradient_norm"] > 100:
                return [f"step {step} has a large gradient"]

    Returns: lines for the log of the run, as a list or a single text; None for nothing.
    When: after the line of a step is written. Training does not wait.
    Process: trainer rank 0, in a thread beside training.
    How often: once for each step.
    Exception: is logged with the plugin's name; the plugin gets no further events, and the run continues.
    """


@hookspec
def areal_batch_logged(hook: HookRelay, run_dir: Path, step: int, batch: object) -> None:
    """Observe the tokens of a few groups of a batch; `training.logged_groups` is their number.

        @hookimpl
        def areal_batch_logged(run_dir, step, batch):
            torch.save(batch["advantages"], run_dir / f"advantages-{step}.pt")

    `batch` is an `areal_core.data.PackedBatch` of their sequences, as the algorithm prepared them. Position t holds the
    values of token t + 1, as in `shift_to_predictions`. It also has what the losses computed, as float32, with NaN for
    tokens that no loss has seen.

    Returns: nothing.
    When: after the optimizer updates of a batch. Training does not wait.
    Process: trainer rank 0, in a thread beside training.
    How often: once for each batch that was trained on.
    Exception: is logged with the plugin's name; the plugin gets no further events, and the run continues.
    """


@hookspec
def areal_weights_synced(hook: HookRelay, run_dir: Path, step: int, version: int) -> None:
    """Observe a weight sync that has begun.

        @hookimpl
        def areal_weights_synced(step, version):
            log.info("the weights of step %d have version %d", step, version)

    Servers may still sample with older weights. Each token carries the version that sampled it.

    Returns: nothing.
    When: after a weight sync has begun. Training does not wait.
    Process: trainer rank 0, in a thread beside training.
    How often: once for each weight sync.
    Exception: is logged with the plugin's name; the plugin gets no further events, and the run continues.
    """


@hookspec
def areal_checkpoint_saved(hook: HookRelay, run_dir: Path, step: int, path: Path) -> None:
    """Observe a checkpoint that is committed: from now on a resume begins here.

        @hookimpl
        def areal_checkpoint_saved(step, path):
            upload(path, name=f"step-{step}")

    Returns: nothing.
    When: after the commit, never for a provisional checkpoint. Training does not wait.
    Process: trainer rank 0, in a thread beside training.
    How often: once for each checkpoint.
    Exception: is logged with the plugin's name; the plugin gets no further events, and the run continues.
    """


@hookspec
def areal_run_finished(hook: HookRelay, run_dir: Path, outcome: str, signal: int) -> Iterable[str] | None:
    """Observe the end of a run.

        @hookimpl
        def areal_run_finished(run_dir, outcome):
            if outcome == "failed":
                send_mail(f"{run_dir.name} has failed")

    `outcome` is `done`, `interrupted` or `failed`. A run that a plugin stopped is `done`. `signal` is the number of the
    signal that stopped the run, and 0 without one.

    Returns: lines for the terminal, as a list or a single text; None for nothing.
    When: after every other process of the run has ended.
    Process: the driver, which is `areal run`.
    How often: once, unless the driver was killed.
    Exception: is logged with the plugin's name; the outcome of the run stays.
    """
