"""Stand-ins for `triton` and `sgl_kernel`, so that a program which imports both can run where neither has a build.

Importing costs nothing and means nothing; whoever launches a kernel gets an error that names it. The one kernel that
SGLang calls on every path is written out with PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

PACKAGES = ("triton", "sgl_kernel")


class Absent:
    """A name of a package that is not there: whatever is looked up in it, subscripted or called is absent as well.

    Called with one function, as decorators are, it gives a `Kernel`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return Absent(f"{self._name}.{key}")

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        if self._name.startswith("sgl_kernel"):
            raise NotImplementedError(f"{self._name} has no build for this CPU")
        if len(arguments) == 1 and not settings and isinstance(arguments[0], (types.FunctionType, Kernel)):
            return Kernel(arguments[0])
        return Absent(f"{self._name}()")

    def __getitem__(self, key: Any) -> Absent:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return f"<absent {self._name}>"


class Kernel:
    """A function that was to be compiled for a GPU."""

    def __init__(self, function: Any) -> None:
        self.__name__: str = getattr(function, "__name__", "kernel")
        self.__module__ = getattr(function, "__module__", __name__)
        self.__doc__ = getattr(function, "__doc__", None)

    def __getitem__(self, grid: Any) -> Kernel:
        return self

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        raise NotImplementedError(f"the Triton kernel {self.__module__}.{self.__name__} cannot run without a GPU")


class Constant:
    """`triton.language.constexpr`: holds a value that modules compute with while they are imported."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def round_up_to_power_of_two(number: int) -> int:
    """`triton.next_power_of_2`, which is called with shapes also where no kernel runs."""
    return 1 << (number - 1).bit_length()


def assign_places(
    pools: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, _: int
) -> None:
    """`sgl_kernel.assign_req_to_token_pool_cpu`: write down where the keys and values of each request's new tokens are.

    Args:
        pools: [R] the row of each request.
        table: [rows, longest sequence] places by row and position; written to.
        starts, ends: [R] the positions of the new tokens.
        places: of all new tokens, request by request.
    """
    taken = 0
    for row, start, end in zip(pools.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[taken : taken + end - start].to(table.dtype)
        taken += end - start


DRIVER = types.SimpleNamespace(get_current_target=lambda: types.SimpleNamespace(backend="cpu", arch=0, warp_size=1))

PRESENT: dict[str, dict[str, Any]] = {
    "triton": {
        "__version__": "3.6.0",
        "cdiv": lambda number, size: -(-number // size),
        "next_power_of_2": round_up_to_power_of_two,
    },
    # Types, because modules derive from them or ask whether something is an instance.
    "triton.language": {"constexpr": Constant, "dtype": type("dtype", (), {}), "tensor": type("tensor", (), {})},
    "triton.runtime": {},
    "triton.runtime.driver": {"active": DRIVER},
    "triton.runtime.jit": {"JITFunction": Kernel},
    "sgl_kernel": {"__version__": "0.4.10", "assign_req_to_token_pool_cpu": assign_places},
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the absent packages, whatever its name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A module of our own making for `triton...` and `sgl_kernel...`, and nothing for all others."""
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """The import system makes an ordinary one."""

    def exec_module(self, module: types.ModuleType) -> None:
        """What is present, and a rule for the rest."""
        name = module.__name__

        def look_up(key: str) -> Any:
            if key.startswith("__"):
                raise AttributeError(key)
            if f"{name}.{key}" in PRESENT:
                return importlib.import_module(f"{name}.{key}")
            return Absent(f"{name}.{key}")

        module.__dict__.update(PRESENT.get(name, {}), __getattr__=look_up)


def pretend() -> None:
    """From now on the packages can be imported."""
    sys.meta_path.insert(0, Finder())
