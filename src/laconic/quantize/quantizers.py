"""How a value is written in a frame: floating-point types, levels, signs, two sizes of a group."""

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import SchemeError
from laconic.kernels import LLOYD_LANE_BITS, LLOYD_LARGEST_GROUP, LLOYD_VALUES_PER_WORD
from laconic.wire import ValueCodec

SMALLEST = torch.finfo(torch.float32).tiny  # of a scale, which is never zero
# The largest value is brought just under 2^15; fp16 ends at 65504, a little under 2^16.
_FP16_TOP_EXPONENT = 15
# Above these, rounding up would give Inf; the few values there are held at them.
_BF16_TOP = torch.finfo(torch.bfloat16).max
_FP16_TOP = 32752.0 * 2.0**113  # the largest 11-bit number under 2^128
_TRITS_PER_BYTE = 5  # 3^5 = 243


class Quantizer(ValueCodec):
    """A code of values, which frames hold."""

    adds = False  # whether a network can add its codes
    asks_host = True  # whether a GPU waits for the host while it writes or reads
    rounds_to_nearest = False  # which is biased, unless what it loses is kept

    def decode_rows(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.stack([self.decode(row, scale) for row, scale in zip(codes, scales, strict=True)])


class FloatCode(Quantizer):
    """A floating-point type, which a network can add."""

    adds = True
    asks_host = False

    def num_bytes(self, count: int) -> int:
        return self.code_dtype.itemsize * count

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values.to(self.code_dtype), values.new_ones(())

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.to(torch.float32)

    def decode_rows(self, codes: Tensor, scales: Tensor) -> Tensor:
        return self.decode(codes, scales.unsqueeze(1))

    def sum_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        """The type in which an all-reduce adds a gradient of this type."""
        return self.code_dtype


@dataclass(frozen=True)
class Exact(FloatCode):
    """float32 goes as it is; an all-reduce adds in the gradient's own type, as DDP does."""

    code_id = 0
    code_dtype = torch.float32

    def sum_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        return gradient_dtype


@dataclass(frozen=True)
class BF16(FloatCode):
    """A value has float32's range with 8 bits of precision: it never overflows where float32 does not."""

    code_id = 1
    code_dtype = torch.bfloat16

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return super().encode(values.clamp(-_BF16_TOP, _BF16_TOP))


@dataclass(frozen=True)
class FP16(FloatCode):
    """A value has 11 bits of precision in a narrow range, into which a power of two moves those of a frame.

    An all-reduce cannot carry that scale, so there a mean beyond 65504 becomes Inf, as in PyTorch's own hook, unless
    something is kept, which then keeps what is beyond 2^15.
    """

    code_id = 2
    code_dtype = torch.float16

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.numel() == 0:
            return super().encode(values)
        _, exponent = torch.frexp(values.abs().max())  # max < 2^exponent
        # 2^e is built from its bits: pow() may be an ulp off, and then scaling would round.
        biased = (exponent - _FP16_TOP_EXPONENT).clamp(-126, 127) + 127
        scale = (biased.to(torch.int32) << 23).view(torch.float32)
        return (values.clamp(-_FP16_TOP, _FP16_TOP) / scale).to(torch.float16), scale

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.to(torch.float32) * scale


@dataclass(frozen=True)
class Levels(Quantizer):
    """A value becomes the nearest of n/s * {-s, ..., s}, n being the frame's largest |v| and s = 2^(bits-1) - 1.

    The grid of maxnorm (Vineeth S, arXiv 2109.12497) where frames are read, not added up in flight: every frame brings
    its norm, and rounding is to the nearest, since what it loses is kept (ours).

    Example:
        >>> scheme = laconic.recipes.topk(0.01, quantize=Levels(5))
    """

    code_id = 6
    code_dtype = torch.int32
    rounds_to_nearest = True

    bits: int = 4  # of a code, its sign included

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 12:
            raise SchemeError(f"Levels.bits is {self.bits}; give 2 to 12, or use bf16")

    @property
    def levels(self) -> int:
        """s."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, count: int) -> int:
        return 4 * -(-count * self.bits // 32)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.numel() == 0:
            return values.new_empty(0, dtype=torch.int32), values.new_ones(())
        step = (values.abs().max() * (1 / self.levels)).clamp_min(SMALLEST)  # CUDA would not divide by a number
        codes = (values / step).round_().clamp_(-self.levels, self.levels).add_(self.levels)
        return kernels.pack_lanes(codes.to(torch.int32), self.bits), step

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        count = 32 * codes.numel() // self.bits
        lanes = kernels.unpack_lanes(codes[: -(-count * self.bits // 32)], count, self.bits)
        return lanes.to(torch.float32).sub_(self.levels).mul_(scale)


@dataclass(frozen=True)
class Sign(Quantizer):
    """A value becomes sign(v) in one bit, times mean|v| of the frame (Seide et al., Interspeech 2014).

    A server that takes a vote looks at the bits alone (Bernstein et al., ICML 2018). A zero is written as positive.
    """

    code_id = 3
    code_dtype = torch.int32

    def num_bytes(self, count: int) -> int:
        return 4 * -(-count // 32)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.numel() == 0:
            return values.new_empty(0, dtype=torch.int32), values.new_ones(())
        size = values.abs().mean(dtype=torch.float64)  # since the sum of two large float32 would be Inf
        return kernels.pack_signs(values.contiguous()), size.to(torch.float32).clamp_min(SMALLEST)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return kernels.unpack_signs(codes, 32 * codes.numel(), float(scale))


@dataclass(frozen=True)
class Trits(Quantizer):
    """Votes -1, 0 and 1 go in base 3, five to a byte: 1.6 bits each; less than a map once six in ten are not zero."""

    code_id = 4
    code_dtype = torch.uint8

    def num_bytes(self, count: int) -> int:
        return -(-count // _TRITS_PER_BYTE)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        digits = values.new_zeros(self.num_bytes(values.numel()) * _TRITS_PER_BYTE, dtype=torch.uint8)
        digits[: values.numel()] = (values + 1).to(torch.uint8)
        return (digits.view(-1, _TRITS_PER_BYTE) * self._weights(values)).sum(1, dtype=torch.uint8), values.new_ones(())

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        digits = torch.div(codes.unsqueeze(1), self._weights(codes), rounding_mode="floor") % 3
        return digits.view(-1).to(torch.float32) - 1

    def _weights(self, like: Tensor) -> Tensor:
        return torch.tensor([3**place for place in range(_TRITS_PER_BYTE)], dtype=torch.uint8, device=like.device)


@dataclass(frozen=True)
class Lloyd(Quantizer):
    """A value becomes the nearest of {-b, -a, a, b}, the means of the smaller and larger |v| of every `group` values.

    They are parted where each is nearer to the mean of its own (Lloyd, IEEE Trans. Inf. Theory 1982), from the mean of
    all on, in three rounds. What top-k sends has no small values, so this loses little, where `levels(bits=2)` loses
    most of it (two-bit-codes in docs/results.md). SparseLoCo (arXiv 2508.15706) also sends two bits a value; the code
    is ours.

    Example:
        >>> scheme = laconic.recipes.topk(0.01, quantize=Lloyd(64))
    """

    code_id = 9
    code_dtype = torch.int32
    rounds_to_nearest = True

    group: int = 128  # values that share two sizes, which take 12 bits

    def __post_init__(self) -> None:
        if not 0 < self.group <= LLOYD_LARGEST_GROUP or self.group % LLOYD_VALUES_PER_WORD:
            raise SchemeError(f"Lloyd.group is {self.group}; give a multiple of 16, up to {LLOYD_LARGEST_GROUP}")

    def num_bytes(self, count: int) -> int:
        words = -(-count // LLOYD_VALUES_PER_WORD)
        return 4 * (self._num_size_words(words) + words)

    def _num_size_words(self, num_words: int) -> int:
        """The words for the sizes, before so many for the values."""
        return -(-self._num_groups(num_words) * LLOYD_LANE_BITS // 32)

    def _num_groups(self, num_words: int) -> int:
        return -(-num_words * LLOYD_VALUES_PER_WORD // self.group)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.numel() == 0:
            return values.new_empty(0, dtype=torch.int32), values.new_ones(())
        top = values.abs().max().clamp_min(SMALLEST)
        lanes, words = kernels.encode_lloyd(values.contiguous(), top, self.group)
        return torch.cat([kernels.pack_lanes(lanes, LLOYD_LANE_BITS), words]), top

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        # Only one number of words for values makes this many in all.
        num_words = bisect_left(range(codes.numel()), codes.numel(), key=lambda n: n + self._num_size_words(n))
        size_words, words = codes.tensor_split([codes.numel() - num_words])
        lanes = kernels.unpack_lanes(size_words, self._num_groups(num_words), LLOYD_LANE_BITS)
        return kernels.decode_lloyd(lanes, words, scale, self.group)
