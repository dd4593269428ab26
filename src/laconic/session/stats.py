"""The bytes, seconds and steps of a session, so far and in its last step."""

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from laconic.errors import StateError
from laconic.paths import PHASES
from laconic.session.state import SavedTogether
from laconic.transport import Count, Transport


@dataclass(frozen=True)
class Stats:
    """One worker's account of its exchanges since the session began."""

    scheme: str
    kernels: str
    num_workers: int
    steps: int
    skipped_steps: int  # an Inf or NaN on some worker; nothing of such a step was kept
    bytes_out: int  # what left this worker for the sake of gradients; checkpoints and the like are in by_kind alone
    bytes_in: int
    dense_bytes_out: int  # what a float32 all-reduce of the same gradients would have sent
    by_kind: dict[str, Count]
    seconds: dict[str, float]  # by phase, in the session's thread; they overlap the backward pass
    passes: float | None = None  # over the entries per selection, on average; None where nothing is selected

    num_pushed: int = 0  # entries that this worker chose and sent to owners
    num_answered: int = 0  # and entries that those answered
    oldest_residual: int | None = None  # steps for which a residual has waited at most; on request
    never_sent: float | None = None  # share of entries that this worker has never sent; on request
    num_living: int | None = None  # workers that a dedicated server still answers; None where it leaves none behind
    first_step: int = 0  # steps of which nothing is counted here: those before a checkpoint, less discarded ones
    held_bytes: int = 0  # what this worker holds as the owner of a share

    @property
    def ratio(self) -> float | None:
        """The bytes of a float32 all-reduce over those that left this worker; None if none did."""
        return self.dense_bytes_out / self.bytes_out if self.bytes_out else None

    @property
    def steps_here(self) -> int:
        """The steps that bytes and seconds are of; at least 1, to divide by."""
        return max(1, self.steps - self.first_step)

    @property
    def bits_per_entry(self) -> float:
        """Bits per gradient entry in an all-reduce of as many bytes: 32 for float32, all that was sent counted."""
        return 32 * self.bytes_out / self.dense_bytes_out if self.dense_bytes_out else 0.0

    @property
    def union(self) -> float | None:
        """|U|/k: entries that owners answered for each that a worker sent them."""
        return self.num_answered / self.num_pushed if self.num_pushed else None

    def as_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("union", "ratio", "bits_per_entry")}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        steps = self.steps_here
        passes = f", {self.passes:.2f} passes a selection" if self.passes else ""
        union = f", unions {self.union:.2f} times what a worker sends" if self.union else ""
        if self.oldest_residual is not None and self.never_sent is not None:
            union += f", {100 * self.never_sent:.1f} % of entries never sent, one owed for {self.oldest_residual} steps"
        lost = f" ({self.num_living} living)" if self.num_living not in (None, self.num_workers) else ""
        phases = ", ".join(f"{phase} {1e3 * self.seconds[phase] / steps:.2f}" for phase in PHASES)
        rest = f"ms per step: {phases}; {self.kernels} kernels{passes}{union}"
        return summary(self, lost=lost, bits=f", {self.bits_per_entry:.3g} bits an entry", rest=rest)


def summary(stats: Stats, *, lost: str = "", exchanges: str = "", bits: str = "", rest: str) -> str:
    """One line about a worker: steps, workers, what it exchanged, bytes per step, and the rest."""
    steps = stats.steps_here
    ratio = f"{stats.ratio:.1f}x fewer than dense fp32" if stats.ratio else "nothing sent"
    return (
        f"{stats.scheme}: {stats.steps} steps ({stats.skipped_steps} skipped), {stats.num_workers} workers{lost}, "
        f"{exchanges}{stats.bytes_out / steps:,.0f} bytes out and {stats.bytes_in / steps:,.0f} in per step "
        f"({ratio}{bits}); {rest}"
    )


def step_ends() -> deque[Mapping[str, float]]:
    """Room for what was counted until the ends of the last two steps, which `metrics_of` takes the difference of."""
    return deque([{}, {}], maxlen=2)


def metrics_of(
    ends: deque[Mapping[str, float]], now: Mapping[str, float] | None = None, /, **others: float
) -> dict[str, float]:
    """The numbers of the last step, or of what came after it until `now`, and what follows from them."""
    before, after = ends if now is None else (ends[1], now)
    last = {name: float(total - before.get(name, 0.0)) for name, total in after.items()}
    dense, pushed, answered = (last.pop(name, 0.0) for name in ("dense_bytes_out", "pushed", "answered"))
    if last.get("bytes_out"):
        last["ratio"] = dense / last["bytes_out"]
    if pushed:
        last["union"] = answered / pushed
    totals = {f"{name}_total": float(after[name]) for name in ("bytes_out", "bytes_in") if name in after}
    return {**last, **totals, **others}


class Observed(SavedTogether):
    """A session or a follower as its user observes it."""

    @abstractmethod
    def stats(self, *, ages: bool = False) -> Stats:
        """Bytes out and in, by kind; seconds by phase; the ratio to dense; with `ages` how long entries wait."""

    def discard_(self) -> None:
        """Take the last step back: what is kept is as before its backward pass; a call that all ranks make.

        Raises:
            StateError: There is no step to take back, or attach() was not given unused_steps="discard".
        """
        raise StateError(
            f"{self.stats().scheme} cannot take a step back here; attach a DistributedDataParallel with "
            "unused_steps='discard', and without servers"
        )

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<{type(self).__name__} {stats.scheme}: {stats.num_workers} workers, {stats.steps} steps>"


class Attached(Observed):
    """The result of attach(), whatever the scheme."""

    transport: Transport | None  # what the workers send through; None where PyTorch's own hook does it

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """The error that came up while the backward pass went on, if any."""

    @property
    @abstractmethod
    def last_step_finite(self) -> bool:
        """Return whether no worker gave the last step Inf or NaN: optimizer.step() is safe; ask before zero_grad()."""

    @abstractmethod
    def check_replicas_(self) -> None:
        """Compare the parameters of all ranks now, as every so many steps; a call that all make between steps."""

    @abstractmethod
    def metrics(self, *, norms: bool = False) -> dict[str, float]:
        """The numbers of the last step: step, bytes_out, bytes_in, ratio, union, skipped, members, ms by phase.

        `bytes_out_total` and `bytes_in_total` are of all steps; `waited_ms` is how long the backward pass waited. With
        `norms`, which waits for the device and wants the gradients to be there, also `residual`: the norm of what is
        kept over that of the gradient, on this rank.
        """

    @abstractmethod
    def close(self) -> None:
        """End the session and give the model back as it was: from the next backward pass on DDP averages by itself.

        Another session may then be attached, and go on from this one's state_dict() if both keep the same.
        """
