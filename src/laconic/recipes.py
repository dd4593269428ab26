"""Published systems and controls, each as five answers or six.

A recipe is a short function; its parameters are what the command line takes after the colon. A part may be given as
text or as an object: `topk(0.01, quantize="levels(bits=4)")` is `topk(0.01, quantize=Levels(4))`.
"""

# ruff: noqa: F401 - parse and RECIPES are found here

from dataclasses import replace
from typing import Any

from laconic.errors import SchemeError
from laconic.exchange import AllGather, AllReduce, Gossip, Pairs, Pattern, Server, Silent
from laconic.memory import Accumulated, Memory, MomentumResidual, Nothing, Residual
from laconic.outer import Agreement, Nesterov, NesterovByWorkers, Outer, OuterSGD, PairMomentum
from laconic.quantize import (
    BF16,
    CODE_BITS,
    Grid,
    Lloyd,
    MaxNorm,
    ModuloCode,
    MultiScale,
    Quantizer,
    Sign,
    is_modulo_code,
    levels_listed,
    levels_of,
)
from laconic.scheme import RECIPES, GossipScheme, OuterScheme, Scheme, TorchHook, parse, part, recipe, score_name
from laconic.select import BlockTopK, ChunkedTopK, Everything, LowRank, Overlap, RandK, Score, Selector, TopK
from laconic.trigger import EveryStep, GossipTrigger, Period, Ramp, Rounds, Schedule, TargetRate, WarmUp

Code = str | Quantizer | Grid | ModuloCode  # how values are written, as text or part
Where = str | Pattern  # where they go


@recipe
def dense() -> Scheme:
    """Everything goes in the gradient's own type, all-reduced: the truth."""
    return Scheme()


@recipe
def bf16() -> Scheme:
    """Everything goes in 16 bits, all-reduced: what users have for free, and the one to beat."""
    return Scheme(quantize=BF16())


@recipe
def silent() -> Scheme:
    """Nothing is sent: the upper bound on speed; the workers drift apart."""
    return Scheme(exchange=Silent())


@recipe
def topk(
    rho: float = 0.01,
    *,
    quantize: Code = "bf16",
    per: str = "bucket",
    warmup: int = 0,
    search: str = "threshold",
    exchange: Where = "all-gather",
) -> Scheme:
    """Exact top-k goes with error feedback, all-gathered or by a server; the first `warmup` steps go dense.

    r += g ; send the k = rho*N largest |r| ; r -= what was sent (Aji and Heafield, EMNLP 2017).
    """
    return _with_feedback(TopK(rho, per=per, search=search), quantize, exchange, warmup)


@recipe
def chunked(
    rho: float = 1 / 64, *, chunk: int = 4096, quantize: Code = "bf16", warmup: int = 0, exchange: Where = "all-gather"
) -> Scheme:
    """Exact top-k of every `chunk` entries goes with error feedback: no part of a tensor is passed over.

    r += g ; send the k = rho*C largest |r| of each C entries ; r -= what was sent (after SparseLoCo, arXiv 2508.15706).
    """
    return _with_feedback(ChunkedTopK(rho, chunk=chunk), quantize, exchange, warmup)


@recipe
def block_topk(
    rho: float = 0.01, *, block: int = 32, quantize: Code = "bf16", warmup: int = 0, exchange: Where = "all-gather"
) -> Scheme:
    """The runs of `block` entries with the largest energy go whole, with error feedback: one index for a run.

    r += g ; send the rho*N/B runs with the largest sum(r^2) ; r -= what was sent.
    """
    return _with_feedback(BlockTopK(rho, block), quantize, exchange, warmup)


@recipe
def laplace(
    rho: float = 0.01,
    *,
    tolerance: float = 0.25,
    quantize: Code = "bf16",
    per: str = "bucket",
    warmup: int = 0,
    exchange: Where = "all-gather",
) -> Scheme:
    """Top-k goes by the published search: a threshold of a Laplace law, bisected; `topk` has ours, which is faster.

    t = mean|r| * ln(N/k), bisected until k to (1 + tolerance)*k entries reach it ; send the k largest (Chen, Liu,
    Han, 2021).
    """
    select = TopK(rho, per=per, search="bisection", tolerance=tolerance)
    return _with_feedback(select, quantize, exchange, warmup)


