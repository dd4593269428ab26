"""What the network interface itself counted."""

from __future__ import annotations

import os
from pathlib import Path

_TABLE = Path("/proc/self/net/dev")


def interface_bytes() -> tuple[int, int] | None:
    """(out, in) so far on the interface that Gloo was told to use; None where it is loopback or not named."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name == "lo" or not _TABLE.exists():
        return None
    for line in _TABLE.read_text().splitlines():
        label, _, counts = line.partition(":")
        if label.strip() == name:
            numbers = counts.split()
            return int(numbers[8]), int(numbers[0])
    return None
