"""The table of everything that the laws are tested over; test_laws proves that nothing is missing from it."""

from __future__ import annotations

from laconic import Scheme, TorchHook, parse
from laconic.quantize import Grid

# One text for each recipe, at settings that a model of a few thousand entries can show.
RECIPE_TEXTS = {
    "dense": "dense",
    "bf16": "bf16",
    "silent": "silent",
    "topk": "topk:rho=0.05",
    "chunked": "chunked:rho=0.1,chunk=512",
    "block-topk": "block-topk:rho=0.1,block=16",
    "laplace": "laplace:rho=0.05",
    "dgc": "dgc:rho=0.05,ramp=2",
    "overlap": "overlap:rho=0.05,score=product",
    "sign": "sign",
    "sparse-sign": "sparse-sign:rho=0.1",
    "maxnorm": "maxnorm:bits=4",
    "multiscale": "multiscale:bits=4",
    "randk-maxnorm": "randk-maxnorm:rho=0.5",
    "randk-multiscale": "randk-multiscale:rho=0.5,share=1",
    "lowrank": "lowrank:rank=3",
    "gossip": "gossip:rate=0.3",
    "gossip-change": "gossip-change:rate=0.3,quantize=modulo,mode=matched",
    "gossip-every": "gossip-every",
    "gossip-period": "gossip-period:steps=3",
    "local": "local:every=3",
    "diloco": "diloco:every=3",
    "streaming": "streaming:every=4,fragments=2,delay=2",
    "muloco": "muloco:every=4,fragments=2,delay=2,bits=2",
    "sparseloco": "sparseloco:every=2,rho=0.125,chunk=512",
    "noloco": "noloco:every=2",
    "torch-fp16": "torch-fp16",
    "torch-powersgd": "torch-powersgd:rank=2",
}

# Compositions that no recipe makes, so that every answer to every question occurs.
COMPOSED_TEXTS = (
    "topk:rho=0.05,per=parameter,quantize=fp16,warmup=3",
    "topk:rho=0.05,per=parameter,quantize=none",
    "topk:rho=0.05,search=sampled",
    "topk:rho=0.05,search=torch",
    "scheme:select=topk(rho=0.05,dense_below=0),memory=none,exchange=all-gather",
    "scheme:select=everything,quantize=fp16,exchange=all-gather",
    "scheme:select=everything,quantize=bf16,memory=residual,exchange=all-reduce",
    "scheme:select=everything,quantize=bf16,memory=momentum(momentum=0.5),exchange=all-gather",
    "scheme:select=randk(rho=0.5),quantize=bf16,memory=residual",
    "scheme:select=randk(rho=0.5,dense_below=0),quantize=maxnorm(levels=3),memory=momentum(momentum=0.5)",
    "scheme:select=chunked(rho=0.1,chunk=512),quantize=lloyd,memory=residual(decay=0.95),exchange=all-gather",
    "scheme:select=overlap(rho=0.05,score=member),quantize=lloyd(group=16),memory=residual(decay=0.5),"
    "exchange=server(down_rho=0.1),trigger=warm-up(steps=2)",
    "scheme:select=blocks(rho=0.1,block=7,dense_below=0),quantize=lloyd,memory=residual(decay=0.9),exchange=all-gather",
    "block-topk:rho=0.1,quantize=levels(bits=5),warmup=2,exchange=server",
    "topk:rho=0.05,exchange=server",
    "topk:rho=0.05,quantize=none,exchange=server(down_rho=0.02)",
    "laplace:rho=0.4,quantize=levels(bits=5),exchange=server",
    "overlap:rho=0.05,score=member,quantize=none,warmup=2",
    "overlap:rho=0.05,score=hits,per=parameter,explore=0.2",
    "overlap:rho=0.05,score=sum,strength=0.5",
    "sign:vote=weighted",
    "sparse-sign:cover=1.5,weight=0.9,score=product,vote=weighted",
    "scheme:select=everything,quantize=sign,memory=residual,exchange=all-gather",
    "scheme:select=everything,quantize=lloyd,memory=residual,exchange=server",
    "maxnorm:levels=15,block=0,seed=5",
    "maxnorm:bits=4,stages=2",
    "multiscale:levels=15,block=0,scales=2,ratio=8,share=1",
    "multiscale:bits=3+6,block=64,share=8",
    "randk-maxnorm:k=700",
    "sparse-sign:rho=0.1,weight=0",
    "randk-maxnorm:rho=0.5,mode=cycle,memory=none",
    "randk-multiscale:rho=0.5,mode=cycle,warmup=2,stages=2",
    "lowrank:rank=2,form=alternating,quantize=bf16,warmup=2",
)

