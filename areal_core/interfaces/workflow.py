"""Workflows, rewards and environments: the parts that turn a data row into trajectories and a reward."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from areal_core.data.trajectory import Episode, Generation


@dataclass(frozen=True, slots=True)
class RewardScore:
    """The reward of an episode, and the components whose weighted sum it is; empty if the reward has no components."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


REWARD_ARGUMENTS = ("prompt", "completion", "prompt_ids", "completion_ids", "finish_reason", "row")
"""Arguments that a reward function may have, in addition to the keys of the data row."""


class Reward(Protocol):
    """A function that scores one completion. It runs in a pool of processes, so it may block or crash.

    A coroutine function suits rewards that wait for others, such as a judge model on a server. Each process calls it
    for up to 32 completions concurrently, or for as many as its attribute `max_concurrency`. It must not block.

    A method `pop_metrics() -> dict[str, float]` returns counters since its last call. areal adds them up and logs them
    as `rewards/NAME/...`.

    A function gets only the arguments that it names, by keyword:

    - `prompt` (str): text of the prompt with special tokens, up to the start of the answer.
    - `completion` (str): text of the answer without the end token. It starts with the text by which the chat template
      opens an answer, such as `<think>`. It has special tokens, such as tags.
    - `prompt_ids` and `completion_ids` (lists of int): token ids of the prompt, and of the sampled answer with its end
      token. The tokens by which the template opens an answer are at the end of `prompt_ids`.
    - `finish_reason` (str): `stop`, `length`, `tool` or `abort`.
    - `row`: the data row, including bytes such as those of images.
    - each key of the data row, such as `answer`.

    If a reward returns None, it abstains: it is neither in the sum nor in its own mean.

    Example:
        >>> from areal_core.sdk import Reward
        >>> def right(completion, answer):
        ...     return float(completion.rpartition("=")[2].strip() == answer)
        >>> reward: Reward = right  # a type checker compares the two
        >>> reward(completion="6 * 7 = 42", answer="42")
        1.0
    """

    def __call__(self, **arguments: Any) -> float | Awaitable[float | None] | None:
        """Return the reward, any finite number, or None to abstain."""


@dataclass(slots=True)
class WorkflowContext:
    """The functions and values that a workflow may use in one episode.

    Attributes:
        tokenizer: the model's tokenizer, as loaded by `transformers.AutoTokenizer`.
        generate: `await generate(input_ids, *, max_new_tokens=None, stop=(), images=(), on_tokens=None)` continues
            token ids with the run's sampling settings and returns a `Generation`. The runtime adds deadline, seed and
            retries.
            `max_new_tokens` lowers the run's setting for this call. `stop` has texts that end this answer; it raises
            `ValueError` if the engine does not support them. `images` has the image files of the image tokens in the
            ids. Pass `TrajectoryBuilder.input_ids` rather than a list: then a turn costs time only for its new tokens.
            `on_tokens` is called with tokens of the answer before it is complete; see `GenerationRequest.on_tokens`.
        score: `await score(prompt=..., completion=..., completion_ids=..., finish_reason=...)` computes the run's
            rewards in the reward pool and returns a `RewardScore`. It also takes `prompt_ids`, for rewards that name
            it. A reward that fails also fails the episode, unless `rollout.failed_reward` is set.
        is_evaluation: whether the episode belongs to an evaluation.
        sample_index: index of the episode in its group.
        end_ids: tokens that end an answer, from the tokenizer, the generation config and the chat template.
    """

    tokenizer: Any
    generate: Callable[..., Awaitable[Generation]]
    score: Callable[..., Awaitable[RewardScore]]
    is_evaluation: bool
    sample_index: int
    end_ids: frozenset[int] = frozenset()


class RowError(ValueError):
    """Raise it in a workflow if no episode can run with this data row. The message names what to fix in the row."""


class SkippedRowError(RowError):
    """Raise it in a workflow if a setting excludes this data row.

    Another row replaces it, and it counts as filtered. In an evaluation it counts as failed.

    Example:
        >>> from areal_core.sdk import RowError, SkippedRowError
        >>> def read_question(row, longest):
        ...     if "question" not in row:
        ...         raise RowError(f"it has no question, only {sorted(row)}")
        ...     if len(row["question"]) > longest:
        ...         raise SkippedRowError(f"its question is longer than {longest} characters")
        ...     return row["question"]
        >>> read_question({"text": "What is 6 * 7?"}, longest=100)
        Traceback (most recent call last):
        areal_core.interfaces.workflow.RowError: it has no question, only ['text']
    """


class RolloutWorkflow(Protocol):
    """Runs episodes. One object runs many episodes concurrently, so it must not keep the state of an episode.

    Example:
        >>> import asyncio
        >>> from areal_core.data import Episode, FinishReason, Generation, Trajectory
        >>> from areal_core.sdk import RolloutWorkflow, WorkflowContext
        >>> class ShortAnswers:
        ...     async def run_episode(self, row, context):
        ...         answer = await context.generate(row["input_ids"], max_new_tokens=8)
        ...         return Episode([Trajectory.from_generation(row["input_ids"], answer)], reward=1 / len(answer))
        >>> async def generate(input_ids, max_new_tokens):
        ...     return Generation([7, 2], [-0.1, -0.2], [0, 0], FinishReason.STOP)
        >>> workflow: RolloutWorkflow = ShortAnswers()
        >>> context = WorkflowContext(None, generate, None, is_evaluation=False, sample_index=0)
        >>> asyncio.run(workflow.run_episode({"input_ids": [5]}, context)).reward
        0.5
    """

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """Run one episode of a data row.

        If it raises an exception, the episode is retried up to `rollout.max_retries` times. Then it counts as failed,
        with the traceback in the ledger. A `RowError` is not retried.
        """


