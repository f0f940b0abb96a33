"""The sections of a run's config, one settings model each. `run_config.py` combines them."""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_serializer, model_validator

from areal_core.config.place import component
from areal_core.config.selection import Selection  # noqa: TC001  pydantic evaluates annotations
from areal_core.config.settings import Seconds, Section
from areal_core.gpus import gpu_bytes

COLDEST = 0.01
"""Lowest temperature above 0. Logits that are divided by a lower one exceed the numbers that engines compute with."""


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"must be at least {COLDEST}, or 0, which is greedy, not {temperature}")
    return temperature


HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A folder, or a name on the hub. `~` is the user's home."""


class ModelSection(Section):
    """Model to train: its folder or name on the hub, and its number format."""

    path: HomePath | None = None
    """Hugging Face model: a folder, or a name on the hub."""
    source: Selection | None = component("models")
    """Component that creates or downloads the folder of the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the forward pass. If it is not set: bfloat16 if placement.training names GPUs, otherwise
    float32."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. Read that code before you set this."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.path is None) == (self.source is None):
            raise ValueError("give exactly one of path (a folder or hub name) and source (a component that makes one)")
        return self


class RoleTerm(Section):
    """Keys beside the settings of the train engine in an entry of `roles`."""

    path: HomePath | None = Field(default=None, min_length=1)
    """Hugging Face model of the role: a folder, or a name on the hub. null: the run's own model, as it was before the
    run."""


class RewardTerm(Section):
    """Keys beside `type:` in an item of `rewards`, for every reward function."""

    name: str | None = None
    """Name of the reward in metrics. null: the name of the component."""
    weight: float = 1.0
    """Weight of the reward in the sum of all rewards."""


OWN_REWARDS = frozenset({"all_episodes", "mean", "std", "groups_all_equal"})
"""Names below `reward/` of areal's own metrics, which no reward may have."""


def reward_name(chosen: Selection) -> str:
    """Return the name of a reward in metrics: its `name`, or else that of its component."""
    name: str | None = getattr(chosen.common, "name", None)
    return name or chosen.reference.rsplit("/", 1)[-1].rsplit(":", 1)[-1]


