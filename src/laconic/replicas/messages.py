"""The messages of a gossip: which entries of a model they are about, and their values in a checked frame.

Three kinds: the values of whole groups, those of the entries that changed most, and modulo codes of a group.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.kernels import end_to_end, half_way, hash_64
from laconic.quantize import Compared, Encoded, ModuloCode, Quantizer, exponents_for, num_blocks, steps_of
from laconic.replicas.vector import EntrySubset, ModelVector, Subset
from laconic.select import Chooser
from laconic.wire import CodesShape, Contents, FrameShape, bucket_of

# Of modulo codes:
_MARGIN = 1.5  # of what two models may be apart over what they are expected to be
_CHANGE_WEIGHT = 1.5  # a peer's own change comes on top of this worker's
_FADE = 0.8  # per exchange, of what was seen before
_FIRST_SHARE = 1 / 128  # of the largest entry: what is expected before anything was seen
_FINEST_SHARE = 2.0**-20  # of the largest entry: below that float32 has no finer steps


class Request(NamedTuple):
    """A request as it goes out, and what it was made of."""

    subset: Any  # a Subset of its writer's own kind
    values: Tensor  # float32, this worker's
    message: Tensor  # uint8
    decoded: Any  # the values as its reader will see them


class MessageWriter(Protocol):
    """How two workers write to each other; which entries a request holds is its writer's own affair.

    Unless a writer overrides that, it sends whole groups, so that it has nothing to remember.
    """

    _vector: ModelVector

    def __init__(self, vector: ModelVector) -> None:
        self._vector = vector

    def subset(self, groups: Sequence[int]) -> Subset:
        """What must be read of a model before a request about these groups is written."""
        return Subset(self._vector, groups)

    def request_(self, subset: Subset, values: Tensor) -> Request:
        """A request about entries with these finite values, which may be overwritten."""

    def request_bytes(self, groups: Sequence[int]) -> int:
        """The length of a request about these groups."""

    def reply_bytes(self, groups: Sequence[int]) -> int:
        """The length of its reply."""

    def open(self, message: Tensor, peer: int) -> tuple[Subset, Any]:
        """(what a request is about, its values); FrameError, which names the peer, if nothing may be applied."""

    def reply_(self, subset: Any, received: Any, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(a reply, the update from `values` to the middle, which is noted); no update if those are not finite."""

    def finish_(self, request: Request, reply: Tensor, peer: int) -> Tensor:
        """The update from the values that were sent to the middle, which is noted; FrameError as above."""

    def note_known_(self) -> None:
        """Take the model as it is for what peers know of it."""
        return

    def sample(self, k: int) -> Tensor:
        """A sample of what the entries of a group were after their last exchange, where one has just ended."""
        return self._vector.sample(k)

    def state_dict(self) -> dict[str, Any]:
        """State that it keeps from exchange to exchange, as plain tensors by name."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        return


class ValueMessages(MessageWriter):
    """Replies that are values alone, of the entries that the request has named."""

    def __init__(self, vector: ModelVector, quantize: Quantizer) -> None:
        super().__init__(vector)
        self._quantize = quantize

    def reply_(self, subset: Any, received: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
        shape = self._shape(values.numel())
        if not kernels.all_finite(values):
            return shape.write_overflow(values.device, step=0, bucket=0), None
        reply, decoded = self._write(shape, None, values)
        update = half_way(received, decoded)
        self._note_exchanged_(subset, values, update)
        return reply, update

    def finish_(self, request: Request, reply: Tensor, peer: int) -> Tensor:
        received = self._read(self._shape(request.subset.num_entries), reply, peer).values
        update = half_way(received, request.decoded)
        self._note_exchanged_(request.subset, request.values, update)
        return update

    def _note_exchanged_(self, subset: Any, values: Tensor, update: Tensor) -> None:
        """Note that entries with these values will move by this update."""

    def _shape(self, count: int) -> FrameShape:
        return FrameShape(count, count, 0, self._quantize)

    def _write(self, shape: FrameShape, positions: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor]:
        """(a frame, the values as its reader will see them)."""
        codes, scale = self._quantize.encode(values)
        return shape.write(positions, codes, scale, step=0, bucket=0), self._quantize.decode(codes, scale)

    def _read(self, shape: FrameShape, message: Tensor, peer: int) -> Contents:
        contents = shape.read(check_taken(message), step=0, bucket=0, peer=peer)
        if contents.overflow:
            raise not_finite(peer)
        return contents


class GroupMessages(ValueMessages):
    """Requests about whole groups, named by a map, one byte each, before the frame of their values."""

    def request_(self, subset: Subset, values: Tensor) -> Request:
        named = torch.zeros(self._num_named, dtype=torch.uint8)
        named[torch.tensor(subset.groups, dtype=torch.int64)] = 1
        frame, decoded = self._write(self._shape(values.numel()), None, values)
        return Request(subset, values, end_to_end([named.to(frame.device), frame]), decoded)

    def request_bytes(self, groups: Sequence[int]) -> int:
        return self._num_named + self.reply_bytes(groups)

    def reply_bytes(self, groups: Sequence[int]) -> int:
        return self._shape(self.subset(groups).num_entries).num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[Subset, Tensor]:
        subset = self.subset(torch.nonzero(message[: len(self._vector.groups)]).view(-1).tolist())
        frame = end_to_end([message[self._num_named :]])  # a copy, on a whole word
        return subset, self._read(self._shape(subset.num_entries), frame, peer).values

    @property
    def _num_named(self) -> int:
        """The bytes of the map: a frame begins on a whole word."""
        return -(-len(self._vector.groups) // 4) * 4


class EntryMessages(ValueMessages):
    """x - last, where last is what each entry was after the last exchange that it took part in.

    The k that changed most are sent; the others keep their change until it is large enough, so nothing is forgotten.
    Small parameters and normalisation buffers go whole. `last` is this worker's own: a peer need not know it. A
    request names the selected entries by the index block of its frame, whose length both know.
    """

    def __init__(self, vector: ModelVector, quantize: Quantizer, select: Chooser, num_workers: int) -> None:
        super().__init__(vector, quantize)
        self._select = select
        self._plan = select.plan(vector.selectable_layout, select.density_among(num_workers))
        self._searches = [kernels.new_search(w.stop - w.start, w.k, vector.device) for w in self._plan.windows]
        is_whole = torch.ones(vector.num_entries, dtype=torch.bool)
        is_whole[vector.selectable] = False
        self._whole = is_whole.nonzero().view(-1).to(vector.device)  # where entries always go
        self.last = vector.read()
        self._out = vector.empty(vector.num_entries)  # where the model is read to
        self.shape = FrameShape(vector.num_entries, self._plan.k, self._whole.numel(), quantize)  # of a request

    def subset(self, groups: Sequence[int]) -> Subset:
        return Subset(self._vector, groups, self._out)

    def request_(self, subset: Subset, values: Tensor) -> Request:
        """A request about those that always go, then about the k that changed most, ascending.

        The values there are last + (x - last), which is x to a rounding: both ends move by them.
        """
        selectable = self._vector.selectable
        whole = values.index_select(0, self._whole)
        at, change = self._select.withdraw_(values[selectable], self.last[selectable], -1.0, self._plan, self._searches)
        at = at + selectable.start
        sent = torch.cat([whole, self.last.index_select(0, at).add_(change)])
        return Request(self._entries(at), sent, *self._write(self.shape, at.to(torch.int32), sent))

    def request_bytes(self, groups: Sequence[int]) -> int:
        return self.shape.num_bytes

    def reply_bytes(self, groups: Sequence[int]) -> int:
        return self._shape(self.shape.num_fixed + self.shape.k).num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[EntrySubset, Tensor]:
        contents = self._read(self.shape, message, peer)
        return self._entries(contents.positions), contents.values

    def _entries(self, selected: Tensor) -> EntrySubset:
        positions = torch.cat([self._whole, selected.to(torch.int64)])
        return EntrySubset(self._vector, (0,), self._out, positions=positions)

    def _note_exchanged_(self, subset: EntrySubset, values: Tensor, update: Tensor) -> None:
        self.last.index_copy_(0, subset.positions, values + update)

    def note_known_(self) -> None:
        self.last.copy_(self._vector.read())

    def sample(self, k: int) -> Tensor:
        return self._vector.sample(k, self.last)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last.to("cpu", copy=True)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.last.copy_(saved["last"])


class ModuloMessages(MessageWriter):
    """Writes and reads messages about groups of the model, a frame each, and learns how far apart two models are.

    A request holds codes modulo a range; its reader replies how far those are from its own values, in steps, and both
    move by half of that, in opposite directions to the last bit.

    reach: how far a block's entries were from a peer's at most, max(seen, 0.8 * reach), and twice as far as was allowed
    for where that was not enough. Allowed for is 1.5 * max(reach, 1.5 * |x - last|), in 2^(bits-1) steps, where last is
    the model after the last exchange (all ours). What there is one of per block is on the host, and entries are where
    the model is. An update lies in a vector of the writer's own, until it makes the next.
    """

    def __init__(self, vector: ModelVector, code: ModuloCode, seed: int, rank: int) -> None:
        super().__init__(vector)
        self._code = code
        self._draw = (seed, rank)
        self._num_requests = 0
        self.last = vector.read()
        sizes = [group.num_entries for group in vector.groups]
        self._free: dict[int, list[Tensor]] = {}  # vectors for the values of requests, by length, while not in use
        self._values, self._update = (vector.empty(max(sizes)) for _ in range(2))  # of the exchange at hand; they grow
        self.reach = [torch.zeros(num_blocks(n), dtype=torch.float32) for n in sizes]
        self._request_shapes = [CodesShape(n, n, 0, code) for n in sizes]
        self._reply_shapes = [CodesShape(n, n, 0, code.answer) for n in sizes]

    def subset(self, groups: Sequence[int]) -> Subset:
        size = self._size(groups)
        free = self._free.get(size)
        return Subset(self._vector, groups, free.pop() if free else self._vector.empty(size))

    def request_(self, subset: Subset, values: Tensor) -> Request:
        """A request about groups; a frame names its own, where a session's would name a bucket."""
        self._num_requests += 1
        offset = _offset_of(*self._draw, self._num_requests)
        frames, codes = [], []
        for k, inside in self._pieces(subset.groups):
            codes.append(self._code.encode(values[inside], self._exponents(k, values[inside]), offset))
            frames.append(self._request_shapes[k].write(None, *self._code.write(codes[-1]), step=0, bucket=k))
        return Request(subset, values, _joined(frames), codes)

    def _size(self, groups: Sequence[int]) -> int:
        return sum(self._vector.groups[k].num_entries for k in groups)

    def _pieces(self, groups: Sequence[int]) -> Iterator[tuple[int, slice]]:
        """Each group, and where its entries lie among those of all of them."""
        start = 0
        for k in groups:
            stop = start + self._vector.groups[k].num_entries
            yield k, slice(start, stop)
            start = stop

    def _exponents(self, k: int, values: Tensor) -> Tensor:
        """The exponents of steps with which a peer's values are expected to be within reach."""
        change, size = (of_block.cpu().numpy() for of_block in kernels.largest_changes(values, self._last(k)))
        reach = self.reach[k].numpy()
        expected = np.maximum(
            np.float32(_CHANGE_WEIGHT) * change, np.where(reach > 0, reach, np.float32(_FIRST_SHARE) * size)
        )
        steps = np.maximum(np.float32(_MARGIN / self._code.half_range) * expected, np.float32(_FINEST_SHARE) * size)
        return exponents_for(torch.from_numpy(steps))

    def request_bytes(self, groups: Sequence[int]) -> int:
        return sum(self._request_shapes[k].num_bytes for k in groups)

    def reply_bytes(self, groups: Sequence[int]) -> int:
        return sum(self._reply_shapes[k].num_bytes for k in groups)

    def open(self, message: Tensor, peer: int) -> tuple[Subset, list[Encoded]]:
        groups: list[int] = []
        received: list[Encoded] = []
        at = 0
        while at < message.numel() or not groups:
            k = bucket_of(message[at:])
            if not (groups[-1] if groups else -1) < k < len(self._request_shapes):
                raise FrameError(f"rank {peer} asked about part {k} of {len(self._request_shapes)}, or not in order")
            shape = self._request_shapes[k]
            codes = _written(shape, message[at : at + shape.num_bytes], k, peer)
            received.append(self._code.read(*codes, self._vector.groups[k].num_entries))
            if not 0 <= received[-1].offset < 1:
                raise FrameError(f"rank {peer} sent an offset of {received[-1].offset}, not one in [0, 1)")
            groups.append(k)
            at += shape.num_bytes
        if (size := self._size(groups)) > self._values.numel():
            self._values = self._vector.empty(size)
        return Subset(self._vector, groups, self._values[:size]), received

    def reply_(self, subset: Subset, received: list[Encoded], values: Tensor) -> tuple[Tensor, Tensor | None]:
        if not kernels.all_finite(values):
            shapes = [(k, self._reply_shapes[k]) for k in subset.groups]
            return _joined([shape.write_overflow(values.device, step=0, bucket=k) for k, shape in shapes]), None
        update = self._room_for_update(values.numel())
        frames = []
        for (k, inside), theirs in zip(self._pieces(subset.groups), received, strict=True):
            _, compared = self._code.compare(values[inside], theirs, out=update[inside])
            self._learn_(k, compared.peaks, theirs.exponents, values[inside], update[inside])
            frames.append(self._reply_shapes[k].write(None, *self._code.answer.write(compared), step=0, bucket=k))
        return _joined(frames), update

    def finish_(self, request: Request, reply: Tensor, peer: int) -> Tensor:
        subset, values, _, sent = request
        reply_code = self._code.answer
        answers: list[Compared] = []
        at = 0
        for k, inside in self._pieces(subset.groups):
            shape = self._reply_shapes[k]
            written = _written(shape, reply[at : at + shape.num_bytes], k, peer)
            answers.append(reply_code.read(*written, inside.stop - inside.start))
            at += shape.num_bytes
        if any(compared.offset != codes.offset for compared, codes in zip(answers, sent, strict=True)):
            raise FrameError(f"rank {peer} answered another request")
        update = self._room_for_update(subset.num_entries)
        for (k, inside), compared, codes in zip(self._pieces(subset.groups), answers, sent, strict=True):
            reply_code.move(compared, codes.exponents, out=update[inside])
            self._learn_(k, compared.peaks, codes.exponents, values[inside], update[inside])
        if values is subset.out and len(subset.groups) == 1:
            self._free.setdefault(values.numel(), []).append(values)
        return update

    def _room_for_update(self, size: int) -> Tensor:
        if size > self._update.numel():
            self._update = self._vector.empty(size)
        return self._update[:size]

    def _last(self, k: int) -> Tensor:
        group = self._vector.groups[k]
        return self.last[group.start : group.stop]

    def _learn_(self, k: int, peaks: Tensor, exponents: Tensor, values: Tensor, update: Tensor) -> None:
        away = peaks.cpu().numpy().astype(np.float32)
        steps = steps_of(exponents).numpy()
        seen = np.where(away < 0, np.float32(2 * self._code.half_range / _MARGIN), away + np.float32(0.5)) * steps
        self.reach[k] = torch.from_numpy(np.maximum(seen, np.float32(_FADE) * self.reach[k].numpy()))
        kernels.join_(self._last(k), [values], update)

    def note_known_(self) -> None:
        self.last.copy_(self._vector.read())

    def state_dict(self) -> dict[str, Any]:
        last = self.last.to("cpu", copy=True)
        learned = {"last": last, "reach": [each.clone() for each in self.reach], "requests": self._num_requests}
        return {"modulo": learned}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        learned = saved["modulo"]
        self.last.copy_(learned["last"])
        for reach, kept in zip(self.reach, learned["reach"], strict=True):
            reach.copy_(kept)
        self._num_requests = int(learned["requests"])


