"""Published systems and controls, each as five answers or six.

A recipe is a short function; its keyword parameters are what the command line takes after the colon.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from laconic.errors import SchemeError
from laconic.exchange import AllGather, AllReduce, Gossip, Pairs, Server, Silent
from laconic.memory import Accumulated, MomentumResidual, Residual
from laconic.outer import Nesterov, OuterSGD, PairMomentum
from laconic.quantize import BF16, CODE_BITS, MaxNorm, MultiScale, Sign, levels_of
from laconic.scheme import COMPOSED, PARTS, AnyScheme, GossipScheme, OuterScheme, Scheme, TorchHook, compose, part
from laconic.scheme.text import build, pairs, write_pairs
from laconic.select import ChunkedTopK, Everything, LowRank, Overlap, RandK, TopK
from laconic.trigger import EveryStep, Period, Ramp, Rounds, Schedule, TargetRate, WarmUp

RECIPES: dict[str, Callable[..., AnyScheme]] = {}

R = TypeVar("R", bound=Callable[..., AnyScheme])


def recipe(function: R) -> R:
    """Register a recipe under its name, and label what it makes with the text that makes it again."""
    name = function.__name__.replace("_", "-")

    @functools.wraps(function)
    def labelled(**arguments: Any) -> AnyScheme:
        made = function(**arguments)
        given = write_pairs({key: arguments[key] for key in inspect.signature(function).parameters if key in arguments})
        object.__setattr__(made, "label", f"{name}:{given}" if given else name)
        return made

    RECIPES[name] = labelled
    return labelled  # type: ignore[return-value]


def parse(text: str) -> AnyScheme:
    """The scheme that a text names: `topk:rho=0.01,quantize=bf16`, or `scheme:select=...,exchange=...`."""
    name, _, rest = text.strip().partition(":")
    if name == COMPOSED:
        arguments = pairs(rest)
        if strange := [question for question in arguments if question not in PARTS]:
            raise SchemeError(f"scheme has no question {strange[0]}; it asks {', '.join(PARTS)}")
        return compose(**arguments)
    if name not in RECIPES:
        raise SchemeError(f"no scheme is called {name!r}; write one of {', '.join(RECIPES)}, or {COMPOSED}:select=...")
    return cast(AnyScheme, build(RECIPES[name], pairs(rest), name))


@recipe
def dense() -> Scheme:
    """Everything in the gradient's own type, all-reduced: the truth."""
    return Scheme()


@recipe
def bf16() -> Scheme:
    """Everything in 16 bits, all-reduced: what users have for free, and the one to beat."""
    return Scheme(quantize=BF16())


@recipe
def silent() -> Scheme:
    """Nothing is sent: the upper bound on speed; the workers drift apart."""
    return Scheme(exchange=Silent())


@recipe
def topk(
    *,
    rho: float = 0.01,
    quantize: str = "bf16",
    per: str = "bucket",
    warmup: int = 0,
    search: str = "threshold",
    exchange: str = "all-gather",
) -> Scheme:
    """Exact top-k with error feedback, all-gathered or by a server; the first `warmup` steps go dense."""
    return Scheme(
        select=TopK(rho=rho, per=per, search=search),
        quantize=part("quantize", quantize),
        memory=Residual(),
        exchange=part("exchange", exchange),
        trigger=_warmed(warmup),
    )


@recipe
def chunked(
    *, rho: float = 1 / 64, chunk: int = 4096, quantize: str = "bf16", warmup: int = 0, exchange: str = "all-gather"
) -> Scheme:
    """Exact top-k of every `chunk` entries, with error feedback: no part of a tensor is passed over."""
    return Scheme(
        select=ChunkedTopK(rho=rho, chunk=chunk),
        quantize=part("quantize", quantize),
        memory=Residual(),
        exchange=part("exchange", exchange),
        trigger=_warmed(warmup),
    )


