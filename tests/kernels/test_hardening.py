"""Native code is built so that an overflow finds checks, read-only tables and no stack that can be run."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

import laconic
import laconic_lab

BUILT = [*Path(laconic.__file__).parent.glob("*/*.so"), *Path(laconic.__file__).parent.glob("kernels/cpu/*.so")]
RELAY = Path(laconic_lab.__file__).parent / "network" / "relay"
PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 2, 0x6474E551, 0x6474E552
DT_FLAGS, DF_BIND_NOW, EXECUTABLE, ET_DYN = 30, 8, 1, 3


def segments(elf: bytes) -> dict[int, tuple[int, int, int]]:
    """Of each kind of segment in a 64-bit little-endian file: its flags, and where its bytes are."""
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    heads = (struct.unpack_from("<IIQQQQ", elf, table + size * number) for number in range(count))
    return {kind: (flags, offset, length) for kind, flags, offset, _, _, length in heads}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has these files")
@pytest.mark.parametrize("path", [*BUILT, RELAY], ids=lambda path: path.name)
def test_native_code_is_hardened(path: Path) -> None:
    if not path.exists():
        pytest.skip("was not built")
    elf = path.read_bytes()
    assert elf[:6] == b"\x7fELF\x02\x01" and struct.unpack_from("<H", elf, 16) == (ET_DYN,), "moves in memory"
    by_type = segments(elf)
    assert PT_GNU_RELRO in by_type and not by_type[PT_GNU_STACK][0] & EXECUTABLE
    _, offset, length = by_type[PT_DYNAMIC]
    tags = dict(struct.iter_unpack("<QQ", elf[offset : offset + length]))
    assert tags.get(DT_FLAGS, 0) & DF_BIND_NOW
    assert b"__stack_chk_fail" in elf
