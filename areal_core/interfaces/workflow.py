"""An episode: how a prompt becomes trajectories and a reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from areal_core.data.trajectory import Episode, Generation


@dataclass(frozen=True, slots=True)
class RewardScore:
    """An outcome reward, and the named rewards that it is the weighted sum of; empty where it is one by itself."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


REWARD_ARGUMENTS = ("prompt", "completion", "prompt_ids", "completion_ids", "finish_reason", "row")
"""Arguments that a reward may name, beside the keys of the data row."""


class Reward(Protocol):
    """A function that scores one completion; runs in a pool of processes, so it may block and may crash.

    A coroutine function is called for up to 32 completions at a time in each process, or as many as its attribute
    `max_concurrency` says: for rewards that wait for others, such as a judge behind an address. It must not block.
    What a method `take_metrics() -> dict[str, float]` of it has counted is added up as `rewards/NAME/...`.

    Arguments are passed by keyword, and only those that the function names:

    - `prompt` (str): what the model was shown, special tokens spelled out, up to the beginning of the answer.
    - `completion` (str): the whole answer. It begins with what the chat template wrote to open it, such as `<think>`,
      and has everything that was sampled except the end token. Special tokens inside it, such as tags, are spelled out.
    - `prompt_ids` and `completion_ids` (lists of int): the exact tokens that the model was given and that it sampled,
      end token included. What the template opened is at the end of `prompt_ids`.
    - `finish_reason` (str): stop, length, tool or abort.
    - `row`: the whole data row, bytes such as those of images included; and each key of it, such as `answer`.

    None means that the reward does not judge this answer: it counts neither in the sum nor in its own mean.

    Example:
        >>> def right(completion, answer):
        ...     return float(completion.rpartition("=")[2].strip() == answer)
    """

    def __call__(self, **arguments: Any) -> float | Awaitable[float | None] | None:
        """Return the reward, any finite number, or None to abstain."""


@dataclass(slots=True)
class WorkflowContext:
    """What an episode may use. One for each episode; nothing in it is shared between episodes but the resources.

    Attributes:
        tokenizer: of the model, as `transformers.AutoTokenizer` loads it.
        generate: continue these token ids with the run's sampling settings; deadline, seed and retries are the
            runtime's. Of the `input_ids` of a `TrajectoryBuilder` a turn costs what it adds, of a list all there is.
            `max_new_tokens` lowers the setting for this call; `stop` adds texts that end this answer, where the engine
            can (`ValueError` where it cannot); `images` are the files of images that stand in the ids.
        score: the run's rewards on one completion, computed in the pool. Takes `prompt`, `completion`,
            `completion_ids`, `finish_reason` and, if a reward asks for it, `prompt_ids` by keyword. A reward that fails
            fails the episode, unless `rollout.failed_reward` is set.
        is_evaluation: the episode is part of an evaluation.
        sample_index: which sibling of its group this episode is.
        end_ids: tokens that end an answer: the tokenizer's, the generation config's and the chat template's.
    """

    tokenizer: Any
    generate: Callable[..., Awaitable[Generation]]
    score: Callable[..., Awaitable[RewardScore]]
    is_evaluation: bool
    sample_index: int
    end_ids: frozenset[int] = frozenset()


class RowError(ValueError):
    """Raised by a workflow: this row of the data cannot be played, however often it is tried; says what to mend."""


class SkippedRowError(RowError):
    """Raised by a workflow: a setting leaves this row out. Another row takes its place, and it counts as filtered.
    An evaluation has no other row and counts it as failed."""


class RolloutWorkflow(Protocol):
    """Runs one episode. One object serves all episodes at once, so it holds no state of an episode."""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """From a row of the data set to trajectories and a reward.

        An exception is retried up to `rollout.max_retries` times, then recorded with its traceback as failed; a
        `RowError` is recorded at once, in its own words.
        """


class Environment(Protocol):
    """The world that a multi-turn workflow talks to. One object for each episode.

    One that holds something (a connection, a process) has a coroutine method `close()` as well, which is called however
    the episode ends.
    """

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
        """Begin; the chat messages that open the episode."""

    async def step(self, completion: str) -> tuple[str | None, float]:
        """Take the policy's turn; the world's answer (None ends the episode) and the reward of this turn."""
