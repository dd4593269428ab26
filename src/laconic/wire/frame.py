"""A frame: a 40-byte header, an index block, a value block; its length is known before it is written."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError, SchemeError
from laconic.wire.index_codec import EliasFano, IndexBlock, Rice, foretold_block

_MAGIC = int.from_bytes(b"LACN", "little")
_VERSION = 2
_FORETOLD = ("magic", "version and codecs", "n", "k", "number of fixed entries", "step", "bucket")
# Places in the header: the check sum of all that follows takes two words.
_MAGIC_AT = 2
_CODECS = 3
_COUNT = 5
_BUCKET = 8
_SCALE = 9
_HEADER_WORDS = 10
_OVERFLOW = 1 << 30  # flag in the word of the codecs


class ValueCode(Protocol):
    """Codes of a known type and length; what they mean is for whoever reads them."""

    code_id: ClassVar[int]  # stands in the frame's header
    code_dtype: ClassVar[torch.dtype]

    def num_bytes(self, count: int) -> int:
        """The bytes of the codes of so many values."""


class ValueCodec(ValueCode, Protocol):
    """float32 values <-> codes that stand for them by themselves; decode(*encode(v)) is v less what rounding lost."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, scale): codes of `code_dtype`, scale a 0-d float32. `values` are finite float32."""

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The float32 values that these codes stand for; more than were encoded, where codes share bytes."""

    def decode_rows(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The same for rows of codes, each with a scale of its own."""


@dataclass(frozen=True)
class Contents:
    """The contents of a frame: values at the fixed entries first, then at `positions`."""

    positions: Tensor  # int32, ascending
    values: Tensor  # float32, num_fixed + k of them
    overflow: bool  # its writer saw Inf or NaN; positions and values mean nothing