class Environment(Protocol):
    """The environment of a multi-turn workflow. Each episode has an object of its own.

    An environment with resources, such as a connection or a process, also has a coroutine method `close()`. It is
    always called at the end of the episode.

    Example:
        >>> import asyncio
        >>> from areal_core.sdk import Environment, StepResult
        >>> class GuessNumber:
        ...     async def reset(self, row):
        ...         self.number = row["number"]
        ...         return [{"role": "user", "content": "Guess my number between 1 and 10."}]
        ...
        ...     async def step(self, completion):
        ...         if not completion.strip().isdecimal():
        ...             return StepResult("Answer with a number.")
        ...         guess = int(completion)
        ...         if guess == self.number:
        ...             return StepResult(reward=1.0, terminated=True)
        ...         return StepResult("Too small." if guess < self.number else "Too large.")
        >>> environment: Environment = GuessNumber()
        >>> asyncio.run(environment.reset({"number": 7}))
        [{'role': 'user', 'content': 'Guess my number between 1 and 10.'}]
        >>> asyncio.run(environment.step("5")).observation
        'Too small.'
        >>> asyncio.run(environment.step("7")).is_over
        True
    """

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
        """Start an episode of a data row. Return the chat messages with which it opens."""

    async def step(self, completion: str) -> StepResult:
        """Process the policy's turn, and return what follows it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment returns for a turn of the policy. The names are those of Gymnasium.

        StepResult("Too small. Try again.")
        StepResult(reward=1.0, terminated=True)
        StepResult([{"role": "tool", "content": "85"}], info={"tool_calls": 1})

    The episode goes on unless it is terminated or truncated.

    Attributes:
        observation: what the policy reads next: a text, which becomes a message of the user, or chat messages, such as
            the results of tools. None if the episode is over.
        reward: reward of this turn.
        terminated: whether the episode has come to its end.
        truncated: whether the environment cuts the episode off, at a limit of steps for example. Its last trajectory
            then has the finish reason of answers that were cut off.
        info: numbers by name. Their sums over the turns are metrics of the episode; see `Episode.metrics`.
    """

    observation: str | Sequence[Mapping[str, Any]] | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


def finite_number(value: object) -> float | None:
    """Return a number, or a scalar of NumPy or PyTorch, as a float. Return None for anything else, NaN and infinity."""
    if not isinstance(value, bool | int | float):
        item = getattr(value, "item", None)
        try:
            value = item() if callable(item) else None
        except (TypeError, ValueError, RuntimeError):  # an array of several elements
            return None
    if not isinstance(value, bool | int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_step(environment: object, returned: Any) -> StepResult:
    """Return what `step` of an environment has returned, as a checked `StepResult`.

    A workflow that plays environments of other authors calls it after each step. A pair of observation and reward, with
    None as the observation at the end, is the old form. It works for one more minor version.

    Raises:
        TypeError: it is neither, or has values of other types.
        ValueError: the episode goes on without an observation.

    Example:
        >>> import asyncio
        >>> from areal_core.sdk import StepResult, read_step
        >>> class Echo:
        ...     async def step(self, completion):
        ...         return StepResult(observation=None) if completion == "bye" else StepResult(completion)
        >>> environment = Echo()
        >>> read_step(environment, asyncio.run(environment.step("hello"))).observation
        'hello'
        >>> read_step(environment, asyncio.run(environment.step("bye")))
        Traceback (most recent call last):
        ValueError: step of Echo returned no observation, and neither terminated nor truncated
    """
    name = type(environment).__name__
    if isinstance(returned, tuple) and len(returned) == 2:
        warnings.warn(
            f"step of {name} returns a pair: return areal_core.sdk.StepResult(observation, reward), and "
            "StepResult(reward=reward, terminated=True) at the end",
            FutureWarning,
            stacklevel=2,
        )
        observation, reward = returned
        returned = StepResult(observation, reward, terminated=observation is None)
    if not isinstance(returned, StepResult):
        raise TypeError(f"step of {name} returned {returned!r:.80}: return an areal_core.sdk.StepResult")
    if not isinstance(returned.observation, str | list | tuple | None):
        observation = f"{returned.observation!r:.60}"
        raise TypeError(f"the observation of {name} is {observation}: return a text or a list of messages")
    for what, value in {"reward": returned.reward, **returned.info}.items():
        if finite_number(value) is None:
            raise TypeError(f"{what} in the StepResult of {name} is {value!r:.80}, and must be a number")
    if returned.observation is None and not returned.is_over:
        raise ValueError(f"step of {name} returned no observation, and neither terminated nor truncated")
    return returned
