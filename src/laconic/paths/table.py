"""Which path a scheme takes."""

from dataclasses import replace

from laconic.exchange import AllReduce, Pairs
from laconic.kernels import Executor
from laconic.layout import Layout
from laconic.memory import Account, Ledger, Residual
from laconic.paths.frames import FramePlans, Gathering
from laconic.paths.low_rank import LowRankSum
from laconic.paths.path import NoExchange, Path, PhaseClock
from laconic.paths.push_pull import PushPull
from laconic.paths.scored_push_pull import ScoredPushPull
from laconic.paths.sums import FloatSum, IntegerSum, PairMean, PlainSum, SharedSelection
from laconic.quantize import Exact, Grid, carrier_for
from laconic.scheme import Scheme
from laconic.select import Chooser, Everything, LowRank, Overlap, SharedSelector
from laconic.server import Owner
from laconic.transport import Collectives, Transport, ring_bytes, silent_end


def path_for(
    scheme: Scheme,
    transport: Transport,
    clock: PhaseClock,
    ledger: Ledger[Account],
    *,
    executor: Executor | None = None,
    undoes: bool = False,
    holds_idle: bool = False,
) -> Path:
    """The one path that carries a scheme's buckets over this transport; dense steps of a warm-up have another.

    `undoes` and `holds_idle` are for owners: see Session.
    """
    ends = transport, clock
    select = scheme.select
    if not scheme.talks:
        return NoExchange(*ends)
    if isinstance(scheme.exchange, Pairs):
        assert isinstance(transport, Collectives)
        return PairMean(transport, clock, scheme.frame_code, scheme.exchange.seed)
    if scheme.exchange.adds_in_flight:
        return _path_of_sums(scheme, transport, clock)
    assert isinstance(select, Chooser)
    plans = FramePlans(select, scheme.frame_code)
    executor = executor or Executor()
    # In a captured step a gradient that is not finite becomes zero: accounts that fade would fade all the same.
    asks_host = select.asks_host or scheme.frame_code.asks_host or scheme.memory != Residual()
    if not scheme.has_owners:
        assert isinstance(transport, Collectives)
        return Gathering(transport, clock, plans, scheme.frame_code, executor, asks_host)
    owner = None
    if transport.owned_share is not None:
        owner = Owner(scheme, transport.owned_share, transport.num_shares, undoes=undoes, holds_idle=holds_idle)
    parts = *ends, plans, scheme.server, scheme.frame_code, owner, ledger, executor, asks_host
    return ScoredPushPull(*parts, select) if isinstance(select, Overlap) else PushPull(*parts)


def _path_of_sums(scheme: Scheme, transport: Transport, clock: PhaseClock) -> Path:
    """That of a scheme whose messages a network adds."""
    ends = transport, clock
    select = scheme.select
    if isinstance(select, LowRank):
        return LowRankSum(*ends, select, scheme.float_code)
    assert isinstance(select, SharedSelector)
    selection = SharedSelection(select, keeps=bool(scheme.memory.kinds))
    grid = scheme.quantize
    if isinstance(grid, Grid):
        assert isinstance(scheme.exchange, AllReduce) and isinstance(transport, Collectives)
        carrier = carrier_for(grid.levels, transport.num_workers, scheme.exchange.stages)
        return IntegerSum(transport, clock, selection, grid, carrier)
    is_plain = select.sends_all and not selection.keeps
    return PlainSum(*ends, scheme.float_code) if is_plain else FloatSum(*ends, selection, scheme.float_code)


def dense_path(scheme: Scheme, transport: Transport, clock: PhaseClock, *, keeps: bool) -> Path:
    """The path of a scheme's dense steps: everything in the gradient's own type, out of its accounts."""
    if scheme.exchange.in_pairs:
        return path_for(replace(scheme, quantize=Exact()), transport, clock, scheme.memory.ledger())
    return FloatSum(transport, clock, SharedSelection(Everything(), keeps=keeps), Exact())


def bytes_out(scheme: Scheme, layout: Layout, num_workers: int) -> int:
    """What leaves one of M workers for a float32 bucket of this layout once the trigger has reached its target."""
    return path_for(scheme, silent_end(num_workers), PhaseClock(), scheme.memory.ledger()).bytes_out(layout)


def bits_per_entry(scheme: Scheme, layout: Layout, num_workers: int) -> float:
    """Bits that each entry of such a bucket takes in an all-reduce, or would take for as many bytes."""
    return 32 * bytes_out(scheme, layout, num_workers) / ring_bytes(4 * layout.num_entries, num_workers)
