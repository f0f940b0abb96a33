"""The planned size of a checkpoint equals the size of the saved tensors."""

import json

import pytest

from areal_core.disk import read_shapes
from areal_core.engines import StoredModel
from areal_core.sdk import ACTOR, EMA, REFERENCE, Role
from areal_fsdp.config import FSDPConfig

AVERAGE = Role("average", ema=EMA("actor", 0.9))
CRITIC = Role("critic", head="scalar", trains=True)
RANDOM_STATE = 1 << 13
"""Bytes of random states and the optimizer's step counts, which the plan leaves out."""


@pytest.mark.parametrize(
    ("role", "dtype", "settings"),
    [
        (ACTOR, "float32", {}),
        (ACTOR, "bfloat16", {}),
        (ACTOR, "bfloat16", {"optimizer_state_dtype": "bfloat16"}),
        (ACTOR, "float32", {"adapter": {"rank": 4}}),
        (CRITIC, "float32", {}),
        (AVERAGE, "bfloat16", {}),
    ],
)
def test_a_checkpoint_is_as_large_as_planned(
    role, dtype, settings, make_engine, model_folder, tmp_path, program, batch
):
    folder = model_folder("mistral")
    engine = make_engine("mistral", role, dtype=dtype, **settings)
    if role is ACTOR:
        program.train(engine, batch)
    stored = StoredModel(folder, json.loads((folder / "config.json").read_text()), read_shapes(folder))
    planned = FSDPConfig(**settings).checkpoint_bytes(role, stored)
    assert planned <= engine.snapshot_size() <= planned + RANDOM_STATE


def test_a_frozen_role_has_no_checkpoint(model_folder):
    folder = model_folder()
    stored = StoredModel(folder, json.loads((folder / "config.json").read_text()), read_shapes(folder))
    assert FSDPConfig().checkpoint_bytes(REFERENCE, stored) == 0
