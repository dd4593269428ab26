"""One class for each way of exchanging, and the one table that picks among them."""

from laconic.paths.frames import FramePlan
from laconic.paths.path import PHASES, Exchange, Messages, Path, PhaseClock, Work
from laconic.paths.table import bits_per_entry, bytes_out, dense_path, path_for
