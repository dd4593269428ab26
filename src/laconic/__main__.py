"""`python -m laconic`, which is also what torchrun starts: `torchrun --nnodes=... -m laconic train ...`."""

import sys

from laconic.cli import main

sys.exit(main())
