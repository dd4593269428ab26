"""What a follower did so far."""

from dataclasses import dataclass, field

from laconic.session import Stats


@dataclass(frozen=True)
class FollowerStats(Stats):
    """One worker's account of its gossip; `seconds` is what its training thread spent, in `exchange`."""

    asked: int = 0  # exchanges that this worker began, and were answered
    answered: int = 0  # exchanges that a peer began
    refused: int = 0  # exchanges left out because one side's model was not finite
    late: int = 0  # answers that took longer than the patience; they count when they come
    lost: dict[int, str] = field(default_factory=dict)  # peers that have died, and what was seen of it

    def __str__(self) -> str:
        steps = self.steps_here
        ratio = f"{self.ratio:.1f}x fewer than dense fp32" if self.ratio else "nothing sent"
        gone = f"; without rank {', '.join(map(str, sorted(self.lost)))}" if self.lost else ""
        return (
            f"{self.scheme}: {self.steps} steps ({self.skipped_steps} skipped), {self.num_workers} workers{gone}, "
            f"{self.asked} exchanges asked and {self.answered} answered, {self.bytes_out / steps:,.0f} bytes out and "
            f"{self.bytes_in / steps:,.0f} in per step ({ratio}); {1e3 * self.seconds['exchange'] / steps:.2f} ms and "
            f"{(self.passes or 0):.2f} passes over the model a step"
        )
