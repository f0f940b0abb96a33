"""Packed attention with cuDNN, through its Python front end (package nvidia-cudnn-frontend).

cuDNN builds a plan for a fixed number of sequences and a fixed longest length. Both are rounded up to powers of two,
and the extra sequences are empty, so that a run builds few plans. Plans are cached.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from areal_fsdp.attention.packed import Reach, Three

_FEWEST_SEQUENCES = 16
_SHORTEST = 256


class Shape(NamedTuple):
    """Sizes that a plan is built for."""

    device: int
    dtype: torch.dtype
    sequences: int
    longest: int
    heads: int
    key_heads: int
    size: int
    scale: float


def _round_up(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


@cache
def _handle(device: int) -> Any:
    return importlib.import_module("cudnn").create_handle()


def _handle_on_stream(device: int) -> Any:
    library: Any = importlib.import_module("cudnn")
    handle = _handle(device)
    library.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


class _Plan:
    """A cuDNN graph with its named inputs and outputs."""

    def __init__(self, shape: Shape, *, is_backward: bool) -> None:
        library: Any = importlib.import_module("cudnn")
        kinds = library.data_type
        kind = kinds.BFLOAT16 if shape.dtype == torch.bfloat16 else kinds.HALF
        self.graph = library.pygraph(
            io_data_type=kind,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=_handle_on_stream(shape.device),
        )
        self.ports: dict[str, Any] = {}
        b, s, d = shape.sequences, shape.longest, shape.size

        def integers(name: str, count: int) -> Any:
            ones = [1, 1, 1, 1]
            self.ports[name] = self.graph.tensor(name=name, dim=[count, 1, 1, 1], stride=ones, data_type=kinds.INT32)
            return self.ports[name]

        def set_layout(port: Any, heads: int, width: int, offsets: Any) -> Any:
            port.set_dim([b, heads, s, width]).set_stride([s * heads * width, width, heads * width, 1])
            port.set_ragged_offset(offsets)
            return port

        def packed(name: str, heads: int, width: int, offsets: Any, of: Any = kind) -> Any:
            port = self.graph.tensor(name=name, dim=[b, heads, s, width], stride=[1, 1, 1, 1], data_type=of)
            self.ports[name] = set_layout(port, heads, width, offsets)
            return port

        of_query, of_key = integers("query offsets", b + 1), integers("key offsets", b + 1)
        of_stats, lengths = integers("stats offsets", b + 1), integers("lengths", b)
        query = packed("query", shape.heads, d, of_query)
        key, value = (packed(name, shape.key_heads, d, of_key) for name in ("key", "value"))
        options = {
            "attn_scale": shape.scale,
            "use_padding_mask": True,
            "seq_len_q": lengths,
            "seq_len_kv": lengths,
            "use_causal_mask": True,
        }
        if is_backward:
            out, gradient = (packed(name, shape.heads, d, of_query) for name in ("out", "gradient"))
            stats = packed("stats", shape.heads, 1, of_stats, kinds.FLOAT)
            gradients = self.graph.sdpa_backward(q=query, k=key, v=value, o=out, dO=gradient, stats=stats, **options)
            names = ("of query", "of key", "of value")
            all_heads = (shape.heads, shape.key_heads, shape.key_heads)
            for name, port, heads in zip(names, gradients, all_heads, strict=True):
                port.set_output(True).set_data_type(kind)
                self.ports[name] = set_layout(port, heads, d, of_query if name == "of query" else of_key)
        else:
            out, stats = self.graph.sdpa(q=query, k=key, v=value, generate_stats=True, **options)
            out.set_output(True).set_data_type(kind)
            stats.set_output(True).set_data_type(kinds.FLOAT)
            self.ports["out"] = set_layout(out, shape.heads, d, of_query)
            self.ports["stats"] = set_layout(stats, shape.heads, 1, of_stats)
        self.graph.build([library.heur_mode.A, library.heur_mode.FALLBACK])
        self.workspace = self.graph.get_workspace_size()

    def run(self, shape: Shape, bounds: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        """Run the graph on named tensors, which include the outputs."""
        missing = shape.sequences + 1 - len(bounds)
        starts = torch.cat([bounds, bounds[-1:].expand(missing)]) if missing else bounds
        tensors |= {
            "query offsets": starts * (shape.heads * shape.size),
            "key offsets": starts * (shape.key_heads * shape.size),
            "stats offsets": starts * shape.heads,
            "lengths": starts.diff(),
        }
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=bounds.device)
        pack = {self.ports[name]: tensor for name, tensor in tensors.items()}
        self.graph.execute(pack, workspace, handle=_handle_on_stream(shape.device))


@cache
def _plan(shape: Shape, is_backward: bool) -> _Plan:
    return _Plan(shape, is_backward=is_backward)


def _shape(query: torch.Tensor, key: torch.Tensor, bounds: torch.Tensor, reach: Reach) -> Shape:
    if reach.window:
        raise NotImplementedError("cuDNN does not compute sliding windows; `kernel_for` returns PyTorch's kernel")
    return Shape(
        query.device.index,
        query.dtype,
        _round_up(len(bounds) - 1, _FEWEST_SEQUENCES),
        _round_up(reach.longest, _SHORTEST),
        query.shape[1],
        key.shape[1],
        query.shape[2],
        reach.scale,
    )


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, reach: Reach
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `areal_fsdp.attention.kernels.Kernel.forward`."""
    shape = _shape(query, key, bounds, reach)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(query)
    stats = query.new_empty(len(query), query.shape[1], dtype=torch.float32)  # the order of cuDNN's ragged tensors
    tensors = {"query": query, "key": key, "value": value, "out": out, "stats": stats}
    _plan(shape, False).run(shape, bounds, tensors)
    return out, stats.t()


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    bounds: torch.Tensor,
    reach: Reach,
) -> Three:
    """Compute `areal_fsdp.attention.kernels.Kernel.backward`."""
    shape = _shape(query, key, bounds, reach)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    tensors = {"query": query, "key": key, "value": value, "out": out, "gradient": gradient.contiguous()}
    tensors |= {
        "stats": stats.t().contiguous(),
        "of query": gradients[0],
        "of key": gradients[1],
        "of value": gradients[2],
    }
    _plan(shape, True).run(shape, bounds, tensors)
    return gradients
