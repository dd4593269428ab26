"""States from peers: what is packed is read again, and what is no state is refused within the bytes that came."""

from __future__ import annotations

import io
import math
import tracemalloc
from typing import Any

import pytest
import torch

from laconic import FrameError, StateError
from laconic.session import SavedTogether
from laconic.transport import Everyone, pack, unpack
from laconic.transport.connection import payload_of


def _state() -> dict[Any, Any]:
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    tensors = {str(dtype): torch.arange(7).to(dtype) for dtype in types}
    scalars: dict[Any, Any] = {
        "step": 3,
        "lr": 0.1,
        "inf": math.inf,
        "none": None,
        "on": True,
        4: "text",
        "betas": (0.9, [1, ()]),
    }
    return {
        "tensors": tensors,
        "empty": torch.empty(0, 3),
        "one": torch.tensor(2.5),
        "strided": torch.eye(4).t()[1:],
        **scalars,
    }


def test_what_is_packed_is_read_again() -> None:
    state = _state()
    again = unpack(pack(state))
    for name, tensor in [*state.pop("tensors").items(), *((n, state.pop(n)) for n in ("empty", "one", "strided"))]:
        other = again.pop(name) if name in again else again["tensors"].pop(name)
        assert other.dtype == tensor.dtype and torch.equal(other, tensor)
    again.pop("tensors")
    assert again == state and list(again) == list(state)
    with pytest.raises(StateError, match="cannot hold a set"):
        pack({"a": set()})


def _frame(text: str, entries: bytes = b"") -> torch.Tensor:
    return payload_of(len(text).to_bytes(8, "little", signed=True) + text.encode() + entries)


@pytest.mark.parametrize(
    "text",
    [
        '{"tensor": ["float32", [268435456]]}',
        '{"tensor": ["float32", [0, 1000000000000000000000]]}',
        '{"tensor": ["float32", [-5]]}',
        '{"tensor": ["load", [1]]}',
        '{"tensor": ["float32", [true]]}',
        '{"dict": [[{"list": []}, 1]]}',
        '{"dict": 5}',
        '{"set": []}',
        "[1]",
        '{"list": ' * 5000,
        "nonsense",
    ],
)
def test_what_is_no_state_is_refused_in_one_line(text: str) -> None:
    tracemalloc.start()
    with pytest.raises(FrameError, match=r"^sent a state that cannot be read; run the same release"):
        unpack(_frame(text))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_every_cut_and_every_length_that_cannot_be_is_refused() -> None:
    whole = pack(_state())
    for length in [*range(0, whole.numel() - 1, 7), whole.numel() - 1]:
        with pytest.raises(FrameError):
            unpack(whole[:length])
    for length in (-5, 1 << 62):
        with pytest.raises(FrameError):
            unpack(payload_of(length.to_bytes(8, "little", signed=True)) if length < 0 else _frame("7")[:8])
    with pytest.raises(FrameError):
        unpack(torch.cat([whole, whole[:1]]))


class _Peers(Everyone):
    """Rank 1 sends something else."""

    def __init__(self, sent: torch.Tensor) -> None:
        self.rank, self.num_ranks = 0, 2
        self._sent = sent

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [own, self._sent]


class _Session(SavedTogether):
    def state_dict(self) -> dict[str, Any]:
        return {"step": 1}

    def load_state_dict(self, saved: Any) -> None: ...


def test_a_pickle_from_a_peer_is_not_read() -> None:
    pickled = io.BytesIO()
    torch.save({"step": 1}, pickled)
    session = _Session()
    session.everyone = _Peers(payload_of(pickled.getvalue()))
    with pytest.raises(FrameError, match="rank 1 sent a state that cannot be read"):
        session.gather_state()
