"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) in their standard binary layouts."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import tarfile
import tempfile
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from laconic_lab.errors import TaskError
from laconic_lab.tasks.models import VGG16, ResNet, ResNet50
from laconic_lab.tasks.task import Data, Model, Task, Training

_HOME = "https://www.cs.toronto.edu/~kriz/"
_IMAGE_BYTES = 3 * 32 * 32
_TIMEOUT_S = 30
_PADDING = 4
_TRAINING = Training(lr=0.3, batch=32)
_FOR_LARGE = Training(lr=0.05, batch=32)


@dataclass(frozen=True)
class _Cifar:
    """One of the two data sets: where it is, in which files, and how many labels stand before an image."""

    title: str
    archive: str
    md5: str  # as the data set's own page gives it
    folder: str
    train: tuple[str, ...]
    test: str
    num_classes: int
    num_labels: int = 1  # bytes before an image, of which the last is its class

    def task(self) -> Task:
        """The task that it makes."""
        n = self.num_classes
        models = {
            "resnet20": Model(lambda _: ResNet(20, n), _TRAINING),
            "resnet8": Model(lambda _: ResNet(8, n), _TRAINING),
            "resnet56": Model(lambda _: ResNet(56, n), _TRAINING),
            "resnet50": Model(lambda _: ResNet50(n), _FOR_LARGE),
            "vgg16": Model(lambda _: VGG16(n), _FOR_LARGE),
        }
        return Task(self.title.replace("-", "").lower(), models, self.load)

    def load(self, folder: Path | None, context: int | None) -> Data:
        """Its images, from a folder or fetched once."""
        home = self._find(folder) if folder is not None else self._download()
        train = np.concatenate([self._read(home / name) for name in self.train])
        return Data(*self._split(train), *self._split(self._read(home / self.test)), prepare, augment)

    def _find(self, folder: Path) -> Path:
        for home in (folder, folder / self.folder):
            if (home / self.test).exists():
                return home
        raise TaskError(f"{folder} has no {self.folder}/{self.test}; give --data the folder that holds {self.folder}")

    def _download(self) -> Path:
        """Fetch the data set into the user's cache, once, and check it."""
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"
            if not (cache / self.folder / self.test).exists():
                cache.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=cache) as fresh:
                    self._fetch(Path(fresh))
                    with suppress(OSError):  # another worker was faster
                        (Path(fresh) / self.folder).rename(cache / self.folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            raise TaskError(
                f"{self.title} cannot be kept in the cache ({error}); set XDG_CACHE_HOME to a folder that can be "
                f"written, or give --data a folder that holds {self.folder}"
            ) from None
        return cache / self.folder

    def _fetch(self, folder: Path) -> None:
        """Fetch the archive (170 MB), check it and unpack it in the folder."""
        try:
            with urllib.request.urlopen(_HOME + self.archive, timeout=_TIMEOUT_S) as source:
                fetched = source.read()
        except (OSError, HTTPException) as error:
            raise TaskError(
                f"cannot fetch {self.title} ({error}); give --data a folder that holds {self.folder}"
            ) from None
        if hashlib.md5(fetched).hexdigest() != self.md5:
            raise TaskError(
                f"what was fetched is not {self.title}: its checksum is wrong; try again, or give --data DIR"
            )
        with tarfile.open(fileobj=io.BytesIO(fetched)) as tar:
            tar.extractall(folder, filter="data")

    def _read(self, path: Path) -> np.ndarray:
        if not path.exists():
            files = ", ".join((*self.train, self.test))
            raise TaskError(f"{path.parent} has no {path.name}; give --data the folder with all of {files}")
        raw = np.fromfile(path, dtype=np.uint8)
        if raw.size == 0 or raw.size % (self.num_labels + _IMAGE_BYTES):
            raise TaskError(f"{path} is not a file of {self.title}; fetch it again")
        records = raw.reshape(-1, self.num_labels + _IMAGE_BYTES)
        if records[:, self.num_labels - 1].max() >= self.num_classes:
            raise TaskError(f"{path} has labels beyond {self.num_classes - 1}; fetch it again")
        return records

    def _split(self, records: np.ndarray) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(records[:, self.num_labels :].copy()).view(-1, 3, 32, 32)
        return images, torch.from_numpy(records[:, self.num_labels - 1].astype(np.int64))


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


CIFAR10 = _Cifar(
    title="CIFAR-10",
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test="test_batch.bin",
    num_classes=10,
).task()
CIFAR100 = _Cifar(
    title="CIFAR-100",
    archive="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    folder="cifar-100-binary",
    train=("train.bin",),
    test="test.bin",
    num_classes=100,
    num_labels=2,
).task()
