"""Imported at the start of every Python of vLLM's environment, by a `.pth` file: torchvision beside PyTorch for CPUs.

The torchvision that package indexes hold is built for CUDA; beside PyTorch for the CPU its operators do not register,
and without them it cannot be imported. They are declared when it is imported, and not in programs that never do.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class Operators(MetaPathFinder):
    """Finds nothing; sees when torchvision is looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Declare what torchvision asks for while it is imported."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", schema)


sys.meta_path.insert(0, Operators())
