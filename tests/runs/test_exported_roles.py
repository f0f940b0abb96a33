"""An engine tries before a run what an export needs, if the run exports the engine's model."""

from types import SimpleNamespace
from typing import Any

import pytest

from areal_core.config.sections import CheckpointSection
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.runs.trainer import build_engines
from areal_core.sdk import ACTOR, CRITIC, Role


class Engine:
    def setup(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        self.is_exported = settings.is_exported


@pytest.mark.parametrize(
    ("export", "keep_best", "exported"), [(True, None, True), (False, True, True), (False, False, False)]
)
def test_the_policy_of_a_run_that_writes_models_is_exported_and_no_other_role(
    export: bool, keep_best: bool | None, exported: bool
) -> None:
    config: Any = SimpleNamespace(
        steps=1,
        roles={},
        checkpoint=CheckpointSection(export=export),
        workflow=None,
        evaluation=None if keep_best is None else SimpleNamespace(keep_best=keep_best),
        training=SimpleNamespace(updates=1),
        algorithm=SimpleNamespace(settings=None),
        train_engine=SimpleNamespace(build=Engine, common=SimpleNamespace(path=None)),
    )
    resolved: Any = SimpleNamespace(config=config)
    engines: dict[str, Any] = dict(build_engines(resolved, ModelReference("tiny"), {"a": ACTOR, "c": CRITIC}, 1.0))
    assert (engines["a"].is_exported, engines["c"].is_exported) == (exported, False)
