"""Architectures of an installed vLLM, read from its source: importing vLLM needs GPU libraries."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.servers import find_architecture

if TYPE_CHECKING:
    from areal_core.plugins import Finding

_REGISTRY = Path("model_executor", "models", "registry.py")
_NATIVE = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_BY_TRANSFORMERS = "_TRANSFORMERS_SUPPORTED_MODELS"


def registered(package: Path) -> dict[str, str]:
    """Return the architectures of generative models, with `yes`, or `by transformers` if vLLM runs transformers' code.

    Args:
        package: the folder `vllm` of an installation.

    Raises:
        OSError: the package has no registry.
        ValueError: the registry has an unknown form.
    """
    tree = ast.parse((package / _REGISTRY).read_text(encoding="utf-8"))
    tables = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    support: dict[str, str] = {}
    for name in (_BY_TRANSFORMERS, *_NATIVE):
        if name not in tables:
            raise ValueError(f"{package / _REGISTRY} has no table {name}")
        keys = [key.value for key in tables[name].keys if isinstance(key, ast.Constant)]
        support |= dict.fromkeys(map(str, keys), "yes" if name in _NATIVE else "by transformers")
    return support


def check_architecture(folder: Path) -> Finding:
    """Report whether the installed vLLM supports a model's architecture."""
    return find_architecture(folder, "vllm", "vLLM", registered)
