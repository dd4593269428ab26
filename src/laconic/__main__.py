"""`python -m laconic`, which is also what torchrun starts: `torchrun --nnodes=... -m laconic train ...`."""

from laconic.cli import run

run()
