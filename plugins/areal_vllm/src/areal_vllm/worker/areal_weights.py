"""Loaded by a vLLM server: how weights reach its workers. Needs vLLM and torch, and nothing of areal.

vLLM's own transfer engines exist for CUDA alone; this one reads a folder or receives a broadcast on any device, through
the same documented interface (`vllm.distributed.weight_transfer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = timedelta(seconds=300)
"""For the servers to meet, and for one tensor. The run's own deadlines (`group_timeout_s`, `update_timeout_s`, and the
trainer's `weight_sync.timeout_s`) decide what becomes of an update; this one only brings a worker back that they have
given up, wherever it hangs. Where they are longer, a worker that gave up here is given the weights through a folder."""


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The group in which the trainer broadcasts; see areal's `WeightGroup`."""

    name: str = ""
    address: str = ""
    port: int = 0
    first_rank: int = 1
    world_size: int = 2
    backend: str = "gloo"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A folder of safetensors, or name, dtype and shape of each tensor that is broadcast."""

    folder: str = ""
    group: str = ""
    tensors: list[list[Any]] = field(default_factory=list)


class AnywhereEngine(WeightTransferEngine[GroupInfo, UpdateInfo]):
    """Takes weights from a folder or a broadcast, on CPU and GPU."""

    init_info_cls = GroupInfo
    update_info_cls = UpdateInfo
    _group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Meet the trainer and the other servers."""
        store = TCPStore(init_info.address, init_info.port, is_master=False, timeout=TIMEOUT)
        prefixed = PrefixStore(init_info.name, store)
        rank = init_info.first_rank + self.parallel_config.rank
        if init_info.backend == "gloo":
            self._group = dist.ProcessGroupGloo(prefixed, rank, init_info.world_size, TIMEOUT)
        else:
            self._group = dist.ProcessGroupNCCL(prefixed, rank, init_info.world_size, dist.ProcessGroupNCCL.Options())

    def start_weight_update(self) -> None:
        """Parameters that were repacked after loading are made ready to be loaded again."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load; the base class would wait for an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Hand every tensor to the model's own loader, which maps names and fuses what vLLM fuses."""
        if update_info.folder:
            self.model.load_weights(_read(Path(update_info.folder)))
        else:
            self.model.load_weights(self._receive(update_info.tensors))

    def finish_weight_update(self) -> None:
        """Repack what was loaded."""
        finalize_layerwise_reload(self.model, self.model_config)
        # A head that is tied to the embeddings is in no file, so vLLM's reload passes it by; but on a CPU it holds a
        # packed copy of its own, which would stay that of the old weights.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    def _receive(self, tensors: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise RuntimeError("no group was formed")
        device = self.device if dist.is_nccl_available() and self.device.type == "cuda" else torch.device("cpu")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for name, dtype, shape in tensors:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self._group.broadcast([tensor], options).wait()
            yield name, tensor


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


class WeightExtension:
    """Named with `--worker-extension-cls`, so that every worker imports this module and knows the engine `areal`."""


if "areal" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("areal", AnywhereEngine)
