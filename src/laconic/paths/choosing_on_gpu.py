"""What a worker chooses of a bucket on a GPU whose messages leave from the host: in one recording, and then there."""

from collections.abc import Callable

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels import Recorded, Recorder
from laconic.paths.frame_plan import FramePlan
from laconic.paths.path import Taken, Work


class ChoiceOnGpu:
    """One bucket's: it is looked at, deposited, chosen from and withdrawn from without a word to the host.

    A worker that sees Inf or NaN deposits nothing; what it took out of the balance goes back, as at those who hear it.
    """

    def __init__(self, plan: FramePlan, recorder: Recorder) -> None:
        self._plan = plan
        self._recorded: Recorded[Taken] = Recorded(recorder)
        self._pinned = plan.fixed.is_cuda
        self._strange = torch.zeros(1, dtype=torch.int32, pin_memory=self._pinned)
        self._on_host: tuple[Tensor, Tensor] | None = None

    def take_(self, work: Work, withdraw_: Callable[[], tuple[Tensor, Tensor]], *tensors: Tensor) -> None:
        """Begin; the choice is there when the stream is through. What withdraws finds `tensors` beside the bucket's."""
        where = [tensor.data_ptr() for tensor in (work.flat, work.account.balance, *tensors)]
        key = work.scale, *where, *(tensor.numel() for tensor in tensors)
        work.taken = self._recorded.run(lambda: self._take(work, withdraw_), key)

    def found(self, work: Work) -> tuple[Tensor, Tensor] | None:
        """(chosen positions, fixed and chosen values), on the host; None if the gradient is not finite."""
        work.finite = not self._strange.numpy()[0]
        return self._on_host if work.finite else None

    def _take(self, work: Work, withdraw_: Callable[[], tuple[Tensor, Tensor]]) -> Taken:
        strange = torch.zeros(1, dtype=torch.int32, device=work.device)
        kernels.flag_nonfinite_(strange, work.flat, work.too_large)
        kernels.zero_if_(work.flat, strange)
        taken = withdraw_()
        if self._on_host is None or [each.shape for each in self._on_host] != [each.shape for each in taken]:
            chosen, values = (torch.empty(each.shape, dtype=each.dtype, pin_memory=self._pinned) for each in taken)
            self._on_host = chosen, values
        for here, there in zip((*taken, strange), (*self._on_host, self._strange), strict=True):
            there.copy_(here, non_blocking=True)
        return Taken(self._plan.positions(taken[0].to(torch.int64)), self._plan.num_fixed, taken[1])
