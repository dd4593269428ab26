"""A bucket whose entries others answer for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.cpu.frames import DO_NOT_ASCEND, as_frame, frames_at, room_for
from laconic.kernels.cpu.library import Facts, library
from laconic.kernels.cpu.pointer import check_reach, num_threads, pointer
from laconic.kernels.cpu.sums import addresses
from laconic.kernels.reference.frames import Blocks
from laconic.kernels.reference.owners import Pieces, Window
from laconic.kernels.search import note_


def write_parts(
    positions: Tensor, values: Tensor, pieces: Pieces, heads: Sequence[Sequence[int]], said: Tensor
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
        pointer("said", said, torch.float32, values.numel()),
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
    told = library().laconic_take_mean(
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
    if told < 0:
        for one in positions:
            check_reach(one, n)
        raise KernelError("positions are not ascending; give each frame's in order")
    for search, found in zip(searches, facts, strict=True):
        if found.passes:
            note_(search, kth=found.kth, mean=found.mean, passes=found.passes)
    return places[:told], means[: num_fixed + told]


def owe_(held: Tensor, fixed: Tensor, places: Tensor, values: Tensor, said: Tensor, factor: float) -> None:
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
        pointer("said", said, torch.float32, total),
        factor,
    )
