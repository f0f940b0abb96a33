"""How busy GPUs are during a row of `curve.py`, and how much of their memory is taken: asked of the driver."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from curve_table import Point

EVERY_MS = 200
MIB_IN_GIB = 1024


class GPUWatch:
    """Samples every GPU of the host while it is entered; finds nothing where there is none."""

    def __enter__(self) -> Self:
        self._samples = tempfile.TemporaryFile("w+")
        self._program: subprocess.Popen[bytes] | None = None
        if shutil.which("nvidia-smi"):
            query = "--query-gpu=timestamp,index,utilization.gpu,memory.used"
            words = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"-lms={EVERY_MS}"]
            self._program = subprocess.Popen(words, stdout=self._samples)
        return self

    def __exit__(self, *_: object) -> None:
        if self._program is not None:
            self._program.terminate()
            self._program.wait()

    def found(self, points: Sequence[Point]) -> dict[str, dict[str, float]]:
        """By GPU: the share of time in which a kernel ran, between the first point and the last, and its memory in GiB
        at most."""
        self._samples.seek(0)
        first, last = (points[0]["wall"], points[-1]["wall"]) if points else (0.0, 0.0)
        busy: dict[str, list[float]] = {}
        memory: dict[str, float] = {}
        for line in self._samples:
            words = [word.strip() for word in line.split(",")]
            if len(words) == 4 and words[2].isdigit():
                stamp = time.mktime(time.strptime(words[0].partition(".")[0], "%Y/%m/%d %H:%M:%S"))
                memory[words[1]] = max(memory.get(words[1], 0.0), float(words[3]) / MIB_IN_GIB)
                if first <= stamp <= last:
                    busy.setdefault(words[1], []).append(float(words[2]) / 100)
        self._samples.close()
        return {gpu: {"busy": sum(shares) / len(shares), "gib": memory[gpu]} for gpu, shares in busy.items()}
