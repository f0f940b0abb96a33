"""Quantized weights (FP8 or MXFP4) to bfloat16, file after file: what `areal dequantize` does."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from areal_core.disk import WEIGHTS_INDEX, replacing_folder, settle_folder, weight_files
from areal_core.errors import RunError
from areal_core.models.quantization import (
    DEQUANTIZED,
    FP8_FACTORS,
    FP8_SCALE,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    quantization_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of E2M1 by the three lower bits of a code. The fourth bit is the sign (OCP Microscaling Formats 1.0)."""
_BIAS = 127
"""Bias of an exponent in a byte (E8M0, in the same standard)."""


def dequantize(source: Path, folder: Path) -> None:
    """Write a model with plain weights in bfloat16: all files of it, or no folder at all.

    Args:
        source: folder of the quantized model.
        folder: of the new model, which must not exist.

    Raises:
        RunError: there is no model, its weights are not quantized, or the method of quantization is unknown.
    """
    if not (source / "config.json").is_file():
        raise RunError(f"'{source}' is no folder of a Hugging Face model: it has no config.json")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    method = quantization_of(config)
    if method not in DEQUANTIZED:
        raise RunError(
            f"the weights of '{source}' are {f'quantized by {method}' if method else 'not quantized'}",
            hints=[f"areal dequantize knows {', '.join(DEQUANTIZED)}"],
        )
    files = _Files(source)
    settings = _settings_of(config)
    plain: _Method = _Fp8(files, settings.get("weight_block_size")) if method == "fp8" else _Mxfp4(files)
    settle_folder(folder)  # remove what a killed call left
    with replacing_folder("the model", folder) as fresh:
        fresh.mkdir(parents=True)
        places: dict[str, str] = {}
        size = 0
        for path in files.paths:
            tensors = {name: tensor.contiguous() for key in files.names_in(path) for name, tensor in plain.read(key)}
            if tensors:
                save_file(tensors, fresh / path.name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, path.name)
            size += sum(tensor.nbytes for tensor in tensors.values())
        if files.paths != [source / "model.safetensors"]:
            index = {"metadata": {"total_size": size}, "weight_map": places}
            (fresh / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        (fresh / "config.json").write_text(json.dumps(_plain(config), indent=2), encoding="utf-8")
        for path in source.iterdir():
            is_other = path.suffix != ".safetensors" and path.name != WEIGHTS_INDEX
            if is_other and path.is_file() and not (fresh / path.name).exists():
                shutil.copyfile(path, fresh / path.name)


def _settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.get("quantization_config") or config["text_config"]["quantization_config"]
    return found


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with plain weights in bfloat16."""
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    if (text := config.get("text_config")) is not None:
        kept["text_config"] = _plain(text)
    return kept | {"dtype": "bfloat16"}


class _Files:
    """The files of a folder's weights, and the tensors in them."""

    def __init__(self, folder: Path) -> None:
        self.paths = weight_files(folder)
        if not self.paths:
            raise RunError(f"there are no weights in {folder}: it holds no *.safetensors")
        self._open: dict[Path, Any] = {path: safe_open(path, "pt") for path in self.paths}
        self._place = {name: path for path, file in self._open.items() for name in file.keys()}  # noqa: SIM118

    def names_in(self, path: Path) -> list[str]:
        return [name for name, place in self._place.items() if place == path]

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open[self._place[name]].get_tensor(name)
        return tensor


class _Method(Protocol):
    def read(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The plain tensor that a tensor of the files stands for, by its name; nothing for one that goes with another.

        Raises:
            RunError: it is quantized in another way.
        """


class _Fp8:
    """A matrix in FP8 and `NAME_scale_inv`, a factor for each block; the last blocks of a side may be smaller.

    Args:
        files: of the model.
        block: rows and columns of a block; None for one factor for all of a matrix.
    """

    def __init__(self, files: _Files, block: Sequence[int] | None) -> None:
        self._files = files
        self._block = block

    def read(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        if name.endswith(FP8_FACTORS):
            return
        tensor = self._files[name]
        if f"{name}{FP8_SCALE}" in self._files:
            tensor = self._scaled(name, tensor, self._files[f"{name}{FP8_SCALE}"].float())
        elif tensor.is_floating_point() and tensor.element_size() == 1:
            raise RunError(f"the tensor '{name}' is in {tensor.dtype} and has no '{name}{FP8_SCALE}'")
        yield name, tensor

    def _scaled(self, name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        rows, columns = codes.shape[-2:]
        height, width = (rows, columns) if self._block is None or scales.numel() == 1 else self._block
        fits = scales.numel() == 1 or tuple(scales.shape[-2:]) == (-(-rows // height), -(-columns // width))
        if not codes.is_floating_point() or codes.element_size() != 1 or not fits:
            raise RunError(
                f"the tensor '{name}', {codes.dtype} {tuple(codes.shape)}, does not go with factors "
                f"{tuple(scales.shape)} for blocks of {height} x {width}"
            )
        if scales.numel() > 1:
            scales = scales.repeat_interleave(height, -2).repeat_interleave(width, -1)[..., :rows, :columns]
        return (codes.float() * scales).bfloat16()


class _Mxfp4:
    """`NAME_blocks` [experts, out, in / 32, 16], two numbers in a byte, the lower bits first, and `NAME_scales`
    [experts, out, in / 32], an exponent of 2 for each 32 numbers, stand for [experts, in, out]."""

    def __init__(self, files: _Files) -> None:
        self._files = files

    def read(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        whole = name.removesuffix(MXFP4_BLOCKS)
        if name.endswith(MXFP4_SCALES) and f"{name.removesuffix(MXFP4_SCALES)}{MXFP4_BLOCKS}" in self._files:
            return
        if name == whole or f"{whole}{MXFP4_SCALES}" not in self._files:
            yield name, self._files[name]
            return
        blocks, scales = self._files[name], self._files[f"{whole}{MXFP4_SCALES}"]
        if blocks.dtype != torch.uint8 or blocks.shape[:-1] != scales.shape:
            raise RunError(f"the tensor '{name}', {blocks.dtype} {tuple(blocks.shape)}, is not in MXFP4")
        table = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)])
        codes = torch.stack([blocks & 0xF, blocks >> 4], -1).flatten(-2)
        factors = torch.exp2(scales.float() - _BIAS)[..., None]
        numbers = (table[codes.int()] * factors).flatten(-2)
        yield whole, numbers.transpose(-1, -2).bfloat16()
