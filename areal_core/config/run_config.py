"""The root of a run's config: all keys of a YAML file, and the checks that compare several of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from areal_core.config import sections
from areal_core.config.launching import launching
from areal_core.config.needs import needs_of, roles_of
from areal_core.config.numbering import numbered, with_servers
from areal_core.config.place import Place, component
from areal_core.config.problems import Path as KeyPath
from areal_core.config.problems import Problem, dotted
from areal_core.config.selection import NotReadError, Selection, selections
from areal_core.config.settings import NoSettings, Section, Settings
from areal_core.config.tree import same_choice
from areal_core.errors import ConfigError
from areal_core.interfaces.algorithm import ForwardPass
from areal_core.interfaces.model import ACTOR
from areal_core.interfaces.training import OPTIONAL_OUTPUTS
from areal_core.plugins.records import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator


class RunConfig(Section):
    """The complete config of a run. Every process of the run has the same one."""

    plugins: list[str] = Field(default=[])
    """Plugins to load in addition to those whose components the config names."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed of the run. Every random choice follows from it."""
    shuffle: bool = True
    """Shuffle the data set in a new order in every epoch."""
    steps: int = Field(ge=1)
    """Number of training steps. Each step trains on one batch."""
    deterministic: bool = False
    """Give bit-for-bit the same parameters for the same config. Needs rollout.max_staleness 0."""
    model: sections.ModelSection
    """The language model to train."""
    dataset: Selection = component("datasets")
    """Data set of prompts, or of examples in fine-tuning."""
    workflow: Selection | None = component("workflows")
    """How an episode is run, from the prompt to its reward. null in fine-tuning."""
    rewards: list[Selection] = component("reward_functions", default=[], common=sections.RewardTerm)
    """Reward functions. The reward of an answer is their weighted sum."""
    sampling: sections.SamplingSection = sections.SamplingSection()
    """How the tokens of an answer are sampled."""
    rollout: sections.RolloutSection = sections.RolloutSection()
    """How data is generated: batch size, staleness, retries and timeouts."""
    training: sections.TrainingSection = sections.TrainingSection()
    """How a batch is trained on."""
    inference_engine: Selection | None = component("inference_engines")
    """Engine that generates answers. `auto`: the fastest installed engine, placed on this machine's GPUs. null in
    fine-tuning."""
    weight_sync: sections.WeightSyncSection = sections.WeightSyncSection()
    """How new weights reach the inference engine."""
    placement: sections.PlacementSection = sections.PlacementSection()
    """Which GPUs train and which generate."""
    train_engine: Selection = component("train_engines")
    """Engine that holds the parameters and makes the optimizer updates."""
    algorithm: Selection = component("algorithms")
    """How a loss is computed from a batch."""
    roles: dict[str, Annotated[Selection, Place(KINDS["train_engines"], common=sections.RoleTerm)]] = Field(default={})
    """Engines of the algorithm's models by role, such as critic: the `path` of the model, and the settings that differ
    from train_engine."""
    evaluation: sections.EvaluationSection | None = None
    """Evaluation on held-out data during the run. null: none."""
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    """When checkpoints are written, from which a run can be resumed."""
    trackers: list[Selection] = component("trackers", default=[])
    """Where metrics are logged in addition to the run folder."""
    launcher: Selection = component("launchers", default="core/local")
    """Launcher that starts the processes of the run."""

    @model_validator(mode="before")
    @classmethod
    def _complete_roles(cls, written: Any) -> Any:
        """Complete each entry of `roles` with the settings of `train_engine`, if both have the same `type`."""
        if not isinstance(written, Mapping) or not isinstance(written.get("roles"), Mapping):
            return written
        shared = written.get("train_engine")
        shared = {"type": shared} if isinstance(shared, str) else shared
        if not isinstance(shared, Mapping):
            return written
        roles = dict(written["roles"])
        for name, role in roles.items():
            if isinstance(role, Mapping) and same_choice(role.get("type") or shared.get("type"), shared.get("type")):
                roles[name] = {**shared, **role}
        return {**written, "roles": roles}

    @model_validator(mode="after")
    def _apply_placement(self) -> RunConfig:
        """Set what follows from the GPUs in `placement`, except for keys that the config sets.

        A layout sets the GPUs' numbers and the servers. On GPUs, the model trains in bfloat16, and servers get weights
        by broadcast or ipc if they can.
        """
        placed = self
        if self.placement.is_counted:
            placed = self.model_copy(update=numbered(self.placement, self.launcher, self.inference_engine))
        elif self.placement.generation:
            engine = with_servers(self.placement, self.inference_engine)
            placed = self.model_copy(update={"inference_engine": engine})
        changes: dict[str, Section] = {}
        if placed.placement.training and "dtype" not in placed.model.model_fields_set:
            changes["model"] = placed.model.model_copy(update={"dtype": "bfloat16"})
        is_unset = "transport" not in placed.weight_sync.model_fields_set
        if placed.has_servers and is_unset and not placed.placement.servers_share_gpus:
            name = "broadcast" if placed.placement.disaggregated else "ipc"
            is_possible = placed.placement.disaggregated or placed.has_rank_on_every_gpu
            settings = getattr(placed.inference_engine, "settings", None)
            if is_possible and f"core/{name}" in getattr(settings, "transports", ()):
                noun = KINDS["weight_transports"].noun
                chosen = Selection("weight_transports", f"core/{name}", NoSettings(), reference=name, noun=noun)
                changes["weight_sync"] = placed.weight_sync.model_copy(update={"transport": chosen})
        return placed.model_copy(update=changes) if changes else placed

    @property
    def trainer_processes(self) -> int:
        """Number of the trainer's ranks."""
        return launching(self.launcher).trainer_processes or len(self.placement.training or ()) or 1

    @property
    def takes_turns(self) -> bool:
        """Whether the GPUs generate and train alternately: the servers sleep and free their memory for training."""
        settings = getattr(self.inference_engine, "settings", None)
        return self.placement.colocated and getattr(settings, "gives_memory", False)

    @property
    def has_rank_on_every_gpu(self) -> bool:
        """Whether the GPUs generate and train alternately, and each has one rank of the trainer and one server."""
        training, generation = self.placement.training or (), self.placement.generation or ()
        return self.takes_turns and len(generation) == len(training) == self.trainer_processes

    @property
    def has_servers(self) -> bool:
        """Whether the run starts inference servers. They may run on other nodes than the trainer."""
        return self.inference_engine is not None and bool(self.inference_engine.keywords().get("servers"))

    @property
    def has_elastic_servers(self) -> bool:
        """Whether the number of servers may change during the run, because nodes join and leave it."""
        chosen = self.inference_engine
        return chosen is not None and isinstance(chosen.keywords().get("servers"), sections.ServerBounds)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the config certainly allows; 0 if the run does not generate."""
        if self.workflow is None:
            return 0
        return max(self.sampling.max_new_tokens + 1, self.workflow.keywords().get("max_tokens", 0))

    @property
    def evaluates_beside_training(self) -> bool:
        """Whether the run trains on the next batch while an evaluation runs.

        It cannot if generation is synchronous or the GPUs generate and train alternately: the next batch has to wait.
        It does not in a deterministic run, in which an evaluation must have the engine's batches for itself.
        """
        is_configured = self.evaluation is not None and self.evaluation.beside_training
        is_asynchronous = self.rollout.max_staleness > 0 and not self.deterministic and not self.takes_turns
        return is_configured and is_asynchronous and self.workflow is not None

    def cross_checks(self) -> Iterator[Problem]:
        """Yield problems that involve several values, including those that plugins report.

        Within `leaving_unread`, checks that need unread settings are skipped.
        """
        yield from self._check_numbers()
        yield from self._check_generation()
        components = [self._check_component(path, chosen) for path, chosen in selections(self)]
        for check in (self._check_roles(), self._check_reward_names(), *components):
            with suppress(NotReadError):
                yield from [*check]

    def _check_component(self, path: KeyPath, chosen: Selection) -> Iterator[Problem]:
        if chosen.kind == "advantages" and self.rollout.group_size == 1 and _needs_group(chosen):
            message = f"'{chosen.target}' compares the answers to one prompt, and rollout.group_size is 1"
            yield Problem(path, message, ("set rollout.group_size to 2 or more, or choose another advantage",))
        if isinstance(chosen.settings, Settings):
            yield from (Problem(path, message) for message in chosen.settings.check(self))

    def cross_notes(self) -> Iterator[str]:
        """Yield a line for each setting that has no effect, and the notes of plugins. Each line starts with the key."""
        if self.rewards and not any(getattr(chosen.common, "weight", 1.0) for chosen in self.rewards):
            yield "rewards: all weights are 0, so every answer earns the same"
        if self.evaluation is not None and self.evaluation.dataset == self.dataset:
            yield "evaluation.dataset: is that of training, so its score is no held-out one"
        if self.sampling.top_logprobs and not self.reader_of_top_logprobs():
            yield "sampling.top_logprobs: no component of the algorithm reads them, and they make every answer larger"
        for path, chosen in selections(self):
            if isinstance(chosen.settings, Settings):
                yield from (f"{dotted(path)}: {text}" for text in chosen.settings.notes(self))

    def _check_numbers(self) -> Iterator[Problem]:
        groups, updates = self.rollout.batch_size, self.training.num_minibatches
        if groups % updates:
            fitting = ", ".join(str(number) for number in range(1, groups + 1) if groups % number == 0)
            yield Problem(
                ("training", "num_minibatches"),
                f"{updates} does not divide rollout.batch_size, which is {groups}",
                (f"choose one of {fitting}, or another batch size",),
            )
        if self.deterministic and self.workflow is not None and self.rollout.max_staleness:
            message = "with rollout.max_staleness above 0 it depends on time which weights sample a token"
            yield Problem(("deterministic",), message, ("set rollout.max_staleness=0, or leave deterministic out",))
        if self.sampling.min_new_tokens > self.sampling.max_new_tokens:
            yield Problem(
                ("sampling", "min_new_tokens"),
                f"{self.sampling.min_new_tokens} is more than max_new_tokens, {self.sampling.max_new_tokens}",
            )

    def _check_generation(self) -> Iterator[Problem]:
        """Yield missing components, and sampling settings whose probabilities the trainer cannot compute."""
        uses_a_gpu_twice = self.placement.colocated or self.placement.servers_share_gpus
        if uses_a_gpu_twice and self.weight_sync.transport.target == "core/broadcast":
            message = "a broadcast has no group in which a GPU is twice, and placement uses one twice"
            yield Problem(("weight_sync", "transport"), message, ("leave it out, or set it to memory",))
        if self.workflow is not None and self.inference_engine is None:
            yield Problem(("inference_engine",), "is required beside a workflow: something has to generate")
        if self.inference_engine is not None and self.workflow is None:
            yield Problem(("workflow",), "is required beside an inference_engine: something must say what to generate")
        if self.rewards and self.workflow is None:
            yield Problem(("rewards",), "have no effect without a workflow")
        lost = self.sampling.irreproducible()
        if self.inference_engine is not None and lost and not self.sampling.allow_mismatched_sampling:
            yield Problem(
                ("sampling",),
                f"the trainer cannot reproduce the probabilities of {', '.join(lost)}",
                ("remove it, or accept the error with sampling.allow_mismatched_sampling=true",),
            )

    def _check_roles(self) -> Iterator[Problem]:
        try:
            needed = roles_of(self.algorithm, self.training.updates)
        except NotReadError:
            raise
        except ConfigError as error:
            yield Problem(("algorithm",), error.message, tuple(error.hints))
            return
        for name, role in needed.items():
            section = self.roles.get(name)
            is_elsewhere = section is not None and section.declared("has_own_model", False)
            if role.needs_path and not is_elsewhere and getattr(section and section.common, "path", None) is None:
                message = "is required: without a model of its own the role would be a copy of the run's"
                yield Problem(("roles", name, "path"), message, (f"add roles.{name}.path=FOLDER",))
        yield from self._lacking_outputs()
        for name in self.roles.keys() - needed.keys():
            hint = f"roles of this algorithm: {', '.join(needed)}"
            yield Problem(("roles", name), f"'{self.algorithm.target}' and its components know no such role", (hint,))

    def _lacking_outputs(self) -> Iterator[Problem]:
        """Yield outputs that the algorithm needs and that the engines do not compute, or are not asked for."""
        needs = needs_of(self.algorithm, self.training.updates)
        outputs = {(need.role.name, need.output) for need in needs if isinstance(need, ForwardPass)}
        if reader := self.reader_of_top_logprobs():
            outputs.add((ACTOR.name, "top_logprobs"))
            if not self.sampling.top_logprobs:
                message = f"is 0, and '{reader}' needs the log-probabilities of the likeliest tokens"
                yield Problem(("sampling", "top_logprobs"), message, ("set it to 20, for example",))
        for role, output in sorted(outputs):
            engine = self.roles.get(role, self.train_engine)
            if output in OPTIONAL_OUTPUTS and not engine.declared(f"computes_{output}"):
                yield Problem(
                    ("roles", role) if role in self.roles else ("train_engine",),
                    f"{engine.target} does not compute the output '{output}', which the algorithm needs",
                    ("choose a train engine that computes it, such as fsdp, or another component of the algorithm",),
                )

    def reader_of_top_logprobs(self) -> str:
        """Return the first component of the algorithm that reads `PolicyTerms.top_logprobs`; empty if none does."""
        readers = (chosen.target for _, chosen in selections(self.algorithm) if chosen.declared("needs_top_logprobs"))
        return next(readers, "")

    def _check_reward_names(self) -> Iterator[Problem]:
        names = [sections.reward_name(chosen) for chosen in self.rewards]
        for number, name in enumerate(names):
            if name in sections.OWN_REWARDS:
                message = f"a reward is called '{name}', as a metric of areal's own is"
                yield Problem(("rewards", number), message, ("give it another name: name: ...",))
            if name in names[:number]:
                message = f"two rewards are called '{name}', and metrics know them by it"
                yield Problem(("rewards", number), message, ("give each a name of its own: name: ...",))


def _needs_group(advantage: Selection) -> bool:
    """Return whether an advantage compares the answers to one prompt."""
    return bool(advantage.declared("needs_group"))
