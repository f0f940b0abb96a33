"""Run one rank of `test_loading.py`.

    python loading_program.py RANK RANKS STORE MODEL FOLDER SETTINGS

Set up an engine, count the bytes read from files, and measure the peak memory of tensors. Rank r writes `rank{r}.pt`
into FOLDER.
"""

import builtins
import json
import logging
import sys
import weakref
from collections import Counter
from pathlib import Path

import safetensors
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, CRITIC, REFERENCE
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.parallel import loading

ROLES = {role.name: role for role in (ACTOR, CRITIC, REFERENCE)}


class Counted:
    """A slice of a file that counts the bytes read from it."""

    def __init__(self, part, key, read, broken):
        self._part, self._key, self._read, self._broken = part, key, read, broken

    def __getattr__(self, name):
        return getattr(self._part, name)

    def __getitem__(self, index):
        if self._broken:
            raise OSError("the disk is gone")
        values = self._part[index]
        self._read[self._key] += values.nbytes
        return values


def count_reading(broken):
    """Return a counter of the bytes that this process reads from safetensors files, by tensor; raise if `broken`."""
    read, real = Counter(), safetensors.safe_open

    class Opened:
        def __init__(self, *arguments, **named):
            self._file = real(*arguments, **named)

        def __enter__(self):
            self._file.__enter__()
            return self

        def __exit__(self, *error):
            return self._file.__exit__(*error)

        def __getattr__(self, name):
            assert name in ("keys", "metadata"), f"this method's reading is not counted: {name}"
            return getattr(self._file, name)

        def get_slice(self, key):
            return Counted(self._file.get_slice(key), key, read, broken)

    safetensors.safe_open = Opened
    return read


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of live CPU tensors that operations allocated; `most` is the peak."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage):
        if storage._cdata not in self._known and storage.nbytes():
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, address, size):
        self._known.discard(address)
        self.now -= size


class MeasuredEngine(FSDPEngine):
    """Records the peak memory of loading, before the probe gathers layers."""

    def _place(self, *arguments):
        result = super()._place(*arguments)
        self.most = meter.most
        return result


def fail_in_parts(error):
    """Make this process fail to read models in parts."""

    def recognize(*_):
        raise error("no such luck")

    loading.ModelFiles.recognize = recognize


meter = MemoryMeter()


def main():
    rank, ranks, store, model, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    settings = {"role": "actor", "dtype": "float32", **json.loads(sys.argv[6])}
    role, dtype = ROLES[settings.pop("role")], settings.pop("dtype")
    torch.set_num_threads(1)
    logged = []
    logger = logging.getLogger("areal_fsdp.parallel.loading")
    logger.addFilter(lambda record: logged.append(record.getMessage()) or True)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    read = count_reading(settings.pop("fails", None) == rank)
    failing_rank, error_name = settings.pop("fails_in_parts", (None, ""))
    if failing_rank == rank:
        fail_in_parts(getattr(builtins, error_name))
    engine = MeasuredEngine(FSDPConfig(**settings))
    results = {"log": logged, "refusal": ""}
    try:
        with meter:
            engine.setup(ModelReference(model, dtype), role, OptimizerSettings(total_updates=100, temperature=1.0))
    except RunError as error:
        results["refusal"] = str(error)
    else:
        parameters = dict(engine._module.model.named_parameters())
        local = {name: getattr(p, "_local_tensor", p) for name, p in parameters.items()}
        results |= {
            "shards": sum(tensor.nbytes for tensor in local.values()),
            "dtypes": {str(tensor.dtype) for tensor in local.values()},
            "buffers": {name: buffer.cpu() for name, buffer in engine._module.model.named_buffers()},
            "parameters": {name: value.to("cpu", copy=True) for name, value in engine.named_full_parameters()},
            "generation": engine._module.model.generation_config.to_dict()
            if engine._module.model.can_generate()
            else {},
        }
    results |= {"read": dict(read), "most": getattr(engine, "most", 0)}
    engine.close()
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