class SamplingSection(Section):
    """How tokens are sampled. The engine and the trainer share these values."""

    temperature: float = Field(default=1.0, ge=COLDEST)
    """Sampling temperature. Both the engine and the trainer divide the logits by it."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens in one generation. A longer answer is cut off and marked as truncated."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Minimum number of tokens before an answer may end. 0: no minimum."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of most probable tokens whose probabilities reach this sum. 1: all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the most probable tokens. 0: all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens whose probability is below this share of the most probable token's. 0: drop none."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Penalty on tokens that have occurred. Above 1 they become less likely; 1: no penalty."""
    frequency_penalty: float = 0.0
    """Amount subtracted from the logit of a token for each time it has occurred. 0: no penalty."""
    presence_penalty: float = 0.0
    """Amount subtracted once from the logit of every token that has occurred. 0: no penalty."""
    stop_token_ids: list[int] = Field(default=[])
    """Ids of tokens that end an answer, in addition to the model's own."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Texts that end an answer."""
    top_logprobs: int = Field(default=0, ge=0)
    """Number of likeliest tokens whose log-probabilities the servers report for each sampled token, for components such
    as the policy loss score_centering. Evaluations do not request them. 0: none."""
    allow_mismatched_sampling: bool = False
    """Train although the trainer cannot reproduce the probabilities under these settings, such as with top_p below
    1."""

    def irreproducible(self) -> list[str]:
        """Return the settings, as `name=value`, that change probabilities in a way that the trainer cannot compute."""
        neutral = SamplingSection(temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        harmless = {"stop", "stop_token_ids", "top_logprobs", "allow_mismatched_sampling"}
        return [f"{name}={value}" for name, value in self if name not in harmless and value != getattr(neutral, name)]


class RolloutSection(Section):
    """Generation of data: how much is generated ahead, how stale it may become, and what happens after failures."""

    batch_size: int = Field(default=16, ge=1)
    """Prompt groups in a training batch."""
    group_size: int = Field(default=8, ge=1)
    """Answers sampled for each prompt; together they are a group."""
    max_staleness: int = Field(default=1, ge=0)
    """Maximum staleness of a token: batches trained after its weights were synced and before it is trained on. 0:
    synchronous generation."""
    max_pending_batches: int = Field(default=2, ge=1)
    """Maximum number of batches that are in generation or waiting to be trained on."""
    stale: Literal["drop", "mask", "keep"] = "drop"
    """What happens to data over max_staleness. `drop`: discard the group and generate another. `mask`: take the stale
    tokens out of the loss. `keep`: train on all of it."""
    incomplete_groups: Literal["replace", "drop", "use"] = "replace"
    """What happens to a group with a failed episode. `replace`: generate a group for another prompt. `drop`: train on a
    smaller batch. `use`: train on the group's other answers."""
    max_retries: int = Field(default=2, ge=0)
    """Retries of an episode after an exception. A failed reward or an unusable row is not retried."""
    max_consecutive_failures: int = Field(default=16, ge=1)
    """The run ends when this many groups in a row have a failed episode, or when the first episodes of an evaluation,
    this many, all fail."""
    episode_timeout_s: Seconds = Field(default=600.0, gt=0)
    """Timeout of an episode in seconds. Includes its retries, excludes time queued for a slot of a server."""
    stall_timeout_s: Seconds = Field(default=1800.0, gt=0)
    """The run ends if no group finishes for this many seconds while the trainer waits for one. In an evaluation: if no
    episode finishes."""
    blocked_timeout_s: Seconds = Field(default=60.0, gt=0)
    """Seconds for which one call may block all other episodes of its rollout worker. After that, the worker is
    replaced."""
    workers: int = Field(default=1, ge=1)
    """Number of rollout workers: processes that run workflows, read data and filter groups."""
    worker_memory_gib: float | None = Field(default=None, gt=0, le=1 << 20)
    """Memory limit in GiB of each rollout worker and of each of its child processes, reward processes included. null:
    no limit."""
    reward_processes: int = Field(default=1, ge=1)
    """Number of processes that compute rewards, in the whole run. Each worker gets an equal share, rounded up."""
    reward_timeout_s: Seconds = Field(default=15.0, gt=0)
    """Timeout in seconds for all rewards of one answer together."""
    failed_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of an answer whose rewards raised, crashed or exceeded reward_timeout_s. null: the episode fails."""

    @property
    def episodes_at_once(self) -> int:
        """Largest number of concurrent episodes: those of all groups in the pending batches."""
        return self.max_pending_batches * self.batch_size * self.group_size


class TrainingSection(Section):
    """How often a batch is trained on, and what ends a run whose training fails or hangs."""

    num_minibatches: int = Field(default=1, ge=1)
    """Minibatches that a batch is split into, group by group. Each is one optimizer update."""
    num_epochs: int = Field(default=1, ge=1)
    """Number of passes over each batch."""
    max_skipped_updates: int = Field(default=3, ge=1)
    """The run ends when this many updates in a row have a non-finite gradient. Such an update is skipped."""
    logged_groups: int = Field(default=2, ge=0)
    """Groups of each batch whose tokens are logged, groups with different rewards first. 0: none."""
    collective_timeout_s: Seconds = Field(default=1800.0, gt=0)
    """Timeout in seconds of a collective between trainer ranks. It must be longer than any time that ranks compute on
    their own."""
    phase_timeout_s: Seconds = Field(default=7200.0, gt=0)
    """Seconds that a process may spend in one phase, such as a checkpoint, before it is considered hung."""

    @property
    def updates(self) -> int:
        """Optimizer updates per batch."""
        return self.num_minibatches * self.num_epochs


class WeightSyncSection(Section):
    """How new weights reach the inference engines."""

    transport: Selection = component("weight_transports", default="core/memory")
    """Weight transport. `memory` and `disk` write the weights to a folder. The default becomes `broadcast` or `ipc`
    where placement makes these faster."""
    address: str | None = None
    """Address under which servers reach rank 0's machine in broadcasts. null: the address of its node."""
    timeout_s: Seconds = Field(default=300.0, gt=0)
    """Timeout of a broadcast in seconds. After it, the weights are sent through a folder."""
    logprob_check_every: int = Field(default=0, ge=0)
    """Weight syncs between log-probability checks, which compare the inference engine with the trainer. 0: check the
    first sync only."""
    logprob_tolerance: float | None = Field(default=None, gt=0)
    """The run ends if the log-probabilities of engine and trainer differ by more than this on average. null: 0.001 in
    float32, 0.1 in bfloat16."""


GPU = Annotated[int, Field(ge=0, le=1_000_000)]
"""Number of a GPU, from 0, as the machine counts them."""


class PlacementSection(Section):
    """How many GPUs train and generate or, on one machine, which. If the same GPUs do both, the run is colocated."""

    layout: str | None = None
    """Numbers of GPUs. `train=8 generate=tp2x4`: 8 GPUs for training, 4 servers with 2 GPUs each. `colocated`: all GPUs
    train and generate."""
    generation: list[GPU] | None = None
    """GPUs of one machine for the inference servers. Repeat a GPU for each further server on it. null: a server sees
    all GPUs."""
    training: list[GPU] | None = None
    """GPUs of one machine for the trainer's ranks, one each. null: a rank sees all GPUs and uses one."""
    gpu_memory_gib: float | None = Field(default=None, ge=0.001, le=100_000)
    """Memory in GiB of each GPU that the run will use, for the memory plan and for servers that share a GPU. null: what
    this machine reports."""

    @model_validator(mode="before")
    @classmethod
    def _read_layout(cls, written: Any) -> Any:
        # A layer that adds a key to a text makes the text the `type`, because it may be the name of a component.
        if isinstance(written, dict) and "type" in written:
            layout, others = written["type"], {key: value for key, value in written.items() if key != "type"}
            if lists := ", ".join(sorted(others.keys() & {"generation", "training"})):
                raise ValueError(f"GPUs are named in words ('{layout}') and in {lists}: write placement=null before it")
            return {"layout": layout, **others}
        return {"layout": written} if isinstance(written, str | None) else written

    @model_validator(mode="after")
    def _check_gpus(self) -> PlacementSection:
        if self.layout is not None and (self.generation is not None or self.training is not None):
            raise ValueError(f"GPUs are named in words ('{self.layout}') and in lists: leave one of them out")
        if twice := [gpu for gpu, times in Counter(self.training or []).items() if times > 1]:
            raise ValueError(f"GPU {twice[0]} is named twice in training: name each once")
        if self.generation is not None and self.training is not None:
            shared = set(self.generation) & set(self.training)
            if shared and set(self.generation) != set(self.training):
                raise ValueError(f"placement shares only the GPUs {sorted(shared)}: share all of them, or none")
        return self

    @model_serializer(mode="wrap")
    def _without_derived(self, write: Any) -> dict[str, Any]:
        """Leave out the lists of GPUs that follow from the layout."""
        written: dict[str, Any] = write(self)
        return written | ({"generation": None, "training": None} if self.is_counted else {})

    def gpu_bytes(self) -> int | None:
        """Return the bytes of memory of the smallest GPU that trains; None if unknown.

        This is `gpu_memory_gib`, or else what the GPU driver of this machine reports.
        """
        if self.gpu_memory_gib is not None:
            return round(self.gpu_memory_gib * (1 << 30))
        return gpu_bytes(self.training or ())

    @property
    def is_counted(self) -> bool:
        """Whether the placement gives the number of GPUs instead of naming them."""
        return self.layout is not None

    @property
    def colocated(self) -> bool:
        """Whether the same GPUs generate and train."""
        return bool(self.generation) and set(self.generation or ()) == set(self.training or ())

    @property
    def servers_share_gpus(self) -> bool:
        """Whether several inference servers share a GPU and compute there at the same time."""
        return len(self.generation or ()) > len(set(self.generation or ()))

    @property
    def disaggregated(self) -> bool:
        """Whether some named GPUs generate and others train."""
        return bool(self.generation and self.training) and not self.colocated


MOST_SERVERS = 100_000
"""Upper bound on the servers of a run. No cluster has as many GPUs."""


class ServerBounds(Section):
    """Bounds of an elastic fleet, whose servers come and go with their nodes.

    Example:
        >>> from pydantic import Field
        >>> from areal_core.config import ServerBounds, Settings
        >>> class EngineSettings(Settings):
        ...     servers: int | ServerBounds = Field(1, description="Number of servers, or its bounds.")
        >>> print(EngineSettings(servers={"minimum": 2, "maximum": 8}).servers)
        2 to 8
    """

    minimum: int = Field(1, ge=1, le=MOST_SERVERS)
    """Number of ready servers with which the run begins, including servers from elsewhere. If fewer are left later, the
    run continues for start_timeout_s."""
    maximum: int = Field(ge=0, le=MOST_SERVERS)
    """Maximum number of servers that the run starts, each as soon as a node has room for it."""

    def __bool__(self) -> bool:
        return self.maximum > 0

    def __str__(self) -> str:
        return f"{self.minimum} to {self.maximum}"


class EvaluationSection(Section):
    """Evaluation on held-out data during the run.

    Example:
        >>> from areal_core.config import EvaluationSection, NoSettings, Selection
        >>> held_out = Selection("datasets", "mine/held_out", NoSettings())
        >>> evaluation = EvaluationSection(dataset=held_out, temperature=0, limit=200)
        >>> evaluation.temperature, evaluation.samples_per_prompt
        (0.0, 1)
    """

    dataset: Selection = component("datasets")
    """Held-out data set."""
    every: int = Field(default=10, ge=1)
    """Training steps between evaluations. The last step is always evaluated."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Answers sampled for each prompt."""
    limit: int | None = Field(default=None, ge=1)
    """Number of prompts to evaluate. null: all."""
    temperature: Annotated[float, Field(ge=0), AfterValidator(_check_temperature)] | None = None
    """Sampling temperature of evaluations. null: the temperature of training. 0: greedy."""
    at_start: bool = True
    """Evaluate before the first training step as well."""
    keep_best: bool = True
    """Export the model with the best evaluation score to best/ in the run folder."""
    beside_training: bool = True
    """Train on the next batch while an evaluation runs. No effect if the run is synchronous or deterministic, or if
    servers sleep while it trains."""


class CheckpointSection(Section):
    """Checkpoints, from which a run can be resumed, and the final export."""

    every: int = Field(default=0, ge=0)
    """Training steps between checkpoints, in addition to those by time. 0: only by time."""
    every_s: Seconds = Field(default=600.0, ge=0)
    """Seconds between checkpoints. 0: no checkpoints by time."""
    largest_share: float = Field(default=0.05, gt=0, le=1)
    """Maximum share of the time, from 0 to 1, that training may wait for checkpoints by time. Slow checkpoints are
    written less often."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep, the newest ones. `areal replay` can rebuild the steps since the oldest of them."""
    keep_trajectories: bool = False
    """Keep the trajectories of all steps, for `areal replay`: about 16 bytes a token. Otherwise those of steps before
    the oldest checkpoint are removed."""
    asynchronous: bool = True
    """Write checkpoints while training continues, from a copy in host memory, if the engine supports it and memory
    suffices."""
    export: bool = True
    """Export the model as a Hugging Face folder at the end of the run."""

    @property
    def kept_trajectories(self) -> int | None:
        """Checkpoints since the oldest of which trajectories are kept; None keeps all."""
        return None if self.keep_trajectories else self.keep
