"""Models that a CPU can train in minutes, and some that want a GPU."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CNN(nn.Sequential):
    """Two convolutions and two linear layers: 1,199,882 parameters on 28x28 images, most of them in one matrix."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which pads channels with zeros where they double."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.stride = channels // channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, self.stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1:
            missing = out.shape[1] - x.shape[1]
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, missing // 2, missing // 2))
        return F.relu(out + x)


class ResNet(nn.Module):
    """The CIFAR ResNet of depth 6n + 2 (He et al., CVPR 2016): 8, 20 and 56 layers have 75, 270 and 853 k entries."""

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        widths = [16] + [w for w in (16, 32, 64) for _ in range((depth - 2) // 6)]
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*(_Block(a, b) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.stem(x)).mean(dim=(2, 3))
        return self.head(features)  # type: ignore[no-any-return]


class _Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, which narrow and widen it, and a shortcut that fits their shape."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.convolutions = nn.Sequential(
            *_normed(channels_in, width, 1),
            nn.ReLU(),
            *_normed(width, width, 3, stride),
            nn.ReLU(),
            *_normed(width, channels, 1),
        )
        fits = channels_in == channels and stride == 1
        self.shortcut = nn.Identity() if fits else nn.Sequential(*_normed(channels_in, channels, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))


class ResNet50(nn.Sequential):
    """The ImageNet ResNet of 50 layers (He et al., CVPR 2016) with a 3x3 stem for 32x32 images: 23.5 M parameters."""

    def __init__(self, num_classes: int) -> None:
        stages = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
        blocks, channels = [], 64
        for width, depth, stride in stages:
            for number in range(depth):
                blocks.append(_Bottleneck(channels, width, 1 if number else stride))
                channels = 4 * width
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
        super().__init__(*_normed(3, 64, 3), nn.ReLU(), *blocks, *pool)


class VGG16(nn.Sequential):
    """Simonyan, Zisserman (ICLR 2015) with batch norms and one linear layer, for 32x32 images: 14.7 M parameters."""

    def __init__(self, num_classes: int) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                layers += [*_normed(channels, width, 3), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels, num_classes))


def _normed(channels_in: int, channels: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels_in, channels, size, stride, size // 2, bias=False), nn.BatchNorm2d(channels)


class _Layer(nn.Module):
    """Attention and a feed-forward net, each after a norm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A small causal transformer over characters: 3 layers of width 128 have 0.6 M parameters."""

    def __init__(
        self, vocabulary: int, context: int, width: int = 128, num_layers: int = 3, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(_Layer(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.layers(x)))  # type: ignore[no-any-return]


class GPT2(GPT):
    """The same as GPT-2 begins and ends it (Radford et al. 2019): one matrix for tokens in and out, small weights.

    Over 65 characters at a context of 256: 1.0 M parameters in 5 layers of 128, 10.8 M in 6 of 384, 85.3 M in 12 of
    768, 302.6 M in 24 of 1,024.
    """

    def __init__(self, vocabulary: int, context: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__(vocabulary, context, width, num_layers, num_heads)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # What each layer adds to the stream shrinks with their number, so that the stream's size does not grow.
                adds = name.endswith(("out.weight", "feed.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if adds else 0.02)
