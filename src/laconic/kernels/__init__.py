"""Numerical kernels: one name and signature each, whatever the machine.

`reference` is plain torch, runs on CPU and CUDA tensors, and is the definition; `cpu` is native code, `gpu` is Triton,
and both give the reference's results, bit for bit. LACONIC_KERNELS names the backend; one that is asked for by name is
used or is an error. Where none is named, a tensor's device decides, and `backend` tells which.
"""

# mypy: implicit-reexport
# ruff: noqa: F403 - a kernel is declared where it is defined, and nowhere again

from laconic.kernels.contract import CALLS, PASSES, Key, hash_64, key_of, new_search
from laconic.kernels.cpu.library import give_threads
from laconic.kernels.device import Executor, to_device, to_host, wait_for_stream
from laconic.kernels.dispatch import *
from laconic.kernels.host import end_to_end, half_way, has_zeros, joined_runs, merged, nonzero, repeated
from laconic.kernels.reference.lloyd import LLOYD_LANE_BITS, LLOYD_LARGEST_GROUP, LLOYD_VALUES_PER_WORD
from laconic.kernels.reference.modulo import MODULO_BLOCK
from laconic.kernels.reference.owners import Blocks, Pieces, Window
from laconic.kernels.searches import SEARCHES, withdraw_of_chunks_, withdraw_runs_
