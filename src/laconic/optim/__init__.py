"""Optimizers for training over slow links: Muon for matrices and AdamW for the rest, as one torch optimizer."""

from laconic.optim.muon import Muon

__all__ = ["Muon"]
