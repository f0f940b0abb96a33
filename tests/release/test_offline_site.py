"""Libraries that are packed for a host without registries still load, and parts of an archive join again."""

from __future__ import annotations

import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import msgspec._core
import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "offline_site.py"


@pytest.fixture(scope="module")
def offline_site() -> Any:
    """The program as a module."""
    specification = spec_from_file_location("offline_site", FILE)
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="ELF files are Linux's")
def test_a_library_without_symbols_loads(offline_site: Any, tmp_path: Path) -> None:
    library = tmp_path / Path(msgspec._core.__file__).name
    shutil.copy(msgspec._core.__file__, library)
    offline_site.prune(library, 90, keep_ptx=False)
    assert library.read_bytes() == Path(msgspec._core.__file__).read_bytes(), "it has no machine code of a GPU"
    offline_site.clear_symbols(library)
    cleared = dict(offline_site.sections_of(library.read_bytes()))
    assert {b".dynsym", b".text"} <= cleared.keys(), "loaded sections are kept"
    specification = spec_from_file_location("msgspec._core", library)
    assert specification is not None
    assert module_from_spec(specification) is not None  # the loader has mapped it and found its entry point


def test_symbol_tables_are_cleared_and_nothing_else(offline_site: Any, tmp_path: Path) -> None:
    """A file with three sections: the names of sections, one that is loaded, and a symbol table."""
    names = b"\0.shstrtab\0.text\0.symtab\0"
    content = [names, b"code", b"symbols"]
    places = [64 + sum(map(len, content[:number])) for number in range(3)]
    table = 64 + sum(map(len, content))
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    header[40:48] = table.to_bytes(8, "little")
    header[58:64] = b"\x40\0\x03\0\0\0"
    described = b"".join(
        offline_site.struct.pack(offline_site.SECTION, names.index(name), 1, flags, 0, place, len(part), 0, 0, 0, 0)
        for name, flags, place, part in zip(
            (b".shstrtab", b".text", b".symtab"), (0, offline_site.ALLOCATED, 0), places, content, strict=True
        )
    )
    library = tmp_path / "library.so"
    library.write_bytes(bytes(header) + b"".join(content) + described)
    offline_site.clear_symbols(library)
    assert library.read_bytes() == bytes(header) + names + b"code" + bytes(7) + described


def test_parts_join_again(offline_site: Any, tmp_path: Path) -> None:
    archive = tmp_path / "site.tar.zst"
    archive.write_bytes(bytes(range(256)))
    offline_site.split(archive, 100)
    parts = sorted(tmp_path.iterdir())
    assert [(part.name, part.stat().st_size) for part in parts] == [
        ("site.tar.zst.00", 100),
        ("site.tar.zst.01", 100),
        ("site.tar.zst.02", 56),
    ]
    assert b"".join(part.read_bytes() for part in parts) == bytes(range(256))
