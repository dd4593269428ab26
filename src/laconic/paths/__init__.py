"""One file for each way of exchanging, and the one table that picks among them."""

from laconic.paths.clock import PHASES, PhaseClock
from laconic.paths.path import Path, Said, Taken, Work
from laconic.paths.table import bits_per_entry, bytes_out, dense_path, path_for
