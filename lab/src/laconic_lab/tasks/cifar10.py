"""CIFAR-10 (Krizhevsky 2009) in its standard binary layout."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import tarfile
import tempfile
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from laconic_lab.errors import TaskError
from laconic_lab.tasks.models import VGG16, ResNet, ResNet50
from laconic_lab.tasks.task import Data, Model, Task, Training

_ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as the data set's own page gives it
_FOLDER = "cifar-10-batches-bin"
_TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]
_RECORD_BYTES = 1 + 3 * 32 * 32
_TIMEOUT_S = 30
_PADDING = 4


def _load(folder: Path | None, context: int | None) -> Data:
    home = _find(folder) if folder is not None else _download()
    train = np.concatenate([_read(home / name) for name in _TRAIN])
    test = _read(home / "test_batch.bin")
    return Data(*_split(train), *_split(test), prepare, augment)


def _find(folder: Path) -> Path:
    for home in (folder, folder / _FOLDER):
        if (home / "test_batch.bin").exists():
            return home
    raise TaskError(f"{folder} has no {_FOLDER}/test_batch.bin; give --data the folder that holds {_FOLDER}")


def _download() -> Path:
    """Fetch the data set into the user's cache, once, and check it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"
        if not (cache / _FOLDER / "test_batch.bin").exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as fresh:
                _fetch(Path(fresh))
                with suppress(OSError):  # another worker was faster
                    (Path(fresh) / _FOLDER).rename(cache / _FOLDER)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise TaskError(
            f"CIFAR-10 cannot be kept in the cache ({error}); set XDG_CACHE_HOME to a folder that can be written, "
            f"or give --data a folder that holds {_FOLDER}"
        ) from None
    return cache / _FOLDER


def _fetch(folder: Path) -> None:
    """Fetch the archive (170 MB), check it and unpack it in the folder."""
    try:
        with urllib.request.urlopen(_ADDRESS, timeout=_TIMEOUT_S) as source:
            fetched = source.read()
    except (OSError, HTTPException) as error:
        raise TaskError(f"cannot fetch CIFAR-10 ({error}); give --data a folder that holds {_FOLDER}") from None
    if hashlib.md5(fetched).hexdigest() != _MD5:
        raise TaskError("what was fetched is not CIFAR-10: its checksum is wrong; try again, or give --data DIR")
    with tarfile.open(fileobj=io.BytesIO(fetched)) as tar:
        tar.extractall(folder, filter="data")


def _read(path: Path) -> np.ndarray:
    if not path.exists():
        raise TaskError(f"{path.parent} has no {path.name}; give --data the folder with all six CIFAR-10 batches")
    raw = np.fromfile(path, dtype=np.uint8)
    if raw.size == 0 or raw.size % _RECORD_BYTES:
        raise TaskError(f"{path} is not a CIFAR-10 batch; fetch it again")
    return raw.reshape(-1, _RECORD_BYTES)


def _split(records: np.ndarray) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(records[:, 1:].copy()).view(-1, 3, 32, 32)
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


def prepare(pixels: Tensor) -> Tensor:
    """Normalise pixels by channel."""
    mean, deviation = _of_channels(pixels.device)
    return (pixels.float() / 255 - mean) / deviation


@functools.cache
def _of_channels(device: torch.device) -> tuple[Tensor, Tensor]:
    """The training pixels' mean and deviation by channel; kept, since a copy to a GPU waits for it."""
    mean, deviation = torch.tensor([[0.491, 0.482, 0.447], [0.247, 0.243, 0.262]], device=device).view(2, 3, 1, 1)
    return mean, deviation


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift a batch by up to four pixels and mirror half of its images."""
    padded = F.pad(images, (_PADDING,) * 4)
    dy, dx = torch.randint(2 * _PADDING + 1, (2,), generator=generator).tolist()
    shifted = padded[:, :, dy : dy + 32, dx : dx + 32]
    mirror = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirror.view(-1, 1, 1, 1).to(images.device), shifted.flip(3), shifted)


_TRAINING = Training(lr=0.3, batch=32)
_FOR_LARGE = Training(lr=0.05, batch=32)
CIFAR10 = Task(
    "cifar10",
    {
        "resnet20": Model(lambda _: ResNet(20), _TRAINING),
        "resnet8": Model(lambda _: ResNet(8), _TRAINING),
        "resnet56": Model(lambda _: ResNet(56), _TRAINING),
        "resnet50": Model(lambda _: ResNet50(), _FOR_LARGE),
        "vgg16": Model(lambda _: VGG16(), _FOR_LARGE),
    },
    _load,
)
