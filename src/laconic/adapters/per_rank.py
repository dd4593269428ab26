"""What each rank keeps for itself, in a torch.distributed.checkpoint."""

import io
from collections.abc import Mapping
from typing import Any

import torch

from laconic.adapters.ddp import Attached
from laconic.session import SavedTogether
from laconic.transport import world


class PerRankState:
    """A session or follower for dcp.save() and dcp.load(), which of equal keys save one rank's: each has its own here.

    dcp.save({"model": model, "laconic": PerRankState(session)}, checkpoint_id=folder)
    """

    def __init__(self, whose: Attached | SavedTogether) -> None:
        self._whose = whose

    @property
    def _key(self) -> str:
        return f"rank {world().rank()}"

    def state_dict(self) -> dict[str, Any]:
        """The state in one piece, whose size need not be known to load it."""
        file = io.BytesIO()
        torch.save(self._whose.state_dict(), file)
        return {self._key: file.getvalue()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from it."""
        self._whose.load_state_dict(torch.load(io.BytesIO(saved[self._key]), weights_only=True))
