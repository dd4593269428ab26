import io

import torch
from laconic import Session, parse
from laconic.exchange import in_process
from laconic.layout import Bucket, Layout

layout = Layout.of(["weight"], [10_000])


def train(medium, session, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(100 * medium.rank + step)
        gradient = torch.randn(10_000, generator=draw)
        session.exchange_(Bucket(0, layout, gradient, is_last=True))
    return gradient


def in_one_go(medium):
    return train(medium, Session(parse("topk:rho=0.01"), medium), range(10))


def with_a_break(medium):
    first = Session(parse("topk:rho=0.01"), medium)
    train(medium, first, range(5))
    file = io.BytesIO()  # one per rank: rank-0.pt, rank-1.pt
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = Session(parse("topk:rho=0.01"), medium)
    second.load_state_dict(torch.load(file, weights_only=True))
    return train(medium, second, range(5, 10))


assert torch.equal(in_process(2, in_one_go)[0], in_process(2, with_a_break)[0])
