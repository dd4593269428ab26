"""The owner of a share: adds up what the workers send of it, or takes their vote, and answers in the smallest form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError, StateError
from laconic.exchange import Shares, piece_borders
from laconic.kernels import Window
from laconic.layout import Layout, positions_of
from laconic.memory import Residual, Undo
from laconic.quantize import Sign, Trits
from laconic.scheme import Scheme
from laconic.server.vote import Vote
from laconic.wire import Contents, FrameShape, read_each, write_each


@dataclass
class Owner:
    """Answers for one share of every bucket, and holds what its answers leave out: sums over workers, by parameter.

    held += what was received ; answer(held[U] / M) ; held[U] -= M * what the answer says

    Where nothing is left out, `held` is zero between steps. `undoes` is for steps that a GradScaler may skip whole,
    `holds_idle` for models of which a step may leave parameters out: DDP then drops what is sent of those.
    """

    scheme: Scheme
    share: int
    num_shares: int
    undoes: bool = False
    holds_idle: bool = False

    def __post_init__(self) -> None:
        self._server = self.scheme.server
        self._quantize = self.scheme.frame_code
        self._holds = self.scheme.holds
        self._votes = self._server.votes
        self._held = Residual().ledger()
        self._cuts: dict[Layout, tuple[Layout, Tensor]] = {}
        self._searched: dict[Layout, tuple[list[Window], list[Tensor]]] = {}  # by share
        self._vote = Vote(weighted=self._server.combine == "weighted")
        self._undo = Undo()
        self._step = -1
        self._overflowed = False  # in some bucket of this step

    @property
    def num_bytes(self) -> int:
        """What it holds, at most its share of the model as float32."""
        return self._held.num_bytes if self._holds else 0

    def read(self, frames: Mapping[int, Tensor], layout: Layout, *, step: int, bucket: int) -> dict[int, Contents]:
        """What workers sent of this share, by rank; FrameError names one whose frame is not as it should be."""
        own, fixed = self._cut(layout, next(iter(frames.values())).device)
        shapes = [FrameShape.of(frame, own.num_entries, [self._quantize], peer=r) for r, frame in frames.items()]
        received = read_each(frames, shapes, step=step, bucket=bucket)
        for (r, contents), shape in zip(received.items(), shapes, strict=True):
            if not contents.overflow and shape.num_fixed != len(fixed):
                raise FrameError(f"rank {r} sent {shape.num_fixed} fixed entries, not {len(fixed)}; use the same model")
        return received

    def answer(self, frames: Mapping[int, Tensor], layout: Layout, *, step: int, bucket: int) -> Tensor:
        """Read the frames of all workers, in the order of their ranks, and answer them."""
        received = self.read(frames, layout, step=step, bucket=bucket)
        return self.answer_to(received, layout, step=step, bucket=bucket)

    def answer_to(self, received: Mapping[int, Contents], layout: Layout, *, step: int, bucket: int) -> Tensor:
        """A frame for all workers: the mean or the vote over what was received, or that a worker overflowed."""
        device = next(iter(received.values())).values.device
        own, fixed = self._cut(layout, device)
        held = self._held.open(own, device).balance
        self._remember(held, step)
        if any(contents.overflow for contents in received.values()):
            self._overflowed = True
            self._undo.restore_()
            shape = FrameShape(own.num_entries, 0, 0, self._quantize)
            return shape.write_overflow(device, step=step, bucket=bucket)
        if self._votes:
            places, votes = self._vote.take(received, held, fixed, step)
            signs = FrameShape(own.num_entries, places.numel(), 0, Sign())
            trits = FrameShape(own.num_entries, own.num_entries, 0, Trits())
            shape, places, values = _smaller(signs, trits, places, votes, fixed[:0])
        else:
            shape, places, values = self._mean(list(received.values()), held, fixed, own)
        ((frame, sent),) = write_each([shape], [places], [values], step=step, bucket=bucket)
        if self._holds:
            kernels.owe_(held, fixed[: shape.num_fixed], places, values, sent, len(received))
        if self._overflowed and self.undoes:
            self._undo.restore_()  # workers undo this bucket too, at the end of the step
        return frame

    def _mean(
        self, received: Sequence[Contents], held: Tensor, fixed: Tensor, own: Layout
    ) -> tuple[FrameShape, Tensor, Tensor]:
        """Add up, take out what is answered: (shape, places, mean at the fixed entries and at those places)."""
        windows, searches = self._windows(own, held.device)
        spare = [(span.start, span.stop) for span in own.spans] if self.holds_idle else []  # DDP would drop it
        positions, values = [each.positions for each in received], [each.values for each in received]
        places, mean = kernels.take_mean_(held, fixed, positions, values, windows, searches, spare)
        shape = FrameShape(own.num_entries, places.numel(), fixed.numel(), self._quantize)
        dense = FrameShape(own.num_entries, own.num_entries, 0, self._quantize)
        return _smaller(shape, dense, places, mean, fixed)

    def _windows(self, own: Layout, device: torch.device) -> tuple[list[Window], list[Tensor]]:
        """Where the largest sums are selected, if not all that is received is answered, and the searches for those.

        Workers that choose by parameter are answered by parameter, so that buckets do not matter.
        """
        if not self._server.down_rho:
            return [], []
        if own not in self._searched:
            spans = own.spans if self.scheme.select.per_parameter else Layout.of([""], [own.num_entries]).spans
            rooms = [max(1, round(self._server.down_rho * span.num_entries)) for span in spans]
            windows = [(span.start, span.stop, room) for span, room in zip(spans, rooms, strict=True)]
            searches = [kernels.new_search(max(1, stop - start), room, device) for start, stop, room in windows]
            self._searched[own] = windows, searches
        return self._searched[own]

    def _cut(self, layout: Layout, device: torch.device) -> tuple[Layout, Tensor]:
        """This share of a bucket, and where in it the entries lie that all workers send at every step; cut once."""
        if layout not in self._cuts:
            own = Shares(layout, self.num_shares).layouts[self.share]
            whole = {span.name for span in self.scheme.select.plan(layout, self.scheme.select.density).fixed}
            self._cuts[layout] = own, positions_of([span for span in own.spans if span.name in whole], device)
        return self._cuts[layout]

    def _remember(self, held: Tensor, step: int) -> None:
        if step != self._step:
            self._step = step
            self._overflowed = False
            if self.undoes:
                self._undo.forget()
        if self.undoes and self._holds:
            self._undo.remember([held])

    def state_dict(self) -> dict[str, Any]:
        """What is held, this share's piece of each parameter, and the voters' records; empty where there is neither."""
        held = self._held.state_dict()["residual"] if self._holds else {}
        return {"num_shares": self.num_shares, "held": held, "records": self._vote.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._held.load_state_dict({"residual": dict(saved["held"])})
        self._vote.load_state_dict(saved["records"])


def _smaller(
    shape: FrameShape, dense: FrameShape, places: Tensor, values: Tensor, fixed: Tensor
) -> tuple[FrameShape, Tensor, Tensor]:
    """These places, or all entries where that is smaller: `values` at the fixed ones and there, zeros elsewhere."""
    if shape.num_bytes <= dense.num_bytes:
        return shape, places, values
    n = dense.num_entries
    everywhere = values.new_zeros(n)
    everywhere[torch.cat([fixed, places])] = values
    return dense, torch.arange(n, dtype=torch.int32, device=values.device), everywhere


def server_states(states: Sequence[Mapping[str, Any]], num_servers: int) -> list[bytes]:
    """What each server kept, from the one worker's state that has it; nothing where none of these has."""
    kept = [state["servers"] for state in states if state.get("servers")]
    if (kept and len(kept[0]) != num_servers) or any(state["owner"] for state in states):
        raise StateError("the state was saved with other servers; resume with as many as then")
    return [bytes(each.numpy()) for each in kept[0]] if kept else []


def owner_state(states: Sequence[Mapping[str, Any]], share: int, num_shares: int) -> dict[str, Any]:
    """The state of a share's owner: its own, or its piece of what all owners held where their number changed."""
    owners = [state["owner"] for state in states if state["owner"]]
    if not owners:
        if any(state.get("servers") for state in states):
            raise StateError("the state was saved under dedicated servers; resume with as many")
        return {"held": {}, "records": {}}
    if owners[0]["num_shares"] == num_shares:
        own = [state["owner"] for state in states if state["rank"] == share]
        return dict(own[0]) if own else {"held": {}, "records": {}}
    pieces = {}
    for name in owners[0]["held"]:
        whole = torch.cat([owner["held"][name] for owner in owners])
        borders = piece_borders(whole.numel(), num_shares)
        pieces[name] = whole[borders[share] : borders[share + 1]].clone()
    return {"held": pieces, "records": {}}
