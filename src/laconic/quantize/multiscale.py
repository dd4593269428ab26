"""Several grids under one norm: small entries get a finer one."""

from dataclasses import dataclass

from laconic.errors import SchemeError
from laconic.quantize.grid import Grid

_MOST_SCALES = 4  # two bits in the map
_MOST_LEVELS = 1 << 20  # of the finest scale: times M it must stay whole in a float32


@dataclass(frozen=True, kw_only=True)
class MultiScale(Grid):
    """Level counts s_j = s*ratio^j; an entry takes the finest on which every worker's |g|/n*s_j is at most s.

    So codes stay in [-s, s] while the step shrinks with the entry (Vineeth S, arXiv 2109.12497). The scales are agreed
    on by a lane-wise MIN over maps of 1 or 2 bits per `share` entries; sharing, and powers of a ratio, are ours.
    """

    scales: int = 4
    ratio: int = 2  # of each scale's level count to the one before
    share: int = 16  # entries that share a scale; 1 is the paper's

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.scales <= _MOST_SCALES:
            raise SchemeError(f"MultiScale.scales is {self.scales}; give 2 to {_MOST_SCALES}, or use MaxNorm()")
        if self.ratio < 2:
            raise SchemeError(f"MultiScale.ratio is {self.ratio}; give 2 or more")
        if self.share < 1:
            raise SchemeError(f"MultiScale.share is {self.share}; give a number of entries, 1 or more")
        if self.block % self.share:
            raise SchemeError(
                f"MultiScale.block is {self.block} and share {self.share}; give a block that is a multiple of it"
            )
        if self.level_counts[-1] > _MOST_LEVELS:
            raise SchemeError(
                f"the finest of these scales has {self.level_counts[-1]} levels; give fewer levels, scales or ratio, "
                f"so that it has {_MOST_LEVELS} at most"
            )

    @property
    def level_counts(self) -> tuple[int, ...]:
        return tuple(self.levels * self.ratio**j for j in range(self.scales))

    def scale_group(self, count: int) -> int:
        return self.share