@recipe
@functools.wraps(topk, assigned=["__annotations__"])  # its parameters, not its name
def laplace(**as_topk: Any) -> Scheme:
    """Top-k by an estimated threshold, corrected to exactly k; `search=bisection` is the paper's, in several passes."""
    return topk(**as_topk)


@recipe
def dgc(
    *, rho: float = 0.01, momentum: float = 0.9, ramp: int = 20, quantize: str = "bf16", per: str = "bucket"
) -> Scheme:
    """Deep Gradient Compression: top-k with momentum correction, reached in stages of `ramp` steps."""
    return Scheme(
        select=TopK(rho=rho, per=per),
        quantize=part("quantize", quantize),
        memory=MomentumResidual(momentum=momentum),
        exchange=AllGather(),
        trigger=Ramp(steps=ramp) if ramp else EveryStep(),
    )


@recipe
def overlap(
    *,
    rho: float = 0.01,
    score: str = "product",
    strength: float = 1.0,
    explore: float = 0.02,
    quantize: str = "bf16",
    per: str = "bucket",
    warmup: int = 0,
    down_rho: float | None = None,
) -> Scheme:
    """Top-k by a score that makes the workers agree, of which a server answers the largest, 3*rho of all entries."""
    return Scheme(
        select=Overlap(rho=rho, score=score, strength=strength, explore=explore, per=per),
        quantize=part("quantize", quantize),
        memory=Residual(),
        exchange=Server(down_rho=min(1.0, 3 * rho) if down_rho is None else down_rho),
        trigger=_warmed(warmup),
    )


@recipe
def sign(*, vote: str = "majority") -> Scheme:
    """signSGD: every worker sends all its signs, and the majority's is applied; no momentum, a rate of about 1e-3."""
    return Scheme(quantize=Sign(), exchange=Server(combine=vote))


@recipe
def sparse_sign(
    *, rho: float = 0.1, cover: float = 0.0, weight: float = 1.0, score: str = "local", vote: str = "majority"
) -> Scheme:
    """S3GD-MV: signs of the largest entries of each layer, accumulated till sent; k = rho*N, or cover*N/M."""
    rho = 0.0 if cover else rho
    select = TopK(rho=rho, cover=cover, per="parameter", dense_below=0)
    if score != "local":
        select = Overlap(rho=rho, cover=cover, per="parameter", dense_below=0, score=score)
    return Scheme(select=select, quantize=Sign(), memory=Accumulated(weight=weight), exchange=Server(combine=vote))


@recipe
def maxnorm(*, bits: int = CODE_BITS, levels: int = 0, block: int = 512, stages: int = 0, seed: int = 0) -> Scheme:
    """Integers on a max-norm grid, added in the network; bits count the sign: levels = 2^(bits-1) - 1, or as given."""
    return Scheme(
        quantize=MaxNorm(levels=levels_of(bits, levels), block=block, seed=seed), exchange=AllReduce(stages=stages)
    )


@recipe
def multiscale(
    *,
    bits: int = CODE_BITS,
    levels: int = 0,
    block: int = 512,
    scales: int = 4,
    ratio: int = 2,
    share: int = 16,
    stages: int = 0,
    seed: int = 0,
) -> Scheme:
    """The same on the finest of several grids that every worker's entry fits, agreed on per `share` entries."""
    return Scheme(
        quantize=MultiScale(
            levels=levels_of(bits, levels), block=block, scales=scales, ratio=ratio, share=share, seed=seed
        ),
        exchange=AllReduce(stages=stages),
    )


@recipe
def randk_maxnorm(
    *,
    rho: float = 0.1,
    bits: int = CODE_BITS,
    levels: int = 0,
    block: int = 512,
    mode: str = "independent",
    memory: str = "residual",
    warmup: int = 0,
    stages: int = 0,
    seed: int = 0,
) -> Scheme:
    """maxnorm on the same random share of the entries everywhere; the rest is kept for later."""
    everywhere = maxnorm(bits=bits, levels=levels, block=block, stages=stages, seed=seed)
    return _random_share(everywhere, rho, mode, seed, memory, warmup)


