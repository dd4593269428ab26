"""Random numbers that need no state: a hash of who draws, when and where, the same on every machine."""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1

Key = tuple[int, int]  # two signed 32-bit numbers: a stream of its own


def hash_64(*numbers: int) -> int:
    """SplitMix64 over a sequence of whole numbers (Steele, Lea, Flood, OOPSLA 2014), as an unsigned 64-bit number."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK_64
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state


def key_of(*numbers: int) -> Key:
    """The stream of draws that belongs to these numbers: (seed, rank, step, bucket) and the like."""
    state = hash_64(*numbers)
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits
