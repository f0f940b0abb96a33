"""Parse a placement in one line. `train=8 generate=tp2x4`: 8 GPUs train, 4 servers with 2 GPUs each generate."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORM = "train=GPUS generate=tpGPUSxSERVERS, and 'colocated' behind it where the same GPUs do both"
MOST_GPUS = 100_000
_TRAIN = re.compile(r"[1-9]\d{0,5}")
_GENERATE = re.compile(r"tp([1-9]\d{0,5})x([1-9]\d{0,5})")


class LayoutError(ValueError):
    """A placement is wrong. `hint` shows how to correct it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of GPUs that train and of servers that generate.

    Attributes:
        trainer_gpus: GPUs that train, on any number of nodes.
        tensor_parallel: GPUs that share the weights of one server; 0 if the placement names no servers.
        servers: number of inference servers; 0 if the placement names none.
        colocated: whether the same GPUs train and generate.
    """

    trainer_gpus: int
    tensor_parallel: int = 0
    servers: int = 0
    colocated: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, (f"train={self.trainer_gpus}", self._generate, "colocated" * self.colocated)))

    @property
    def _generate(self) -> str:
        return f"generate=tp{self.tensor_parallel}x{self.servers}" if self.servers else ""

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse a placement.

        Raises:
            LayoutError: the text is not a placement. The message names the wrong part, the hint a correct form.
        """
        parts = text.split()
        colocated = parts[-1:] == ["colocated"]
        values: dict[str, str] = {}
        for part in parts[:-1] if colocated else parts:
            key, equals, value = part.partition("=")
            if key not in ("train", "generate") or not equals:
                raise LayoutError(f"'{part}' is not a part of a placement", f"write {FORM}")
            if key in values:
                raise LayoutError(f"'{key}' occurs twice", f"write {FORM}")
            values[key] = value
        if "train" not in values:
            raise LayoutError(f"'{text}' does not say how many GPUs train", "for 8 GPUs: train=8")
        if colocated and "generate" not in values:
            raise LayoutError("'colocated' without servers has no meaning", "write train=8 generate=tp1x8 colocated")
        layout = cls(_read_train(values["train"]), *_read_generate(values.get("generate")), colocated)
        if layout.trainer_gpus + layout.tensor_parallel * layout.servers > MOST_GPUS:
            raise LayoutError(f"'{text}' asks for more than {MOST_GPUS:,} GPUs", "name as many as there are")
        return layout

    def number(self, per_server: int) -> tuple[list[int], list[int] | None]:
        """Return the numbers of the GPUs that train, and of those that generate, server by server.

        The numbers count from 0 over the whole run. The driver finds a node for each GPU later. The second list is
        None if the placement names no servers.

        Args:
            per_server: GPUs of one server.

        Raises:
            LayoutError: colocated servers do not use all GPUs that train.
        """
        training, generating = list(range(self.trainer_gpus)), per_server * self.servers
        if not self.servers:
            return training, None
        if not self.colocated:
            return training, list(range(self.trainer_gpus, self.trainer_gpus + generating))
        if generating != self.trainer_gpus:
            hint = f"generate=tp{self.tensor_parallel}x{self.trainer_gpus // per_server} takes all of them"
            hint += "; several servers on a GPU are named by number: placement.generation=[0, 0, 1, 1]"
            raise LayoutError(
                f"colocated, the same GPUs do both: train={self.trainer_gpus}, and {self._generate} names {generating}",
                hint if self.trainer_gpus % per_server == 0 else f"name a number of GPUs that {per_server} divides",
            )
        return training, training


def _read_train(value: str) -> int:
    if not _TRAIN.fullmatch(value):
        raise LayoutError(f"'train={value}' is not a number of GPUs", "train=8 is 8 GPUs, on however many nodes")
    return int(value)


def _read_generate(value: str | None) -> tuple[int, int]:
    if value is None:
        return 0, 0
    if not (match := _GENERATE.fullmatch(value)):
        number = value if value.isdigit() and int(value) else "8"
        raise LayoutError(
            f"'generate={value}' is not tpGPUSxSERVERS",
            f"generate=tp1x{number} is {number} servers with a GPU each, generate=tp{number}x1 one server on {number}",
        )
    return int(match[1]), int(match[2])