@recipe
def dgc(
    rho: float = 0.01, *, momentum: float = 0.9, ramp: int = 20, quantize: Code = "bf16", per: str = "bucket"
) -> Scheme:
    """Deep Gradient Compression sends top-k with momentum correction, reached in stages of `ramp` steps.

    u = m*u + g ; v += u ; send the k largest |v| ; there u = v = 0 (Lin et al., ICLR 2018).
    """
    return Scheme(
        select=TopK(rho=rho, per=per),
        quantize=part("quantize", quantize),
        memory=MomentumResidual(momentum=momentum),
        exchange=AllGather(),
        trigger=Ramp(steps=ramp) if ramp else EveryStep(),
    )


@recipe
def overlap(
    rho: float = 0.01,
    *,
    score: str | Score = "local",
    strength: float = 1.0,
    explore: float = 0.02,
    quantize: Code = "bf16",
    per: str = "bucket",
    warmup: int = 0,
    down_rho: float | None = None,
) -> Scheme:
    """Top-k goes to a server, which replies with the largest sums, 3*rho of all entries, and keeps the rest for later.

    held += sum(r_i[I_i]) ; reply with the largest |held|. A `score` makes the workers agree instead (after Wang et al.,
    ICNCC 2018): s = |r| * (e + |G|/mean|G|), G being the last reply ; send the k largest s.
    """
    scored = score_name(score)
    select = TopK(rho, per=per)
    if scored != "local":
        select = Overlap(rho, score=scored, strength=strength, explore=explore, per=per)
    exchange = Server(down_rho=min(1.0, 3 * rho) if down_rho is None else down_rho)
    return _with_feedback(select, quantize, exchange, warmup)


@recipe
def sign(vote: str = "majority") -> Scheme:
    """signSGD sends all signs, and the majority's is applied; no momentum, a rate of about 1e-3.

    x = sign(sum(sign(g))) (Bernstein et al., ICML 2018).
    """
    return Scheme(quantize=Sign(), exchange=Server(combine=vote))


@recipe
def sparse_sign(
    rho: float = 0.1, *, cover: float = 0.0, weight: float = 1.0, score: str | Score = "local", vote: str = "majority"
) -> Scheme:
    """S3GD-MV sends signs of the largest entries of each layer, accumulated till sent; k = round(rho*N or cover*N/M).

    a = w*a + g ; send sign(a) of the k largest |a| ; there a = 0 (Park and Lee, arXiv 2302.07475). With weight=0
    nothing is accumulated, as in its abstract. vote=weighted is after their arXiv 2402.01340 and 2403.16372.
    """
    rho = 0.0 if cover else rho
    select = TopK(rho=rho, cover=cover, per="parameter", dense_below=0)
    if (scored := score_name(score)) != "local":
        select = Overlap(rho, cover=cover, per="parameter", dense_below=0, score=scored)
    memory = Accumulated(weight=weight) if weight else Nothing()
    return Scheme(select=select, quantize=Sign(), memory=memory, exchange=Server(combine=vote))


@recipe
def maxnorm(bits: int = CODE_BITS, *, levels: int = 0, block: int = 512, stages: int = 0, seed: int = 0) -> Scheme:
    """Integers on a max-norm grid go, added in the network; levels = 2^(bits-1) - 1, or as given.

    q = round(g/n * s), n = max|g| ; x = n/s * sum(q)/M (Vineeth S, arXiv 2109.12497).
    """
    grid = MaxNorm(levels_of(bits, levels), block=block, seed=seed)
    return Scheme(quantize=grid, exchange=AllReduce(stages=stages))


@recipe
def multiscale(
    bits: str | int = CODE_BITS,
    *,
    levels: str | int = 0,
    block: int = 512,
    scales: int = 4,
    ratio: int = 2,
    share: int = 16,
    stages: int = 0,
    seed: int = 0,
) -> Scheme:
    """Integers go on the finest of several grids that every worker's entry fits, agreed on per `share` entries.

    q = round(g/n * s_j), s_j = s*ratio^j, or as listed: bits=6+10 or levels=31+511 (Vineeth S, arXiv 2109.12497).
    """
    first, *finer = levels_listed(bits, levels)
    more = {"finer": "+".join(map(str, finer))} if finer else {"scales": scales, "ratio": ratio}
    grid = MultiScale(first, block=block, share=share, seed=seed, **more)
    return Scheme(quantize=grid, exchange=AllReduce(stages=stages))


