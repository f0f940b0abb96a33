"""A power cut at any moment: the ledger is never ahead of a segment, nor a commit ahead of its checkpoint.

A program writes a ledger and checkpoints under `strace`; its system calls are played, one by one, onto a disk that
keeps only what was synced. After each of them the machine is switched off and the run is taken up again.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_core.ledger.store import Ledger

PROGRAM = """
import asyncio, sys
from pathlib import Path
import torch.distributed as dist
from areal_core.ledger.groups import PromptGroup
from areal_core.ledger.segments import SegmentWriter
from areal_core.ledger.store import Ledger
from areal_core.training.checkpoint import prune_checkpoints, write_checkpoint
from areal_core.training.collectives import barrier
from areal_core.training.state import TrainerState

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run = Path(sys.argv[1]) / "run"

class Engine:
    def save(self, folder):
        (folder / "parameters").write_bytes(b"parameters" * 10)

def finish(ledger, numbers):
    for n in numbers:
        ledger.dispatched(n, n, 0)
    writer = SegmentWriter(ledger.folder.parent / "segments", run, f"worker-{numbers}", print)
    async def write():
        return await asyncio.gather(*(writer.write(f"group {n}".encode()) for n in numbers))
    records = asyncio.run(write())
    for n, record in zip(numbers, records):
        ledger.ended(PromptGroup(n, (n, 0), record, 0))
    ledger.flush()

def steps(ledger, epoch, first, last):
    for step in range(first, last):
        finish(ledger, [2 * step, 2 * step + 1])
        ledger.consumed([2 * step], step)
        ledger.synced(step + 1, step + 1)
        checkpoints, writers = run / f"attempts/{epoch}/checkpoints", {"actor": Engine().save}
        folder = write_checkpoint(checkpoints, TrainerState(step + 1), writers, barrier)
        ledger.commit(step + 1, folder, 2 * step + 2)
        prune_checkpoints(run, 1, folder)
        (Path(sys.argv[1]) / f"committed-{step + 1}").mkdir()

