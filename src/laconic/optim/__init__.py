"""Optimizers for training over slow links: Muon for matrices and AdamW for the rest, as one torch optimizer."""

from laconic.optim.muon import Muon
from laconic.optim.newton_schulz import orthogonalize

__all__ = ["Muon", "orthogonalize"]
