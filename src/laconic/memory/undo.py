"""Tensors as they were before a step, for a step that is taken back."""

from collections.abc import Sequence

from torch import Tensor


class Undo:
    """Makes tensors what they were when they were remembered, bit for bit; it costs a copy of each."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Copy them as they are."""
        self._before += [(tensor, tensor.clone()) for tensor in tensors]

    def restore_(self, only: Sequence[Tensor] | None = None) -> None:
        """Overwrite everything remembered, or these of it; it stays remembered."""
        for tensor, before in self._before:
            if only is None or any(tensor is one for one in only):
                tensor.copy_(before)

    def forget(self) -> None:
        """Remember nothing: another step begins."""
        self._before = []


class SetAside(Undo):
    """Zeros in these views for a while; then what was there."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        super().__init__()
        self.remember(views)
        for view in views:
            view.zero_()
