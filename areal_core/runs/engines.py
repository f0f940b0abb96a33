"""The inference engine of a run: started in the controller, and made in rollout workers, which are its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.runs.models import sampling_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces import InferenceEngine
    from areal_core.launchers.member import Member
    from areal_core.runs.folder import RunFolder


FOLDERS = {"core/memory", "core/disk"}
"""Weight transports that every inference engine takes."""


def build_engine(config: RunConfig, run: RunFolder, scratch: Path, member: Member | None) -> InferenceEngine:
    """The inference engine, not yet started.

    Raises:
        RunError: it cannot do what the rest of the config asks of it.
    """
    assert config.inference_engine is not None
    name = config.inference_engine.reference
    engine: InferenceEngine = config.inference_engine.build(
        scratch=scratch,
        member=member,
        log_dir=run.logs,
        gpus=config.placement.generation,
        deterministic=config.deterministic,
    )
    transport = config.weight_sync.transport.target
    if transport not in {*FOLDERS, *engine.capabilities.transports}:
        raise RunError(
            f"weight_sync.transport is {transport}, and {name} as it is set takes no weights that way",
            hints=["set it to memory or disk, or leave it out: placement then decides"],
        )
    if getattr(getattr(config.workflow, "settings", None), "shows_images", False) and not engine.capabilities.images:
        raise RunError(f"the workflow shows images, and {name} takes none", hints=["choose one that does, as hf"])
    asked = sampling_parameters(config).unsupported(engine.capabilities.sampling)
    if asked:
        raise RunError(f"{name} as it is set cannot sample with {', '.join(asked)}", hints=["remove it from sampling"])
    return engine
