"""Where each worker owns a share: parts go to their owners and answers to all, of lengths that only senders know."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import FrameError, PeerError
from laconic.transport.traffic import Traffic
from laconic.transport.transport import Push

_UP = 1  # the tag of parts
_DOWN = 2  # and that of answers
_LENGTH_BYTES = 8  # int64, so that the words behind it stay aligned
_LAST_WORDS_S = 5.0
_GAVE_UP = -1  # in place of a length: nothing follows, and no other message


@dataclass
class TwoHops:
    """Over Gloo: a message begins with its length, and is received into room for the longest.

    Gloo takes a message that is shorter than the room, and ends the process over a longer one, so senders look before.
    All receives are posted before the first part leaves: a sender that had to ask for one would wait behind what fills
    the link. The worker behind sends here first, and is read first. Rooms are kept, and pages that no message reaches
    are never touched. A worker that fails says so to all who wait for it, who would not notice otherwise.
    """

    group: dist.ProcessGroup
    wire: torch.device
    traffic: Traffic
    rooms: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by tag and sender
    owed: list[tuple[int, int]] = field(default_factory=list)  # tag and peer of the messages that are still to leave
    works: list[dist.Work] = field(default_factory=list)  # of the last consultation: Gloo drops what nobody holds

    def push_pull(self, push: Push) -> list[Tensor]:
        self.works = []
        self.owed = [(tag, peer) for tag in (_UP, _DOWN) for peer in self._ahead()]
        try:
            return self._push_pull(push)
        except Exception:
            self._give_up()
            raise

    def _push_pull(self, push: Push) -> list[Tensor]:
        assert push.answer is not None
        me = self.group.rank()
        parts = push.parts
        longest = push.longest
        ahead = self._ahead()
        coming = {peer: self._expect(peer, _UP, longest[me]) for peer in reversed(ahead)}
        answers = {peer: self._expect(peer, _DOWN, longest[peer]) for peer in reversed(ahead)}
        sent = [self._send(with_length(parts[peer], longest[peer]), peer, _UP) for peer in ahead]
        heard = [0] * len(parts)

        def arriving() -> Iterator[tuple[int, Tensor]]:
            yield me, parts[me]
            for peer, read in coming.items():
                part = read()
                heard[peer] = part.numel()
                yield peer, part

        own = push.answer(arriving())
        message = with_length(own, longest[me])
        sent += [self._send(message, peer, _DOWN) for peer in ahead]
        told = {me: own} | {peer: read() for peer, read in answers.items()}
        for work in sent:
            work.wait()
        in_order = [told[rank] for rank in range(len(parts))]
        sent_bytes = [part.numel() for part in parts]
        self.traffic.count_push_pull(me, sent_bytes, heard, [one.numel() for one in in_order])
        return in_order

    def _ahead(self) -> list[int]:
        """The others, from the next one on."""
        num_workers = self.group.size()
        return [(self.group.rank() + hop) % num_workers for hop in range(1, num_workers)]

    def _give_up(self) -> None:
        """Tell all who wait for this worker that nothing will come, and see that they hear it: the process may end."""
        last_words = []
        for tag, peer in list(self.owed):
            with suppress(RuntimeError):  # it may be the one that is gone
                last_words.append(self._send(torch.tensor([_GAVE_UP]).view(torch.uint8), peer, tag))
        until = time.monotonic() + _LAST_WORDS_S
        for work in last_words:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))  # 0 would be for ever

    def _expect(self, sender: int, tag: int, longest: int) -> Callable[[], Tensor]:
        """Make room for a message; returns what waits for it and reads it."""
        num_bytes = _LENGTH_BYTES + longest
        kept = self.rooms.get((tag, sender))
        if kept is None or kept.numel() < num_bytes:
            kept = self.rooms[tag, sender] = torch.empty(num_bytes, dtype=torch.uint8, device=self.wire)
        room = kept[:num_bytes]
        work = dist.irecv(room, group=self.group, group_src=sender, tag=tag)
        assert work is not None
        self.works.append(work)

        def read() -> Tensor:
            work.wait()
            return without_length(room, sender)

        return read

    def _send(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.isend(message, group=self.group, group_dst=peer, tag=tag)
        assert work is not None
        self.owed.remove((tag, peer))
        self.works.append(work)
        return work


@dataclass
class Rounds:
    """Over NCCL, which receives a message into room of its own length: four collectives, of which two tell lengths."""

    group: dist.ProcessGroup
    wire: torch.device
    traffic: Traffic

    def push_pull(self, push: Push) -> list[Tensor]:
        assert push.answer is not None
        sent = [part.numel() for part in push.parts]
        heard = self._lengths(sent)
        own = push.answer(enumerate(self._swap(torch.cat(list(push.parts)), sent, heard)))
        repeated = [own.numel()] * len(sent)
        lengths = self._lengths(repeated)
        self.traffic.count_push_pull(self.group.rank(), sent, heard, lengths)
        return self._swap(own.repeat(len(sent)), repeated, lengths)

    def _lengths(self, mine: Sequence[int]) -> list[int]:
        """What each worker will send here, told in one hop; mine[r] goes to worker r."""
        heard = torch.empty(len(mine), dtype=torch.int64, device=self.wire)
        dist.all_to_all_single(heard, torch.tensor(mine, device=self.wire), group=self.group)
        return heard.tolist()

    def _swap(self, outgoing: Tensor, sent: Sequence[int], heard: Sequence[int]) -> list[Tensor]:
        """sent[r] bytes go to worker r and heard[r] come from it."""
        incoming = torch.empty(sum(heard), dtype=torch.uint8, device=self.wire)
        dist.all_to_all_single(incoming, outgoing, list(heard), list(sent), group=self.group)
        # A message may begin anywhere, its words may not.
        return [part.clone() for part in torch.split(incoming, list(heard))]


def without_length(room: Tensor, sender: int) -> Tensor:
    """The frame in a room; an error names the sender if it gave up, or if the length cannot be."""
    length = int(room[:_LENGTH_BYTES].view(torch.int64))
    longest = room.numel() - _LENGTH_BYTES
    if length == _GAVE_UP:
        raise PeerError(f"rank {sender} gave up this step, and so does this one; see what it says")
    if not 0 <= length <= longest:
        raise FrameError(f"a message from rank {sender} says it has {length} bytes of {longest}; nothing is applied")
    return room[_LENGTH_BYTES:][:length]


def with_length(frame: Tensor, longest: int) -> Tensor:
    """What is sent of a frame: its length before it."""
    assert frame.numel() <= longest, "its receiver has no room for it"
    return torch.cat([torch.tensor([frame.numel()], device=frame.device).view(torch.uint8), frame])
