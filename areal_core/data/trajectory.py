"""One token sequence that the policy (partly) wrote, and the episode that it belongs to."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.data.tokens import SampledTokens, TokenIds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Values = np.ndarray[Any, Any]
"""Numbers of a trajectory. Tensors of PyTorch are taken as well and become such, without a copy."""


class FinishReason(IntEnum):
    """Why the last generation of a trajectory ended. Truncation is known, never inferred from a width.

    Compare with a member, `FinishReason.LENGTH`: only rewards get the reason as a text, "length".
    """

    STOP = 0
    LENGTH = 1
    TOOL = 2
    ABORT = 3


class Generation:
    """What was generated for one request.

    Args:
        output_ids: the sampled tokens, a stop token included.
        logprobs: of each; see `SampledTokens`.
        versions: the weight version that sampled each token, as the engine itself recorded it.
        finish_reason: why it ended.
        columns: further token keys of the trajectory, integers [T, ...] of the request's tokens and then the sampled
            ones: what the engine knows of each token's prediction, 0 where it knows nothing, as behind their end.

    Attributes:
        sampled: the tokens as arrays of numbers.
        finish_reason, columns: as given.

    Raises:
        TypeError: a token is no integer, or a log-probability no number.
        ValueError: nobody has sampled these tokens so, or the three are not equally long.
    """

    __slots__ = ("columns", "finish_reason", "sampled")

    def __init__(
        self,
        output_ids: Iterable[int],
        logprobs: Iterable[float],
        versions: Iterable[int],
        finish_reason: FinishReason,
        columns: Mapping[str, Values] | None = None,
    ) -> None:
        self.sampled = SampledTokens(output_ids, logprobs, versions)
        self.finish_reason, self.columns = finish_reason, columns or {}
        if fault := self.sampled.fault():
            raise ValueError(f"an inference engine answered with {fault}")
        if len(self.sampled.versions) != len(self.sampled):
            raise ValueError(f"{len(self.sampled)} tokens have {len(self.sampled.versions)} versions")

    @classmethod
    def of(
        cls, sampled: SampledTokens, finish_reason: FinishReason, columns: Mapping[str, Values] | None = None
    ) -> Generation:
        """Of tokens that were looked at before."""
        self = cls.__new__(cls)
        self.sampled, self.finish_reason, self.columns = sampled, finish_reason, columns or {}
        return self

    @property
    def output_ids(self) -> list[int]:
        """The sampled tokens, a stop token included; a list that is made each time."""
        return self.sampled.ids.tolist()

    @property
    def logprobs(self) -> list[float]:
        """Of each token; a list that is made each time."""
        return self.sampled.logprobs.tolist()

    @property
    def versions(self) -> list[int]:
        """Of each token; a list that is made each time."""
        return self.sampled.versions.tolist()

    def __len__(self) -> int:
        return len(self.sampled)

    def __repr__(self) -> str:
        return f"Generation({self.output_ids}, {self.logprobs}, {self.versions}, {self.finish_reason!r})"


def joined_columns(known: Mapping[str, Values], told: Mapping[str, Values], count: int) -> dict[str, Values]:
    """Columns of the first `count` tokens at most: what is known of them stays, what is told now goes on behind it."""
    found = dict(known)
    for name, column in told.items():
        before = found.get(name, column[:0])
        found[name] = np.concatenate([before, column[len(before) : count]])
    return found


TOKEN_DTYPES = {
    "input_ids": np.dtype(np.int64),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "turn_ids": np.dtype(np.int32),
}
"""The per-token keys that every trajectory has, each of shape [T]."""


@dataclass(slots=True)
class Trajectory:
    """One token sequence with what is known of each token, of each turn and of the whole.

    Attributes:
        tokens: values of shape [T, ...]. Always there: `input_ids` int64; `loss_mask` bool, token was sampled by the
            policy; `logprobs` float32, log-softmax(logits / temperature) of token t under the weights that sampled
            it, 0 where not sampled; `versions` int32, the weight version that sampled token t, -1 where not sampled;
            `turn_ids` int32, turn of a multi-turn episode, -1 outside. Further keys travel along untouched.
        sequence: values of any fixed shape that hold for the whole sequence. The rollout runtime fills in scalars:
            `reward` float32, `group_id`, `episode_id`, `sample_index` and `part_index` int64 (its place among the
            trajectories of the episode), `agent_id` int64 (a digest of its name), `finish_reason` int8; and `prompt_id`
            [2] int64.
        turns: values of shape [turns, ...]; `turn_rewards` float32, where there are: what each
            turn earned of `Episode.reward` and `reward` together; the rest is earned at the end.
        multimodal: further values with lengths of their own, by what they are of, such as `images` and their `patches`.
        agent_id: who wrote it, in an episode in which the policy plays several parts, such as a planner and a solver.
            What is compared within a group is compared for each agent by itself.
        reward: its own, beside the episode's; the `reward` of its sequence is the sum.

    Raises:
        ValueError: a required key is missing, has another dtype, or the lengths of the token keys differ.
    """

    tokens: dict[str, Values]
    sequence: dict[str, Values] = field(default_factory=dict)
    turns: dict[str, Values] = field(default_factory=dict)
    agent_id: str = ""
    reward: float = 0.0
    multimodal: dict[str, dict[str, Values]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Take what was put into it as arrays; raises as making one does."""
        self.tokens, self.sequence, self.turns = map(_arrays, (self.tokens, self.sequence, self.turns))
        self.multimodal = {name: _arrays(level) for name, level in self.multimodal.items()}
        for key, dtype in TOKEN_DTYPES.items():
            if key not in self.tokens:
                raise ValueError(f"a trajectory needs the token key '{key}'; it has {sorted(self.tokens)}")
            if self.tokens[key].dtype != dtype:
                raise ValueError(f"token key '{key}' has dtype {self.tokens[key].dtype}, it must be {dtype}")
        for name, values in (("token", self.tokens), ("turn", self.turns), *self.multimodal.items()):
            if len({*map(len, values.values())}) > 1:
                lengths = {key: len(value) for key, value in values.items()}
                raise ValueError(f"the {name} keys of a trajectory differ in length: {lengths}")
        if not len(self):
            raise ValueError("a trajectory needs at least one token")

    def __len__(self) -> int:
        return len(self.tokens["input_ids"])

    @classmethod
    def from_generation(cls, prompt_ids: Sequence[int], generation: Generation) -> Trajectory:
        """The trajectory of one prompt and what the policy wrote behind it."""
        builder = TrajectoryBuilder()
        builder.add_context(prompt_ids)
        builder.add_generation(generation)
        return builder.build()