@recipe
def randk_maxnorm(
    rho: float = 0.1,
    *,
    k: int = 0,
    bits: int = CODE_BITS,
    levels: int = 0,
    block: int = 512,
    mode: str = "independent",
    memory: str | Memory = "residual",
    warmup: int = 0,
    stages: int = 0,
    seed: int = 0,
) -> Scheme:
    """maxnorm goes of the same random share of the entries everywhere; the rest is kept for later."""
    everywhere = maxnorm(bits=bits, levels=levels, block=block, stages=stages, seed=seed)
    return _random_share(everywhere, rho, k, mode, seed, memory, warmup)


@recipe
def randk_multiscale(
    rho: float = 0.1,
    *,
    k: int = 0,
    bits: str | int = CODE_BITS,
    levels: str | int = 0,
    block: int = 512,
    scales: int = 4,
    ratio: int = 2,
    share: int = 16,
    mode: str = "independent",
    memory: str | Memory = "residual",
    warmup: int = 0,
    stages: int = 0,
    seed: int = 0,
) -> Scheme:
    """multiscale goes of the same random share of the entries everywhere; the rest is kept for later."""
    everywhere = multiscale(
        bits=bits, levels=levels, block=block, scales=scales, ratio=ratio, share=share, stages=stages, seed=seed
    )
    return _random_share(everywhere, rho, k, mode, seed, memory, warmup)


@recipe
def lowrank(
    rank: int = 4,
    *,
    form: str = "both",
    quantize: Code = "none",
    dense_below: int = 1000,
    warmup: int = 0,
    seed: int = 0,
) -> Scheme:
    """PowerSGD adds two thin factors of each matrix, with error feedback; `form=alternating` adds one a step.

    P = M Q ; Q = M^T orth(P) ; M' = orth(P) Q^T (Vogels, Karimireddy, Jaggi, NeurIPS 2019; Zhang et al., ICDCS 2023).
    """
    select = LowRank(rank, form=form, dense_below=dense_below, seed=seed)
    return _with_feedback(select, quantize, AllReduce(), warmup)


@recipe
def gossip(
    rate: float = 1.3,
    *,
    rho: float = 1,
    trigger: str | GossipTrigger = "",
    quantize: Code = "",
    peers: str = "uniform",
    mode: str = "",
    momentum: str = "",
    seed: int = 0,
) -> GossipScheme:
    """A model goes in a modulo code, or the share `rho` that changed most: `rate` models leave a worker a step.

    x_i += (x_j - x_i)/2 ; x_j += (x_i - x_j)/2 (after Ho, Wu, Liu, CCGRID 2018, and Lu and De Sa, ICML 2020).
    """
    code = part("quantize", quantize or ("modulo" if rho == 1 else "bf16"))
    is_modulo = is_modulo_code(code)
    mode = mode or ("paired" if is_modulo and not trigger else "free")
    messages, shortest = (1, 0.0) if mode == "paired" else (2, 1.0)  # requests or replies in a round, or both
    by_clock = rate > 0 and (is_modulo or 0 < rho < 1 or mode == "paired")
    clock = Period(steps=max(messages * rho / rate, shortest)) if by_clock else TargetRate(rate=rate)
    momentum = momentum or ("quasi-global" if is_modulo else "local")
    return GossipScheme(
        select=TopK(rho=rho) if rho != 1 else Everything(),
        quantize=code,
        exchange=Gossip(peers=peers, mode=mode, momentum=momentum, seed=seed),
        trigger=part("trigger", trigger) if trigger else clock,
    )


@recipe
def gossip_change(
    rate: float = 0.16,
    *,
    quantize: Code = "none",
    per: str = "tensor",
    peers: str = "uniform",
    mode: str = "free",
    momentum: str = "quasi-global",
    seed: int = 0,
) -> GossipScheme:
    """Gossip goes of those tensors that have changed enough, the threshold moving so that `rate` models leave a step.

    By default 8 % of what leaves at every step (Ho, Wu, Liu, CCGRID 2018); tensor by tensor, by n^1.5, is ours.
    With quantize=modulo they go in a modulo code of a few bits, an eighth of that.
    """
    when = TargetRate(rate=rate, per=per)
    return gossip(trigger=when, quantize=quantize, peers=peers, mode=mode, momentum=momentum, seed=seed)


