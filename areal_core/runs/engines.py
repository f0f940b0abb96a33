"""Build the inference engine of a run. The controller starts it; rollout workers build it to get its client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.runs.models import sampling_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces.inference import InferenceEngine
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.member import Member


FOLDERS = {"core/memory", "core/disk"}
"""Weight transports that every inference engine supports."""


def build_engine(config: RunConfig, run: RunFolder, scratch: Path, member: Member | None) -> InferenceEngine:
    """Build the inference engine without starting it.

    Raises:
        RunError: the engine does not support the weight transport, the images or the sampling parameters of the config.
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
            f"weight_sync.transport is {transport}, which {name} does not support with its current settings",
            hints=["set it to memory or disk, or remove it: areal then chooses by placement"],
        )
    # Ask the engine first: a workflow of the user's own is imported for its settings.
    if not engine.capabilities.images and config.workflow is not None and config.workflow.declared("shows_images"):
        raise RunError(f"the workflow shows images, which {name} does not support", hints=["choose hf, which does"])
    unsupported = sampling_parameters(config).unsupported(engine.capabilities.sampling)
    if unsupported:
        raise RunError(
            f"{name} does not support sampling with {', '.join(unsupported)}", hints=["remove it from sampling"]
        )
    return engine
