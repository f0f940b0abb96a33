"""An environment of verifiers with two agents: the first adds two numbers, the second adds a third to the result."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import verifiers.v1 as vf

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RelayEnv", "RelayTaskset"]


class RelayData(vf.TaskData):
    """A sum for one agent."""

    answer: str
    third: int = 0


class RelayTask(vf.Task[RelayData]):
    """Rewards the result behind the working."""

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """Return 1 if the text behind the working is the result."""
        return float(result_of(trace) == self.data.answer)


class RelayTaskset(vf.Taskset[RelayTask]):
    """Sums of three numbers."""

    def load(self) -> Iterator[RelayTask]:
        """Yield the tasks."""
        generator = random.Random(0)
        for _ in range(4000):
            first, second = generator.randrange(10, 50), generator.randrange(10, 50)
            data = RelayData(
                prompt=f"{first}+{second}=", answer=str(first + second), third=generator.randrange(10, 100)
            )
            yield RelayTask(data, self.config.task)


class RelayEnvConfig(vf.EnvConfig):
    """The two agents. Both are the policy."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class RelayEnv(vf.Env[RelayEnvConfig]):
    """Gives the first agent's result to the second agent."""

    async def run(self, task: RelayTask, agents: vf.Agents) -> None:
        """Play one episode."""
        trace = await agents.first.run(task)
        result = result_of(trace)
        if not result.isdecimal() or not 10 <= int(result) < 100:
            return  # the second agent was taught numbers of two digits
        total = int(result) + task.data.third
        await agents.second.run(task.with_data(prompt=f"{result}+{task.data.third}=", answer=str(total)))


def result_of(trace: vf.Trace) -> str:
    """Return the text behind the working of an agent's reply."""
    return (trace.last_reply or "").rpartition("}")[2].strip()
