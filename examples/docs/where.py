import torch
from laconic import Session, recipes
from laconic.exchange import in_process
from laconic.layout import Bucket, Layout

layout = Layout.of(["weight"], [10_000])


def worker(medium):
    session = Session(recipes.topk(rho=0.01), medium)
    draw = torch.Generator().manual_seed(medium.rank)
    gradient = torch.randn(10_000, generator=draw)
    # Overwrites the gradient with the mean of what was sent.
    session.exchange_(Bucket(0, layout, gradient, is_last=True))
    return gradient, session.stats().bytes_out


results = in_process(8, worker)
assert all(torch.equal(results[0][0], gradient) for gradient, _ in results)
assert 100 <= int((results[0][0] != 0).sum()) <= 800
