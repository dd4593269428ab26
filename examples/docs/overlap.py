import torch
from laconic import Session, parse
from laconic.exchange import in_process
from laconic.layout import Bucket, Layout

layout = Layout.of(["weight"], [100_000])
draw = torch.Generator().manual_seed(99)
common = torch.randn(100_000, generator=draw) ** 3  # seen by all workers


def worker(medium, text):
    session = Session(parse(text), medium)
    draw = torch.Generator().manual_seed(medium.rank)
    for _ in range(5):
        gradient = common + 3 * torch.randn(100_000, generator=draw)
        session.exchange_(Bucket(0, layout, gradient, is_last=True))
    return gradient, session.stats().union


def run(text):
    return in_process(8, lambda medium: worker(medium, text))


plain = run("topk:rho=0.01,exchange=server")
scored = run("overlap:rho=0.01,score=product")
assert scored[0][1] < 0.8 * plain[0][1]
assert all(torch.equal(scored[0][0], gradient) for gradient, _ in scored)
