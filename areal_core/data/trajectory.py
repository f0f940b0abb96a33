"""Trajectories: token sequences that the policy wrote, in whole or in part, and the episodes that they form."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.data.tokens import SampledTokens, TokenIds, logprob_fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Values = np.ndarray[Any, Any]
"""Numbers of a trajectory. PyTorch tensors are accepted, too, and are converted without a copy."""


class FinishReason(IntEnum):
    """Why the last generation of a trajectory ended. The engine reports truncation; it is never inferred from lengths.

    Compare it with a member such as `FinishReason.LENGTH`. Only reward functions get the reason as a text ("length").
    """

    STOP = 0
    LENGTH = 1
    TOOL = 2
    ABORT = 3


class Generation:
    """The tokens that an engine generated for one request.

    Args:
        output_ids: sampled token ids, including a stop token.
        logprobs: log-probability of each sampled token; see `SampledTokens`.
        versions: weight version that sampled each token, as recorded by the engine.
        finish_reason: why the generation ended.
        columns: further token keys of the trajectory: integers [T, ...] for the request's tokens followed by the
            sampled ones, such as routed experts. A value is 0 if the engine does not know it.
        top_ids: [G, K] integers, the K likeliest tokens at the position of each of the G sampled tokens, if the request
            has `SamplingParameters.top_logprobs`.
        top_logprobs: [G, K], their log-probabilities; see `SampledTokens`.
        prompt_logprobs: log-softmax(logits) of each token of the prompt after the first, given the tokens before it,
            under the weights that sampled the first token. One number less than the prompt has tokens. None if the
            request has no `SamplingParameters.prompt_logprobs`.

    Attributes:
        sampled: the sampled tokens with log-probabilities, versions and likeliest tokens.
        finish_reason, columns, prompt_logprobs: as in the arguments; `prompt_logprobs` as a list in float32.

    Raises:
        TypeError: a token id is not an integer, or a log-probability is not a number.
        ValueError: a value is impossible (see `SampledTokens.fault`), or the lengths differ.
    """

    __slots__ = ("columns", "finish_reason", "prompt_logprobs", "sampled")

    def __init__(
        self,
        output_ids: Iterable[int],
        logprobs: Iterable[float],
        versions: Iterable[int],
        finish_reason: FinishReason,
        columns: Mapping[str, Values] | None = None,
        top_ids: Sequence[Sequence[int]] | Values = (),
        top_logprobs: Sequence[Sequence[float]] | Values = (),
        prompt_logprobs: Iterable[float] | None = None,
    ) -> None:
        tops, top_values = np.asarray(top_ids, np.int32), np.asarray(top_logprobs, np.float32)
        self.sampled = SampledTokens(output_ids, logprobs, versions, tops.ravel(), top_values.ravel())
        self.finish_reason, self.columns = finish_reason, columns or {}
        of_prompt = array("f", () if prompt_logprobs is None else prompt_logprobs)
        self.prompt_logprobs: list[float] | None = None if prompt_logprobs is None else of_prompt.tolist()
        if fault := self.sampled.fault() or logprob_fault(of_prompt):
            raise ValueError(f"an inference engine answered with {fault}")
        if len(self.sampled.versions) != len(self.sampled):
            raise ValueError(f"{len(self.sampled)} tokens have {len(self.sampled.versions)} versions")
        if tops.shape != top_values.shape or (tops.size and len(tops) != len(self.sampled)):
            shapes = f"top_ids has the shape {tops.shape} and top_logprobs {top_values.shape}"
            raise ValueError(f"{shapes}; both must be [{len(self.sampled)}, K]")

    @classmethod
    def of(
        cls,
        sampled: SampledTokens,
        finish_reason: FinishReason,
        columns: Mapping[str, Values] | None = None,
        prompt_logprobs: list[float] | None = None,
    ) -> Generation:
        """Create a generation from tokens that were checked before."""
        self = cls.__new__(cls)
        self.sampled, self.finish_reason, self.columns = sampled, finish_reason, columns or {}
        self.prompt_logprobs = prompt_logprobs
        return self

    @property
    def output_ids(self) -> list[int]:
        """Sampled token ids, including a stop token, as a new list."""
        return self.sampled.ids.tolist()

    @property
    def logprobs(self) -> list[float]:
        """Log-probability of each sampled token, as a new list."""
        return self.sampled.logprobs.tolist()

    @property
    def versions(self) -> list[int]:
        """Weight version that sampled each token, as a new list."""
        return self.sampled.versions.tolist()

    @property
    def top_ids(self) -> Values:
        """The K likeliest tokens at the position of each sampled token, [G, K] int32, as a new array."""
        return np.array(self.sampled.top_ids, np.int32).reshape(len(self), self.sampled.top_count)

    @property
    def top_logprobs(self) -> Values:
        """Log-probabilities of `top_ids`, [G, K] float32, as a new array."""
        return np.array(self.sampled.top_logprobs, np.float32).reshape(len(self), self.sampled.top_count)

    def __len__(self) -> int:
        return len(self.sampled)

    def __repr__(self) -> str:
        return f"Generation({self.output_ids}, {self.logprobs}, {self.versions}, {self.finish_reason!r})"


def joined_columns(known: Mapping[str, Values], new: Mapping[str, Values], count: int) -> dict[str, Values]:
    """Extend the known columns with the values of `new` beyond their ends, up to `count` tokens."""
    columns = dict(known)
    for name, column in new.items():
        before = columns.get(name, column[:0])
        columns[name] = np.concatenate([before, column[len(before) : count]])
    return columns


TOKEN_DTYPES = {
    "input_ids": np.dtype(np.int64),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "turn_ids": np.dtype(np.int32),
}
"""Keys per token that every trajectory has, each of shape [T], with their dtypes."""


@dataclass(slots=True)
class Trajectory:
    """A token sequence with values per token, per turn and for the whole sequence.

    Attributes:
        tokens: values of shape [T, ...]. These keys are required: `input_ids` int64; `loss_mask` bool, True if the
            policy sampled the token; `logprobs` float32, log-softmax(logits / temperature) of token t under the weights
            that sampled it, 0 for other tokens; `versions` int32, weight version that sampled token t, -1 for other
            tokens; `turn_ids` int32, turn of a multi-turn episode, -1 for other tokens. If the algorithm needs them
            (`areal_core.sdk.TopLogprobs`): `top_ids` [T, K] int32, the K likeliest tokens at the position of token t
            under the weights that sampled it, and `top_logprobs` [T, K] float32, their log-probabilities; both are 0
            for other tokens. Further keys are passed on.
        sequence: values of any fixed shape for the whole sequence. The rollout runtime adds the scalars `reward`
            float32, `group_id`, `episode_id`, `sample_index`, `part_index` int64 (position among the trajectories of
            the episode), `agent_id` int64 (digest of the name) and `finish_reason` int8, and `prompt_id` [2] int64.
        turns: values of shape [turns, ...]. The optional `turn_rewards` float32 is the share of each turn in the sum
            of `Episode.reward` and `reward`. The rest belongs to the end of the episode.
        multimodal: values with lengths of their own, by what they describe, such as `images` and their `patches`.
        agent_id: name of the agent that wrote the sequence, if the policy plays several agents in one episode, such as
            a planner and a solver. Comparisons within a group are made per agent.
        reward: reward of this trajectory, which is added to that of the episode.

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
        """Convert all values to arrays and check them, after you have changed them. Raises like the constructor."""
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
        """Build the trajectory of one prompt [P] and one generation [G], with T = P + G tokens."""
        builder = TrajectoryBuilder()
        builder.add_context(prompt_ids)
        builder.add_generation(generation)
        return builder.build()


