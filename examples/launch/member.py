"""A member that joins the server of members.yaml, and leaves when Kubernetes ends its pod: LACONIC_SERVER=HOST:PORT."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

import laconic


def main(steps: int = int(os.environ.get("STEPS", "1000000"))) -> None:
    """Train until told to end."""
    is_ended = False

    def end(*_: object) -> None:
        nonlocal is_ended
        is_ended = True

    signal.signal(signal.SIGTERM, end)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    member = laconic.join(os.environ["LACONIC_SERVER"], model, optimizer, id=os.environ.get("HOSTNAME", ""))
    for _ in range(steps):
        inputs = torch.randn(64, 32)
        loss = (model(inputs) - inputs.sum(1, keepdim=True).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        member.step(tokens=len(inputs), loss=loss.item())
        if is_ended:
            break
    member.leave()


if __name__ == "__main__":
    main()
