import torch
from laconic import Session, parse
from laconic.exchange import in_process
from laconic.layout import Bucket, Layout

layout = Layout.of(["weight"], [100_000])
common = torch.randn(100_000, generator=torch.Generator().manual_seed(99)) ** 3  # what the workers see alike


def worker(medium, scheme):
    session, draw = Session(scheme, medium), torch.Generator().manual_seed(medium.rank)
    for _ in range(5):
        gradient = common + 3 * torch.randn(100_000, generator=draw)
        session.exchange_(Bucket(0, layout, gradient, is_last=True))
    return gradient, session.stats().union


plain = in_process(8, lambda medium: worker(medium, parse("topk:rho=0.01,exchange=server")))
scored = in_process(8, lambda medium: worker(medium, parse("overlap:rho=0.01,score=product")))
assert scored[0][1] < 0.8 * plain[0][1]
assert all(torch.equal(scored[0][0], gradient) for gradient, _ in scored)
