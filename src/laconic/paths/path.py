"""What differs between exchanges: a path takes a bucket's values, says them, hears everyone's and applies those."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.layout import Bucket, Layout
from laconic.memory import Account, SetAside
from laconic.paths.clock import PhaseClock
from laconic.transport import Transport

Message = Callable[[], Any]  # called where messages leave, in an order that all workers share; returns what all said


@dataclass(frozen=True)
class Taken:
    """What a worker took out of an account to say it."""

    positions: Tensor | None  # int64, those that go at every step first; None: every entry, in order
    num_fixed: int  # how many go at every step
    values: Tensor  # float32


@dataclass
class Work:
    """One bucket on its way through a step: everything that is in flight."""

    bucket: Bucket
    step: int
    number: int  # of the bucket, as it comes in this step
    density: float  # the share of entries that goes
    scale: float  # of the loss: balances are kept in unscaled units
    account: Account
    too_large: float  # the least size of an entry, as it comes, that counts as Inf
    finite: bool = True
    taken: Taken | None = None  # nothing was, where the gradient is not finite
    aside: SetAside = field(default_factory=lambda: SetAside(()))  # what is kept of idle parameters

    @property
    def flat(self) -> Tensor:
        """The bucket's gradient, which becomes the mean over workers."""
        return self.bucket.flat

    @property
    def layout(self) -> Layout:
        return self.bucket.layout

    @property
    def device(self) -> torch.device:
        return self.bucket.flat.device

    @property
    def frame_id(self) -> dict[str, int]:
        """What its frames say that they are about."""
        return {"step": self.step, "bucket": self.number}


@dataclass(frozen=True)
class Said:
    """How a bucket was said, and what was heard."""

    heard: Any  # the path's own
    sent: Tensor | None = None  # what the messages say of the taken values; None: those very values


Speech = Generator[Message, Any, Said | None]  # None: some worker's gradient is not finite, and nobody applies anything


@dataclass
class Path:
    """One way of exchanging a bucket; it owns what it keeps from step to step.

    `speak` yields each message and goes on with what all said. A worker whose gradient is not finite yields the same
    messages, marked; whoever hears a mark returns None, in the same round on all workers.
    """

    transport: Transport
    clock: PhaseClock

    looks: ClassVar[bool] = True  # whether gradients are looked at first; where the network adds floats, NaN survives

    @property
    def turns(self) -> Sequence[int]:
        """Message r about bucket b leaves in turn b + turns[r]; whatever ends before its last says no more.

        What takes long to find after a message is said two turns later: another bucket's travels meanwhile.
        """
        return (0,)

    def bytes_out(self, layout: Layout) -> int:
        """What leaves one worker for a float32 bucket of this layout once the trigger has reached its target."""
        return 0

    def on_wire(self, message: Tensor) -> Tensor:
        """A message where the transport takes it: as it is, or a copy in pinned memory of the host.

        The copy is complete when the phase ends that it is made in.
        """
        wire = self.transport.wire
        if wire is None or message.device.type == wire.type:
            return message
        return torch.empty(message.shape, dtype=message.dtype, pin_memory=True).copy_(message, non_blocking=True)

    def off_wire(self, message: Tensor, device: torch.device) -> Tensor:
        """What was heard where it is wanted: as it is, or a copy that nobody waits for, through pinned memory."""
        if device.type != "cuda" or message.is_cuda:
            return message.to(device)
        return message.pin_memory().to(device, non_blocking=True)

    def comes_from_gpu(self, work: Work) -> bool:
        """Whether a GPU's float32 bucket is told by messages of the host."""
        wire = self.transport.wire
        on_the_way = work.device.type == "cuda" and wire is not None and wire.type == "cpu"
        return on_the_way and work.flat.dtype == torch.float32

    def looks_itself(self, work: Work) -> bool:
        """Whether `speak` finds out by itself whether a gradient is finite, and says it in the work."""
        return False

    def kept(self, work: Work) -> Sequence[Tensor]:
        """What a step on this bucket may change besides its account."""
        return ()

    def speak(self, work: Work) -> Speech:
        """Take what is to be said out of the account, say it, hear everyone."""
        yield from ()  # no message
        return Said(None)

    def apply_(self, work: Work, said: Said) -> None:
        """Overwrite the bucket with what everyone said, in rank order."""

    def restored(self) -> None:
        """What `kept` told of has been overwritten: a step was undone."""

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        """What it adds to a session's stats, by their names; with `ages` also what takes a pass over all entries."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What it keeps, for a checkpoint."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of all workers that are given, by rank."""
