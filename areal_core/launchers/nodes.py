"""The nodes of a run: which GPU is whose, and which node a process is put on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


def name_order(name: str) -> list[tuple[int, str]]:
    """By which names are sorted: numbers in them count as such, so that node-2 comes before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


@dataclass
class Nodes:
    """Counts GPUs through all nodes: those of the first by name come first, then those of the second.

    A node keeps its numbers when others go, and has them again when it comes back under its name.

    Attributes:
        gpus: how many each node has, by its name, in the order in which they are counted.
        first: number of each node's first GPU, also of nodes that have gone.
    """

    gpus: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, gpus: int) -> None:
        """A node has come."""
        if name not in self.first or gpus > self._sizes[name]:
            self.first[name] = max((self.first[one] + size for one, size in self._sizes.items()), default=0)
            self._sizes[name] = gpus
        self.gpus[name] = gpus

    def choose(self, numbers: Sequence[int] | None, load: Callable[[str], int]) -> str:
        """The node of GPUs; without any, the one with the least to do.

        Args:
            numbers: of the GPUs, counted through all nodes.
            load: of a node, by its name.

        Raises:
            RunError: there is no such node, or there are several.
        """
        if not self.gpus:
            raise RunError("there is no node left for a process")
        if not numbers or not any(self.gpus.values()):  # a machine that does not say how many it has is believed
            return min(self.gpus, key=load)
        found = {self.node_of(number) for number in numbers}
        if len(found) > 1:
            raise RunError(
                f"the GPUs {', '.join(map(str, numbers))} belong together and lie on {' and '.join(sorted(found))}",
                hints=["tensor parallelism stays inside of a node: name GPUs of one node, or lower tensor_parallel"],
            )
        return found.pop()

    def find_room(
        self, count: int, among: Collection[int] | None, held: Collection[int], served: Collection[str]
    ) -> tuple[str, tuple[int, ...] | None]:
        """A node with so many GPUs that nobody holds, and these; where no node has any, one that serves nothing.

        Args:
            count: of GPUs.
            among: which they must be; None for any.
            held: GPUs that are not free.
            served: names of nodes that serve.

        Raises:
            RunError: there is none now.
        """
        if not any(self.gpus.values()):
            if free := [name for name in self.gpus if name not in served]:
                return free[0], None
            raise RunError("no node is without a server, and none has a GPU")
        for name in self.gpus:
            found = [gpu for gpu in self.numbers_on(name) if gpu not in held and (among is None or gpu in among)]
            if len(found) >= count:
                return name, tuple(found[:count])
        raise RunError(
            f"no node has {count} GPUs that no process holds; ranks hold all of their node's, unless "
            "placement.training names theirs"
        )

    def numbers_on(self, name: str) -> range:
        """The numbers of a node's GPUs."""
        return range(self.first[name], self.first[name] + self.gpus[name])

    def node_of(self, number: int) -> str:
        """The name of the node that has a GPU.

        Raises:
            RunError: none has; says what there is.
        """
        for name in self.gpus:
            if number in self.numbers_on(name):
                return name
        there = ", ".join(f"{name} has {self._range(name)}" for name in self.gpus)
        raise RunError(
            f"placement names GPU {number}, which there is not: {there}",
            hints=["GPUs are counted through all nodes from 0; name others, or give the launcher more nodes"],
        )

    def local(self, name: str, numbers: Sequence[int] | None) -> tuple[int, ...] | None:
        """The numbers of GPUs as their own node counts them."""
        if numbers is None or not any(self.gpus.values()):
            return None if numbers is None else tuple(numbers)
        return tuple(number - self.first[name] for number in numbers)

    def spread(self, count: int, numbers: Sequence[int] | None) -> list[str]:
        """The node of each of `count` ranks: that of its GPU, or, without GPUs, nodes in equal blocks.

        Raises:
            RunError: a GPU is named that no node has.
        """
        names = list(self.gpus)
        if not numbers or not any(self.gpus.values()):
            each = -(-count // len(names))
            return [names[rank // each] for rank in range(count)]
        return [self.node_of(numbers[rank]) for rank in range(count)]

    def _range(self, name: str) -> str:
        first, count = self.first[name], self.gpus[name]
        return "none" if not count else f"{first} to {first + count - 1}" if count > 1 else str(first)