@recipe
def gossip_every(*, quantize: Code = "none", peers: str = "uniform", mode: str = "wait", seed: int = 0) -> GossipScheme:
    """Gossip goes at every step and waits for the answer: the published baseline of `gossip`."""
    return gossip(trigger="every-step", quantize=quantize, peers=peers, mode=mode, momentum="local", seed=seed)


@recipe
def gossip_period(
    steps: float = 16,
    *,
    quantize: Code = "none",
    peers: str = "uniform",
    mode: str = "free",
    momentum: str = "quasi-global",
    seed: int = 0,
) -> GossipScheme:
    """Gossip goes every `steps` steps: the control of equal bytes of `gossip-change`, 2/steps models a step."""
    when = f"period(steps={steps})"
    return gossip(trigger=when, quantize=quantize, peers=peers, mode=mode, momentum=momentum, seed=seed)


@recipe
def local(
    every: int = 16, *, lr: float = 1.0, quantize: Code = "bf16", fragments: int = 1, delay: int = 0, warmup: int = 0
) -> OuterScheme:
    """Every worker trains alone, and every `every` steps all models become their mean.

    anchor -= lr * mean(anchor - x_i) (Stich, ICLR 2019).
    """
    return OuterScheme(
        exchanged=Scheme(quantize=part("quantize", quantize)),
        when=Rounds(every=every, fragments=fragments, delay=delay, warmup=warmup),
        then=OuterSGD(lr=lr),
    )


@recipe
def diloco(
    every: int = 32,
    *,
    lr: float | None = None,
    momentum: str | float = 0.9,
    quantize: Code = "bf16",
    fragments: int = 1,
    delay: int = 0,
    warmup: int = 0,
) -> OuterScheme:
    """DiLoCo makes the mean of what all drifted a gradient, by which an outer Nesterov step moves the anchor.

    D = mean(anchor - x_i) ; b = m*b + D ; anchor -= lr * (D + m*b) (Douillard et al., arXiv 2311.08105).
    """
    everyone = local(every=every, quantize=quantize, fragments=fragments, delay=delay, warmup=warmup)
    return replace(everyone, then=_nesterov(lr, momentum))