class TrajectoryBuilder:
    """Builds a trajectory by appending context and generations in order.

    To add a key per token, set it in the result, as `score` in the example. It must have the length of the trajectory
    and be in every trajectory of the run. Losses and advantages find it under this name, shifted by one like all keys
    per token: position t has the value of token t + 1.

    Attributes:
        input_ids: all tokens so far, which the next generation continues.

    Example:
        >>> from areal_core.data import FinishReason, Generation, TrajectoryBuilder, Values
        >>> builder = TrajectoryBuilder()
        >>> builder.add_context([1, 2, 3])
        >>> builder.add_generation(Generation([4, 5], [-0.1, -0.2], [0, 0], FinishReason.STOP))
        >>> trajectory = builder.build()
        >>> trajectory.tokens["loss_mask"].tolist()
        [False, False, False, True, True]
        >>> score: Values = np.zeros(len(trajectory), np.float32)
        >>> trajectory.tokens["score"] = score
        >>> trajectory.check()
    """

    def __init__(self) -> None:
        self.input_ids = TokenIds()
        self._columns: dict[str, Values] = {}
        self._tops: list[tuple[int, Values, Values]] = []
        self._logprobs = array("f")
        self._versions = array("i")
        self._turn_ids = array("i")
        self._turn = -1
        self._finish_reason = FinishReason.ABORT

    def __len__(self) -> int:
        return len(self.input_ids)

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: the prompt, a tool's answer, the user's next turn."""
        self.input_ids.extend(token_ids)
        count = len(token_ids)
        self._logprobs.frombytes(bytes(4 * count))
        self._versions.extend(_NEVER * count)
        self._turn_ids.extend(_NEVER * count)

    def add_generation(self, generation: Generation) -> None:
        """Append the tokens of a generation as the next turn. Its columns extend those of earlier generations.

        Raises:
            ValueError: a column is longer than the trajectory.
        """
        self._turn += 1
        sampled = generation.sampled
        if sampled.top_count:
            self._tops.append((len(self), generation.top_ids, generation.top_logprobs))
        self.input_ids.extend(sampled.ids)
        self._logprobs.extend(sampled.logprobs)
        self._versions.extend(sampled.versions)
        self._turn_ids.extend(array("i", [self._turn]) * len(sampled))
        self._finish_reason = generation.finish_reason
        for name, column in generation.columns.items():
            if len(column) > len(self):
                raise ValueError(f"'{name}' of a generation has {len(column)} values for {len(self)} tokens")
        if generation.columns:
            self._columns = joined_columns(self._columns, generation.columns, len(self))

    def _top_columns(self) -> dict[str, Values]:
        """Return `top_ids` and `top_logprobs`; nothing if no generation has them.

        Raises:
            ValueError: generations differ in K, or only some of them have likeliest tokens.
        """
        if not self._tops:
            return {}
        count = self._tops[0][1].shape[1]
        covered = sum(len(ids) for _, ids, _ in self._tops)
        sampled = int((np.array(self._turn_ids) >= 0).sum())
        if covered != sampled or any(ids.shape[1] != count for _, ids, _ in self._tops):
            raise ValueError(
                f"{covered} of {sampled} sampled tokens have top_logprobs, of {count} tokens or another number: "
                "request the same number in every turn"
            )
        columns: dict[str, Values] = {
            "top_ids": np.zeros((len(self), count), np.int32),
            "top_logprobs": np.zeros((len(self), count), np.float32),
        }
        for start, ids, logprobs in self._tops:
            columns["top_ids"][start : start + len(ids)] = ids
            columns["top_logprobs"][start : start + len(ids)] = logprobs
        return columns

    def cut(self) -> None:
        """Mark the trajectory as truncated by a limit, whatever ended its last generation."""
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
        """Build the trajectory.

        Args:
            sequence: further values for the whole sequence.
            turns: values per turn.
            agent_id, reward, multimodal: see `Trajectory`.
        """
        count, turn_ids = len(self), np.array(self._turn_ids)
        return Trajectory(
            tokens={
                "input_ids": self.input_ids.numpy(),
                "loss_mask": turn_ids >= 0,
                "logprobs": np.array(self._logprobs),
                "versions": np.array(self._versions),
                "turn_ids": turn_ids,
                **self._top_columns(),
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
"""Version and turn of a token that was not sampled."""


def _arrays(values: Mapping[str, Any]) -> dict[str, Values]:
    return {key: value if type(value) is np.ndarray else np.asarray(value) for key, value in values.items()}


@dataclass(slots=True)
class Episode:
    """The result of running a workflow for one sample: its trajectories, its reward and its metrics.

    Attributes:
        trajectories: one or more trajectories. There are several if a chat template rewrites the prefix between turns.
        reward: reward of the episode, which is added to that of each trajectory.
        rewards: components of the reward by name, for metrics.
        text: prompt and completion as text, for the sample log only.
        prompt: the beginning of `text` that the policy did not write, if the workflow knows it.
        metrics: further metrics by name, such as `tool_calls`. areal logs their means over episodes, with a prefix that
            keeps them apart from the run's own: `workflow/tool_calls`, or `PLUGIN/tool_calls` for a plugin's workflow.
    """

    trajectories: list[Trajectory]
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)
    text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    prompt: str = ""
