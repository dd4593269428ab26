"""A member of the server of members.yaml: LACONIC_SERVER=HOST:PORT.

It leaves when Kubernetes ends its pod.
"""

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
    server, name = os.environ["LACONIC_SERVER"], os.environ.get("HOSTNAME", "")
    member = laconic.join(server, model, optimizer, id=name)
    for _ in range(steps):
        inputs = torch.randn(64, 32)
        targets = inputs.sum(1, keepdim=True).tanh()
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        member.step(tokens=len(inputs), loss=loss.item())
        if is_ended:
            break
    member.leave()


if __name__ == "__main__":
    main()
