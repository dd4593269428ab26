"""What differs between exchanges: a path withdraws values of a bucket, sends them, receives and applies everyone's."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels import to_host
from laconic.layout import Bucket, Layout
from laconic.memory import Account, SetAside
from laconic.transport import Transport

PHASES = ("select", "encode", "exchange", "decode")
Message = Callable[[], Any]  # called where messages leave, in an order that all workers share; returns what is received
# Yields each message of a bucket, is resumed with what that received, and returns what the path applies: None where
# some worker's gradient is not finite, so that nobody applies anything.
Messages = Generator[Message, Any, Any]


class PhaseClock:
    """Seconds per phase, in the threads that exchange; phases of several buckets may pass at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def time(self, phase: str, device: torch.device) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            kernels.wait_for_stream(device)  # holds up this thread and its own stream, never the backward pass
        with self._lock:
            self.seconds[phase] += time.perf_counter() - start


@dataclass(frozen=True)
class Withdrawn:
    """What a worker took out of an account to send it."""

    positions: Tensor | None  # int64, those that go at every step first; None: every entry, in order
    num_fixed: int  # how many go at every step
    values: Tensor  # float32
    sent: Tensor | None = None  # the values as the messages say them, after rounding; None: those very values


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
    finite: bool = True  # as far as the host has looked
    withdrawn: Withdrawn | None = None  # nothing was, where the gradient is not finite
    aside: SetAside | None = None  # what is kept of idle parameters, until the end of the step

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

    def flag_nonfinite_(self) -> Tensor:
        """One int32 on the device: whether the gradient is not finite, which then becomes zero: nothing is deposited.

        What is withdrawn all the same is refunded, as it is on the workers that receive the flag.
        """
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        kernels.flag_nonfinite_(flag, self.flat, self.too_large)
        kernels.zero_if_(self.flat, flag)
        return flag

    def note_sent(self, sent: Tensor) -> None:
        """Note how messages say the withdrawn values; nothing was withdrawn of a gradient that is not finite."""
        if self.withdrawn is not None:
            self.withdrawn = replace(self.withdrawn, sent=sent)

    def refund_(self, *, refunds: bool) -> None:
        """Put back what rounding lost of the withdrawn values, and note those that went out; late ones did not."""
        out = self.withdrawn
        if out is None or self.bucket.was_late:
            return
        if out.sent is not None and refunds:
            self.account.refund_(out.positions, out.values - out.sent)
        if out.positions is not None:
            gone = out.values if out.sent is None else out.sent
            self.account.sent_(out.positions[out.num_fixed :], gone[out.num_fixed :])


@dataclass
class Path:
    """One way of exchanging a bucket; it owns what it keeps from step to step.

    A worker whose gradient is not finite sends the same messages, marked; whoever receives a mark returns None, in the
    same round on all workers.
    """

    transport: Transport
    clock: PhaseClock

    checks_finite: ClassVar[bool] = True  # before an exchange; where the network adds floats, NaN survives
    num_pushed = num_answered = 0  # entries that went to owners, and came back from them

    @property
    def message_offsets(self) -> Sequence[int]:
        """Message r about bucket b leaves at place b + offsets[r]; a path may end before its last.

        A message that takes long to make has an offset larger by two: another bucket's travels meanwhile.
        """
        return (0,)

    def bytes_out(self, layout: Layout) -> int:
        """What leaves one worker for a float32 bucket of this layout once the trigger has reached its target."""
        return 0

    def on_wire(self, message: Tensor) -> Tensor:
        """A message where the transport takes it; a copy is complete when the phase ends that it is made in."""
        wire = self.transport.wire
        return message if wire is None or message.device.type == wire.type else to_host(message)

    def captures(self, work: Work) -> bool:
        """Whether a CUDA graph exchanges this bucket, which then checks by itself that the gradient is finite."""
        return False

    def kept(self, work: Work) -> Sequence[Tensor]:
        """What a step on this bucket may change besides its account."""
        return ()

    def exchange(self, work: Work) -> Messages:
        """Withdraw what is to be sent from the account, send it, receive from everyone."""
        yield from ()  # no message
        return ()

    def finish_(self, work: Work, received: Any, *, refunds: bool) -> None:
        """Refund what rounding lost, and overwrite the bucket with what was received."""
        work.refund_(refunds=refunds)
        self.apply_(work, received)

    def apply_(self, work: Work, received: Any) -> None:
        """Overwrite the bucket with what everyone sent, in rank order."""

    def restored(self) -> None:
        """The tensors that `kept` names have been overwritten: a step was undone."""

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        """What it adds to a session's stats, by their names; with `ages` also what takes a pass over all entries."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What it keeps, for a checkpoint."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of all workers that are given, by rank."""


class NoExchange(Path):
    """Every worker keeps its own gradient: the upper bound on speed, not a way to train."""

    checks_finite: ClassVar[bool] = False


@dataclass
class Exchange:
    """A bucket's exchange under way: `message` is the next one to send, None at the end, when `received` is known."""

    work: Work
    path: Path
    messages: Messages
    message: Message | None = None
    received: Any = None
    was_late: bool = False  # what was received last is without what this worker sent

    def resume(self, received: Any = None) -> None:
        """Hand the path what its last message received, and get the next one; None begins."""
        try:
            self.message = self.messages.send(received)
        except StopIteration as end:
            self.message = None
            self.received = end.value
