"""One token sequence that the policy (partly) wrote, and the episode that it belongs to."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class FinishReason(IntEnum):
    """Why the last generation of a trajectory ended. Truncation is known, never inferred from a width."""

    STOP = 0
    LENGTH = 1
    TOOL = 2
    ABORT = 3


HIGHEST_LOGPROB = 1e-2
"""Of a token: 0, and what rounding may add."""


def sampling_fault(output_ids: Sequence[int], logprobs: Sequence[float], room: int) -> str | None:
    """What shows that nobody has sampled these tokens so, or None.

    Args:
        output_ids, logprobs: as an engine says that it has sampled them.
        room: how many tokens it was asked for at most.
    """
    if len(output_ids) != len(logprobs):
        return f"{len(output_ids)} tokens with {len(logprobs)} log-probabilities"
    if len(output_ids) > room:
        return f"{len(output_ids)} tokens where {room} were asked for"
    # Whole lists at once, for every token that is ever generated comes by here; one that is odd is looked for then.
    kinds_fit = {*map(type, output_ids)} <= {int} and {*map(type, logprobs)} <= {float, int}
    are_tokens = kinds_fit and min(output_ids, default=0) >= 0
    if are_tokens and math.isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= HIGHEST_LOGPROB:
        return None
    for token, logprob in zip(output_ids, logprobs, strict=True):
        if type(token) is not int or token < 0:
            return f"{token!r:.40} as a token"
        if type(logprob) not in (float, int) or not -math.inf < logprob <= HIGHEST_LOGPROB:
            return f"{logprob!r:.40} as a log-probability"
    return None


@dataclass(slots=True)
class Generation:
    """What was generated for one request; the lists are equally long.

    Attributes:
        output_ids: the sampled tokens, a stop token included.
        logprobs: log-softmax(logits / temperature) of each token under the weights that sampled it, not truncated.
        versions: the weight version that sampled each token, as the engine itself recorded it.
        finish_reason: why it ended.
        columns: further token keys of the trajectory, integers [T, ...] of the request's tokens and then the sampled
            ones: what the engine knows of each token's prediction, 0 where it knows nothing, as behind their end.
    """

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)


def joined_columns(
    known: Mapping[str, torch.Tensor], told: Mapping[str, torch.Tensor], count: int
) -> dict[str, torch.Tensor]:
    """Columns of the first `count` tokens at most: what is known of them stays, what is told now goes on behind it."""
    found = dict(known)
    for name, column in told.items():
        before = found.get(name, column[:0])
        found[name] = torch.cat([before, column[len(before) : count]])
    return found


TOKEN_DTYPES = {
    "input_ids": torch.int64,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "turn_ids": torch.int32,
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
            trajectories of the episode), `player` int64 (a digest of its name), `finish_reason` int8; and `prompt_id`
            [2] int64.
        turns: values of shape [turns, ...]; `turn_rewards` float32, where there are, are parts of `reward`.
        levels: further values with lengths of their own, by what they are of, such as `images` and their `patches`.
        player: who wrote it, in an episode in which the policy plays several parts, such as a planner and a solver.
            What is compared within a group is compared for each player by itself.
        earned: what it earned beside the episode's reward; its `reward` is the sum.

    Raises:
        ValueError: a required key is missing, has another dtype, or the lengths of the token keys differ.
    """

    tokens: dict[str, torch.Tensor]
    sequence: dict[str, torch.Tensor] = field(default_factory=dict)
    turns: dict[str, torch.Tensor] = field(default_factory=dict)
    player: str = ""
    earned: float = 0.0
    levels: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, dtype in TOKEN_DTYPES.items():
            if key not in self.tokens:
                raise ValueError(f"a trajectory needs the token key '{key}'; it has {sorted(self.tokens)}")
            if self.tokens[key].dtype != dtype:
                raise ValueError(f"token key '{key}' has dtype {self.tokens[key].dtype}, it must be {dtype}")
        for name, values in (("token", self.tokens), ("turn", self.turns), *self.levels.items()):
            lengths = {key: len(value) for key, value in values.items()}
            if len(set(lengths.values())) > 1:
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
    """Collects the tokens of a trajectory in order, context and generations in turns; tokens are only appended."""

    def __init__(self) -> None:
        self._columns: dict[str, torch.Tensor] = {}
        self._input_ids = array("q")
        self._logprobs = array("f")
        self._versions = array("i")
        self._turn_ids = array("i")
        self._turn = -1
        self._finish_reason = FinishReason.ABORT

    @property
    def input_ids(self) -> list[int]:
        """All tokens so far: what the next generation continues."""
        return self._input_ids.tolist()

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not write: the prompt, a tool's answer, the user's next turn."""
        self._append(token_ids, array("f", [0.0]) * len(token_ids), array("i", [-1]) * len(token_ids), -1)

    def add_generation(self, generation: Generation) -> None:
        """Append what the policy wrote, as the next turn; its columns tell of what none before them has told.

        Raises:
            ValueError: its columns are of more tokens than there are.
        """
        self._turn += 1
        self._append(generation.output_ids, generation.logprobs, generation.versions, self._turn)
        self._finish_reason = generation.finish_reason
        for name, column in generation.columns.items():
            if len(column) > len(self._input_ids):
                raise ValueError(f"'{name}' of a generation is of {len(column)} tokens, not {len(self._input_ids)}")
        self._columns = joined_columns(self._columns, generation.columns, len(self._input_ids))

    def _append(self, token_ids: Sequence[int], logprobs: Iterable[float], versions: Iterable[int], turn: int) -> None:
        self._input_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
        self._turn_ids.extend(array("i", [turn]) * len(token_ids))

    def build(
        self,
        sequence: Mapping[str, torch.Tensor] | None = None,
        turns: Mapping[str, torch.Tensor] | None = None,
        *,
        player: str = "",
        earned: float = 0.0,
        levels: Mapping[str, dict[str, torch.Tensor]] | None = None,
    ) -> Trajectory:
        """The trajectory; `sequence` adds per-sequence values such as named rewards, `turns` values of each turn."""
        count, turn_ids = len(self._input_ids), _tensor(self._turn_ids, torch.int32)
        return Trajectory(
            tokens={
                "input_ids": _tensor(self._input_ids, torch.int64),
                "loss_mask": turn_ids >= 0,
                "logprobs": _tensor(self._logprobs, torch.float32),
                "versions": _tensor(self._versions, torch.int32),
                "turn_ids": turn_ids,
                **{key: torch.cat([c, c.new_zeros(count - len(c), *c.shape[1:])]) for key, c in self._columns.items()},
            },
            sequence={"finish_reason": torch.tensor(int(self._finish_reason), dtype=torch.int8), **(sequence or {})},
            turns=dict(turns or {}),
            player=player,
            earned=earned,
            levels=dict(levels or {}),
        )


def _tensor(numbers: array[Any], dtype: torch.dtype) -> torch.Tensor:
    # Of a copy: an array that lends its memory cannot grow. No tensor is made of an empty one.
    return torch.frombuffer(numbers[:], dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


@dataclass(slots=True)
class Episode:
    """What one run of a workflow brought: its trajectories, its reward, and what a reader of samples wants to see.

    Attributes:
        trajectories: at least one; several where a template rewrites the prefix between turns.
        reward: the outcome reward of the episode, given to each of its trajectories beside what that has earned.
        rewards: named components of the reward, for metrics.
        text: prompt and completion as text, for the report; never used in training.
        metrics: further figures of it, such as `agents/turns`; their means over episodes are logged.
    """

    trajectories: list[Trajectory]
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)
    text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
