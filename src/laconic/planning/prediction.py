"""A step's time from its parts: what is computed, what is exchanged, and how much of the one hides the other."""

from dataclasses import dataclass, replace
from functools import singledispatch

from laconic.planning.candidates import Candidate
from laconic.planning.links import LinkCosts, Messages
from laconic.scheme import AnyScheme, GossipScheme, OuterScheme, Scheme


@dataclass(frozen=True)
class Compute:
    """Seconds of a step, and when in it the buckets of its gradient are there."""

    alone_s: float  # of a worker that waits for nobody
    together_s: float  # of workers that wait for the slowest at each step
    arrivals_s: tuple[float, ...]  # since the step's beginning, by bucket; its end, where nothing overlaps
    num_entries: tuple[int, ...]  # of each bucket
    pipelined: bool  # whether one bucket is chosen while another travels
    beside: float  # what a second of work in another thread adds to a step: 0 with cores to spare, 1 with none

    @property
    def backward_s(self) -> float:
        """The time at which the last gradient is there."""
        return max(self.arrivals_s)

    @property
    def waits_for_slowest(self) -> float:
        """The share of a step for which workers wait for the slowest of them."""
        return max(0.0, 1 - self.alone_s / self.together_s)


@dataclass(frozen=True)
class Rehearsal:
    """The cost of one exchange of the whole model to a worker, in seconds by stage."""

    choose_s: float  # with encoding
    talk_s: float
    apply_s: float  # with decoding
    bytes_out: int
    messages: Messages
    fixed_s: float  # of talk_s, what does not depend on bytes
    busy_talk_s: float  # what messages take longer while all workers compute
    num_buckets: int
    num_entries: int
    adds: bool  # whether the network adds the messages

    @property
    def work_s(self) -> float:
        """The work of this worker's own cores or device."""
        return self.choose_s + self.apply_s

    def on(self, here: LinkCosts, elsewhere: LinkCosts) -> "Rehearsal":
        """The same exchange over other links: what was waited for beyond bytes and latency stays."""
        old = here.sums if self.adds else here.frames
        new = elsewhere.sums if self.adds else elsewhere.frames
        rest = max(0.0, self.talk_s - old.seconds(self.bytes_out, self.messages))
        return replace(
            self,
            talk_s=new.seconds(self.bytes_out, self.messages) + rest,
            fixed_s=new.fixed_s(self.bytes_out, self.messages) + rest,
            busy_talk_s=self.messages.count * (new.busy_latency_s - new.latency_s),
        )


@dataclass(frozen=True)
class Prediction:
    """Of one step of a user's, on average."""

    step_s: float
    talk_s: float  # for which a step waits for the network alone
    bytes_out: float
    memory_bytes: int  # beyond model, gradients and optimizer


def predict(candidate: Candidate, compute: Compute, rehearsal: Rehearsal) -> Prediction:
    """The time, bytes and memory of a user's step under a candidate."""
    step_s, talk_s, period = _step(candidate.scheme, compute, rehearsal, candidate.accumulate)
    return Prediction(
        step_s=step_s,
        talk_s=talk_s,
        bytes_out=rehearsal.bytes_out / period,
        memory_bytes=4 * _num_vectors(candidate.scheme) * rehearsal.num_entries,
    )


@singledispatch
def _step(scheme: AnyScheme, compute: Compute, rehearsal: Rehearsal, accumulate: int) -> tuple[float, float, float]:
    """(seconds of a step, those of them that only wait for the network, steps of an exchange of the whole model)."""
    raise NotImplementedError(scheme)


