"""Kills the server at chosen points of an `optim_step`; a `sitecustomize` of the server's processes imports it.

TINKER_KILLS is a file with the names of points, one a line. The first one is where the server dies next.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

POINTS = ("accepted", "begun", "computed", "finished", "saving", "written", "renamed", "saved")
"""Changes of state of an `optim_step` after which the state of the model is saved, in their order."""


class Hook:
    """Patches areal_tinker.training when it is imported.

    Args:
        raises: let a step with the learning rate 77 raise an unexpected error, instead of killing the server.
    """

    def __init__(self, raises: bool = False) -> None:
        self._patch = patch_step if raises else patch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "areal_tinker.training":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            self._patch(module)

        loader.exec_module = execute_and_patch
        return spec


def reach(point: str) -> None:
    """Die if this is the next point."""
    file = Path(os.environ["TINKER_KILLS"])
    points = file.read_text().split()
    if points[:1] == [point]:
        file.write_text("\n".join(points[1:]))
        os.kill(os.getpid(), signal.SIGKILL)


def patch_step(module: Any) -> None:
    """Let a step with the learning rate 77 raise an unexpected error."""
    from areal_tinker.ranks import Rank

    step = Rank.step

    def stepping(self: Any, adam: Any) -> Any:
        if adam["learning_rate"] == 77.0:
            raise MemoryError("too large")
        return step(self, adam)

    Rank.step = stepping


def patch(module: Any) -> None:
    """Call `reach` at each point."""
    from areal_tinker.journal import Journal
    from areal_tinker.ranks import Ranks

    accept, begin, finish, mark, call = Journal.accept, Journal.begin, Journal.finish, Journal.mark_saved, Ranks.call

    def accepting(self: Any, one: Any) -> None:
        accept(self, one)
        if one.kind == "optim_step":
            reach("accepted")

    def beginning(self: Any, one: Any) -> None:
        begin(self, one)
        if one.kind == "optim_step":
            reach("begun")

    def finishing(self: Any, one: Any, *arguments: Any, **named: Any) -> None:
        if one.kind == "optim_step":
            reach("computed")
        finish(self, one, *arguments, **named)
        if one.kind == "optim_step":
            reach("finished")

    def calling(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
        if name == "save":
            reach("saving")
        result = call(self, name, *arguments, **named)
        if name == "save":
            reach("written")
        return result

    def marking(self: Any, *arguments: Any) -> None:
        reach("renamed")
        mark(self, *arguments)
        reach("saved")

    Journal.accept, Journal.begin, Journal.finish, Journal.mark_saved = accepting, beginning, finishing, marking
    Ranks.call = calling


def point_file(folder: Path, points: tuple[str, ...]) -> dict[str, str]:
    """Return the environment of a server that dies at these points."""
    (folder / "site").mkdir()
    source = f"import sys\nsys.path.insert(0, {json.dumps(str(Path(__file__).parent))})\n"
    source += "import killed_at\nsys.meta_path.insert(0, killed_at.Hook())\n"
    (folder / "site" / "sitecustomize.py").write_text(source)
    (folder / "kills").write_text("\n".join(points))
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "TINKER_KILLS": str(folder / "kills")}
