"""What a worker gossips with, whichever way it does."""

from __future__ import annotations

from typing import NamedTuple

from laconic.exchange import Gossip
from laconic.follow.letter import Letters
from laconic.follow.unsaid import Unsaid
from laconic.follow.vector import ModelVector
from laconic.follow.watch import Watch


class Parts(NamedTuple):
    """One worker's."""

    pattern: Gossip
    vector: ModelVector
    letters: Letters
    watch: Watch
    unsaid: Unsaid | None  # where only chosen entries go
