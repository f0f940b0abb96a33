"""Assertions that computed values equal the expected ones within a tolerance. Messages contain the difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, message: str) -> None:
    """Assert that two tensors of the same shape differ nowhere by more than the tolerance."""
    worst = float((actual.double() - expected.double()).detach().abs().max()) if actual.numel() else 0.0
    assert worst <= tolerance, f"{message}: values differ by {worst:.7f}"


def same_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, message: str
) -> None:
    """Assert that gradients have the same names, and the same values within the tolerance."""
    assert actual.keys() == expected.keys(), f"{message}: gradients of {sorted(actual)} instead of {sorted(expected)}"
    for name, value in expected.items():
        same(actual[name], value, tolerance, message)


def same_sums(actual: dict[str, float], expected: dict[str, float], message: str) -> None:
    """Assert that losses and metrics have the same names, and the same values within a relative 1e-4."""
    assert actual.keys() == expected.keys(), f"{message}: metrics {sorted(actual)} instead of {sorted(expected)}"
    for name, value in expected.items():
        assert abs(actual[name] - value) <= 1e-4 * max(1.0, abs(value)), (
            f"{message}: {name} is {actual[name]:.6f} instead of {value:.6f}"
        )
