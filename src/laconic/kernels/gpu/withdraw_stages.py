"""The stages of the withdrawal kernel: bins of magnitudes, a pass that adds, candidates, a search of all entries."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.contract import GUESS, MARGIN
from laconic.kernels.gpu.bits import lowest_one, num_ones
from laconic.kernels.gpu.launch import DIGITS, NUM_OPEN, magnitude_bits, meet

_GUESS = tl.constexpr(GUESS)
_MARGIN = tl.constexpr(MARGIN)

# 2,048 bins of one width, in which the k-th largest is expected, from the 512th on; above, 512 bins each time the
# distance from the guess doubles, four times; the last one has no end. So one bin holds a few thousandths of those
# between the guess and the k-th largest, even if the guess was far too low.
NUM_BINS = tl.constexpr(4096)
_NUM_EVEN = tl.constexpr(2048)
_LOG_EXPECTED = tl.constexpr(9)
_LOG_OCTAVE = tl.constexpr(9)
_FLOAT_OF_NUM_EVEN = tl.constexpr((127 + 11) << 23)  # the bits of 2048.0
NUM_COPIES = tl.constexpr(4)  # of all bins, so that fewer programs add to the same one


@triton.jit
def guessed(search):
    """The bits of the guess (without one, more than any number has), and how many of them a narrow bin spans."""
    guess = tl.load(search + _GUESS).to(tl.float32)
    least = tl.where(guess > 0, magnitude_bits(guess), 0x7FFFFFFF)
    log_margin = (magnitude_bits(tl.load(search + _MARGIN).to(tl.float32)) >> 23) - 127
    return least, tl.maximum(23 + log_margin - _LOG_EXPECTED, 0)


@triton.jit
def bin_of(bits, least, shift):
    """The bin of a magnitude that reaches `least`."""
    steps = (bits - least) >> shift
    octaves = steps.to(tl.float32).to(tl.int32, bitcast=True) - _FLOAT_OF_NUM_EVEN
    return tl.where(steps < _NUM_EVEN, steps, tl.minimum(_NUM_EVEN + (octaves >> (23 - _LOG_OCTAVE)), NUM_BINS - 1))


@triton.jit
def find_bin(bins, k, least, shift):
    """Where the k-th largest is.

    Its bin, the least magnitude in there, how many bits tell the others in there apart, how many of them are among the
    k largest, and how many there are.
    """
    each = tl.arange(0, NUM_BINS)
    copies = tl.arange(0, NUM_COPIES)[:, None] * NUM_BINS + each[None, :]
    tally = tl.sum(tl.load(bins + copies, cache_modifier=".cg"), 0)
    reached = tl.sum(tally, 0) - tl.cumsum(tally, 0) + tally  # in this bin or a higher one
    kth_bin = tl.maximum(tl.sum((reached >= k).to(tl.int32), 0) - 1, 0)
    wanted = k - tl.sum(tl.where(each > kth_bin, tally, 0), 0)
    octaves = tl.maximum(kth_bin - _NUM_EVEN, 0) << (23 - _LOG_OCTAVE)
    steps = tl.where(
        kth_bin < _NUM_EVEN, kth_bin, (octaves + _FLOAT_OF_NUM_EVEN).to(tl.float32, bitcast=True).to(tl.int32)
    )
    num_bits = tl.where(kth_bin < _NUM_EVEN, shift, shift + 2 + (octaves >> 23))
    num_bits = tl.where(kth_bin == NUM_BINS - 1, 31, num_bits)
    return kth_bin, least + (steps << shift), num_bits, wanted, tl.sum(tl.where(each == kth_bin, tally, 0), 0)


TILE = tl.constexpr(4096)  # entries that a program reads at once; 16 a thread, so 128 bytes of loads in flight
WORDS = tl.constexpr(TILE.value // 32)
GROUP = tl.constexpr(2)  # tiles whose hits are moved together, from the cache: a word of 32 entries to each thread


@triton.jit
def _tile_of(row, run):
    """The tile that is this program's number `row`: programs take turns of `run` tiles."""
    return (row // run * tl.num_programs(0) + tl.program_id(0)) * run + row % run


@triton.jit
def _load_tile(x, tile, n, MASKED: tl.constexpr):
    """Rows of 32 entries. Only the last tile is masked: a mask that no compiler sees through undoes 16-byte loads."""
    within = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    start = tile.to(tl.int64) * TILE
    if MASKED:
        return tl.load(x + start + within, mask=within < n - start, other=0.0)
    return tl.load(x + start + within)


@triton.jit
def _load_both(balance, addend, tile, n, MASKED: tl.constexpr):
    x = _load_tile(balance, tile, n, MASKED)
    return x, _load_tile(addend, tile, n, MASKED) if addend is not None else x


@triton.jit
def _add_tile(balance, addend, words, x, y, tile, n, factor, least, MASKED: tl.constexpr):
    """Add a loaded tile and keep a bit for each hit; returns |x| summed four by four, within a thread."""
    lane = tl.arange(0, 32)[None, :]
    within = tl.arange(0, WORDS)[:, None] * 32 + lane
    start = tile.to(tl.int64) * TILE
    inside = (within < n - start) if MASKED else None
    if addend is not None:
        x += factor * y
        tl.store(balance + start + within, x, mask=inside)
    hit = magnitude_bits(x) >= least
    if MASKED:
        hit &= inside
    tl.store(words + tl.arange(0, WORDS), tl.sum(hit.to(tl.int32) << lane, 1))
    return tl.sum(tl.reshape(tl.abs(x), [WORDS, 8, 4]), 2)


@triton.jit
def _move_hits(balance, words, places, kept, bins, first_row, num_rows, num_hits, room, run, least, shift):
    """Move the hits of some tiles to the list, in the order of positions, while there is room; returns their number.

    Each round takes one bit from every word, so that 36 % of words with a hit (1.4 % of entries) cost a few rounds and
    empty words nothing of their own.
    """
    tl.debug_barrier()
    at = tl.arange(0, GROUP * WORDS)
    word = tl.load(words + at, mask=at < num_rows * WORDS, other=0).to(tl.uint32, bitcast=True)
    ones = num_ones(word)
    slot = num_hits + tl.cumsum(ones, 0) - ones
    position = _tile_of(first_row + at // WORDS, run) * TILE + at % WORDS * 32
    for _ in range(tl.max(ones, 0)):
        listed = (word != 0) & (slot < room)
        place = position + lowest_one(word)
        value = tl.load(balance + place, mask=listed, other=0.0)
        tl.store(places + slot, place, mask=listed)
        tl.store(kept + slot, value, mask=listed)
        tl.store(balance + place, tl.zeros_like(value), mask=listed)
        tl.atomic_add(bins + bin_of(magnitude_bits(value), least, shift), 1, mask=listed, sem="relaxed")
        slot += 1
        word &= word - 1
    tl.debug_barrier()
    return tl.sum(ones, 0)


@triton.jit
def add_entries(balance, addend, words, places, kept, bins, run, n, room, factor, least, shift):
    """Add this program's tiles; returns the sum of |x| in them and how many of them reach `least`.

    What reaches it leaves the balance for the program's list, and is counted in bins. Turns of few tiles spread the
    hits of one layer, which may have them all, over many programs. The next tile is loaded ahead, so that memory has
    work while hits are moved.
    """
    programs = tl.num_programs(0)
    me = tl.program_id(0)
    num_whole = n // TILE
    num_turns = num_whole // (run * programs)
    rest = num_whole - num_turns * run * programs - me * run
    num_rows = num_turns * run + tl.minimum(tl.maximum(rest, 0), run)
    sums = tl.zeros([WORDS, 8], tl.float32)
    num_hits = 0
    if num_rows > 0:
        x, y = _load_both(balance, addend, _tile_of(0, run), n, MASKED=False)
        for first_row in range(0, num_rows, GROUP):
            num_here = tl.minimum(num_rows - first_row, GROUP)
            for row in range(num_here):
                ahead = _tile_of(tl.minimum(first_row + row + 1, num_rows - 1), run)
                next_x, next_y = _load_both(balance, addend, ahead, n, MASKED=False)
                tile = _tile_of(first_row + row, run)
                sums += _add_tile(balance, addend, words + row * WORDS, x, y, tile, n, factor, least, MASKED=False)
                x = next_x
                y = next_y
            num_hits += _move_hits(
                balance, words, places, kept, bins, first_row, num_here, num_hits, room, run, least, shift
            )
    if (num_whole * TILE < n) & (num_whole // run % programs == me):  # the last tile of all, if it is not whole
        x, y = _load_both(balance, addend, num_whole, n, MASKED=True)
        sums += _add_tile(balance, addend, words, x, y, num_whole, n, factor, least, MASKED=True)
        num_hits += _move_hits(balance, words, places, kept, bins, num_rows, 1, num_hits, room, run, least, shift)
    return tl.sum(tl.sum(sums.to(tl.float64), 1), 0), num_hits


SPAN = tl.constexpr(1024)  # candidates handled at once; a program has 5,000 to 8,000 of them at 1 % of 100 M entries
TURNS = tl.constexpr(32)  # of a program, at most
_AT_HAND = tl.constexpr(1024)  # open candidates that a search keeps in registers; a few hundred are usual
_MOST = tl.constexpr(0x7FFFFFFF)  # a position


@triton.jit
def _load_candidates(places, kept, start, num_hits):
    """Positions and values of candidates from `start` on, and which of them there are; asked for one round ahead."""
    at = start + tl.arange(0, SPAN)
    here = at < num_hits
    return tl.load(places + at, mask=here, other=0), tl.load(kept + at, mask=here, other=0.0), here


@triton.jit
def list_open(memory, opens, places, kept, num_hits, run, least, shift, kth_bin):
    """List the candidates in the bin of the k-th largest, for all to see; returns how many of each turn exceed it."""
    above = tl.zeros([TURNS], tl.int32)
    place, value, here = _load_candidates(places, kept, 0, num_hits)
    for start in range(0, num_hits, SPAN):
        next_place, next_value, next_here = _load_candidates(places, kept, start + SPAN, num_hits)
        bits = magnitude_bits(value)
        own = bin_of(bits, least, shift)
        above += tl.histogram(_run_of(place, run) // tl.num_programs(0), TURNS, mask=here & (own > kth_bin))
        is_open = (here & (own == kth_bin)).to(tl.int32)
        num_open = tl.sum(is_open, 0)
        if num_open > 0:  # which is so in one of three, as there are a few hundred in all
            slot = tl.atomic_add(memory + NUM_OPEN, num_open, sem="relaxed") + tl.cumsum(is_open, 0) - 1
            tl.store(opens + slot, (bits.to(tl.int64) << 32) + place, mask=is_open != 0)
        place = next_place
        value = next_value
        here = next_here
    return above


@triton.jit
def _run_of(place, run):
    """Which run of tiles a position is in; run r is a turn of program r % programs, its turn number r // programs."""
    return place // TILE // run


@triton.jit
def _load_open(opens, at, num_open):
    """Positions and magnitudes of open candidates; -1 where there are none."""
    pair = tl.load(opens + at, mask=at < num_open, other=-1, cache_modifier=".cg")  # other programs wrote it
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def _key(place, bits, kth):
    """What open candidates are ordered by: their bits, or among those equal to `kth` their places from the last on."""
    return bits if kth is None else tl.where(bits == kth, _MOST - place, -1)


@triton.jit
def _in_fields(key, one, two, three):
    """How many keys reach each of three numbers, in 21 bits each."""
    reached = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 21) + ((key >= three).to(tl.int64) << 42)
    return tl.sum(reached, 0)


@triton.jit
def _num_reaching(opens, num_open, key, kth, one, two, three):
    """How many keys of open candidates reach each of three numbers. The first are at hand, others are read again."""
    counts = _in_fields(key, one, two, three)
    for start in range(_AT_HAND, num_open, _AT_HAND):
        place, bits = _load_open(opens, start + tl.arange(0, _AT_HAND), num_open)
        counts += _in_fields(_key(place, bits, kth), one, two, three)
    return counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42


@triton.jit
def _reached_by(opens, num_open, key, kth, lowest, num_bits, wanted):
    """The largest of the numbers lowest ... lowest + 2^num_bits - 1 that `wanted` keys reach, two bits at a time."""
    for step in range(0, num_bits, 2):
        unit = 1 << tl.maximum(num_bits - 2 - step, 0)
        one, two, three = lowest + unit, lowest + 2 * unit, lowest + 3 * unit  # one past the last number is negative
        num_one, num_two, num_three = _num_reaching(opens, num_open, key, kth, one, two, three)
        raised = tl.where((one > lowest) & (num_one >= wanted), one, lowest)
        raised = tl.where((two > lowest) & (num_two >= wanted), two, raised)
        lowest = tl.where((three > lowest) & (num_three >= wanted), three, raised)
    return lowest


@triton.jit
def settle(opens, num_open, lowest, num_bits, wanted):
    """The bits of the `wanted`-th largest open candidate, and the last position at which one equal to it is taken."""
    place, bits = _load_open(opens, tl.arange(0, _AT_HAND), num_open)
    kth = _reached_by(opens, num_open, bits, None, lowest, num_bits, wanted)
    num_at_least, num_above, _ = _num_reaching(opens, num_open, bits, None, kth, kth + 1, kth + 1)
    last = _MOST
    if num_at_least > wanted:
        key = _key(place, bits, kth)
        last -= _reached_by(opens, num_open, key, kth, tl.zeros_like(kth), 31, wanted - num_above)
    return kth, last


@triton.jit
def _is_chosen(bits, place, kth, last):
    return (bits > kth) | ((bits == kth) & (place <= last))


@triton.jit
def first_slots(aboves, opens, num_open, kth, last, run, WIDTH: tl.constexpr):
    """For each turn of this program: how many are chosen before it, less those that the program itself chose before."""
    programs = tl.num_programs(0)
    me = tl.program_id(0)
    program = tl.arange(0, WIDTH)[None, :]
    at = aboves + tl.arange(0, TURNS)[:, None] * programs + program
    above = tl.load(at, mask=program < programs, other=0, cache_modifier=".cg")
    by_all = tl.sum(above, 1)
    earlier = tl.sum(tl.where(program < me, above, 0), 1)
    by_me = tl.sum(tl.where(program == me, above, 0), 1)
    for start in range(0, num_open, SPAN):
        place, bits = _load_open(opens, start + tl.arange(0, SPAN), num_open)
        chosen = _is_chosen(bits, place, kth, last)
        turn = _run_of(place, run) // programs
        who = _run_of(place, run) - turn * programs
        by_all += tl.histogram(turn, TURNS, mask=chosen)
        earlier += tl.histogram(turn, TURNS, mask=chosen & (who < me))
        by_me += tl.histogram(turn, TURNS, mask=chosen & (who == me))
    return tl.cumsum(by_all, 0) - by_all + earlier - tl.cumsum(by_me, 0) + by_me


@triton.jit
def take_candidates(balance, positions, values, places, kept, slots, num_hits, kth, last, run):
    """Write the chosen out and put the others back where they were."""
    taken = 0
    place, value, here = _load_candidates(places, kept, 0, num_hits)
    for start in range(0, num_hits, SPAN):
        next_place, next_value, next_here = _load_candidates(places, kept, start + SPAN, num_hits)
        chosen = here & _is_chosen(magnitude_bits(value), place, kth, last)
        rank = tl.cumsum(chosen.to(tl.int32), 0)
        slot = tl.load(slots + _run_of(place, run) // tl.num_programs(0), mask=here, other=0) + taken + rank - 1
        tl.store(positions + slot, place, mask=chosen)
        tl.store(values + slot, value, mask=chosen)
        tl.store(balance + place, value, mask=here & (chosen == 0))
        taken += tl.max(rank, 0)
        place = next_place
        value = next_value
        here = next_here


@triton.jit
def restore(balance, places, kept, count):
    """Put all candidates back."""
    for start in range(0, count, SPAN):
        at = start + tl.arange(0, SPAN)
        place = tl.load(places + at, mask=at < count, other=0)
        tl.store(balance + place, tl.load(kept + at, mask=at < count), mask=at < count)


PASSES = tl.constexpr(6)  # four digits, a count, the taking
NUM_VALUES = tl.constexpr(256)  # of a digit of 8 bits; tallies of 2,048 values take twice as long


@triton.jit
def _tally_entries(balance, begin, end, shift, prefix):
    """How many entries of [begin, end) whose digits above are `prefix` have each value of the next 8 bits."""
    tally = tl.zeros([NUM_VALUES], tl.int32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        digits = magnitude_bits(tl.load(balance + place, mask=place < end, other=0.0)) >> shift
        tally += tl.histogram(digits & 255, NUM_VALUES, mask=(place < end) & (digits >> 8 == prefix))
    return tally


@triton.jit
def find_kth(memory, balance, begin, end, k, awaited):
    """The bits of the k-th largest |x|, how many equal to it belong to the k, and the arrivals awaited so far.

    Four digits of 8 bits, the highest first: each program tallies its entries [begin, end), and all read the sum.
    """
    value = tl.arange(0, NUM_VALUES)
    prefix = 0
    wanted = k
    for digit in range(4):
        own = _tally_entries(balance, begin, end, 24 - 8 * digit, prefix)
        row = memory + DIGITS + digit * NUM_VALUES + value
        tl.atomic_add(row, own, mask=own > 0, sem="relaxed")
        awaited = meet(memory, awaited)
        tally = tl.load(row, cache_modifier=".cg")
        reached = tl.sum(tally, 0) - tl.cumsum(tally, 0) + tally  # of this value or a higher one
        chosen = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(value > chosen, tally, 0), 0)
        prefix = (prefix << 8) + chosen
    return prefix, wanted, awaited


@triton.jit
def _weigh(bits, kth, here):
    """1 << 32 for what is above `kth`, 1 for what equals it: both counts in one sum."""
    return tl.where(here, ((bits > kth).to(tl.int64) << 32) + (bits == kth).to(tl.int64), 0)


@triton.jit
def count_entries(balance, begin, end, kth):
    """How many entries of [begin, end) lie (above << 32) + (at) `kth`."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(balance + place, mask=place < end, other=0.0))
        total += _weigh(bits, kth, place < end)
    return tl.sum(total, 0)


@triton.jit
def take_entries(balance, positions, values, begin, end, before, kth, ties):
    """Take what is above `kth`, and the first `ties` at it, out of [begin, end); leave zeros behind.

    `before` counts (above << 32) + (at) in all that stands earlier, which tells each of the chosen its rank.
    """
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        here = place < end
        value = tl.load(balance + place, mask=here, other=0.0)
        bits = magnitude_bits(value)
        weight = _weigh(bits, kth, here)
        rank = before + tl.cumsum(weight, 0) - weight
        at_kth = rank & 0xFFFFFFFF
        chosen = here & ((bits > kth) | ((bits == kth) & (at_kth < ties)))
        slot = (rank >> 32) + tl.minimum(at_kth, ties)
        tl.store(positions + slot, place, mask=chosen)
        tl.store(values + slot, value, mask=chosen)
        tl.store(balance + place, tl.zeros_like(value), mask=chosen)
        before += tl.sum(weight, 0)
