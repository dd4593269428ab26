"""Buckets of one step, cut another way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.layout import Bucket, Layout


@contextmanager
def regrouped(buckets: Sequence[Bucket], layouts: Sequence[Layout]) -> Iterator[Sequence[Bucket]]:
    """The same gradients in buckets of the given layouts, written back on leaving; as they are if the names differ."""
    views: dict[str, Tensor] = {
        span.name: bucket.flat[span.start : span.stop] for bucket in buckets for span in bucket.layout.spans
    }
    shapes = {span.name: span.shape for bucket in buckets for span in bucket.layout.spans}
    wanted = [span for layout in layouts for span in layout.spans]
    fits = {name: view.numel() for name, view in views.items()} == {span.name: span.num_entries for span in wanted}
    if not fits or [bucket.layout for bucket in buckets] == list(layouts):
        yield buckets
        return
    shaped = [Layout.of(layout.names, [shapes[name] for name in layout.names]) for layout in layouts]
    cut = [
        Bucket(index, layout, torch.cat([views[name] for name in layout.names]), is_last=index == len(layouts) - 1)
        for index, layout in enumerate(shaped)
    ]
    yield cut
    for bucket in cut:
        for span in bucket.layout.spans:
            views[span.name].copy_(bucket.flat[span.start : span.stop])