@recipe
def streaming(
    every: int = 16,
    *,
    fragments: int | None = None,
    delay: int | None = None,
    bits: int = CODE_BITS,
    block: int = 512,
    lr: float | None = None,
    momentum: str | float = "auto",
    warmup: int = 0,
    seed: int = 0,
) -> OuterScheme:
    """Fragments of the model agree in turn, in the background and in few bits: for transformers over slow links.

    D = mean(maxnorm(anchor - x_i)) ; b = m*b + D ; anchor -= lr * (D + m*b) (Douillard et al., arXiv 2501.18512).
    Eight fragments, applied H/16 steps later and two at least, where H steps have room for them.
    """
    fragments = min(8, every) if fragments is None else fragments
    delay = min(max(2, every // 16), every) if delay is None else delay
    return OuterScheme(
        exchanged=_in_few_bits(bits, Nothing(), block=block, seed=seed),
        when=Rounds(every=every, fragments=fragments, delay=delay, warmup=warmup),
        then=_nesterov(lr, momentum),
    )


@recipe
def muloco(
    every: int = 30,
    *,
    fragments: int = 1,
    delay: int = 0,
    bits: int = CODE_BITS,
    lr: float | None = None,
    momentum: str | float = "",
    warmup: int = 0,
    seed: int = 0,
) -> OuterScheme:
    """MuLoCo takes outer steps with Muon inside, in few bits with error feedback; momentum grows with the workers.

    r += anchor - x_i ; send code(r) ; r -= code(r) ; then as diloco, with laconic.optim.Muon (arXiv 2505.23725).
    """
    return OuterScheme(
        exchanged=_in_few_bits(bits, Residual(), block=512, seed=seed),
        when=Rounds(every=every, fragments=fragments, delay=delay, warmup=warmup),
        then=_nesterov(lr, momentum) if momentum != "" else NesterovByWorkers(lr=0.7 if lr is None else lr),
    )


@recipe
def sparseloco(
    every: int = 16,
    *,
    rho: float = 1 / 64,
    decay: float = 0.95,
    lr: float = 1.0,
    quantize: Code = "lloyd",
    exchange: Where = "all-gather",
    chunk: int = 4096,
    fragments: int = 1,
    delay: int = 0,
    warmup: int = 0,
) -> OuterScheme:
    """SparseLoCo sends the largest of what all drifted, chunk by chunk, in two bits; the rest is kept, and fades.

    r = d*r + (anchor - x_i) ; send the k largest |r| of each chunk ; r -= what was sent (arXiv 2508.15706).
    """
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
    every: int = 16,
    *,
    lr: float = 0.7,
    momentum: float = 0.5,
    pull: float = 0.7,
    quantize: Code = "bf16",
    fragments: int = 1,
    delay: int = 0,
    seed: int = 0,
) -> OuterScheme:
    """NoLoCo takes outer steps between pairs instead of all, whose anchors differ and pull each other together.

    b = m*b - lr*mean(d) - pull*(a - mean(a)) ; a += b, the means being over two (Kolehmainen et al., arXiv 2506.10911).
    """
    return OuterScheme(
        exchanged=Scheme(quantize=part("quantize", quantize), exchange=Pairs(seed=seed)),
        when=Rounds(every=every, fragments=fragments, delay=delay),
        then=PairMomentum(lr=lr, momentum=momentum, pull=pull),
    )


@recipe
def torch_fp16() -> TorchHook:
    """PyTorch's fp16_compress_hook runs unchanged: a control."""
    return TorchHook(hook="fp16")


@recipe
def torch_powersgd(rank: int = 1, *, start: int = 2) -> TorchHook:
    """PyTorch's powerSGD_hook runs unchanged from step `start` on: a control; Gloo needs one large bucket."""
    return TorchHook(hook="powersgd", rank=rank, start=start)


def _in_few_bits(bits: int, memory: Memory, *, block: int, seed: int) -> Scheme:
    """Drifts on a grid, summed in two stages; in two bits as Lloyd's codes, to the owners of a share, who reply alike.

    A grid of two bits has one level: it loses more than it sends, and feeding that back would make it grow. Lloyd's
    code does not, so workers and owners keep what it loses, whatever `memory` is of a grid; `block` and `seed` are a
    grid's.
    """
    levels = levels_of(bits, 0)
    if levels == 1:
        return Scheme(quantize=Lloyd(), memory=Residual(), exchange=Server())
    grid = MaxNorm(levels=levels, block=block, seed=seed)
    return Scheme(quantize=grid, memory=memory, exchange=AllReduce(stages=2))


def _nesterov(lr: float | None, momentum: str | float) -> Outer:
    """Nesterov's outer step: at 0.7, by agreement at 1, or without momentum, unless another rate is given."""
    if momentum == "auto":
        return Agreement(lr=1.0 if lr is None else lr)
    try:
        momentum = float(momentum)
    except ValueError:
        raise SchemeError(f"the outer momentum is {momentum!r}; give a number in [0, 1), or auto") from None
    lr = 0.7 if lr is None else lr
    return Nesterov(lr=lr, momentum=momentum) if momentum else OuterSGD(lr=lr)


def _with_feedback(select: Selector, quantize: Any, exchange: Any, warmup: int) -> Scheme:
    """A scheme that keeps what it does not send, and whose first steps are dense."""
    return Scheme(
        select=select,
        quantize=part("quantize", quantize),
        memory=Residual(),
        exchange=part("exchange", exchange),
        trigger=_warmed(warmup),
    )


def _random_share(
    everywhere: Scheme, rho: float, k: int, mode: str, seed: int, memory: str | Memory, warmup: int
) -> Scheme:
    select = RandK(rho=0.0 if k else rho, k=k, mode=mode, seed=seed)
    return replace(everywhere, select=select, memory=part("memory", memory), trigger=_warmed(warmup))


def _warmed(steps: int) -> Schedule:
    return WarmUp(steps=steps) if steps else EveryStep()
