"""Which path a scheme takes."""

from __future__ import annotations

from laconic.errors import SchemeError
from laconic.exchange import AllReduce, Server
from laconic.layout import Layout
from laconic.memory import Account, Ledger
from laconic.paths.all_gather import Gathering
from laconic.paths.choice import LedChoice, OwnChoice, ScoredChoice
from laconic.paths.clock import PhaseClock
from laconic.paths.float_sum import FloatSum
from laconic.paths.frame_plan import FramePlans
from laconic.paths.integer_sum import IntegerSum
from laconic.paths.path import Path
from laconic.paths.plain_sum import PlainSum
from laconic.paths.push_pull import PushPull
from laconic.paths.shared_choice import SharedChoice
from laconic.paths.silence import Silence
from laconic.quantize import Exact, FloatCode, Grid, Quantizer, carrier_for
from laconic.scheme import Scheme
from laconic.select import Chooser, Everything, Overlap, SharedSelector
from laconic.server import Owner
from laconic.transport import Collectives, Transport, ring_bytes, silent_end


def path_for(
    scheme: Scheme,
    transport: Transport,
    clock: PhaseClock,
    ledger: Ledger[Account],
    *,
    undoes: bool = False,
    holds_idle: bool = False,
) -> Path:
    """The one path that carries a scheme's buckets over this transport; dense steps of a warm-up have another.

    `undoes` and `holds_idle` are for owners: see Session.
    """
    select = scheme.select
    quantize = scheme.quantize
    exchange = scheme.exchange
    if not scheme.talks:
        return Silence()
    if isinstance(exchange, AllReduce) and isinstance(select, SharedSelector):
        choice = SharedChoice(select, keeps=bool(scheme.memory.kinds))
        if isinstance(quantize, Grid):
            carrier = carrier_for(quantize.levels, transport.num_workers, exchange.stages)
            return IntegerSum(choice, quantize, carrier, collectives(transport, scheme), clock)
        if isinstance(quantize, FloatCode):
            plain = select.density == 1 and not choice.keeps
            return PlainSum(quantize, transport, clock) if plain else FloatSum(choice, quantize, transport, clock)
    if isinstance(select, Chooser) and isinstance(quantize, Quantizer):
        plans = FramePlans(select, quantize)
        if not isinstance(exchange, Server):
            return Gathering(plans, quantize, collectives(transport, scheme), clock)
        return PushPull(
            plans,
            _choice(select, plans, transport, clock),
            exchange,
            quantize,
            _owner(scheme, transport, undoes=undoes, holds_idle=holds_idle),
            ledger,
            transport,
            clock,
        )
    raise SchemeError(f"no path carries {scheme}; compose it of parts that fit together")


def dense_path(scheme: Scheme, transport: Transport, clock: PhaseClock) -> Path:
    """The path of a scheme's dense steps: everything in the gradient's own type, out of its accounts."""
    return FloatSum(SharedChoice(Everything(), keeps=bool(scheme.memory.kinds)), Exact(), transport, clock)


def bytes_out(scheme: Scheme, layout: Layout, num_workers: int) -> int:
    """What leaves one of M workers for a float32 bucket of this layout once the trigger has reached its target."""
    return path_for(scheme, silent_end(num_workers), PhaseClock(), Ledger(scheme.memory)).bytes_out(layout)


def bits_per_entry(scheme: Scheme, layout: Layout, num_workers: int) -> float:
    """Bits that each entry of such a bucket takes in an all-reduce, or would take for as many bytes."""
    return 32 * bytes_out(scheme, layout, num_workers) / ring_bytes(4 * layout.num_entries, num_workers)


def collectives(transport: Transport, scheme: Scheme) -> Collectives:
    """The transport, where all workers can make a call together."""
    if not isinstance(transport, Collectives):
        raise SchemeError(f"{scheme} asks no server; leave the servers out, or give a scheme with exchange=Server()")
    return transport


def _choice(select: Chooser, plans: FramePlans, transport: Transport, clock: PhaseClock) -> OwnChoice:
    if not isinstance(select, Overlap):
        return OwnChoice(plans, clock)
    if select.score == "leader":
        return LedChoice(plans, clock, select, transport)
    return ScoredChoice(plans, clock, select)


def _owner(scheme: Scheme, transport: Transport, *, undoes: bool, holds_idle: bool) -> Owner | None:
    """What answers for this worker's own share, if it owns one."""
    if transport.owned_share is None:
        return None
    return Owner(scheme, transport.owned_share, transport.num_shares, undoes=undoes, holds_idle=holds_idle)
