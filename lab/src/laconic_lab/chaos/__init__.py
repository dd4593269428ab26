"""Faults drawn from a seed, over every family and phase, and the promises that must hold after each."""
