"""`python -m laconic`, which is also what torchrun starts: `torchrun --nnodes=... -m laconic train ...`."""

from laconic.cli import run

if __name__ == "__main__":  # and not where chaos forks its workers
    run()
