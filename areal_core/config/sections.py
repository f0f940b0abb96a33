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
    """The language model that is trained."""

    path: HomePath | None = None
    """a Hugging Face model: a folder, or a name on the hub"""
    source: Selection | None = component("models")
    """a component that makes or fetches the model's folder"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """number format of the forward pass; bfloat16, unless it is written, where placement.training names GPUs"""
    trust_remote_code: bool = False
    """run Python code that ships with the model; only if you read it"""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.path is None) == (self.source is None):
            raise ValueError("give exactly one of path (a folder or hub name) and source (a component that makes one)")
        return self


class RoleTerm(Section):
    """What stands beside the settings of the training engine in an entry of `roles`."""

    path: HomePath | None = Field(default=None, min_length=1)
    """a Hugging Face model, a folder or a name on the hub; null is the run's own model, as it was before the run"""


class RewardTerm(Section):
    """What stands beside `type:` in an item of `rewards`, whichever reward it is."""

    name: str | None = None
    """its name in metrics; by default the component's"""
    weight: float = 1.0
    """its factor in the sum"""


OWN_REWARDS = frozenset({"all_episodes", "mean", "std", "groups_all_equal"})
"""Names below `reward/` of areal's own metrics, which no reward may have."""


def reward_name(chosen: Selection) -> str:
    """Return the name of a reward in metrics: its `name`, or else that of its component."""
    name: str | None = getattr(chosen.common, "name", None)
    return name or chosen.reference.rsplit("/", 1)[-1].rsplit(":", 1)[-1]


