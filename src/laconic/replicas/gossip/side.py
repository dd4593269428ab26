"""One worker's model, and all that its exchanges go through, whichever way they are made."""

from dataclasses import dataclass, field
from typing import Any

from laconic.exchange import Gossip
from laconic.fault_points import fault_point
from laconic.replicas.gossip.messages import MessageWriter
from laconic.replicas.gossip.momentum import Momentum
from laconic.replicas.gossip.tracker import ChangeTracker
from laconic.replicas.gossip.vector import ModelVector, Owed


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

    def __post_init__(self) -> None:
        self._owed = Owed(self.vector)

    def move_(self) -> None:
        """Add what exchanges owe to the model; momentum and tracker hear of it."""
        fault_point("gossip.apply")
        groups = sorted(self._owed.groups)
        moved = self.vector.add_(self._owed.whole, groups)
        self._owed.groups = set()
        self.momentum.heed_(moved, self.tracker.gap(groups), self.tracker.lr_share)
        self.tracker.note_exchanged_(groups, self.messages.sample)

    def note_all_said_(self) -> None:
        """Take the model as it is for what peers know of it."""
        self.messages.note_all_said_()
        self.tracker.note_exchanged_(range(len(self.vector.groups)), self.messages.sample)
