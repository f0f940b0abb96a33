"""`inference_engine: auto`: the fastest installed engine that the rest of the config works with, and GPUs for it.

The choice is made once, where the config is read, and the run folder's config names the engine that was chosen:

    GPUs of this machine -> installed engines, fastest first -> the first with which the config passes every check

An engine takes part by `Settings.automatic_rank`. Servers share one GPU with the trainer; of several GPUs half
train, and the others have servers, as many as `servers` and `tensor_parallel` say. A config that names GPUs in
`placement` keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from areal_core.config.settings import Settings
from areal_core.errors import ConfigError, PluginError
from areal_core.gpus import count_gpus
from areal_core.plugins.loading import load_attribute
from areal_core.plugins.manager import survey
from areal_core.plugins.records import Component

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.plugins.catalog import Catalog

AUTO: Final = "auto"
_KIND: Final = "inference_engines"
_GPUS_NAMED: Final = {"type", "layout", "generation", "training"}
"""Keys of `placement` with which a config says which GPUs it takes."""


class Candidate(NamedTuple):
    """A config with one of the engines.

    Attributes:
        engine: `plugin/name`.
        values: of the whole config.
    """

    engine: str
    values: dict[str, Any]


def is_automatic(values: Mapping[str, Any]) -> bool:
    """Return whether a config leaves the inference engine to areal."""
    return _type_of(values.get("inference_engine")) == AUTO


def candidates(values: Mapping[str, Any], catalog: Catalog) -> list[Candidate]:
    """Return the config with each engine that can run on this machine, the fastest first.

    Args:
        values: of a config whose inference engine is `auto`.
        catalog: of the installed plugins.

    Raises:
        ConfigError: no installed engine can run here, or placement names GPUs for one half alone.
    """
    placement, engine = values.get("placement"), values["inference_engine"]
    named = _named_gpus(placement)
    if named in ({"generation"}, {"training"}):
        raise ConfigError(
            f"placement names GPUs for {next(iter(named))} alone, and inference_engine: auto needs both or none",
            hints=["for servers that share the trainer's GPU: placement={generation: [0, 0], training: [0]}"],
        )
    gpus = count_gpus() if is_local(values) else 0
    ranked = sorted(_ranked(catalog, gpus or len(named)), key=lambda found: -found[1])
    if not ranked:
        raise ConfigError(
            "inference_engine: auto: no installed engine can generate on this machine",
            hints=["areal plugins lists what is installed; name an engine: inference_engine.type=PLUGIN/NAME"],
        )
    return [
        Candidate(
            name,
            {
                **values,
                **_with_engine(engine, name),
                **(_with_gpus(placement, engine, gpus) if needs_gpu and not named else {}),
            },
        )
        for name, _, needs_gpu in ranked
    ]


def is_local(values: Mapping[str, Any]) -> bool:
    """Return whether a config's processes run on this machine, so that its GPUs count."""
    return _type_of(values.get("launcher", "local")) in ("local", "core/local")


def _named_gpus(placement: object) -> set[str]:
    """Return the keys with which a placement names GPUs; a value that is no placement counts as one, to be refused."""
    if placement is None:
        return set()
    if not isinstance(placement, Mapping):
        return {"layout"}
    return {key for key in _GPUS_NAMED if placement.get(key) is not None}


def _ranked(catalog: Catalog, gpus: int) -> Iterator[tuple[str, int, bool]]:
    """Yield the engines that can run here, with their rank, and whether placement names GPUs for them."""
    for plugin in survey(catalog):
        for kind, record in plugin.records:
            if kind != _KIND or not isinstance(record, Component) or record.config is None:
                continue
            try:
                settings: Any = load_attribute(record.config, f"the settings of '{record.reference}'", plugin.installed)
            except PluginError:  # `areal plugins` and `areal doctor` report it
                continue
            has_rank = isinstance(settings, type) and issubclass(settings, Settings)
            if has_rank and (rank := settings.automatic_rank(gpus)):
                yield record.reference, rank, settings.needs_gpu


def _type_of(written: object) -> object:
    return written.get("type") if isinstance(written, Mapping) else written


def _with_engine(written: object, engine: str) -> dict[str, Any]:
    settings = written if isinstance(written, Mapping) else {}
    return {"inference_engine": {**settings, "type": engine}}


def _with_gpus(placement: object, engine: object, gpus: int) -> dict[str, Any]:
    """Return a placement on so many GPUs of this machine.

    Args:
        placement: what the config says besides, such as `gpu_memory_gib`.
        engine: `inference_engine` of the config, which may have `servers` and `tensor_parallel`.
        gpus: at least one.
    """
    rest = placement if isinstance(placement, Mapping) else {}
    settings = engine if isinstance(engine, Mapping) else {}
    servers, each = settings.get("servers"), settings.get("tensor_parallel") or 1
    if not isinstance(each, int) or each < 1:
        each = 1  # the value is refused later
    if gpus == 1:
        count = servers if isinstance(servers, int) and servers > 0 else 1
        return {"placement": {**rest, "generation": [0] * count, "training": [0]}}
    count = servers if isinstance(servers, int) and 0 < servers * each < gpus else max(1, (gpus - gpus // 2) // each)
    return {"placement": {**rest, "layout": f"train={max(1, gpus - count * each)} generate=tp{each}x{count}"}}
