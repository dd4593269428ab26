"""Write the Fashion-MNIST slice that ships with the package, from the full data set's four IDX files.

    python tools/make_fashion_mnist_slice.py DIR

The first 1,000 training and 200 test images of each class, in the data set's own order.
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import numpy as np

from laconic_lab.tasks.fashion_mnist import SLICE, read_idx

PER_CLASS = {"train": 1000, "t10k": 200}


def main(folder: Path) -> None:
    """Cut, join, compress."""
    blocks = []
    for split, per_class in PER_CLASS.items():
        images, labels = read_idx(folder, f"{split}-images-idx3-ubyte"), read_idx(folder, f"{split}-labels-idx1-ubyte")
        first = np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in range(10)])
        chosen = np.sort(first)
        blocks += [images[chosen].reshape(len(chosen), -1).tobytes(), labels[chosen].tobytes()]
    # Raw bytes: train images, train labels, test images, test labels.
    SLICE.write_bytes(lzma.compress(b"".join(blocks), preset=9 | lzma.PRESET_EXTREME))
    print(f"{SLICE}: {SLICE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
