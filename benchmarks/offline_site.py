"""Wheels for a GPU host that reaches no registry, as one small archive: a folder for that host's PYTHONPATH.

    python benchmarks/offline_site.py vllm.tar.xz vllm==0.26.0 trl==1.16.0 ... --python 3.12 --arch 90
      --leave-out fa2_C third_party/deep_gemm vllm-rs flashmla

Nothing is resolved: name each distribution; `--constraint` takes versions from a lock file. `--arch` keeps the machine
code of one architecture in each fat binary, which has five or more: vLLM's extensions shrink from 300 MB to 27. A
kernel without code for it keeps its PTX; with `--no-ptx` it fails when it is called. `--no-symbols` clears symbol
tables and debug information, which no import reads. The suffix names the compression: .tar.xz is smaller, .tar.zst
much faster. `--parts` splits the archive.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GLIBC = range(39, 4, -1)
MAGIC, CONTAINER, ENTRY = 0xBA55ED50, "<IHHQ", "<HHIQ"
"""Of a fat binary: a header with its own size and that of what follows; then entries of a kind, each with its sizes."""
PTX, MACHINE_CODE, ARCH_AT = 1, 2, 28
SECTION, NO_BITS, ALLOCATED = "<IIQQQQIIQQ", 8, 2
"""Of an ELF section: its header; the type of one without content; the flag of one that is loaded."""


def main() -> None:
    """Download, unpack, prune, pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("requirements", nargs="+")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--arch", type=int, help="such as 90 for Hopper; all are kept without it")
    parser.add_argument("--no-ptx", action="store_true")
    parser.add_argument("--no-symbols", action="store_true")
    parser.add_argument("--constraint", type=Path, help="lock file with the versions")
    parser.add_argument("--parts", type=float, help="MB of each part of the archive, named OUTPUT.00 and so on")
    parser.add_argument("--leave-out", nargs="*", default=[], help="files with one of these in their path")
    arguments = parser.parse_intermixed_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site"
        download(arguments.requirements, arguments.python, wheels, arguments.constraint)
        for wheel in sorted(wheels.iterdir()):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if not any(out in name for out in arguments.leave_out)]
                archive.extractall(site, names)
        for library in site.rglob("*.so*"):
            if arguments.arch is not None:
                prune(library, arguments.arch, keep_ptx=not arguments.no_ptx)
            if arguments.no_symbols:
                clear_symbols(library)
        compression = ["-I", "zstd -9 -T0"] if arguments.output.suffix == ".zst" else ["-a"]
        subprocess.run(["tar", "-C", str(site), *compression, "-cf", str(arguments.output.resolve()), "."], check=True)
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.0f} MB")
    if arguments.parts is not None:
        split(arguments.output, int(arguments.parts * 1e6))


def split(archive: Path, size: int) -> None:
    """Replace a file by parts of at most `size` bytes, which `cat` joins again."""
    with archive.open("rb") as file:
        for number, part in enumerate(iter(lambda: file.read(size), b"")):
            archive.with_name(f"{archive.name}.{number:02}").write_bytes(part)
    archive.unlink()


def download(requirements: Sequence[str], python: str, folder: Path, constraint: Path | None) -> None:
    """The wheels alone, for Linux on x86-64."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]
    words = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    words += ["--constraint", str(constraint)] if constraint is not None else []
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *words, "-d", str(folder), *requirements], check=True
    )


def prune(library: Path, arch: int, *, keep_ptx: bool) -> None:
    """Write zeros, which pack to nothing, over what other architectures need of a library's fat binaries."""
    data = bytearray(library.read_bytes())
    if not data.startswith(b"\x7fELF\x02"):
        return  # a linker's script, or an empty file
    for entries in fat_binaries(data):
        has_code = any(kind == MACHINE_CODE and each == arch for kind, each, _, _ in entries)
        for kind, each, start, end in entries:
            is_kept = kind == MACHINE_CODE and each == arch if has_code else kind == PTX and keep_ptx
            if not is_kept:
                data[start:end] = bytes(end - start)
    library.write_bytes(data)


def clear_symbols(library: Path) -> None:
    """Write zeros over the symbol tables and the debug information of a library, which the loader does not read."""
    data = bytearray(library.read_bytes())
    if not data.startswith(b"\x7fELF\x02"):
        return
    for name, section in sections_of(data):
        is_loaded = section[1] == NO_BITS or section[2] & ALLOCATED
        if not is_loaded and (name in (b".symtab", b".strtab") or name.startswith(b".debug")):
            data[section[4] : section[4] + section[5]] = bytes(section[5])
    library.write_bytes(data)


def sections_of(data: bytes | bytearray) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """The sections of an ELF file, with their names."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, number, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from(SECTION, data, table + place * size) for place in range(number)]
    for section in sections:
        name = sections[names][4] + section[0]
        yield bytes(data[name : data.index(0, name)]), section


def fat_binaries(data: bytes | bytearray) -> Iterator[list[tuple[int, int, int, int]]]:
    """The entries of each fat binary in an ELF file: kind, architecture, and where their content begins and ends."""
    for name, section in sections_of(data):
        at, end = section[4], section[4] + section[5]
        if name not in (b".nv_fatbin", b"__nv_relfatbin"):
            continue
        while at < end:
            magic, _, header, content = struct.unpack_from(CONTAINER, data, at)
            if magic != MAGIC:
                at += 8  # padding between two of them
                continue
            entries, place = [], at + header
            at += header + content
            while place < at:
                kind, _, header, content = struct.unpack_from(ENTRY, data, place)
                (arch,) = struct.unpack_from("<I", data, place + ARCH_AT)
                entries.append((kind, arch, place + header, place + header + content))
                place += header + content
            yield entries


if __name__ == "__main__":
    main()
