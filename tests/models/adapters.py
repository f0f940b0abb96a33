"""What an adapter with default settings does to each tiny family: values, gradients and files, against PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import small_models
import torch
from peft import PeftModel

from areal_core.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path


RANK = 2


class Adapted(NamedTuple):
    """What became of an adapter on a family.

    Attributes:
        kinds: names of the matrices that have one; empty where it is refused.
        note: what stays frozen, or why it is refused.
    """

    kinds: list[str]
    note: str


def measure(family: str, folder: Path) -> Adapted:
    """Train an adapter on a family, export it, and let PEFT load it on transformers' model.

    Raises:
        AssertionError: values or gradients differ from PEFT's, or the merged export from both.
    """
    small_models.make_model(family, folder / "model")
    batch = small_models.make_batch()
    try:
        engine = small_models.set_up(folder / "model", adapter={"rank": RANK, "alpha": RANK})
    except RunError as error:
        return Adapted([], str(error).splitlines()[0])
    try:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in engine._parameters.items():
                if "lora_B" in name:
                    parameter.normal_(std=0.5, generator=generator)
        values = engine.forward(batch, ["logprobs"])["logprobs"]
        found = small_models.gradients(engine, batch)
        engine.export(folder / "export")
        kinds, frozen = engine._adapter.kinds, engine._adapter.frozen
    finally:
        engine.close()
    base = small_models.load(folder / "model")
    by_peft = PeftModel.from_pretrained(base, folder / "export" / "adapter", is_trainable=True).eval()
    wanted, wanted_gradients = small_models.reference_of(by_peft, batch)
    assert small_models.distance(values, wanted) < small_models.TOLERANCE, "values differ from PEFT's"
    wanted_gradients = {_name(name): gradient for name, gradient in wanted_gradients.items()}
    assert found.keys() == wanted_gradients.keys(), found.keys() ^ wanted_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
    for name, gradient in wanted_gradients.items():
        error = float((found[name] - gradient).abs().max()) / largest
        assert error < small_models.GRADIENT_TOLERANCE, f"gradient of {name}: {error:.2g}"
    plain, _ = small_models.reference(folder / "model", batch)
    assert small_models.distance(plain, wanted) > 100 * small_models.TOLERANCE, "the adapter changes nothing"
    exported = dict(small_models.load(folder / "export").named_parameters())
    for name, parameter in by_peft.merge_and_unload().named_parameters():
        assert small_models.distance(exported[name], parameter) < small_models.TOLERANCE, f"merged {name}"
    on = f"the adapter is on {', '.join(kinds)}; frozen in its layers are {', '.join(frozen)}"
    return Adapted(kinds, on if frozen else "")


def _name(name: str) -> str:
    """Return the name of an adapter's parameter in files, from that in PEFT's model."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")
