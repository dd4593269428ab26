"""Messages between models that are nearly alike: of each value only a modulo code goes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.kernels import hash_64
from laconic.quantize import ModuloCode, Told, exponents_for, num_blocks, steps_of
from laconic.replicas.messages import MessageWriter, Request, check_taken, no_positions, not_finite
from laconic.replicas.pending import Subset
from laconic.replicas.vector import ModelVector
from laconic.wire import CodesShape, bucket_of

_MARGIN = 1.5  # of what two models may be apart over what they are expected to be
_CHANGE_WEIGHT = 1.5  # a peer's own change comes on top of this worker's
_FADE = 0.8  # per exchange, of what was seen before
_FIRST_SHARE = 1 / 128  # of the largest entry: what is expected before anything was seen
_FINEST_SHARE = 2.0**-20  # of the largest entry: below that float32 has no finer steps


class ModuloMessages(MessageWriter):
    """Writes and reads messages about one group of the model each, and learns how far apart two models are.

    A request holds codes modulo a range; its reader replies how far those are from its own values, in steps, and both
    move by half of that, in opposite directions to the last bit.

    reach: how far a block's entries were from a peer's at most, max(seen, 0.8 * reach), and twice as far as was allowed
    for where that was not enough. Allowed for is 1.5 * max(reach, 1.5 * |x - last|), in 2^(bits-1) steps, where last is
    the model after the last exchange (all ours). What there is one of per block is on the host, and entries are where
    the model is. An update lies in a vector of the writer's own, until it makes the next.
    """

    def __init__(self, vector: ModelVector, residue: ModuloCode, seed: int, rank: int) -> None:
        super().__init__(vector)
        self._residue = residue
        self._draw = (seed, rank)
        self._num_requests = 0
        self.last = vector.read()
        sizes = [group.num_entries for group in vector.groups]
        self._free: list[list[Tensor]] = [[] for _ in sizes]  # vectors for the values of requests, while not in use
        self._values, self._update = (vector.empty(max(sizes)) for _ in range(2))  # of the exchange at hand
        self.reach = [torch.zeros(num_blocks(n), dtype=torch.float32) for n in sizes]
        self._request_shapes = [CodesShape(n, n, 0, residue) for n in sizes]
        self._reply_shapes = [CodesShape(n, n, 0, residue.answer) for n in sizes]

    def subset(self, groups: Sequence[int]) -> Subset:
        (k,) = groups
        size = self._vector.groups[k].num_entries
        return Subset(self._vector, groups, self._free[k].pop() if self._free[k] else self._vector.empty(size))

    def request_(self, subset: Subset, values: Tensor) -> Request:
        """A request about a group; its frame names it, where a session's would name a bucket."""
        (k,) = subset.groups
        self._num_requests += 1
        codes = self._residue.tell(values, self._exponents(k, values), _offset_of(*self._draw, self._num_requests))
        frame = self._request_shapes[k].write(no_positions(values), *self._residue.write(codes), step=0, bucket=k)
        return Request(subset, values, frame, codes)

    def _exponents(self, k: int, values: Tensor) -> Tensor:
        """The exponents of steps with which a peer's values are expected to be within reach."""
        change, size = (of_block.cpu().numpy() for of_block in kernels.largest_changes(values, self._last(k)))
        reach = self.reach[k].numpy()
        expected = np.maximum(
            np.float32(_CHANGE_WEIGHT) * change, np.where(reach > 0, reach, np.float32(_FIRST_SHARE) * size)
        )
        steps = np.maximum(np.float32(_MARGIN / self._residue.half_range) * expected, np.float32(_FINEST_SHARE) * size)
        return exponents_for(torch.from_numpy(steps))

    def request_bytes(self, groups: Sequence[int]) -> int:
        return self._request_shapes[groups[0]].num_bytes

    def reply_bytes(self, groups: Sequence[int]) -> int:
        return self._reply_shapes[groups[0]].num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[Subset, Told]:
        k = bucket_of(message)
        if not 0 <= k < len(self._request_shapes):
            raise FrameError(f"rank {peer} asked about part {k} of {len(self._request_shapes)}")
        size = self._vector.groups[k].num_entries
        subset = Subset(self._vector, [k], self._values[:size])
        received = self._residue.read(*_written(self._request_shapes[k], message, k, peer), subset.num_entries)
        if not 0 <= received.offset < 1:
            raise FrameError(f"rank {peer} sent an offset of {received.offset}, not one in [0, 1)")
        return subset, received

    def reply_(self, subset: Subset, received: Told, values: Tensor) -> tuple[Tensor, Tensor | None]:
        (k,) = subset.groups
        if not kernels.all_finite(values):
            return self._reply_shapes[k].write_overflow(values.device, step=0, bucket=k), None
        update, compared = self._residue.compare(values, received, out=self._update[: values.numel()])
        self._learn_(k, compared.peaks, received.exponents, values, update)
        frame = self._reply_shapes[k].write(
            no_positions(values), *self._residue.answer.write(compared), step=0, bucket=k
        )
        return frame, update

    def finish_(self, request: Request, reply: Tensor, peer: int) -> Tensor:
        subset, values, _, codes = request
        (k,) = subset.groups
        reply_code = self._residue.answer
        compared = reply_code.read(*_written(self._reply_shapes[k], reply, k, peer), subset.num_entries)
        if compared.offset != codes.offset:
            raise FrameError(f"rank {peer} answered another request")
        update = reply_code.way(compared, codes.exponents, out=self._update[: subset.num_entries])
        self._learn_(k, compared.peaks, codes.exponents, values, update)
        if values is subset.out:
            self._free[k].append(values)
        return update

    def _last(self, k: int) -> Tensor:
        group = self._vector.groups[k]
        return self.last[group.start : group.stop]

    def _learn_(self, k: int, peaks: Tensor, exponents: Tensor, values: Tensor, update: Tensor) -> None:
        away = peaks.cpu().numpy().astype(np.float32)
        steps = steps_of(exponents).numpy()
        seen = np.where(away < 0, np.float32(2 * self._residue.half_range / _MARGIN), away + np.float32(0.5)) * steps
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


def _offset_of(*numbers: int) -> float:
    """One of 2^24 offsets in [0, 1), each as likely as the next."""
    return (hash_64(*numbers) >> 40) / 2.0**24


def _written(shape: CodesShape, message: Tensor, k: int, peer: int) -> tuple[Tensor, Tensor]:
    """(codes, scale) as a peer wrote them of a group."""
    written = shape.codes(check_taken(message), step=0, bucket=k, peer=peer)
    if written is None:
        raise not_finite(peer)
    return written
