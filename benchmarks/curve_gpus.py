"""How busy GPUs are during a row of `curve.py`, and how much of their memory is taken: asked of the driver."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from curve_table import Point

EVERY_MS = 200
GIB_IN_MIB = 1024


class GPUWatch:
    """Samples every GPU of the host, from its making until `end`; finds nothing where there is no GPU."""

    def __init__(self) -> None:
        self._samples = tempfile.TemporaryFile("w+")  # noqa: SIM115 - written by the program until `end`
        self._program: subprocess.Popen[bytes] | None = None
        if shutil.which("nvidia-smi"):
            query = "--query-gpu=timestamp,index,utilization.gpu,memory.used"
            words = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"-lms={EVERY_MS}"]
            self._program = subprocess.Popen(words, stdout=self._samples)

    def end(self, points: Sequence[Point]) -> dict[str, Mapping[str, float]]:
        """By GPU: the share of time in which a kernel ran, while steps were trained, and the largest memory in GiB."""
        if self._program is not None:
            self._program.terminate()
            self._program.wait()
        self._samples.seek(0)
        first, last = (points[0]["wall"], points[-1]["wall"]) if points else (0.0, 0.0)
        busy: dict[str, list[float]] = {}
        memory: dict[str, float] = {}
        for line in self._samples:
            words = [word.strip() for word in line.split(",")]
            if len(words) == 4 and words[2].isdigit():
                stamp = time.mktime(time.strptime(words[0].partition(".")[0], "%Y/%m/%d %H:%M:%S"))
                memory[words[1]] = max(memory.get(words[1], 0.0), float(words[3]) / GIB_IN_MIB)
                if first <= stamp <= last:
                    busy.setdefault(words[1], []).append(float(words[2]) / 100)
        self._samples.close()
        return {gpu: {"busy": sum(found) / len(found), "gib": memory[gpu]} for gpu, found in busy.items()}
