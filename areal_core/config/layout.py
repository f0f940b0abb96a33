"""A placement in one line, such as `train=8 generate=tp2x4`: how many GPUs train, and how many servers generate."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORM = "train=GPUS generate=tpGPUSxSERVERS, and 'colocated' behind it where the same GPUs do both"
MOST_GPUS = 100_000
_TRAIN = re.compile(r"[1-9]\d{0,5}")
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
        trainer_gpus: that train, on however many nodes.
        tensor_parallel: GPUs that share the weights of one server; 0 where the placement names no servers.
        servers: how many there are.
        colocated: whether the same GPUs do both.
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
        """Read a placement.

        Raises:
            LayoutError: it is none; says which word is wrong, and what would be right.
        """
        words = text.split()
        colocated = words[-1:] == ["colocated"]
        given: dict[str, str] = {}
        for word in words[:-1] if colocated else words:
            key, equals, value = word.partition("=")
            if key not in ("train", "generate") or not equals:
                raise LayoutError(f"'{word}' is not a part of a placement", f"write {FORM}")
            if key in given:
                raise LayoutError(f"'{key}' occurs twice", f"write {FORM}")
            given[key] = value
        if "train" not in given:
            raise LayoutError(f"'{text}' does not say how many GPUs train", "for 8 GPUs: train=8")
        if colocated and "generate" not in given:
            raise LayoutError("'colocated' without servers has no meaning", "write train=8 generate=tp1x8 colocated")
        layout = cls(_read_train(given["train"]), *_read_generate(given.get("generate")), colocated)
        if layout.trainer_gpus + layout.tensor_parallel * layout.servers > MOST_GPUS:
            raise LayoutError(f"'{text}' asks for more than {MOST_GPUS:,} GPUs", "name as many as there are")
        return layout

    def number(self, per_server: int) -> tuple[list[int], list[int] | None]:
        """The GPUs that train, and those that generate, server by server, counted through; nodes come later.

        Args:
            per_server: GPUs of one server.

        Raises:
            LayoutError: colocated servers do not take all GPUs that train.
        """
        training, generating = list(range(self.trainer_gpus)), per_server * self.servers
        if not self.servers:
            return training, None
        if not self.colocated:
            return training, list(range(self.trainer_gpus, self.trainer_gpus + generating))
        if generating != self.trainer_gpus:
            fits = f"generate=tp{self.tensor_parallel}x{self.trainer_gpus // per_server} takes all of them"
            fits += "; several servers on a GPU are named by number: placement.generation=[0, 0, 1, 1]"
            raise LayoutError(
                f"colocated, the same GPUs do both: train={self.trainer_gpus}, and {self._generate} names {generating}",
                fits if self.trainer_gpus % per_server == 0 else f"name a number of GPUs that {per_server} divides",
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
        plain = value if value.isdigit() and int(value) else "8"
        raise LayoutError(
            f"'generate={value}' is not tpGPUSxSERVERS",
            f"generate=tp1x{plain} is {plain} servers with a GPU each, generate=tp{plain}x1 one server on {plain}",
        )
    return int(match[1]), int(match[2])
