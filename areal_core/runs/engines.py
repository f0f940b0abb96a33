"""Build the inference engine of a run, or the adapter of its servers.

    controller, rollout workers   build_engine     an `InferenceEngine`, or a `ServerFleet` around a `ServerAdapter`
    server processes, areal serve build_adapter    the adapter, for the command that starts a server

The controller starts the engine; rollout workers build it to get its client.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from areal_core.errors import ConfigError, RunError
from areal_core.inference.adapter import ServerAdapter
from areal_core.inference.fleet import ServerFleet
from areal_core.inference.settings import FleetSettings, ServerSettings
from areal_core.interfaces.inference import InferenceCapabilities
from areal_core.plugins.catalog import Catalog
from areal_core.runs.models import sampling_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import RunConfig, Selection
    from areal_core.interfaces.inference import InferenceEngine
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.member import Member


FOLDERS = {"core/memory", "core/disk"}
"""Weight transports that every inference engine supports."""


def build_engine(config: RunConfig, run: RunFolder, scratch: Path, member: Member | None) -> InferenceEngine:
    """Build the inference engine without starting it.

    Args:
        config: config of the run. It has an inference engine.
        run: the run folder, which has the logs of servers and the keys that they ask for.
        scratch: folder for temporary files of this process, such as `Member.scratch`.
        member: this process, whose driver starts the servers; None: the engine starts them on this machine.

    Raises:
        ConfigError: the component is neither an engine nor an adapter, or it cannot be constructed.
        RunError: the engine does not support the weight transport, the images or the sampling parameters of the config.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.config import resolve
        >>> from areal_core.programs import RunFolder
        >>> from areal_core.programs import build_engine
        >>> config = resolve("grpo/addition").config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     engine = build_engine(config, RunFolder(Path(folder)), Path(folder), None)
        >>> engine.capabilities.images  # then: await engine.start(model), await engine.generate(request)
        True
    """
    assert config.inference_engine is not None
    name = config.inference_engine.reference
    engine: InferenceEngine
    if is_adapter(config.inference_engine):
        settings = settings_for(config, run.path, member.host if member is not None else "")
        adapter = build_adapter(config.inference_engine, settings)
        engine = ServerFleet(adapter, run.logs, member, config.placement.generation)
    else:
        engine = config.inference_engine.build(
            scratch=scratch,
            member=member,
            log_dir=run.logs,
            gpus=config.placement.generation,
            deterministic=config.deterministic,
        )
    if not isinstance(getattr(engine, "capabilities", None), InferenceCapabilities):
        raise ConfigError(
            f"'{config.inference_engine.target}' is neither a ServerAdapter nor an InferenceEngine",
            hints=["derive the class from one of these, which are in areal_core.servers"],
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


def is_adapter(chosen: Selection) -> bool:
    """Return whether an inference engine is a `ServerAdapter`, which areal puts behind a fleet."""
    target = chosen.load()
    return isinstance(target, type) and issubclass(target, ServerAdapter)


def settings_for(config: RunConfig, run_dir: Path, host: str) -> Any:
    """Return the settings of the inference engine as the run uses them: if it has servers, with the run's key.

    Args:
        config: config of the run.
        run_dir: the run folder.
        host: address where servers of this process listen; see `ServerSettings.with_key`.
    """
    assert config.inference_engine is not None
    settings = config.inference_engine.settings
    return settings.for_run(config).with_key(run_dir, host) if isinstance(settings, ServerSettings) else settings


def build_adapter(chosen: Selection, settings: Any) -> ServerAdapter:
    """Build the adapter of a run's servers.

    Args:
        chosen: the inference engine of the config.
        settings: the settings that `settings_for` returns, or those of a server that shares its GPU.

    Raises:
        ConfigError: it is no adapter, its settings are no `ServerSettings`, it cannot be constructed, or the server
            program is not installed.
    """
    if not is_adapter(chosen):
        raise ConfigError(
            f"'{chosen.target}' is no ServerAdapter, so areal does not know how to start its servers",
            hints=["derive it from ServerAdapter, or define `serve` in its settings"],
        )
    if not isinstance(settings, ServerSettings):
        raise ConfigError(
            f"'{chosen.target}' is a ServerAdapter, and its settings are no ServerSettings",
            hints=["derive its Config from FleetSettings or ServerSettings, which are in areal_core.servers"],
        )
    adapter: ServerAdapter = replace(chosen, settings=settings).build()
    if getattr(adapter, "settings", None) is not settings:
        raise ConfigError(
            f"'{chosen.target}' does not keep its settings",
            hints=["call super().__init__(settings) in its __init__"],
        )
    starts_program = isinstance(settings, FleetSettings) and settings.servers and not settings.program
    if starts_program and adapter.package and find_spec(adapter.package) is None:
        installed = Catalog.scan().get(chosen.plugin) if chosen.plugin else None
        repair = f"pip install {adapter.package}" if installed is None else installed.repair(adapter.package)
        raise ConfigError(
            f"{adapter.name} is not installed beside areal, and the run is to start {adapter.name} servers",
            hints=[f"{repair}; or set program, or addresses and servers=0"],
        )
    return adapter
