"""Whether a model's files hold the weights that its config asks for, in every family."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import composite_models
import pytest
import small_models

from areal_core.disk import read_shapes
from areal_core.errors import RunError
from areal_core.models.fit import check_weights_fit

if TYPE_CHECKING:
    from pathlib import Path

FAST = ("qwen3", "qwen3_5_text", "llama4_text", "gemma2", "phi3")
EVERY = [
    pytest.param(module, name, marks=small_models.tier_of(name, FAST), id=name)
    for module in (small_models, composite_models)
    for name in module.FAMILIES
]


@pytest.mark.parametrize(("module", "family"), EVERY)
def test_the_weights_that_transformers_saved_fit_and_with_one_less_they_do_not(module, family: str, tmp_path: Path):
    module.make_model(family, tmp_path)
    shapes = read_shapes(tmp_path)
    check_weights_fit(tmp_path, shapes)
    layers = (".layers.", ".h.", ".blocks.")
    # A missing expert ends the joining of the experts, so that the model is not checked.
    name = next(name for name in shapes if any(part in name for part in layers) and ".experts." not in name)
    del shapes[name]
    with pytest.raises(RunError, match=r"are not those of its config\.json"):
        check_weights_fit(tmp_path, shapes)


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_shape_that_the_config_does_not_ask_for_is_refused(dtype: str | None, tmp_path: Path):
    small_models.make_model("qwen3", tmp_path)
    config = tmp_path / "config.json"
    values = {**json.loads(config.read_text()), "vocab_size": small_models.VOCABULARY + 1, "dtype": dtype}
    config.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    with pytest.raises(RunError, match=r"have another shape, such as .* which is \[61, 32\] and must be \[62, 32\]"):
        check_weights_fit(tmp_path, read_shapes(tmp_path))