class SamplingSection(Section):
    """How tokens are sampled; engine and trainer share these values."""

    temperature: float = Field(default=1.0, ge=COLDEST)
    """divides the logits, in the engine and in the trainer"""
    max_new_tokens: int = Field(default=256, ge=1)
    """the longest answer; a longer one is cut and known to be cut"""
    min_new_tokens: int = Field(default=0, ge=0)
    """tokens before which an answer may not end"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """sample from the most probable tokens with this total"""
    top_k: int = Field(default=0, ge=0)
    """sample from this many tokens; 0 is all of them"""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """drop tokens below this share of the most probable one"""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """above 1 makes tokens that occurred less likely"""
    frequency_penalty: float = 0.0
    """subtracted from a logit for each time its token occurred"""
    presence_penalty: float = 0.0
    """subtracted from a logit once its token occurred"""
    stop_token_ids: list[int] = Field(default=[])
    """tokens that end an answer, beside the model's own"""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """texts that end an answer"""
    allow_mismatched_sampling: bool = False
    """train although the trainer cannot reproduce the sampling's probabilities"""

    def irreproducible(self) -> list[str]:
        """Return the settings, as `name=value`, that change probabilities in a way that the trainer cannot compute."""
        neutral = SamplingSection(temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        harmless = {"stop", "stop_token_ids", "allow_mismatched_sampling"}
        return [f"{name}={value}" for name, value in self if name not in harmless and value != getattr(neutral, name)]


class RolloutSection(Section):
    """The asynchronous half: how much is generated ahead, how stale it may become, what failures lead to."""

    batch_size: int = Field(default=16, ge=1)
    """prompt groups in a training batch"""
    group_size: int = Field(default=8, ge=1)
    """answers to one prompt"""
    max_staleness: int = Field(default=1, ge=0)
    """bound on how many batches old a sampled token may be; 0 is synchronous"""
    max_pending_batches: int = Field(default=2, ge=1)
    """batches that may be in generation or waiting at a time"""
    stale: Literal["drop", "mask", "keep"] = "drop"
    """what happens to data over the bound"""
    incomplete_groups: Literal["replace", "drop", "use"] = "replace"
    """what happens to a group in which an episode failed"""
    max_retries: int = Field(default=2, ge=0)
    """times an episode is tried again after an exception"""
    max_consecutive_failures: int = Field(default=16, ge=1)
    """failures in a row that end the run"""
    episode_timeout_s: Seconds = Field(default=600.0, gt=0)
    """seconds that one episode may take, those in which it waits for a slot of a server left out"""
    stall_timeout_s: Seconds = Field(default=1800.0, gt=0)
    """seconds without a finished group, while one is waited for, that end the run; in evaluations without an episode"""
    blocked_timeout_s: Seconds = Field(default=60.0, gt=0)
    """seconds for which a workflow may block all others of its process before that is replaced"""
    workers: int = Field(default=1, ge=1)
    """processes that run workflows, data and group filters"""
    worker_memory_gib: float | None = Field(default=None, gt=0, le=1 << 20)
    """GiB that each of them and of the programs that it starts, rewards too, may allocate; null is no limit"""
    reward_processes: int = Field(default=1, ge=1)
    """processes that compute rewards, in all; each worker has as many as the others, at least one"""
    reward_timeout_s: Seconds = Field(default=15.0, gt=0)
    """seconds that one reward may take"""
    failed_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of an answer whose rewards raised, crashed or exceeded reward_timeout_s. null: the episode fails."""

    @property
    def episodes_at_once(self) -> int:
        """Largest number of concurrent episodes: those of all groups in the pending batches."""
        return self.max_pending_batches * self.batch_size * self.group_size


class TrainingSection(Section):
    """The synchronous half: what is done with a batch."""

    num_minibatches: int = Field(default=1, ge=1)
    """optimizer updates that a batch is split into, by groups"""
    num_epochs: int = Field(default=1, ge=1)
    """times that a batch is gone through"""
    max_skipped_updates: int = Field(default=3, ge=1)
    """updates with a non-finite gradient, in a row, that end the run"""
    logged_groups: int = Field(default=2, ge=0)
    """groups of each batch whose tokens are logged, those with different rewards first; 0 logs none"""
    collective_timeout_s: Seconds = Field(default=1800.0, gt=0)
    """seconds that the ranks may compute apart before a collective between them counts as lost"""
    phase_timeout_s: Seconds = Field(default=7200.0, gt=0)
    """seconds that a process may be in one phase, such as a checkpoint, before it counts as hanging"""

    @property
    def updates(self) -> int:
        """Optimizer updates per batch."""
        return self.num_minibatches * self.num_epochs


class WeightSyncSection(Section):
    """How new weights reach the inference engines."""

    transport: Selection = component("weight_transports", default="core/memory")
    """how weights are sent: memory and disk are folders; placement chooses broadcast or ipc where they are faster"""
    address: str | None = None
    """of rank 0's machine, as servers reach it, in broadcasts; null is that of its node"""
    timeout_s: Seconds = Field(default=300.0, gt=0)
    """seconds that a broadcast may take before a folder is used"""
    logprob_check_every: int = Field(default=0, ge=0)
    """weight syncs between comparisons of engine and trainer; 0 compares the first only"""
    logprob_tolerance: float | None = Field(default=None, gt=0)
    """mean difference of their log-probabilities that ends the run; null is 0.001 in float32, 0.1 in bfloat16"""


GPU = Annotated[int, Field(ge=0, le=1_000_000)]
"""Number of a GPU, from 0, as the machine counts them."""


class PlacementSection(Section):
    """How many GPUs train and generate, or, on one machine, which; the same for both means colocated."""

    layout: str | None = None
    """counts: train=8 generate=tp2x4 is 8 GPUs that train and 4 servers on 2 each; colocated: the same GPUs do both"""
    generation: list[GPU] | None = None
    """GPUs of one machine for the inference servers, a number again for each further server on that GPU; null is all"""
    training: list[GPU] | None = None
    """GPUs of one machine for the trainer's ranks; null is all"""
    gpu_memory_gib: float | None = Field(default=None, ge=0.001, le=100_000)
    """GiB of each GPU where the run will be, for its plan and for servers that share a GPU; null asks the machine"""

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
    """Bounds of an elastic fleet, whose servers come and go with their nodes."""

    minimum: int = Field(1, ge=1, le=MOST_SERVERS)
    """ready servers, of the run or from elsewhere, with which the run begins; with fewer it continues for
    `start_timeout_s`"""
    maximum: int = Field(ge=0, le=MOST_SERVERS)
    """servers that the run starts, as soon as nodes have room for them"""

    def __bool__(self) -> bool:
        return self.maximum > 0

    def __str__(self) -> str:
        return f"{self.minimum} to {self.maximum}"


class EvaluationSection(Section):
    """Evaluation on held-out data while the run goes on."""

    dataset: Selection = component("datasets")
    """the held-out data"""
    every: int = Field(default=10, ge=1)
    """training steps between evaluations"""
    samples_per_prompt: int = Field(default=1, ge=1)
    """answers to each prompt"""
    limit: int | None = Field(default=None, ge=1)
    """prompts that are used; null is all"""
    temperature: Annotated[float, Field(ge=0), AfterValidator(_check_temperature)] | None = None
    """null is the temperature of training; 0 is greedy"""
    at_start: bool = True
    """evaluate before the first step as well"""
    keep_best: bool = True
    """export the model with the best score to best/"""
    beside_training: bool = True
    """train on the next batch meanwhile, except where the run is synchronous or servers sleep"""


class CheckpointSection(Section):
    """What is written to the run folder to go on from."""

    every: int = Field(default=0, ge=0)
    """training steps between checkpoints, beside those by time; 0 is none"""
    every_s: Seconds = Field(default=600.0, ge=0)
    """seconds between checkpoints; 0 leaves those by time out"""
    largest_share: float = Field(default=0.05, gt=0, le=1)
    """share of the time that training may wait for checkpoints by time; they come less often where they are slow"""
    keep: int = Field(default=2, ge=1)
    """checkpoints that are kept, the newest ones"""
    asynchronous: bool = True
    """write them while training goes on, from a copy in host memory, where engine and memory allow it"""
    export: bool = True
    """write a Hugging Face folder at the end"""
