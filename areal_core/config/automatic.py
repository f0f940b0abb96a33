"""Choose the engine for `inference_engine: auto`: the fastest installed one that fits the config, and its GPUs.

`resolve` makes the choice once. The config in the run folder names the chosen engine:

    GPUs of this machine -> installed engines, fastest first -> the first with which the config passes every check

An engine takes part if its `Settings.automatic_rank` is above 0. On a machine with one GPU, the servers share it with
the trainer. With several GPUs, half of them train and the others generate, unless `servers` and `tensor_parallel` set
another number. A config that names GPUs in `placement` keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError

from areal_core.config.layout import Layout, LayoutError
from areal_core.config.sections import PlacementSection
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
"""Keys of `placement` that name GPUs."""


class Candidate(NamedTuple):
    """A config in which one engine replaces `auto`.

    Attributes:
        engine: the engine, as `plugin/name`.
        values: values of the whole config.
    """

    engine: str
    values: dict[str, Any]


def is_automatic(values: Mapping[str, Any]) -> bool:
    """Return whether a config has `inference_engine: auto`."""
    return _type_of(values.get("inference_engine")) == AUTO


def candidates(values: Mapping[str, Any], catalog: Catalog) -> list[Candidate]:
    """Return the config once for each engine that can run on this machine, the fastest engine first.

    Args:
        values: values of a config whose inference engine is `auto`.
        catalog: the installed plugins.

    Raises:
        ConfigError: no installed engine can run here, or `placement` names GPUs for training or generation only.
    """
    placement, engine = values.get("placement"), values["inference_engine"]
    named_keys = _keys_that_name_gpus(placement)
    if named_keys in ({"generation"}, {"training"}):
        raise ConfigError(
            f"placement names GPUs for {next(iter(named_keys))} alone, and inference_engine: auto needs both or none",
            hints=["for servers that share the trainer's GPU: placement={generation: [0, 0], training: [0]}"],
        )
    gpus = count_gpus() if is_local(values) else 0
    ranked = sorted(_ranked(catalog, gpus or _named_gpus(placement)), key=lambda entry: -entry[1])
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
                **(_with_gpus(placement, engine, gpus) if needs_gpu and not named_keys else {}),
            },
        )
        for name, _, needs_gpu in ranked
    ]


def is_local(values: Mapping[str, Any]) -> bool:
    """Return whether the launcher starts all processes on this machine, so that its GPUs count."""
    return _type_of(values.get("launcher", "local")) in ("local", "core/local")


def _keys_that_name_gpus(placement: object) -> set[str]:
    """Return the keys of a placement that name GPUs. A value that is not a mapping counts as the key `layout`."""
    if placement is None:
        return set()
    if not isinstance(placement, Mapping):
        return {"layout"}
    return {key for key in _GPUS_NAMED if placement.get(key) is not None}


def _named_gpus(placement: object) -> int:
    """Return how many GPUs a placement names; 1 for a wrong one, whose validation reports the problem."""
    try:
        section = PlacementSection.model_validate(placement)
        training, generation = section.training, section.generation
        if section.layout is not None:
            layout = Layout.parse(section.layout)
            training, generation = layout.number(layout.tensor_parallel)
    except (ValidationError, LayoutError):
        return 1
    return len({*(training or ()), *(generation or ())})


def _ranked(catalog: Catalog, gpus: int) -> Iterator[tuple[str, int, bool]]:
    """Yield each engine that can run here, its rank, and whether it needs GPUs in the placement."""
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
    """Return a placement on the GPUs of this machine, as an update of the config's values.

    Args:
        placement: the placement as written. Its keys, such as `gpu_memory_gib`, are kept.
        engine: the section `inference_engine`, which may set `servers` and `tensor_parallel`.
        gpus: number of GPUs, at least 1.
    """
    kept = placement if isinstance(placement, Mapping) else {}
    settings = engine if isinstance(engine, Mapping) else {}
    servers, per_server = settings.get("servers"), settings.get("tensor_parallel") or 1
    if not isinstance(per_server, int) or per_server < 1:
        per_server = 1  # the validation reports the wrong value
    if gpus == 1:
        count = servers if isinstance(servers, int) and servers > 0 else 1
        return {"placement": {**kept, "generation": [0] * count, "training": [0]}}
    count = max(1, (gpus - gpus // 2) // per_server)
    if isinstance(servers, int) and 0 < servers * per_server < gpus:
        count = servers
    trainer_gpus = max(1, gpus - count * per_server)
    return {"placement": {**kept, "layout": f"train={trainer_gpus} generate=tp{per_server}x{count}"}}
