"""Virtual workers in one process: the laws without the cost of starting processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from laconic import Scheme, Session, testing
from laconic.layout import Bucket, Layout
from laconic.session import Background
from laconic.testing import InProcess

SHAPES = {"a": (40, 50), "b": (10,), "c": (5, 10, 30), "d": (7,), "e": (1201,), "f": (8, 5), "g": (3,)}


def layout_of(names: str) -> Layout:
    """These parameters end to end."""
    return Layout.of(list(names), [SHAPES[name] for name in names])


# Three buckets of mixed shapes; "b" and "d" are too small to sparsify, and the last bucket holds only such.
LAYOUTS = (layout_of("ab"), layout_of("cde"), layout_of("fg"))

T = TypeVar("T")


def gradients(rank: int, step: int, layouts: Sequence[Layout] = LAYOUTS) -> dict[str, Tensor]:
    """A worker's gradient at a step: heavy-tailed, other for each worker, with a part common to all."""
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(7919 * (step + 1) + rank)
    return {
        span.name: torch.randn(span.num_entries, generator=common) ** 3 + torch.randn(span.num_entries, generator=own)
        for layout in layouts
        for span in layout.spans
    }


def one_step(session: Session, given: Mapping[str, Tensor], layouts: Sequence[Layout] = LAYOUTS) -> dict[str, Tensor]:
    """Pass one step's gradients through a session; returns what came out, by parameter."""
    buckets = buckets_of(given, layouts)
    if session.wants_whole_step:
        session.exchange_step_(buckets)
    else:
        for bucket in buckets:
            session.exchange_(bucket)
    return by_name(buckets)


def pipelined_step(session: Session, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same through the stages."""
    buckets = buckets_of(given)
    background = Background(session, torch.device("cpu"))
    futures = [background.submit(bucket) for bucket in buckets]
    for future in futures:
        future.wait()
    background.close()
    return by_name(buckets)


def buckets_of(given: Mapping[str, Tensor], layouts: Sequence[Layout] = LAYOUTS) -> list[Bucket]:
    """The buckets of one step."""
    flats = [torch.cat([given[name] for name in layout.names]) for layout in layouts]
    last = len(layouts) - 1
    return [Bucket(index, layouts[index], flat, is_last=index == last) for index, flat in enumerate(flats)]


def by_name(buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """What stands in the buckets, by parameter."""
    return {span.name: bucket.flat[span.start : span.stop] for bucket in buckets for span in bucket.layout.spans}


def run(scheme: Scheme, num_workers: int, work: Callable[[Session, int], T]) -> list[T]:
    """work(session, rank) once for each virtual worker."""

    def start(transport: InProcess) -> T:
        return work(Session(scheme, transport), transport.rank)

    return in_process(num_workers, start)


def in_process(num_workers: int, work: Callable[[InProcess], T], *, num_servers: int = 0) -> list[T]:
    """laconic.testing's, kept to one core."""
    with one_core():
        return testing.in_process(num_workers, work, num_servers=num_servers)


@contextmanager
def one_core() -> Iterator[None]:
    """Keep to one core: on two, threads with little to do wake each other at every call, and take twice the time.

    Of several processes that run tests, each has a core of its own.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})  # this thread, and those that it starts
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
