"""A placement in words, such as `train=8x2 generate=tp2x8`, and the numbers of the GPUs that it means."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORM = "train=GPUSxNODES generate=tpGPUSxSERVERS, and 'in turns' behind it where the same GPUs do both"
MOST_GPUS = 100_000
_TRAIN = re.compile(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?")
_GENERATE = re.compile(r"tp([1-9]\d{0,5})x([1-9]\d{0,5})")


class LayoutError(ValueError):
    """A placement that cannot be; `hint` says what could."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Layout:
    """How many GPUs train, and how many servers generate.

    Attributes:
        trainer_gpus: of each node that trains.
        trainer_nodes: how many nodes train.
        tensor_parallel: GPUs that share the weights of one server; 0 where the placement names no servers.
        servers: how many there are.
        in_turns: whether the same GPUs do both, one after the other.
    """

    trainer_gpus: int
    trainer_nodes: int = 1
    tensor_parallel: int = 0
    servers: int = 0
    in_turns: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, (self._train, self._generate, "in turns" if self.in_turns else "")))

    @property
    def _train(self) -> str:
        return f"train={self.trainer_gpus}" + (f"x{self.trainer_nodes}" if self.trainer_nodes > 1 else "")

    @property
    def _generate(self) -> str:
        return f"generate=tp{self.tensor_parallel}x{self.servers}" if self.servers else ""

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a placement in words.

        Raises:
            LayoutError: it is none; says which word is wrong, and what would be right.
        """
        words = text.split()
        in_turns = words[-2:] == ["in", "turns"]
        given: dict[str, str] = {}
        for word in words[:-2] if in_turns else words:
            key, equals, value = word.partition("=")
            if key not in ("train", "generate") or not equals:
                raise LayoutError(f"'{word}' is no part of a placement", f"write {FORM}")
            if key in given:
                raise LayoutError(f"'{key}' stands there twice", f"write {FORM}")
            given[key] = value
        if "train" not in given:
            raise LayoutError(f"'{text}' does not say which GPUs train", "for 8 GPUs on each of 2 nodes: train=8x2")
        if in_turns and "generate" not in given:
            raise LayoutError("'in turns' without servers has no meaning", "write train=8 generate=tp1x8 in turns")
        layout = cls(*_read_train(given["train"]), *_read_generate(given.get("generate")), in_turns)
        if layout.trainer_gpus * layout.trainer_nodes + layout.tensor_parallel * layout.servers > MOST_GPUS:
            raise LayoutError(f"'{text}' asks for more than {MOST_GPUS:,} GPUs", "name as many as there are")
        return layout

    def number(
        self, per_server: int, nodes: int | None, gpus_per_node: int | None
    ) -> tuple[list[int], list[int] | None]:
        """The GPUs that train, and those that generate, server by server, counted through all nodes.

        Trainers stand on the first nodes; servers take what is left there and then the nodes behind, and none stands
        on two nodes.

        Args:
            per_server: GPUs of one server.
            nodes: how many there are; None for as many as are needed.
            gpus_per_node: GPUs that each has; None for as many as are needed, where there is one node.

        Raises:
            LayoutError: there is no room; says what is missing.
        """
        needed = self.trainer_gpus + (0 if self.in_turns else per_server * self.servers)
        if not gpus_per_node:
            if nodes != 1:
                raise LayoutError(
                    f"'{self}' can be placed only where it is known how many GPUs a node has",
                    "set launcher.gpus_per_node",
                )
            gpus_per_node = needed
        there = f"launcher.nodes={nodes}, launcher.gpus_per_node={gpus_per_node}"
        if self.trainer_gpus > gpus_per_node:
            total = self.trainer_gpus * self.trainer_nodes
            fits = total % gpus_per_node == 0
            raise LayoutError(
                f"{self._train} needs nodes with {self.trainer_gpus} GPUs each; {there}",
                f"train={gpus_per_node}x{total // gpus_per_node} are as many GPUs" if fits else "name fewer on a node",
            )
        if nodes is not None and self.trainer_nodes > nodes:
            raise LayoutError(
                f"{self._train} needs {self.trainer_nodes} nodes with {self.trainer_gpus} free GPUs each; {there}",
                f"set launcher.nodes={self.trainer_nodes}, or train on fewer nodes",
            )
        starts = range(0, self.trainer_nodes * gpus_per_node, gpus_per_node)
        training = [start + gpu for start in starts for gpu in range(self.trainer_gpus)]
        if not self.servers:
            return training, None
        if self.in_turns:
            return training, self._same(training, per_server)
        return training, self._beside(per_server, nodes, gpus_per_node)

    def _same(self, training: list[int], per_server: int) -> list[int]:
        """All GPUs that train, for servers that stand on one node each."""
        if self.trainer_gpus % per_server:
            raise LayoutError(
                f"in turns, servers of {per_server} GPUs each must fill the {self.trainer_gpus} of a node, and do not",
                f"choose a number of GPUs that divides {self.trainer_gpus}",
            )
        if self.servers * per_server != len(training):
            raise LayoutError(
                f"in turns, the same GPUs do both: {self._train} names {len(training)}, and {self._generate} "
                f"{self.servers * per_server}",
                f"generate=tp{self.tensor_parallel}x{len(training) // per_server} takes all of them",
            )
        return training

    def _beside(self, per_server: int, nodes: int | None, gpus_per_node: int) -> list[int]:
        """GPUs for servers that stand on one node each, beside the trainer's and behind them."""
        shared, alone = (gpus_per_node - self.trainer_gpus) // per_server, gpus_per_node // per_server
        rest = max(0, self.servers - self.trainer_nodes * shared)
        further = -(-rest // alone) if alone else 0
        if not alone or (nodes is not None and self.trainer_nodes + further > nodes):
            room = self.trainer_nodes * shared + ((nodes or 0) - self.trainer_nodes) * alone if alone else 0
            raise LayoutError(
                f"{self._generate} needs {per_server} free GPUs of one node for each of {self.servers} servers; beside "
                f"{self._train} there is room for {room}: launcher.nodes={nodes}, "
                f"launcher.gpus_per_node={gpus_per_node}",
                f"set launcher.nodes={self.trainer_nodes + further}, or name fewer servers or GPUs"
                if alone
                else f"a server stands on one node: name at most {gpus_per_node} GPUs for one",
            )
        generation: list[int] = []
        for node in range(self.trainer_nodes + further):
            first = self.trainer_gpus if node < self.trainer_nodes else 0
            there = (gpus_per_node - first) // per_server * per_server
            generation += range(node * gpus_per_node + first, node * gpus_per_node + first + there)
        return generation[: self.servers * per_server]


def _read_train(value: str) -> tuple[int, int]:
    if not (match := _TRAIN.fullmatch(value)):
        raise LayoutError(
            f"'train={value}' is not GPUSxNODES", "train=8x2 is 8 GPUs on each of 2 nodes, train=8 those of one"
        )
    return int(match[1]), int(match[2] or 1)


def _read_generate(value: str | None) -> tuple[int, int]:
    if value is None:
        return 0, 0
    if not (match := _GENERATE.fullmatch(value)):
        plain = value if value.isdigit() and int(value) else "8"
        raise LayoutError(
            f"'generate={value}' is not tpGPUSxSERVERS",
            f"generate=tp1x{plain} is {plain} servers with a GPU each, generate=tp{plain}x1 one server on {plain}",
        )
    return int(match[1]), int(match[2])