first = run / "attempts/1/ledger"
ledger = Ledger.take_over(first, [], run)
steps(ledger, 1, 0, 2)
ledger.database.close()
ledger = Ledger.take_over(run / "attempts/2/ledger", [first], run)
ledger.rollback(discard=False)
steps(ledger, 2, 2, 4)
"""
CALLS = (
    "openat,write,pwrite64,sendfile,ftruncate,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,"
    "fsync,fdatasync"
)


@dataclass
class Call:
    """A system call.

    Attributes:
        name: of the call.
        place: path of the descriptor that it is given first; empty where there is none.
        source: path of the second one.
        texts: its texts: paths, or what is written.
        words: its other arguments.
    """

    name: str
    place: str
    source: str
    texts: list[bytes]
    words: str

    @classmethod
    def read(cls, name: str, arguments: str) -> Call:
        """From a line of strace, which writes all texts as hexadecimal escapes."""
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in re.findall(r'"([^"]*)"', arguments)]
        places = [bytes.fromhex(text.replace("\\x", "")) for text in re.findall(r"<((?:\\x..)+)>", arguments)]
        place, source, *_ = [*(path.decode() for path in places), "", ""]
        return cls(name, place, source, texts, re.sub(r'"[^"]*"|<[^>]*>', "", arguments))

    @property
    def path(self) -> str:
        """What a call that names one is about."""
        return str(Path(self.place, self.texts[0].decode()))

    @property
    def last_number(self) -> int:
        """An offset or a length."""
        return int(self.words.rsplit(", ", 1)[1])

    def is_below(self, top: str) -> bool:
        """Whether it changes anything below a folder."""
        is_open = self.name.startswith(("write", "pwrite", "ftruncate", "fsync", "fdatasync", "sendfile"))
        named = [] if is_open else [self.path]
        return any(path.startswith(top) for path in [self.place, *named])


class Disk:
    """What programs see, and what a power cut leaves of it. Files and folders have numbers, as on a true disk.

    Args:
        top: the folder that it is mounted at.
        keeps_names: whether names change on the disk at once; else a name is there once its folder was synced.
    """

    def __init__(self, top: Path, *, keeps_names: bool) -> None:
        self._top = top
        self._keeps_names = keeps_names
        self._seen: dict[int, dict[str, int]] = {0: {}}  # names in each folder; 0 is the top
        self._kept: dict[int, dict[str, int]] = {0: {}}
        self._contents: dict[int, bytes] = {}
        self._synced: dict[int, bytes] = {}
        self._numbers = itertools.count(1)

    def play(self, call: Call) -> None:
        """One system call that succeeded."""
        match call.name:
            case "openat" if "O_CREAT" in call.words:
                folder, name = self._place(call.path)
                number = self._seen[folder].setdefault(name, next(self._numbers))
                if number not in self._contents or "O_TRUNC" in call.words:
                    self._contents[number] = b""
            case "mkdir" | "mkdirat":
                folder, name = self._place(call.path)
                number = self._seen[folder][name] = next(self._numbers)
                self._seen[number], self._kept[number] = {}, {}
            case "write" | "pwrite64":
                number = self._number(call.place)
                before = self._contents[number]
                start = call.last_number if call.name == "pwrite64" else len(before)
                after = before[start + len(call.texts[0]) :]
                self._contents[number] = before[:start].ljust(start, b"\0") + call.texts[0] + after
            case "sendfile":  # of whole files
                self._contents[self._number(call.place)] = self._contents[self._number(call.source)]
            case "ftruncate":
                number = self._number(call.place)
                self._contents[number] = self._contents[number][: call.last_number]
            case "rename" | "renameat" | "renameat2":
                (folder, name), (target, new) = (self._place(text.decode()) for text in call.texts)
                self._seen[target][new] = self._seen[folder].pop(name)
            case "unlink" | "unlinkat" | "rmdir":
                folder, name = self._place(call.path)
                del self._seen[folder][name]
            case "fsync" | "fdatasync" if (number := self._number(call.place)) in self._contents:
                self._synced[number] = self._contents[number]
            case "fsync" | "fdatasync":
                self._kept[number] = dict(self._seen[number])
        if self._keeps_names:
            self._kept = {folder: dict(names) for folder, names in self._seen.items()}

    def switch_off(self, target: Path) -> None:
        """Write what is left to a folder."""
        folders = [(0, target)]
        for folder, path in folders:
            path.mkdir(parents=True, exist_ok=True)
            for name, number in self._kept[folder].items():
                if number in self._contents:
                    (path / name).write_bytes(self._synced.get(number, b""))
                else:
                    folders.append((number, path / name))

    def _place(self, path: str) -> tuple[int, str]:
        """The folder that a path stands in, and its name there."""
        *above, name = Path(path).relative_to(self._top).parts
        folder = 0
        for part in above:
            folder = self._seen[folder][part]
        return folder, name

    def _number(self, path: str) -> int:
        if Path(path) == self._top:
            return 0
        folder, name = self._place(path)
        return self._seen[folder][name]


def recorded(folder: Path) -> list[Call]:
    """The program's system calls, in order."""
    log = folder / "calls"
    trace = ["strace", "-f", "-y", "-xx", "-s", "10000000", "-e", f"trace={CALLS}", "-o", str(log)]
    (folder / "disk").mkdir()
    program = [sys.executable, "-c", PROGRAM, str(folder / "disk")]
    done = subprocess.run([*trace, *program], capture_output=True, text=True, check=False, timeout=280)
    if "ptrace" in done.stderr:
        pytest.skip("this machine lets nobody trace system calls")
    assert done.returncode == 0, done.stderr
    calls, begun = [], {}
    for line in log.read_text().splitlines():
        process, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[process] = rest.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
            rest = begun.pop(process) + resumed.group(1)
        found = re.match(r"(\w+)\((.*)\)\s+= (-?\d+)", rest)
        if found and int(found.group(3)) >= 0:
            calls.append(Call.read(found.group(1), found.group(2)))
    return calls


def take_up(folder: Path, committed: int) -> None:
    """Go on with a run after a power cut; what was committed is there, and whole."""
    former = sorted(path for path in folder.glob("attempts/*/ledger") if (path / "ledger.sqlite").is_file())
    ledger = Ledger.take_over(folder / "attempts/9/ledger", former, folder)
    try:
        assert ledger.committed_step >= committed
        if ledger.checkpoint is not None:
            state = json.loads((ledger.checkpoint / "trainer.json").read_text())
            assert state["step"] == ledger.committed_step
            assert (ledger.checkpoint / "actor/parameters").read_bytes() == b"parameters" * 10
        ledger.rollback(discard=False)
        ledger.finished(pytest.fail)  # what it names is whole
    finally:
        ledger.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("keeps_names", [False, True], ids=["names are lost too", "names are kept at once"])
def test_a_power_cut_after_any_system_call(tmp_path: Path, keeps_names: bool) -> None:
    calls = recorded(tmp_path)
    disk, committed, cuts = Disk(tmp_path / "disk", keeps_names=keeps_names), 0, 0
    for number, call in enumerate(calls):
        if not call.is_below(str(tmp_path / "disk")):
            continue
        disk.play(call)
        if call.name.startswith("mkdir") and (done := re.search(r"committed-(\d+)$", call.path)):
            committed = int(done.group(1))
        left = tmp_path / "left" / str(number)
        disk.switch_off(left)
        take_up(left / "run", committed)
        shutil.rmtree(left)
        cuts += 1
    assert committed == 4
    assert cuts > 100
