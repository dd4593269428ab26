"""Messages between workers that own shares: a length before each, and what is said of one that cannot be."""

from __future__ import annotations

import pytest
import torch

from laconic.errors import FrameError, PeerError
from laconic.transport.push_pull import with_length, without_length

FRAME = torch.arange(40).to(torch.uint8)


@pytest.mark.parametrize("longest", [40, 48, 4000])
def test_a_frame_arrives_whole_in_room_for_the_longest(longest: int) -> None:
    message = with_length(FRAME, longest)
    room = torch.full((8 + longest,), 255, dtype=torch.uint8)
    room[: message.numel()] = message
    assert torch.equal(without_length(room, 3), FRAME)


@pytest.mark.parametrize("length", [41, -4, 1 << 60])
def test_a_length_that_cannot_be_names_its_sender(length: int) -> None:
    message = with_length(FRAME, 40)
    message[:8].view(torch.int64)[0] = length
    with pytest.raises(FrameError, match=f"from rank 3 says it has {length} bytes of 40"):
        without_length(message, 3)


def test_who_gave_up_is_named() -> None:
    with pytest.raises(PeerError, match="rank 3 gave up"):
        without_length(torch.tensor([-1]).view(torch.uint8), 3)
