import torch
from laconic import Session, parse
from laconic.exchange import in_process
from laconic.layout import Bucket, Layout

layout = Layout.of([f"layer{i}" for i in range(8)], [2**16] * 8)
draw = torch.Generator().manual_seed(0)
# Layers differ in size by up to a thousand.
scales = torch.logspace(0, -3, 8).repeat_interleave(2**16)
gradients = [
    scales * torch.randn(2**19, generator=draw) ** 3 for _ in range(4)
]
true = sum(gradients) / 4


def worker(medium, scheme):
    session = Session(scheme, medium)
    flat = gradients[medium.rank].clone()
    session.exchange_(Bucket(0, layout, flat, is_last=True))
    return flat, session.stats().bits_per_entry


def error_and_bits(text):
    flat, bits = in_process(4, lambda medium: worker(medium, parse(text)))[0]
    return float((flat - true).norm() ** 2 / true.norm() ** 2), bits


fine = error_and_bits("multiscale:share=4")
coarse = error_and_bits("maxnorm:levels=15")
assert fine[0] < coarse[0] and fine[1] < coarse[1]  # in error and in bits
