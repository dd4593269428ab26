"""What a training step costs where nothing is exchanged."""

from dataclasses import dataclass


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
        """When the last gradient is there."""
        return max(self.arrivals_s)

    @property
    def tail_s(self) -> float:
        """What comes after the exchange: the optimizer's step."""
        return max(0.0, self.together_s - self.backward_s)

    @property
    def waits_for_slowest(self) -> float:
        """The share of a step for which workers wait for the slowest of them."""
        return max(0.0, 1 - self.alone_s / self.together_s)