@recipe
def randk_multiscale(
    *,
    rho: float = 0.1,
    bits: int = CODE_BITS,
    levels: int = 0,
    block: int = 512,
    scales: int = 4,
    ratio: int = 2,
    share: int = 16,
    mode: str = "independent",
    memory: str = "residual",
    warmup: int = 0,
    stages: int = 0,
    seed: int = 0,
) -> Scheme:
    """multiscale on the same random share of the entries everywhere; the rest is kept for later."""
    everywhere = multiscale(
        bits=bits, levels=levels, block=block, scales=scales, ratio=ratio, share=share, stages=stages, seed=seed
    )
    return _random_share(everywhere, rho, mode, seed, memory, warmup)


@recipe
def lowrank(
    *,
    rank: int = 4,
    form: str = "both",
    quantize: str = "none",
    dense_below: int = 1000,
    warmup: int = 0,
    seed: int = 0,
) -> Scheme:
    """PowerSGD: two thin factors of each matrix are added, with error feedback; `form=alternating` adds one a step."""
    return Scheme(
        select=LowRank(rank=rank, form=form, dense_below=dense_below, seed=seed),
        quantize=part("quantize", quantize),
        memory=Residual(),
        exchange=AllReduce(),
        trigger=_warmed(warmup),
    )


@recipe
def gossip(
    *,
    rate: float = 1.3,
    rho: float = 1,
    trigger: str = "",
    quantize: str = "",
    peers: str = "uniform",
    mode: str = "",
    momentum: str = "",
    seed: int = 0,
) -> GossipScheme:
    """A model's remainders, or the share `rho` that changed most, so often that `rate` models leave a worker a step."""
    quantize = quantize or ("residue" if rho == 1 else "bf16")
    remainders = quantize.startswith("residue")
    mode = mode or ("paired" if remainders and not trigger else "free")
    messages, shortest = (1, 0.0) if mode == "paired" else (2, 1.0)  # a worker asks or answers at a turn, or does both
    by_clock = rate > 0 and (remainders or 0 < rho < 1 or mode == "paired")
    turns = Period(steps=max(messages * rho / rate, shortest)) if by_clock else TargetRate(rate=rate)
    momentum = momentum or ("quasi-global" if remainders else "local")
    return GossipScheme(
        select=TopK(rho=rho) if rho != 1 else Everything(),
        quantize=part("quantize", quantize),
        exchange=Gossip(peers=peers, mode=mode, momentum=momentum, seed=seed),
        trigger=part("trigger", trigger) if trigger else turns,
    )


@recipe
def gossip_every(*, quantize: str = "none", peers: str = "uniform", mode: str = "wait", seed: int = 0) -> GossipScheme:
    """Gossip at every step, waiting for the answer: the published baseline of `gossip`."""
    return gossip(trigger="every-step", quantize=quantize, peers=peers, mode=mode, momentum="local", seed=seed)


@recipe
def gossip_period(
    *, steps: float = 16, quantize: str = "none", peers: str = "uniform", mode: str = "free", seed: int = 0
) -> GossipScheme:
    """Gossip every `steps` steps: the control of equal bytes, 2/steps models a step."""
    when = f"period(steps={steps})"
    return gossip(trigger=when, quantize=quantize, peers=peers, mode=mode, momentum="local", seed=seed)


@recipe
def local(
    *, every: int = 16, lr: float = 1.0, quantize: str = "bf16", fragments: int = 1, delay: int = 0, warmup: int = 0
) -> OuterScheme:
    """Every worker trains alone, and every `every` steps all models become their mean."""
    return OuterScheme(
        exchanged=Scheme(quantize=part("quantize", quantize)),
        when=Rounds(every=every, fragments=fragments, delay=delay, warmup=warmup),
        then=OuterSGD(lr=lr),
    )


