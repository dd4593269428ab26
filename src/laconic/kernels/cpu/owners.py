"""A bucket whose entries others answer for: frames of bf16 values behind Rice's code, and their mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import note_
from laconic.kernels.cpu.library import Facts, check_reach, library, num_threads, pointer
from laconic.kernels.cpu.sparse import addresses
from laconic.kernels.reference.owners import HEAD_WORDS, Blocks, Pieces, Window

DO_NOT_ASCEND = "frames of positions that do not ascend; give them sorted, each once, from 0 on"
# Of a frame to be written, and of one to be read, in native/frames.cpp; the last field of each says how it went.
_WRITTEN_FIELDS, _READ_FIELDS, _NUM_WORDS = 8, 9, 1


def write_rice_frames(
    positions: Sequence[Tensor], values: Sequence[Tensor], heads: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    rooms = []
    table = np.zeros((len(heads), _WRITTEN_FIELDS), dtype=np.int64)
    for row, (at, what, head) in enumerate(zip(positions, values, heads, strict=True)):
        k, num_values = at.numel(), what.numel()
        if not 1 <= k <= num_values:
            raise KernelError(f"a frame of {num_values} values at {k} positions; give 1 <= positions <= values")
        words, decoded = room_for(head, k, num_values), torch.empty_like(what)
        rooms.append((words, decoded))
        sources = pointer("positions", at, torch.int32), pointer("values", what, torch.float32), decoded.data_ptr()
        table[row, :-1] = words.ctypes.data, 0, k, num_values, *sources
    library().laconic_write_frames(table.ctypes.data, len(table), num_threads())
    if not table[:, -1].all():
        raise KernelError(DO_NOT_ASCEND)
    lengths = table[:, _NUM_WORDS].tolist()
    return [(as_frame(words, length), decoded) for (words, decoded), length in zip(rooms, lengths, strict=True)]


def read_rice_frames(frames: Sequence[Tensor], blocks: Sequence[Blocks]) -> list[tuple[Tensor, Tensor]] | None:
    positions = [torch.empty(each.k, dtype=torch.int32) for each in blocks]
    values = [torch.empty(each.num_values, dtype=torch.float32) for each in blocks]
    table = np.zeros((len(frames), _READ_FIELDS), dtype=np.int64)
    table[:, :6] = frames_at(frames, blocks)
    table[:, 6:8] = [(at.data_ptr(), what.data_ptr()) for at, what in zip(positions, values, strict=True)]
    library().laconic_read_frames(table.ctypes.data, len(table), num_threads())
    return list(zip(positions, values, strict=True)) if table[:, -1].all() else None


def room_for(head: Sequence[int], k: int, num_values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Words that begin with a head, and have room for any k positions and for the values."""
    most = HEAD_WORDS + library().laconic_most_rice_words(k) + -(-num_values // 2)
    words = np.empty(most, dtype=np.int32)
    words[:HEAD_WORDS] = head
    return words


def as_frame(words: np.ndarray[tuple[int], np.dtype[np.int32]], length: int) -> Tensor:
    """So many words as a frame."""
    return torch.from_numpy(words[:length].view(np.uint8))


def frames_at(frames: Sequence[Tensor], blocks: Sequence[Blocks]) -> list[tuple[int, ...]]:
    """Frames as native code reads them: where, of how many words, and what their blocks are."""
    rows: list[tuple[int, ...]] = []
    for frame, each in zip(frames, blocks, strict=True):
        num_words = frame.numel() // 4
        expected = HEAD_WORDS + each.num_index_words + -(-each.num_values // 2)
        if num_words != expected or not 1 <= each.k <= each.num_values:
            raise KernelError(f"a frame of {num_words} words does not hold {each}; give what its head says")
        rows.append((pointer("frame", frame, torch.uint8), num_words, *each))
    return rows


def write_parts(
    positions: Tensor, values: Tensor, pieces: Pieces, heads: Sequence[Sequence[int]], decoded: Tensor
) -> list[Tensor] | None:
    num_owners = len(heads)
    k = positions.numel()
    borders = np.append(np.searchsorted(positions.numpy(), pieces.starts.view(-1).numpy()), k)
    counts = np.diff(borders).reshape(-1, num_owners).sum(0).tolist()
    lengths = pieces.fixed_lengths.numpy()
    fixed_borders = np.append(0, lengths.reshape(-1).cumsum())
    if values.numel() != k + fixed_borders[-1]:
        raise KernelError(f"{values.numel()} values at {k} positions and {fixed_borders[-1]} fixed ones; give one each")
    if not all(counts):
        return None
    sizes = zip(heads, counts, lengths.sum(0).tolist(), strict=True)
    rooms = [room_for(head, count, count + num_fixed) for head, count, num_fixed in sizes]
    ways = np.ascontiguousarray(pieces.ways.numpy().T)
    words = np.array([room.ctypes.data for room in rooms])
    num_words = np.zeros(num_owners, dtype=np.int64)
    ascends = library().laconic_write_parts(
        pointer("positions", positions, torch.int32),
        pointer("values", values, torch.float32),
        borders.ctypes.data,
        ways.ctypes.data,
        ways.size,
        fixed_borders.ctypes.data,
        lengths.size,
        num_owners,
        num_threads(),
        words.ctypes.data,
        num_words.ctypes.data,
        pointer("decoded", decoded, torch.float32, values.numel()),
    )
    if not ascends:
        raise KernelError(DO_NOT_ASCEND)
    return [as_frame(room, length) for room, length in zip(rooms, num_words.tolist(), strict=True)]


def read_answers(
    frames: Sequence[Tensor], blocks: Sequence[Blocks], pieces: Pieces, positions: Tensor, values: Tensor
) -> bool:
    table = np.array(frames_at(frames, blocks), dtype=np.int64)
    num_owners, num_spans = pieces.within.shape
    if len(frames) != num_owners:
        raise KernelError(f"{len(frames)} frames of {num_owners} owners; give one each")
    fine: int = library().laconic_read_answers(
        table.ctypes.data,
        num_owners,
        pointer("within", pieces.within, torch.int32, dims=2),
        pointer("ways", pieces.ways, torch.int32, dims=2),
        num_spans,
        num_threads(),
        pointer("positions", positions, torch.int64, sum(each.k for each in blocks)),
        pointer("values", values, torch.float32, sum(each.num_values for each in blocks)),
    )
    return bool(fine)


def take_mean_(
    held: Tensor,
    fixed: Tensor,
    positions: Sequence[Tensor],
    values: Sequence[Tensor],
    windows: Sequence[Window],
    searches: Sequence[Tensor],
    spare: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor]:
    n, num_fixed = held.numel(), fixed.numel()
    check_reach(fixed, n)
    if not all(0 <= start <= stop <= n for start, stop, *_ in (*windows, *spare)):
        raise KernelError(f"a window reaches outside {n} entries; give 0 <= start <= stop <= n")
    total, _, at, what, counts, num_frames = addresses(held, positions, values, more=num_fixed)
    most = sum(one.numel() for one in positions)
    places = torch.empty(most, dtype=torch.int32)
    means = torch.empty(num_fixed + most, dtype=torch.float32)
    ranges = np.array(windows, dtype=np.int64), np.array(spare, dtype=np.int64)
    facts = (Facts * len(windows))()
    num_places = library().laconic_take_mean(
        total,
        n,
        pointer("fixed", fixed, torch.int64),
        num_fixed,
        at,
        what,
        counts,
        num_frames,
        ranges[0].ctypes.data,
        len(windows),
        ranges[1].ctypes.data,
        len(spare),
        num_threads(),
        places.data_ptr(),
        means.data_ptr(),
        facts,
    )
    if num_places < 0:
        for one in positions:
            check_reach(one, n)
        raise KernelError("positions are not ascending; give each frame's in order")
    for search, fact in zip(searches, facts, strict=True):
        if fact.passes:
            note_(search, kth=fact.kth, mean=fact.mean, passes=fact.passes)
    return places[:num_places], means[: num_fixed + num_places]


def owe_(held: Tensor, fixed: Tensor, places: Tensor, values: Tensor, decoded: Tensor, factor: float) -> None:
    check_reach(fixed, held.numel())
    check_reach(places, held.numel())
    total = fixed.numel() + places.numel()
    library().laconic_owe(
        pointer("held", held, torch.float32),
        pointer("fixed", fixed, torch.int64),
        fixed.numel(),
        pointer("places", places, torch.int32),
        places.numel(),
        pointer("values", values, torch.float32, total),
        pointer("decoded", decoded, torch.float32, total),
        factor,
    )
