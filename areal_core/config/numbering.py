"""Derive GPU numbers, servers and tensor parallelism from a layout, such as `train=8 generate=tp2x4`."""

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
"""Settings that follow from the layout if the config does not set them."""


def numbered(placement: PlacementSection, launcher: Selection, engine: Selection | None) -> dict[str, Any]:
    """Return the sections that a layout changes: the placement, and the inference engine with its servers.

    The placement gets GPU numbers that count from 0 over the whole run. The driver finds a node for each GPU later.

    Raises:
        RejectedError: the layout is wrong, or it contradicts a setting of the launcher or the inference engine.
    """
    try:
        layout = Layout.parse(placement.layout or "")
        engine = _with_layout(engine, layout)
        ranks, gpus = launching(launcher).trainer_processes, layout.trainer_gpus
        _refuse_contradiction(f"train={gpus}", "launcher.trainer_processes", ranks, gpus)
        copies = engine.keywords().get("data_parallel", 1) if engine is not None else 1
        training, generation = layout.number(layout.tensor_parallel * copies)
    except LayoutError as error:
        hints = (error.hint,) if error.hint else ()
        raise RejectedError([Problem(("placement",), str(error), hints)]) from None
    lists = {"training": training, "generation": generation}
    return {"placement": placement.model_copy(update=lists), "inference_engine": engine}


def with_servers(placement: PlacementSection, engine: Selection | None) -> Selection | None:
    """Return the inference engine with as many servers as fit on the GPUs in `placement.generation`.

    The engine stays as it is if the config sets `servers`, or if the servers cannot divide the GPUs evenly.
    """
    settings: Any = None if engine is None else engine.settings
    per_server, gpus = getattr(settings, "gpus_each", 0), len(placement.generation or ())
    if engine is None or not per_server or gpus % per_server or "servers" in settings.model_fields_set:
        return engine
    return replace(engine, settings=settings.model_copy(update={"servers": gpus // per_server}))


def _with_layout(engine: Selection | None, layout: Layout) -> Selection | None:
    """Return the inference engine with the servers and the tensor parallelism of a layout. Raises `LayoutError`."""
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
    counts = {"servers": layout.servers, "tensor_parallel": layout.tensor_parallel}
    if "tensor_parallel" not in engine.keywords() and counts.pop("tensor_parallel") > 1:
        raise LayoutError(f"a server of '{engine.target}' has one GPU", f"write generate=tp1x{layout.servers}")
    for name, count in counts.items():
        if name in engine.settings.model_fields_set:
            part = f"generate=tp{layout.tensor_parallel}x{layout.servers}"
            _refuse_contradiction(part, f"inference_engine.{name}", engine.keywords()[name], count)
    return replace(engine, settings=engine.settings.model_copy(update=counts))


def _refuse_contradiction(part: str, key: str, written: Any, count: int) -> None:
    """Raise `LayoutError` if a key is set to another number than a part of the layout says."""
    if written not in (None, count):
        raise LayoutError(
            f"{part} means {key}={count}, but {key}={written} is set", f"write {key}={count}, or other words"
        )
