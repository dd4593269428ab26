"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): a slice ships with the package, the full set is read from IDX files."""

from __future__ import annotations

import gzip
import lzma
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laconic_lab.errors import TaskError
from laconic_lab.tasks.models import CNN
from laconic_lab.tasks.task import Data, Model, Task, Training

SLICE = Path(__file__).parent / "data" / "fashion_mnist_slice.xz"
_NUM_TRAIN = 10_000
_NUM_TEST = 2_000
_NUM_PIXELS = 28 * 28


def _load(folder: Path | None, context: int | None) -> Data:
    train_x, train_y, test_x, test_y = _read_slice() if folder is None else _read_folder(folder)
    return Data(
        _images(train_x), torch.from_numpy(train_y).long(), _images(test_x), torch.from_numpy(test_y).long(), _prepare
    )


def _images(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).view(-1, 1, 28, 28)


def _prepare(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.286) / 0.353  # mean and deviation of the training pixels


def _read_slice() -> list[np.ndarray]:
    """Train images, train labels, test images, test labels: raw bytes, one after the other."""
    raw = np.frombuffer(bytearray(lzma.decompress(SLICE.read_bytes())), dtype=np.uint8)
    sizes = [_NUM_TRAIN * _NUM_PIXELS, _NUM_TRAIN, _NUM_TEST * _NUM_PIXELS, _NUM_TEST]
    return np.split(raw, np.cumsum(sizes)[:-1])


def _read_folder(folder: Path) -> list[np.ndarray]:
    names = (f"{split}-{what}" for split in ("train", "t10k") for what in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    return [read_idx(folder, name) for name in names]


def read_idx(folder: Path, name: str) -> np.ndarray:
    """One IDX file of bytes, plain or gzipped, as an array of its own shape."""
    plain = folder / name
    zipped = folder / f"{name}.gz"
    if plain.exists():
        raw = plain.read_bytes()
    elif zipped.exists():
        try:
            raw = gzip.decompress(zipped.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise TaskError(f"{zipped} is not a whole gzip file ({error}); fetch it again") from None
    else:
        raise TaskError(
            f"{folder} has no {name} or {name}.gz; give --data the folder with Fashion-MNIST's four IDX files"
        )
    num_dims = raw[3] if len(raw) > 3 and raw[:3] == b"\x00\x00\x08" else 0
    shape = tuple(np.frombuffer(raw, dtype=">u4", count=num_dims, offset=4).tolist()) if num_dims else ()
    body = np.frombuffer(bytearray(raw[4 + 4 * num_dims :]), dtype=np.uint8)
    if not num_dims or body.size != int(np.prod(shape)):
        raise TaskError(f"{name} in {folder} is not an IDX file of bytes; fetch it again")
    return body.reshape(shape)


FASHION_MNIST = Task("fashion-mnist", {"cnn": Model(lambda _: CNN(), Training(lr=0.2, batch=32))}, _load)
