"""Several frames at once, as owners receive and answer them: in one call where bf16 values lie behind Rice's code."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels import Blocks, Pieces
from laconic.wire.frame import Contents, FrameShape, count_in
from laconic.wire.index_codec import IndexBlock, Rice

_ANY_LENGTH = IndexBlock(Rice, 0)  # how positions are written, before it is known in how many words


def write_each(
    shapes: Sequence[FrameShape], places: Sequence[Tensor], values: Sequence[Tensor], *, step: int, bucket: int
) -> list[tuple[Tensor, Tensor]]:
    """Each frame in the shortest code for its places, and its values as it holds them."""
    frames = list(zip(shapes, places, values, strict=True))
    if not all(_is_bf16(shape) and Rice.can_code(shape.num_entries, shape.k) for shape in shapes):
        return [_write(*each, step=step, bucket=bucket) for each in frames]
    written = kernels.write_rice_frames(places, values, [_head(shape, step, bucket) for shape in shapes])
    return [
        (frame, decoded) if frame.numel() < each[0].num_bytes else _write(*each, step=step, bucket=bucket)
        for each, (frame, decoded) in zip(frames, written, strict=True)
    ]


def write_parts(
    shapes: Sequence[FrameShape],
    positions: Tensor,
    values: Tensor,
    pieces: Pieces,
    decoded: Tensor,
    *,
    step: int,
    bucket: int,
) -> list[Tensor] | None:
    """A frame for each owner, as the kernel writes them; None where Rice's code is not the shortest.

    `decoded` becomes the values as the frames hold them. The number of positions in a shape only the frame tells.
    """
    frames = kernels.write_parts(positions, values, pieces, [_head(shape, step, bucket) for shape in shapes], decoded)
    if frames is None:
        return None
    pairs = zip(shapes, frames, strict=True)
    are_shortest = all(frame.numel() < replace(shape, k=count_in(frame)).num_bytes for shape, frame in pairs)
    return frames if are_shortest else None


def read_each(
    frames: Mapping[int, Tensor], shapes: Sequence[FrameShape], *, step: int, bucket: int
) -> dict[int, Contents]:
    """The contents that each peer wrote; FrameError names one whose frame is not as it should be."""
    if _are_usual(frames.values(), shapes, step, bucket):
        contents = kernels.read_rice_frames(list(frames.values()), [_blocks(shape) for shape in shapes])
        if contents is not None:
            return {peer: Contents(*held, False) for peer, held in zip(frames, contents, strict=True)}
    pairs = zip(frames.items(), shapes, strict=True)
    return {peer: shape.read(frame, step=step, bucket=bucket, peer=peer) for (peer, frame), shape in pairs}


def read_answers(
    frames: Sequence[Tensor],
    shapes: Sequence[FrameShape],
    pieces: Pieces,
    positions: Tensor,
    values: Tensor,
    *,
    step: int,
    bucket: int,
) -> bool:
    """Put the answers of all owners together, as the kernel does; False where they are better read frame by frame."""
    usual = _are_usual(frames, shapes, step, bucket)
    return usual and kernels.read_answers(frames, [_blocks(shape) for shape in shapes], pieces, positions, values)


def _are_usual(frames: Iterable[Tensor], shapes: Sequence[FrameShape], step: int, bucket: int) -> bool:
    """Return whether frames are bf16 behind Rice's code, and have the heads that they should."""
    return all(
        _is_bf16(shape) and shape.index.codec is Rice and shape.is_foretold(frame, step=step, bucket=bucket)
        for frame, shape in zip(frames, shapes, strict=True)
    )


def _is_bf16(shape: FrameShape) -> bool:
    return shape.quantize.code_dtype == torch.bfloat16


def _head(shape: FrameShape, step: int, bucket: int) -> list[int]:
    return replace(shape, own_index=_ANY_LENGTH).head(step=step, bucket=bucket, scale=1.0)


def _blocks(shape: FrameShape) -> Blocks:
    return Blocks(shape.index.num_words, shape.num_entries, shape.k, shape.num_fixed + shape.k)


def _write(shape: FrameShape, places: Tensor, values: Tensor, *, step: int, bucket: int) -> tuple[Tensor, Tensor]:
    codes, scale = shape.quantize.encode(values)
    frame = shape.write_smallest(places, codes, scale, step=step, bucket=bucket)
    return frame, shape.quantize.decode(codes, scale)[: values.numel()]