@dataclass(frozen=True)
class CodesShape:
    """Everything about a frame that both ends know beforehand; its reader knows what to make of the codes."""

    num_entries: int
    k: int
    num_fixed: int
    quantize: ValueCode
    own_index: IndexBlock | None = None  # where the length depends on the positions; else the foretold one

    def __post_init__(self) -> None:
        if self.num_entries >= 2**31:
            raise SchemeError(f"a bucket of {self.num_entries} entries is too large for a frame; lower bucket_cap_mb")

    @cached_property
    def index(self) -> IndexBlock:
        """The code of positions, and its length."""
        return self.own_index or foretold_block(self.num_entries, self.k)

    @cached_property
    def num_bytes(self) -> int:
        """The length of every frame of this shape."""
        return 4 * (self._end_of_index + -(-self._num_value_bytes // 4))

    def write(self, positions: Tensor | None, codes: Tensor, scale: Tensor, *, step: int, bucket: int) -> Tensor:
        """A frame, as uint8 on the device of `codes`: fixed entries first, then those at `positions`; None: all."""
        index = None if positions is None else self.index.codec.encode(positions, self.num_entries)
        return self._write(index, codes, scale, step, bucket)

    def write_smallest(self, positions: Tensor, codes: Tensor, scale: Tensor, *, step: int, bucket: int) -> Tensor:
        """The same in the shortest code for these positions: for a reader who need not know its length beforehand."""
        if Rice.can_code(self.num_entries, self.k):
            index = Rice.encode(positions, self.num_entries)
            if index.numel() < self.index.num_words:
                shortest = replace(self, own_index=IndexBlock(Rice, index.numel()))
                return shortest._write(index, codes, scale, step, bucket)
        return self.write(positions, codes, scale, step=step, bucket=bucket)

    def _write(self, index: Tensor | None, codes: Tensor, scale: Tensor, step: int, bucket: int) -> Tensor:
        head = torch.zeros(_HEADER_WORDS, dtype=torch.int32, device=codes.device)
        head[_SCALE] = scale.view(torch.int32)
        frame = self._joined(head, index, codes)
        kernels.seal_(frame.view(torch.int32), self._header(step, bucket))
        return frame

    def _joined(self, head: Tensor, index: Tensor | None, codes: Tensor) -> Tensor:
        blocks = [block.view(torch.uint8) for block in (head, index, codes.contiguous()) if block is not None]
        if -self._num_value_bytes % 4:
            blocks.append(blocks[0].new_zeros(-self._num_value_bytes % 4))
        return kernels.end_to_end(blocks)

    def head(self, *, step: int, bucket: int, scale: float = 0.0) -> list[int]:
        """The words of a header, whose check sum is yet to come, and its scale where none is given."""
        return [0, 0, *self._header(step, bucket), *struct.unpack("<i", struct.pack("<f", scale))]

    def write_after(self, head: Tensor, positions: Tensor, codes: Tensor, scale: Tensor, overflow: Tensor) -> Tensor:
        """A frame for a header that lies on the device, which this changes; `overflow`, one int32: 1 marks it so."""
        head[_SCALE] = scale.view(torch.int32)
        head[_CODECS].add_(overflow[0], alpha=_OVERFLOW)
        frame = self._joined(head, self.index.codec.encode(positions, self.num_entries), codes)
        words = frame.view(torch.int32)
        words[:2] = kernels.check_sum(words[2:]).view(1).view(torch.int32)
        return frame

    def write_overflow(self, device: torch.device, *, step: int, bucket: int) -> Tensor:
        """A frame of the same length that only tells that its writer saw Inf or NaN."""
        words = torch.zeros(self.num_bytes // 4, dtype=torch.int32, device=device)
        kernels.seal_(words, self._header(step, bucket, _OVERFLOW))
        return words.view(torch.uint8)

    def codes(self, frame: Tensor, *, step: int, bucket: int, peer: int) -> tuple[Tensor, Tensor] | None:
        """(codes, scale) as `peer` wrote them, or None if it saw Inf or NaN; FrameError if not as foretold."""
        with _from(peer, step, bucket):
            if frame.numel() != self.num_bytes:
                raise FrameError(f"it has {frame.numel()} bytes, not {self.num_bytes}")
            words = frame.view(torch.int32)
            header = _header_of(frame)
            overflow = header[_CODECS] & _OVERFLOW
            foretold = self._header(step, bucket, overflow)
            for name, value, expected in zip(_FORETOLD, header[_MAGIC_AT:_SCALE], foretold, strict=True):
                if value != expected:
                    raise FrameError(
                        f"{name} is {value}, not {expected}; all workers must run the same scheme and model"
                    )
            if int(kernels.check_sum(words[2:])) != _check_in(header):
                raise FrameError("its check sum does not match; it was damaged on the way")
        if overflow:
            return None
        raw = frame[4 * self._end_of_index :][: self._num_value_bytes]
        return raw.view(self.quantize.code_dtype), words[_SCALE].view(torch.float32)

    @property
    def _end_of_index(self) -> int:
        return _HEADER_WORDS + self.index.num_words

    @property
    def _num_value_bytes(self) -> int:
        return self.quantize.num_bytes(self.num_fixed + self.k)

    def _header(self, step: int, bucket: int, flags: int = 0) -> list[int]:
        """The words that both ends know beforehand; the check sum comes before it, the scale after it."""
        codecs = _VERSION | self.index.codec.codec_id << 8 | self.quantize.code_id << 16 | flags
        return [_MAGIC, codecs, self.num_entries, self.k, self.num_fixed, step & 0x7FFFFFFF, bucket]


@dataclass(frozen=True)
class FrameShape(CodesShape):
    """The shape of a frame whose codes stand for values by themselves."""

    quantize: ValueCodec

    @classmethod
    def of(cls, frame: Tensor, num_entries: int, quantizers: Sequence[ValueCodec], *, peer: int) -> FrameShape:
        """The shape in a frame's header, where only the number of entries is known beforehand."""
        magic, codecs, n, k, num_fixed = _header_of(frame)[_MAGIC_AT:][:5]
        decoders = [quantize for quantize in quantizers if quantize.code_id == codecs >> 16 & 0xFF]
        if magic != _MAGIC or not decoders or n != num_entries or not 0 <= min(k, num_fixed) <= k + num_fixed <= n:
            raise FrameError(f"a frame from rank {peer} is damaged, or of another scheme; nothing of it is applied")
        foretold = cls(n, k, num_fixed, decoders[0])
        if codecs >> 8 & 0xFF != Rice.codec_id or not Rice.can_code(n, k):
            return foretold
        num_words = foretold.index.num_words + (frame.numel() - foretold.num_bytes) // 4
        if num_words < 1:
            raise FrameError(f"a frame from rank {peer} is cut short; nothing of it is applied")
        return replace(foretold, own_index=IndexBlock(Rice, num_words))

    def read(self, frame: Tensor, *, step: int, bucket: int, peer: int) -> Contents:
        """The contents that `peer` wrote; FrameError names it, and nothing is applied, if it is not as foretold."""
        written = self.codes(frame, step=step, bucket=bucket, peer=peer)
        words = frame.view(torch.int32)
        if written is None:
            return Contents(words.new_empty(0), words.new_empty(0, dtype=torch.float32), True)
        with _from(peer, step, bucket):
            positions = self.index.codec.decode(words[_HEADER_WORDS : self._end_of_index], self.num_entries, self.k)
            values = self.quantize.decode(*written)[: self.num_fixed + self.k]
            if not kernels.all_finite(values):
                raise FrameError("its values are not finite")
            return Contents(positions, values, False)

    def read_all(self, frames: Tensor, device: torch.device, *, step: int, bucket: int) -> tuple[Tensor, Tensor] | None:
        """(positions, values) of everyone's frames, in rows by rank on `device`; None if someone saw Inf or NaN.

        A GPU reads all rows of the usual code at once; where something is wrong, one by one, to name the peer.
        """
        if (
            device.type != "cpu"
            and self.index.codec is EliasFano
            and self.are_foretold(frames, step=step, bucket=bucket)
        ):
            damaged = torch.zeros(1, dtype=torch.int32, device=device)
            together = self.read_later(frames.to(device, non_blocking=True), damaged)
            if not damaged.item():
                return together
        everyone = [self.read(row, step=step, bucket=bucket, peer=peer) for peer, row in enumerate(frames)]
        if any(contents.overflow for contents in everyone):
            return None
        positions = torch.stack([contents.positions for contents in everyone])
        values = torch.stack([contents.values for contents in everyone])
        return positions.to(device), values.to(device)

    def are_foretold(self, frames: Tensor, *, step: int, bucket: int) -> bool:
        """Return whether all frames have the length and the header that they should, and none is of an overflow."""
        heads: list[list[int]] = frames[:, : 4 * _HEADER_WORDS].contiguous().view(torch.int32).tolist()
        known = self._header(step, bucket)
        return frames.shape[1] == self.num_bytes and all(head[_MAGIC_AT:_SCALE] == known for head in heads)

    def is_foretold(self, frame: Tensor, *, step: int, bucket: int) -> bool:
        """The same of one frame."""
        known = self._header(step, bucket)
        return frame.numel() == self.num_bytes and _header_of(frame)[_MAGIC_AT:_SCALE] == known

    def read_later(self, frames: Tensor, damaged: Tensor) -> tuple[Tensor, Tensor]:
        """(positions, values) of frames with the header that they should have, in rows by rank, on their device.

        Nothing is waited for: `damaged`, one int32, is set if something is wrong with one of them.
        """
        words = frames.view(torch.int32)
        stated = words[:, :2].reshape(-1).view(torch.int64)  # of one row, contiguous() keeps an odd stride
        damaged |= (kernels.check_sum(words[:, 2:]) != stated).any()
        positions = EliasFano.read(words[:, _HEADER_WORDS : self._end_of_index], self.num_entries, self.k, damaged)
        codes = frames[:, 4 * self._end_of_index :][:, : self._num_value_bytes].view(self.quantize.code_dtype)
        scales = words[:, _SCALE].view(torch.float32)
        values = self.quantize.decode_rows(codes, scales)[:, : self.num_fixed + self.k].contiguous()
        kernels.flag_nonfinite_(damaged, values.view(-1))
        return positions, values


def bucket_of(frame: Tensor) -> int:
    """The bucket in a frame's header, not yet checked; -1 if it has none."""
    return _header_of(frame)[_BUCKET]


def count_in(frame: Tensor) -> int:
    """The number of positions in a frame's header, not yet checked."""
    return _header_of(frame)[_COUNT]


def longest_frame(num_entries: int, quantizers: Sequence[ValueCode]) -> int:
    """The most bytes of a frame about so many entries, whichever of them it holds: those of a map and of all values."""
    most = max(quantize.num_bytes(num_entries) for quantize in quantizers)
    return 4 * (_HEADER_WORDS + -(-num_entries // 32) + -(-most // 4))


def _header_of(frame: Tensor) -> list[int]:
    """The words of a header, not yet checked; each -1 if there is none."""
    end = 4 * _HEADER_WORDS
    if frame.numel() < end:
        return [-1] * _HEADER_WORDS
    on_host = frame if frame.device.type == "cpu" else frame[:end].cpu()
    words: list[int] = on_host.numpy()[:end].view(np.int32).tolist()
    return words


@contextmanager
def _from(peer: int, step: int, bucket: int) -> Iterator[None]:
    """Say of an error whose frame it is about."""
    try:
        yield
    except FrameError as error:
        raise FrameError(f"frame of bucket {bucket}, step {step} from rank {peer}: {error}") from None


def _check_in(head: Sequence[int]) -> int:
    """The check sum in a header, as an int64."""
    return head[0] & 0xFFFFFFFF | head[1] << 32
