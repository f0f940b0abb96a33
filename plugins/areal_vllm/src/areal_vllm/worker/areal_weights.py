"""Weight updates in the workers of a vLLM server, which imports this module. It needs vLLM and torch, but not areal.

vLLM's own transfer engines support only CUDA. This one reads a folder or receives a broadcast on any device, through
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
"""Timeout for forming the group, and for the broadcast of one tensor.

The run's timeouts (`group_timeout_s`, `update_timeout_s`, and the trainer's `weight_sync.timeout_s`) decide about an
update. This one frees a worker that hangs after the run has abandoned the update. If the run's timeouts are longer, a
worker that times out here gets the weights through a folder.
"""


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The group in which the trainer broadcasts; see `WeightGroup` of areal."""

    name: str = ""
    address: str = ""
    port: int = 0
    first_rank: int = 1
    world_size: int = 2
    backend: str = "gloo"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A folder of safetensors, or the name, dtype and shape of each tensor of a broadcast."""

    folder: str = ""
    group: str = ""
    tensors: list[list[Any]] = field(default_factory=list)


class AnywhereEngine(WeightTransferEngine[GroupInfo, UpdateInfo]):
    """Loads weights from a folder or a broadcast, on CPU and GPU."""

    init_info_cls = GroupInfo
    update_info_cls = UpdateInfo
    _group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the group of the trainer and the other servers."""
        store = TCPStore(init_info.address, init_info.port, is_master=False, timeout=TIMEOUT)
        prefixed = PrefixStore(init_info.name, store)
        rank = init_info.first_rank + self.parallel_config.rank
        if init_info.backend == "gloo":
            self._group = dist.ProcessGroupGloo(prefixed, rank, init_info.world_size, TIMEOUT)
        else:
            self._group = dist.ProcessGroupNCCL(prefixed, rank, init_info.world_size, dist.ProcessGroupNCCL.Options())

    def start_weight_update(self) -> None:
        """Prepare parameters for loading that vLLM has repacked after the last loading."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights. The base class would wait for an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Pass all tensors to the model's own loader, which maps names and fuses parameters.

        Raises:
            RuntimeError: a broadcast is requested, but no group was formed.
        """
        if update_info.folder:
            self.model.load_weights(_read(Path(update_info.folder)))
        else:
            self.model.load_weights(self._receive(update_info.tensors))

    def finish_weight_update(self) -> None:
        """Repack the loaded parameters."""
        finalize_layerwise_reload(self.model, self.model_config)
        # No file has a head that is tied to the embeddings, so vLLM does not reload it. But on a CPU, it has a packed
        # copy of its own, which would keep the old weights.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    def _receive(self, tensors: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise RuntimeError("the server cannot receive weights: no group was formed")
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
    """Makes vLLM import this module in every worker (`--worker-extension-cls`), which registers the engine `areal`."""


if "areal" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("areal", AnywhereEngine)
