"""A role whose model another role's engine holds already: an adapter's frozen base is the reference."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_core.config.sections import CheckpointSection
from areal_core.engines import ModelReference
from areal_core.errors import RunError
from areal_core.runs.trainer import build_engines
from areal_core.sdk import ACTOR, REFERENCE
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_testing.conformance.models import make_model

ROLES = {role.name: role for role in (REFERENCE, ACTOR)}
"""Whoever borrows stands first: the order of roles does not matter."""


def chosen(**settings: Any) -> Any:
    return SimpleNamespace(build=lambda: FSDPEngine(FSDPConfig(**settings)), common=SimpleNamespace(path=None))


def engines_of(model: Path, **more: Any) -> dict[str, Any]:
    config: Any = {"steps": 1, "roles": {}, "train_engine": chosen(adapter={"rank": 2})} | more
    config |= {"training": SimpleNamespace(updates=1), "algorithm": SimpleNamespace(settings=None)}
    config |= {"checkpoint": CheckpointSection(), "evaluation": None, "workflow": None}
    resolved: Any = SimpleNamespace(config=SimpleNamespace(**config), base_dir=model)
    return dict(build_engines(resolved, ModelReference(str(model)), ROLES, 1.0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_the_reference_borrows_the_actors_base(model: Path) -> None:
    engines = engines_of(model)
    assert engines["reference"] is not engines["actor"]
    assert engines["reference"]._module is engines["actor"]._module
    assert engines["actor"]._others is engines["reference"]._others, "each knows the others"


def test_it_has_a_model_of_its_own_where_all_parameters_learn_or_a_section_asks_for_it(model: Path) -> None:
    for more in ({"train_engine": chosen()}, {"roles": {"reference": chosen(adapter={"rank": 2})}}):
        engines = engines_of(model, **more)
        assert engines["reference"]._module is not engines["actor"]._module


def test_a_role_whose_model_is_nowhere_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lost = chosen()
    lost.common.path = "models/lost"
    with pytest.raises(RunError, match=f"roles.reference.path: there is no folder {model}/models/lost"):
        engines_of(model, roles={"reference": lost})