# Compositions of gossip that no recipe has as its default.
GOSSIP_TEXTS = (
    "gossip:rate=0.3,quantize=none",
    "gossip:trigger=target-rate(rate=0.3,per=model),peers=ring",
    "gossip-change:rate=0.3,quantize=modulo",
    "gossip:rho=0.2,rate=0.22",
    "gossip:rho=0.05,trigger=change(threshold=0.05),quantize=none",
    "gossip:rho=1,trigger=change(threshold=0.05),quantize=none,peers=exponential,mode=matched",
    "gossip:rate=0.3,quantize=bf16,mode=matched,seed=4",
    "gossip:mode=matched,seed=4,quantize=modulo(bits=5),momentum=local",
    "gossip:rho=0.2,rate=0.22,mode=matched,seed=4",
    "gossip:rho=0.2,trigger=target-rate(rate=0.3,per=model),quantize=none,mode=matched",
    "gossip-every:mode=matched,quantize=bf16,peers=ring",
    "gossip-period:steps=2.5,mode=matched",
)

# Outer steps over other paths and answers than the recipes'.
OUTER_TEXTS = (
    "local:every=2,quantize=none,delay=2",
    "scheme:select=topk(rho=0.1,dense_below=0),quantize=bf16,memory=residual,exchange=all-gather,"
    "trigger=rounds(every=2,warmup=1),outer=sgd(lr=0.5)",
    "scheme:select=overlap(rho=0.1),memory=residual,exchange=server,trigger=rounds(every=2,fragments=2,delay=1),"
    "outer=nesterov(lr=0.5,momentum=0.5)",
    "noloco:every=4,fragments=2,delay=2,quantize=none,momentum=0.3,pull=0.9,seed=5",
    "scheme:quantize=maxnorm(levels=7),trigger=rounds(every=3,fragments=3,delay=2,mix=0.5)",
    "sparseloco:every=4,rho=0.125,chunk=512,fragments=2,delay=4,warmup=1",
    "streaming:every=2,fragments=2,delay=1,momentum=auto",
    "muloco:every=2,warmup=1",
    "scheme:select=low-rank(rank=2),memory=residual,trigger=rounds(every=2,fragments=2,delay=1)",
)

# What DDP's gradients can go through; models that train alone have laws of their own.
ALL_TEXTS = (*(text for text in RECIPE_TEXTS.values() if parse(text).of_what == "gradients"), *COMPOSED_TEXTS)


def made(text: str) -> Scheme:
    """The composition that a text names."""
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    return scheme


def own_schemes() -> list[Scheme]:
    """Every scheme of the table that is a composition of ours and exchanges gradients."""
    return [scheme for scheme in map(parse, ALL_TEXTS) if isinstance(scheme, Scheme)]


def gossip_texts() -> list[str]:
    """Every scheme of the table that exchanges models."""
    return [text for text in (*RECIPE_TEXTS.values(), *GOSSIP_TEXTS) if parse(text).of_what == "models"]


def outer_texts() -> list[str]:
    """Every scheme of the table that exchanges the drift of models."""
    return [text for text in (*RECIPE_TEXTS.values(), *OUTER_TEXTS) if parse(text).of_what == "drift"]


def talking_schemes() -> list[Scheme]:
    """Those under which the workers hear of each other."""
    return [scheme for scheme in own_schemes() if str(scheme) != "silent"]


def remembering_schemes() -> list[Scheme]:
    """Those that keep what they do not send."""
    return [scheme for scheme in own_schemes() if scheme.memory.kinds]


def conserving_schemes() -> list[Scheme]:
    """Those that also keep what rounding loses, so that nothing is ever lost."""
    return [scheme for scheme in remembering_schemes() if scheme.memory.refunds]


def adds_exactly(scheme: Scheme) -> bool:
    """Whether the network adds integers, so that no order of adding and no rounding in flight can show."""
    return isinstance(scheme.quantize, Grid) and scheme.trigger.density(0, 0.01) < 1


def torch_hooks() -> list[TorchHook]:
    return [scheme for scheme in map(parse, ALL_TEXTS) if isinstance(scheme, TorchHook)]