@_step.register
def _(scheme: Scheme, compute: Compute, rehearsal: Rehearsal, accumulate: int) -> tuple[float, float, float]:
    """Gradients: buckets leave as the backward pass makes them, one after the other.

    Without an exchange every micro-batch but the last takes a step alone.
    """
    with_it = _exposed(compute, rehearsal)
    without = _exposed(compute, replace(rehearsal, talk_s=0.0, busy_talk_s=0.0, fixed_s=0.0))
    talk_s = with_it - without
    together_s = compute.together_s + with_it
    step_s = ((accumulate - 1) * compute.alone_s + together_s) / accumulate
    return step_s, talk_s / accumulate, accumulate


@_step.register
def _(scheme: OuterScheme, compute: Compute, rehearsal: Rehearsal, accumulate: int) -> tuple[float, float, float]:
    """Drift: a round of all fragments every H steps, each of which may travel for `delay` steps unnoticed."""
    rounds = scheme.when
    fixed_s = rehearsal.fixed_s / rehearsal.num_buckets  # a fragment is a bucket of its own
    fragment_talk_s = fixed_s + (rehearsal.talk_s - rehearsal.fixed_s) / rounds.fragments
    hidden_s = rounds.delay * compute.alone_s
    waits_s = rounds.fragments * max(0.0, fragment_talk_s - hidden_s)
    # A link that is never idle sets the pace.
    saturated_s = rounds.fragments * fragment_talk_s - rounds.every * compute.alone_s
    talk_s = max(waits_s, saturated_s)
    work_s = rehearsal.work_s * (compute.beside if rounds.delay else 1.0)
    # Who waits for all at an agreement waits for the slowest of that time, less by the root of the steps between.
    slowest_s = 0.0 if rounds.delay else (compute.together_s - compute.alone_s) * rounds.every**0.5
    return compute.alone_s + (talk_s + work_s + slowest_s) / rounds.every, talk_s / rounds.every, rounds.every


@_step.register
def _(scheme: GossipScheme, compute: Compute, rehearsal: Rehearsal, accumulate: int) -> tuple[float, float, float]:
    """Models: who asks when it likes waits for nobody, unless messages leave more slowly than they are made.

    Who keeps an appointment is there until both models have crossed.
    """
    own_s = compute.alone_s + rehearsal.work_s
    hidden_s = own_s if scheme.exchange.mode == "free" else 0.0
    waits_s = max(0.0, rehearsal.talk_s - hidden_s)
    return own_s + waits_s, waits_s, 1.0


def _exposed(compute: Compute, rehearsal: Rehearsal) -> float:
    """Seconds by which a step is longer with its exchange than without.

    A bucket is chosen and encoded when its gradient is there, then sent, then applied, each when that stage is free.
    Without a pipeline one thread does all three. What is done while the backward pass goes on takes `beside` of its
    time from that.
    """
    chosen_s = talked_s = applied_s = stretched_s = 0.0
    whole = sum(compute.num_entries)
    for arrival_s, num_entries in zip(compute.arrivals_s, compute.num_entries, strict=True):
        share = num_entries / whole
        hides = arrival_s < compute.backward_s
        start_s = max(arrival_s + stretched_s, chosen_s if compute.pipelined else applied_s)
        chosen_s = start_s + share * rehearsal.choose_s
        # Messages are as many for small buckets.
        fixed_s = (rehearsal.fixed_s + hides * rehearsal.busy_talk_s) / len(compute.num_entries)
        talked_s = max(chosen_s, talked_s) + fixed_s + share * (rehearsal.talk_s - rehearsal.fixed_s)
        applied_s = max(talked_s, applied_s) + share * rehearsal.apply_s
        stretched_s += hides * compute.beside * share * rehearsal.work_s
    return max(compute.backward_s + stretched_s, applied_s) - compute.backward_s


def _num_vectors(scheme: AnyScheme) -> int:
    """Vectors of the model's length that a scheme keeps: a residual; an anchor and its momentum."""
    if isinstance(scheme, GossipScheme):
        return 0
    outer = 1 + bool(scheme.then.momentum) if isinstance(scheme, OuterScheme) else 0
    return len(scheme.exchanged.memory.kinds) + outer