def check_finite(values: Tensor) -> Tensor:
    """These values; FrameError if a message about them would be of no use."""
    if not kernels.all_finite(values):
        raise FrameError("its own model is not finite")
    return values


def not_finite(peer: int) -> FrameError:
    """The error of a message that holds nothing but this."""
    return FrameError(f"the model of rank {peer} is not finite")


def check_taken(message: Tensor) -> Tensor:
    """This message; FrameError if it is a refusal."""
    if not message[:16].any():  # where a frame has its check sum and its name
        raise FrameError("nothing of a message was taken")
    return message


def refusal(num_bytes: int) -> Tensor:
    """A reply of zeros: nothing of the request was taken."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _offset_of(*numbers: int) -> float:
    """One of 2^24 offsets in [0, 1), each as likely as the next."""
    return (hash_64(*numbers) >> 40) / 2.0**24


def _joined(frames: list[Tensor]) -> Tensor:
    return frames[0] if len(frames) == 1 else end_to_end(frames)


def _written(shape: CodesShape, message: Tensor, k: int, peer: int) -> tuple[Tensor, Tensor]:
    """(codes, scale) as a peer wrote them of a group."""
    written = shape.codes(check_taken(message), step=0, bucket=k, peer=peer)
    if written is None:
        raise not_finite(peer)
    return written
