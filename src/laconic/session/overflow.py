"""What becomes of a step in which some worker's gradient is Inf, NaN or as good as that: one rule, for all paths."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.errors import LaconicError
from laconic.memory import Undo
from laconic.paths import Work

# The least |g| that counts as Inf, in unscaled units. A balance is float32: it would hold 2^64 of these, so neither
# steps that an entry waits nor momentum nor the states of other workers bring it to Inf, where it would stay.
TOO_LARGE = 2.0**64
_MOST_IN_A_ROW = 10  # steps; a model that does not recover in so many does not recover


class OverflowRule:
    """All workers see NaN in the bucket, or zeros (`zeroes`), and nothing of what overflowed is kept.

    Without a GradScaler each bucket stands for itself: who was finite keeps its gradient, which goes out later, and
    who was not loses its own alone; a balance that fades has faded for the former and not for the latter. With one
    (`undoes`), which skips the optimizer's step whole, everything that outlives a step is afterwards as it was before,
    bit for bit, in buckets before and after the bad one too; that costs a copy of it, so only those who have a
    GradScaler pay.
    """

    def __init__(self, *, undoes: bool, zeroes: bool) -> None:
        self.skipped_steps = 0
        self.zeroes = zeroes
        self._in_a_row = 0
        self._undoes = undoes
        self._undo = Undo()
        self.overflowed = False  # in the step that is under way

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Note what a bucket is about to change."""
        if self._undoes:
            self._undo.remember(tensors)

    def overflow_(self, work: Work) -> None:
        """Nobody applies this bucket: what was taken out of its account goes back."""
        self.overflowed = True
        if work.taken is not None:
            work.account.refund_(work.taken.positions, work.taken.values)
        work.flat.fill_(0.0 if self.zeroes else torch.nan)

    def take_back_(self, work: Work) -> None:
        """What was taken out of a bucket's account came too late: all that it keeps is as it was before."""
        assert self._undoes, "who cannot undo is never late"
        self._undo.restore_(work.account.kept)
        work.taken = None

    def end_step_(self) -> bool:
        """Take the step back if that is asked for; whether it overflowed."""
        overflowed = self.overflowed
        if overflowed:
            self.skipped_steps += 1
            self._undo.restore_()
        self._undo.forget()
        self.overflowed = False
        self._in_a_row = self._in_a_row + 1 if overflowed else 0
        if self._in_a_row == _MOST_IN_A_ROW and self.zeroes:
            raise LaconicError(
                f"{_MOST_IN_A_ROW} steps in a row gave Inf or NaN and were zeroed; go back to a checkpoint, "
                "with a smaller learning rate"
            )
        if self._in_a_row == _MOST_IN_A_ROW and not self._undoes:  # a GradScaler may need more to find its scale
            warnings.warn(
                f"{_MOST_IN_A_ROW} steps in a row gave Inf or NaN, as weights do that took one in; go back to a "
                "checkpoint, and call optimizer.step() only where session.last_step_finite",
                stacklevel=2,
            )
        return overflowed
