"""Whether what a component computes is what it should be, within a tolerance, and by how much it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, message: str) -> None:
    """Assert that two tensors differ nowhere by more than the tolerance."""
    worst = float((found.double() - wanted.double()).detach().abs().max()) if found.numel() else 0.0
    assert worst <= tolerance, f"{message}: values differ by {worst:.7f}"


def same_gradients(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float, message: str
) -> None:
    """Assert that gradients are the same, by name."""
    assert found.keys() == wanted.keys(), f"{message}: gradients of {sorted(found)} instead of {sorted(wanted)}"
    for name, value in wanted.items():
        same(found[name], value, tolerance, message)


def same_sums(found: dict[str, float], wanted: dict[str, float], message: str) -> None:
    """Assert that losses and metrics are the same but for rounding."""
    assert found.keys() == wanted.keys(), f"{message}: metrics {sorted(found)} instead of {sorted(wanted)}"
    for name, value in wanted.items():
        assert abs(found[name] - value) <= 1e-4 * max(1.0, abs(value)), (
            f"{message}: {name} is {found[name]:.6f} instead of {value:.6f}"
        )