@recipe
def diloco(
    *,
    every: int = 32,
    lr: float = 0.7,
    momentum: float = 0.9,
    quantize: str = "bf16",
    fragments: int = 1,
    delay: int = 0,
    warmup: int = 0,
) -> OuterScheme:
    """DiLoCo: the same, but that the mean of what all drifted is a gradient to an outer Nesterov step."""
    everyone = local(every=every, quantize=quantize, fragments=fragments, delay=delay, warmup=warmup)
    return replace(everyone, then=Nesterov(lr=lr, momentum=momentum))


@recipe
def streaming(
    *,
    every: int = 16,
    fragments: int = 4,
    delay: int = 4,
    bits: int = CODE_BITS,
    block: int = 512,
    lr: float = 0.7,
    momentum: float = 0.9,
    warmup: int = 0,
    seed: int = 0,
) -> OuterScheme:
    """Fragments of the model agree in turn, in the background and in few bits: for transformers over slow links."""
    return OuterScheme(
        exchanged=Scheme(
            quantize=MaxNorm(levels=levels_of(bits, 0), block=block, seed=seed), exchange=AllReduce(stages=2)
        ),
        when=Rounds(every=every, fragments=fragments, delay=delay, warmup=warmup),
        then=Nesterov(lr=lr, momentum=momentum) if momentum else OuterSGD(lr=lr),
    )


@recipe
def sparseloco(
    *,
    every: int = 16,
    rho: float = 1 / 64,
    decay: float = 0.95,
    lr: float = 1.0,
    quantize: str = "lloyd",
    exchange: str = "all-gather",
    chunk: int = 4096,
    fragments: int = 1,
    delay: int = 0,
    warmup: int = 0,
) -> OuterScheme:
    """SparseLoCo: the largest of what all drifted, chunk by chunk, in two bits; what is not sent is kept, and fades."""
    return OuterScheme(
        exchanged=Scheme(
            select=ChunkedTopK(rho=rho, chunk=chunk),
            quantize=part("quantize", quantize),
            memory=Residual(decay=decay),
            exchange=part("exchange", exchange),
        ),
        when=Rounds(every=every, fragments=fragments, delay=delay, warmup=warmup),
        then=OuterSGD(lr=lr),
    )


@recipe
def noloco(
    *,
    every: int = 16,
    lr: float = 0.7,
    momentum: float = 0.5,
    pull: float = 0.7,
    quantize: str = "bf16",
    fragments: int = 1,
    delay: int = 0,
    seed: int = 0,
) -> OuterScheme:
    """NoLoCo: outer steps between pairs instead of all, whose anchors differ and pull each other together."""
    return OuterScheme(
        exchanged=Scheme(quantize=part("quantize", quantize), exchange=Pairs(seed=seed)),
        when=Rounds(every=every, fragments=fragments, delay=delay),
        then=PairMomentum(lr=lr, momentum=momentum, pull=pull),
    )


@recipe
def torch_fp16() -> TorchHook:
    """PyTorch's fp16_compress_hook, unchanged: a control."""
    return TorchHook(hook="fp16")


@recipe
def torch_powersgd(*, rank: int = 1, start: int = 2) -> TorchHook:
    """PyTorch's powerSGD_hook, unchanged, from step `start` on: a control; over Gloo it needs one large bucket."""
    return TorchHook(hook="powersgd", rank=rank, start=start)


def _random_share(everywhere: Scheme, rho: float, mode: str, seed: int, memory: str, warmup: int) -> Scheme:
    """A scheme on random entries alone."""
    select = RandK(rho=rho, mode=mode, seed=seed)
    return replace(everywhere, select=select, memory=part("memory", memory), trigger=_warmed(warmup))


def _warmed(steps: int) -> Schedule:
    return WarmUp(steps=steps) if steps else EveryStep()