class TrajectoryBuilder:
    """Collects the tokens of a trajectory in order, context and generations in turns; tokens are only appended.

    A further column is put into what `build` returns: `trajectory.tokens["score"] = numpy.zeros(len(trajectory))`, as
    long as the trajectory, and in every trajectory of the run. Losses and advantages find it under that name, shifted
    by one as all columns of tokens are: at the place of a token stands what belongs to the token behind it.

    Attributes:
        input_ids: all tokens so far: what the next generation continues.
    """

    def __init__(self) -> None:
        self.input_ids = TokenIds()
        self._columns: dict[str, Values] = {}
        self._logprobs = array("f")
        self._versions = array("i")
        self._turn_ids = array("i")
        self._turn = -1
        self._finish_reason = FinishReason.ABORT

    def __len__(self) -> int:
        return len(self.input_ids)

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not write: the prompt, a tool's answer, the user's next turn."""
        self.input_ids.extend(token_ids)
        count = len(token_ids)
        self._logprobs.frombytes(bytes(4 * count))
        self._versions.extend(_NEVER * count)
        self._turn_ids.extend(_NEVER * count)

    def add_generation(self, generation: Generation) -> None:
        """Append what the policy wrote, as the next turn; its columns tell of what none before them has told.

        Raises:
            ValueError: its columns are of more tokens than there are.
        """
        self._turn += 1
        sampled = generation.sampled
        self.input_ids.extend(sampled.ids)
        self._logprobs.extend(sampled.logprobs)
        self._versions.extend(sampled.versions)
        self._turn_ids.extend(array("i", [self._turn]) * len(sampled))
        self._finish_reason = generation.finish_reason
        for name, column in generation.columns.items():
            if len(column) > len(self):
                raise ValueError(f"'{name}' of a generation is of {len(column)} tokens, not {len(self)}")
        if generation.columns:
            self._columns = joined_columns(self._columns, generation.columns, len(self))

    def cut(self) -> None:
        """The trajectory ends here by a limit, whatever ended its last generation."""
        self._finish_reason = FinishReason.LENGTH

    def build(
        self,
        sequence: Mapping[str, Values] | None = None,
        turns: Mapping[str, Values] | None = None,
        *,
        agent_id: str = "",
        reward: float = 0.0,
        multimodal: Mapping[str, dict[str, Values]] | None = None,
    ) -> Trajectory:
        """The trajectory; `sequence` adds per-sequence values such as named rewards, `turns` values of each turn."""
        count, turn_ids = len(self), np.array(self._turn_ids)
        return Trajectory(
            tokens={
                "input_ids": self.input_ids.numpy(),
                "loss_mask": turn_ids >= 0,
                "logprobs": np.array(self._logprobs),
                "versions": np.array(self._versions),
                "turn_ids": turn_ids,
                **{
                    key: np.concatenate([c, np.zeros((count - len(c), *c.shape[1:]), c.dtype)])
                    for key, c in self._columns.items()
                },
            },
            sequence={"finish_reason": np.array(int(self._finish_reason), np.int8), **(sequence or {})},
            turns=dict(turns or {}),
            agent_id=agent_id,
            reward=reward,
            multimodal=dict(multimodal or {}),
        )


_NEVER = array("i", [-1])
"""Of a token that was not sampled."""


def _arrays(values: Mapping[str, Any]) -> dict[str, Values]:
    return {key: value if type(value) is np.ndarray else np.asarray(value) for key, value in values.items()}


@dataclass(slots=True)
class Episode:
    """What one run of a workflow brought: its trajectories, its reward, and what a reader of samples wants to see.

    Attributes:
        trajectories: at least one; several where a template rewrites the prefix between turns.
        reward: the outcome reward of the episode, given to each of its trajectories beside its own reward.
        rewards: named components of the reward, for metrics.
        text: prompt and completion as text, for the report; never used in training.
        metrics: further figures of it, such as `agents/turns`; their means over episodes are logged under these names.
            A name that areal's own metrics have, such as `step` or any below `train/`, fails the episode.
    """

    trajectories: list[Trajectory]
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)
    text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
