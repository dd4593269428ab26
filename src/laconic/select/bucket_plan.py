"""A selector's plan for one bucket: known before any gradient is, and the same on every worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic import kernels
from laconic.layout import Layout, Span
from laconic.wire import IndexBlock


@dataclass(frozen=True)
class Window:
    """A range [start, stop) within which exactly `k` positions are selected."""

    start: int
    stop: int
    k: int


@dataclass(frozen=True)
class BucketPlan:
    """Spans that go whole, whose positions need no code, and windows from each of which k positions are selected."""

    num_entries: int
    fixed: tuple[Span, ...]
    windows: tuple[Window, ...]

    @cached_property
    def num_fixed(self) -> int:
        return sum(span.num_entries for span in self.fixed)

    @cached_property
    def k(self) -> int:
        return sum(window.k for window in self.windows)


class Selector(Protocol):
    """A frozen answer to *what is sent*."""

    is_shared: ClassVar[bool] = False  # whether all workers send the same positions, which a network can add
    needs_owners: ClassVar[bool] = False  # whether it makes unions small, which only an owner's answer gains by
    factors: ClassVar[bool] = False  # whether products of thin matrices stand for the entries

    @property
    def density(self) -> float:
        """The share of entries it aims to send, in (0, 1]."""

    @property
    def sends_all(self) -> bool:
        """Whether every entry goes at every step."""
        return self.density == 1

    @property
    def per_parameter(self) -> bool:
        """Whether each parameter is selected from by itself, so that buckets do not matter."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether what goes follows from the number of the step, so that every bucket must go at each."""
        return False

    def density_among(self, num_workers: int) -> float:
        """That share among M workers."""
        return self.density

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        """The plan of a bucket of this layout, of whose entries the share `density` may go."""


@runtime_checkable
class SharedSelector(Selector, Protocol):
    """A selector whose positions follow from the step alone."""

    def positions(self, plan: BucketPlan, step: int, bucket: int, device: torch.device) -> Tensor:
        """The plan.k positions of a step that are not fixed, int64, ascending."""


@runtime_checkable
class Chooser(Selector, Protocol):
    """A selector that looks at the entries, so that every worker has positions of its own."""

    @property
    def dense_below(self) -> int:
        """Parameters with fewer entries go whole."""

    @property
    def asks_host(self) -> bool:
        """Whether a GPU waits for the host while it selects."""
        return True

    @property
    def withdraw_window_(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """kernels.withdraw_, or a function like it, for one window."""
        return kernels.withdraw_

    def index_code(self, plan: BucketPlan) -> IndexBlock | None:
        """The code of a frame's positions; None: the shortest of those that know nothing of the selector."""
        return None

    def withdraw_(
        self, balance: Tensor, addend: Tensor | None, factor: float, plan: BucketPlan, searches: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """balance += factor*addend within the windows; the plan.k selected positions (ascending, int32) and values.

        The selected entries of `balance` become zero. `searches` (kernels.new_search, one per window) remember from
        step to step where to look first.
        """
        positions = [torch.empty(0, dtype=torch.int32, device=balance.device)]
        values = [balance[:0]]
        for window, search in zip(plan.windows, searches, strict=True):
            inside = slice(window.start, window.stop)
            due = None if addend is None else addend[inside]
            at, withdrawn = self.withdraw_window_(balance[inside], due, window.k, search, factor=factor)
            positions.append(at + window.start if window.start else at)
            values.append(withdrawn)
        if len(plan.windows) == 1:
            return positions[1], values[1]
        return torch.cat(positions), torch.cat(values)


def plan_of_chunks(layout: Layout, chunk: int, dense_below: int, share: Callable[[int], int]) -> BucketPlan:
    """Parameters under `dense_below` entries go whole, and a share of every `chunk` entries of another one.

    A parameter is a window of whole chunks and one of the last, if that is shorter; share(n) of n entries go.
    """
    small = tuple(span for span in layout.spans if span.num_entries < dense_below)
    windows = []
    for span in layout.spans:
        if span.num_entries >= max(1, dense_below):
            rest = span.stop - span.num_entries % chunk  # where a last, shorter chunk begins
            windows.append(Window(span.start, rest, share(rest - span.start)))
            windows.append(Window(rest, span.stop, share(span.stop - rest)))
    return BucketPlan(layout.num_entries, small, tuple(w for w in windows if w.start < w.stop))


def plan_of_bucket(layout: Layout, density: float, dense_below: int) -> BucketPlan:
    """Parameters under `dense_below` entries go whole; of all the others together `density` of the entries goes."""
    small = tuple(span for span in layout.spans if span.num_entries < dense_below)
    num_large = layout.num_entries - sum(span.num_entries for span in small)
    windows = (Window(0, layout.num_entries, share_of(num_large, density)),) if num_large else ()
    return BucketPlan(layout.num_entries, small, windows)


def share_of(num_entries: int, density: float) -> int:
    """k = round(density * n), at least 1 and at most n."""
    return min(num_entries, max(1, round(density * num_entries)))
