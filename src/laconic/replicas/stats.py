"""What a follower did so far."""

from dataclasses import dataclass, field

from laconic.session import Stats


@dataclass(frozen=True)
class FollowerStats(Stats):
    """One worker's account; `seconds` is what its training thread spent, in `exchange`.

    `skipped_steps` are rounds in which some worker's drift was not finite: nobody who heard of it moved by them.
    """

    rounds: int = 0  # outer: fragments whose result was applied
    late_rounds: int = 0  # of those, agreed on without this worker, whose drift came too late and went later
    waited_s: float = 0.0  # outer: for results that had not come when they were due
    background_s: dict[str, float] = field(default_factory=dict)  # outer: by phase, while training went on
    asked: int = 0  # gossip: exchanges that this worker began, and were answered
    answered: int = 0  # gossip: exchanges that a peer began
    refused: int = 0  # gossip: exchanges left out because one side's model was not finite
    late: int = 0  # gossip: answers that took longer than the patience; they count when they come
    lost: dict[int, str] = field(default_factory=dict)  # gossip: peers that have died, and what was seen of it

    def __str__(self) -> str:
        steps = self.steps_here
        ratio = f"{self.ratio:.1f}x fewer than dense fp32" if self.ratio else "nothing sent"
        gone = f"; without rank {', '.join(map(str, sorted(self.lost)))}" if self.lost else ""
        exchanges = f"{self.rounds} rounds" + (f" ({self.late_rounds} without it)" if self.late_rounds else "")
        if self.asked or self.answered:
            exchanges = f"{self.asked} exchanges asked and {self.answered} answered"
        passes = f", {self.passes:.2f} passes over the model a step" if self.passes else ""
        return (
            f"{self.scheme}: {self.steps} steps ({self.skipped_steps} skipped), {self.num_workers} workers{gone}, "
            f"{exchanges}, {self.bytes_out / steps:,.0f} bytes out and {self.bytes_in / steps:,.0f} in per step "
            f"({ratio}); {1e3 * self.seconds['exchange'] / steps:.2f} ms a step in the training thread, of which "
            f"{1e3 * self.waited_s / steps:.2f} waiting; {self.kernels} kernels{passes}"
        )
