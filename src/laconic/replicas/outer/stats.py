"""What a follower in rounds did so far."""

from dataclasses import dataclass, field

from laconic.session import Stats


@dataclass(frozen=True)
class OuterStats(Stats):
    """One worker's account of its rounds; `seconds` is what its training thread spent, in `exchange`.

    `skipped_steps` are turns in which some worker's drift was not finite: nobody who heard of it moved by them.
    """

    turns: int = 0  # fragments whose result was applied
    late_rounds: int = 0  # of those, agreed on without this worker, which had spoken too late: its drift came later
    waited_s: float = 0.0  # for results that had not come when they were due
    background_s: dict[str, float] = field(default_factory=dict)  # by phase, while training went on

    def __str__(self) -> str:
        steps = self.steps_here
        ratio = f"{self.ratio:.1f}x fewer than dense fp32" if self.ratio else "nothing sent"
        turns = f"{self.turns} turns" + (f" ({self.late_rounds} without it)" if self.late_rounds else "")
        return (
            f"{self.scheme}: {self.steps} steps ({self.skipped_steps} skipped), {self.num_workers} workers, "
            f"{turns}, {self.bytes_out / steps:,.0f} bytes out and {self.bytes_in / steps:,.0f} in per step "
            f"({ratio}); {1e3 * self.seconds['exchange'] / steps:.2f} ms a step in the training thread, of which "
            f"{1e3 * self.waited_s / steps:.2f} waiting; {self.kernels} kernels"
        )
