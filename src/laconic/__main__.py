"""`python -m laconic`, which is also what torchrun starts: `torchrun --nnodes=... -m laconic train ...`."""

from laconic.measure.cli import run

run()
