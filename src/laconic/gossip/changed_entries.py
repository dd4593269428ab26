"""What is said of a model of which only a part goes: the entries that have changed most since they last went."""

import torch
from torch import Tensor

from laconic import kernels
from laconic.gossip.vector import ModelVector
from laconic.select import Chooser


class ChangedEntries:
    """x - last, where last is what each entry was after the last exchange that it took part in, asked or answered.

    The k that changed most are said; the others keep their change until it is large enough, so nothing is forgotten.
    Small parameters and normalisation buffers go whole. `last` is this worker's own: a peer need not know it.
    """

    def __init__(self, select: Chooser, vector: ModelVector, num_workers: int) -> None:
        self._select = select
        self._vector = vector
        self._plan = select.plan(vector.chosen_layout, select.density_among(num_workers))
        self._searches = [kernels.new_search(w.stop - w.start, w.k, torch.device("cpu")) for w in self._plan.windows]
        self._whole = torch.ones(vector.num_entries, dtype=torch.bool)
        self._whole[vector.chosen] = False
        self._whole = self._whole.nonzero().view(-1)
        self.last = vector.read()

    @property
    def k(self) -> int:
        """The entries that are chosen; `num_whole` more always go."""
        return self._plan.k

    @property
    def num_whole(self) -> int:
        return self._whole.numel()

    def choose_(self, model: Tensor) -> tuple[Tensor, Tensor]:
        """(what is said of a model: those that always go, then the k that changed most, ascending; the values there).

        `model` is overwritten. The values are last + (x - last), which is x to a rounding: both ends move by them.
        """
        chosen = self._vector.chosen
        whole = model.index_select(0, self._whole)
        at, change = self._select.withdraw_(model[chosen], self.last[chosen], -1.0, self._plan, self._searches)
        positions = self.positions(at + chosen.start)
        return positions, torch.cat([whole, self.last.index_select(0, positions[self.num_whole :]).add_(change)])

    def positions(self, chosen: Tensor) -> Tensor:
        """Those that always go, and the chosen ones."""
        return torch.cat([self._whole, chosen.to(torch.int64)])

    def chosen(self, positions: Tensor) -> Tensor:
        """The chosen ones among such positions, as frames have them."""
        return positions[self.num_whole :].to(torch.int32)
