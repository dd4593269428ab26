"""The definition of every kernel, in plain torch and numpy; CPU and CUDA tensors alike, no Python loop over entries."""

# mypy: implicit-reexport
# ruff: noqa: F403 - a kernel is declared where it is defined, and nowhere again

from laconic.kernels.reference.bits import *
from laconic.kernels.reference.lloyd import *
from laconic.kernels.reference.low_rank import *
from laconic.kernels.reference.modulo import *
from laconic.kernels.reference.momentum import *
from laconic.kernels.reference.owners import *
from laconic.kernels.reference.rounding import *
from laconic.kernels.reference.signs import *
from laconic.kernels.reference.sparse import *
from laconic.kernels.reference.symmetric import *
