"""From a placement that counts to what the rest of a config says about the same: GPUs, servers, tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from areal_core.config.launching import launching
from areal_core.config.layout import Layout, LayoutError
from areal_core.config.problems import Problem, RejectedError
from areal_core.config.settings import Settings

if TYPE_CHECKING:
    from areal_core.config.sections import PlacementSection
    from areal_core.config.selection import Selection

NUMBERED = {("inference_engine", "servers"), ("inference_engine", "tensor_parallel")}
"""Settings that follow from the words, where they are not written."""


def numbered(placement: PlacementSection, launcher: Selection, engine: Selection | None) -> dict[str, Any]:
    """What a config becomes whose placement is counted: GPUs are counted through, and the driver finds their nodes.

    Raises:
        RejectedError: the words are wrong, contradict what is written elsewhere, or ask for what the launcher has not.
    """
    try:
        layout = Layout.parse(placement.layout or "")
        engine = _served(engine, layout)
        written, gpus = launching(launcher).trainer_processes, layout.trainer_gpus
        _refuse(f"train={gpus}", "launcher.trainer_processes", written, gpus)
        copies = engine.keywords().get("data_parallel", 1) if engine is not None else 1
        training, generation = layout.number(layout.tensor_parallel * copies)
    except LayoutError as error:
        hints = (error.hint,) if error.hint else ()
        raise RejectedError([Problem(("placement",), str(error), hints)]) from None
    lists = {"training": training, "generation": generation}
    return {"placement": placement.model_copy(update=lists), "inference_engine": engine}


def with_servers(placement: PlacementSection, engine: Selection | None) -> Selection | None:
    """The inference engine with a server for each share of the GPUs that are named for it, where none are counted."""
    settings: Any = None if engine is None else engine.settings
    each, gpus = getattr(settings, "gpus_each", 0), len(placement.generation or ())
    if engine is None or not each or gpus % each or "servers" in settings.model_fields_set:
        return engine
    return replace(engine, settings=settings.model_copy(update={"servers": gpus // each}))


def _served(engine: Selection | None, layout: Layout) -> Selection | None:
    """The inference engine with as many servers as the words say."""
    has_servers = engine is not None and "servers" in engine.keywords()
    if not layout.servers:
        if has_servers:
            raise LayoutError(
                "the placement does not mention the inference engine's servers",
                f"add how many, and on how many GPUs each: {layout} generate=tp1x8",
            )
        return engine
    if engine is None or not has_servers or not isinstance(engine.settings, Settings):
        name = "there is no inference engine" if engine is None else f"'{engine.target}' starts no servers"
        raise LayoutError(f"generate names servers, and {name}", "leave generate out, or choose another engine")
    said = {"servers": layout.servers, "tensor_parallel": layout.tensor_parallel}
    if "tensor_parallel" not in engine.keywords() and said.pop("tensor_parallel") > 1:
        raise LayoutError(f"a server of '{engine.target}' has one GPU", f"write generate=tp1x{layout.servers}")
    for name, value in said.items():
        if name in engine.settings.model_fields_set:
            words = f"generate=tp{layout.tensor_parallel}x{layout.servers}"
            _refuse(words, f"inference_engine.{name}", engine.keywords()[name], value)
    return replace(engine, settings=engine.settings.model_copy(update=said))


def _refuse(words: str, key: str, written: Any, said: int) -> None:
    """Raise `LayoutError` where something else is written than the words say."""
    if written not in (None, said):
        raise LayoutError(
            f"{words} means {key}={said}, but {key}={written} is set", f"write {key}={said}, or other words"
        )
