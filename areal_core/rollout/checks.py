"""Checks what a workflow returns as soon as it returns: a bad episode costs its group and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.config.sections import OWN_REWARDS
from areal_core.data.trajectory import Episode, FinishReason, Trajectory
from areal_core.errors import writable
from areal_core.interfaces.workflow import finite_number
from areal_core.metric_names import prefix_of, prefixed

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from areal_core.messages.workflows import GroupOutcome

REASONS = {int(reason) for reason in FinishReason}
Layout = dict[tuple[str, str], tuple[np.dtype[Any], tuple[int, ...]]]
LARGEST = float(np.finfo(np.float32).max)


class EpisodeChecks:
    """Checks that every episode of a run can be trained on.

    Args:
        vocabulary: number of token ids that the model has; None if it is not known.
        metric_prefix: put before the names of the episodes' metrics, with its slash.
    """

    def __init__(self, vocabulary: int | None = None, metric_prefix: str = prefix_of("")) -> None:
        self.vocabulary = vocabulary
        self._metric_prefix = metric_prefix
        self._layout: Layout | None = None

    def check(self, episode: object) -> Episode:
        """Return the same episode, with its rewards as floats and with prefixes of its metrics.

        Raises:
            TypeError: it is no episode, or a field has a wrong type.
            ValueError: a field has a value that cannot be trained on; the message names it.
        """
        if not isinstance(episode, Episode):
            raise TypeError(f"run_episode returned {episode!r:.80}; it must return an Episode")
        if not isinstance(episode.text, str):
            raise TypeError(f"Episode.text is {episode.text!r:.80}; it must be a text")
        if not isinstance(episode.trajectories, list) or not episode.trajectories:
            raise TypeError(f"Episode.trajectories is {episode.trajectories!r:.80}; it must be a list of at least one")
        for name, numbers in (("rewards", episode.rewards), ("metrics", episode.metrics)):
            if not isinstance(numbers, dict):
                raise TypeError(f"Episode.{name} is {numbers!r:.80}; it must be a mapping from names to numbers")
        episode.text = writable(episode.text)
        episode.reward = _reward("reward", episode.reward)
        episode.rewards = {writable(name): _reward(f"rewards['{name}']", v) for name, v in episode.rewards.items()}
        if taken := sorted(OWN_REWARDS & episode.rewards.keys()):
            raise ValueError(f"Episode.rewards has {', '.join(taken)}, which areal's own metrics are called: rename it")
        episode.metrics = {
            prefixed(self._metric_prefix, name): _reward(f"metrics['{name}']", value)
            for name, value in episode.metrics.items()
        }
        for place, trajectory in enumerate(episode.trajectories):
            if not isinstance(trajectory, Trajectory):
                raise TypeError(f"Episode.trajectories[{place}] is {trajectory!r:.80}; it must be a Trajectory")
            trajectory.reward = _reward(f"trajectories[{place}].reward", trajectory.reward)
            if not isinstance(trajectory.agent_id, str):
                raise TypeError(
                    f"Episode.trajectories[{place}].agent_id is {trajectory.agent_id!r:.80}; it must be a text"
                )
            self._check(trajectory, f"Episode.trajectories[{place}]")
        return episode

    def _check(self, trajectory: Trajectory, where: str) -> None:
        trajectory.check()  # again: the workflow may have changed it since it was made
        tokens = trajectory.tokens
        low, high = int(tokens["input_ids"].min()), int(tokens["input_ids"].max())
        if low < 0 or (self.vocabulary is not None and high >= self.vocabulary):
            raise ValueError(
                f"{where}: input_ids hold the token {low if low < 0 else high}, which is not among the vocabulary's "
                f"{self.vocabulary or ''}"
            )
        reason = trajectory.sequence.get("finish_reason")
        if reason is None or reason.shape != () or int(reason) not in REASONS:
            raise ValueError(f"{where}: finish_reason is {reason!r}; it must be one of FinishReason")
        layout: Layout = {}
        levels = {"tokens": tokens, "sequence": trajectory.sequence, "turns": trajectory.turns, **trajectory.multimodal}
        for level, columns in levels.items():
            for name, values in columns.items():
                if values.dtype.kind not in "biuf" or values.itemsize > 8:
                    raise TypeError(f"{where}: {level}['{name}'] is of {values.dtype}, which PyTorch has no tensor for")
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    raise ValueError(f"{where}: {level}['{name}'] holds NaN or infinity")
                layout[level, name] = values.dtype, values.shape if level == "sequence" else values.shape[1:]
        self._layout = self._layout or layout
        if layout != self._layout:
            odd = [f"{level}['{name}']" for level, name in sorted(dict(layout.items() ^ self._layout.items()))]
            raise ValueError(
                f"{where}: {', '.join(odd)} differ in name, dtype or shape from the run's first trajectory; "
                "all trajectories of a run have the same"
            )


class GroupChecks:
    """Checks the groups of all workers: their weight versions were synced, and their columns are the same."""

    def __init__(self) -> None:
        self._layout: Mapping[str, str] = {}

    def fault(self, outcome: GroupOutcome, synced: Container[int]) -> str:
        """Return why a group cannot be trained on; empty if it can.

        Args:
            outcome: of the group, which has a record.
            synced: weight versions that were synced.
        """
        if unknown := [version for version in outcome.versions if version not in synced]:
            return f"versions hold {unknown}, which were never synced"
        self._layout = self._layout or outcome.layout
        odd = sorted({key for key, _ in outcome.layout.items() ^ self._layout.items()})
        return f"{', '.join(odd)} differ in name, dtype or shape from the run's first trajectory" if odd else ""


def _reward(name: str, value: object) -> float:
    number = finite_number(value)
    if number is None or abs(number) > LARGEST:
        raise ValueError(f"Episode.{name} is {value!r:.60}; it must be a finite float32 number")
    return number
