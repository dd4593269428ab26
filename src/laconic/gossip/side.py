"""One worker's model, and all that its exchanges go through, whichever way they are made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from laconic.exchange import Gossip
from laconic.gossip.messages import MessageWriter
from laconic.gossip.momentum import Momentum
from laconic.gossip.tracker import ChangeTracker
from laconic.gossip.vector import ModelVector


@dataclass(eq=False)
class Side:
    """One worker's side of a gossip."""

    end: Any  # of the network: a Mailbox, or where all workers meet at each step their Collectives
    pattern: Gossip
    vector: ModelVector
    messages: MessageWriter
    tracker: ChangeTracker
    momentum: Momentum
    lost: dict[int, str] = field(default_factory=dict, init=False)

    asked = 0
    answered = 0
    refused = 0
    late = 0

    def move_(self, way: Tensor, groups: Sequence[int]) -> None:
        """Add a vector that exchanges of these groups have brought to the model; momentum and tracker hear of it."""
        moved = self.vector.add_(way, groups)
        self.momentum.heed_(moved, self.tracker.gap(groups), self.tracker.lr_share)
        self.tracker.note_exchanged_(groups, self.messages.sample)

    def note_all_said_(self) -> None:
        """Take the model as it is for what peers know of it."""
        self.messages.note_all_said_()
        self.tracker.note_exchanged_(range(len(self.vector.groups)), self.messages.sample)
