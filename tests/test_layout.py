"""Spans of a flat buffer."""

from __future__ import annotations

import torch

from laconic.layout import Layout


def test_a_span_has_the_shape_of_its_parameter() -> None:
    matrix = torch.empty(3, 5)
    layout = Layout.of(["weight", "bias", "scale", "rows"], [matrix.shape, 7, torch.Size([]), (2, 0)])
    assert [(span.start, span.stop) for span in layout.spans] == [(0, 15), (15, 22), (22, 23), (23, 23)]
    assert [span.shape for span in layout.spans] == [(3, 5), (7,), (), (2, 0)]
    assert layout.num_entries == 23


def test_a_layout_made_of_sizes_is_the_same_as_one_made_of_shapes() -> None:
    sizes = Layout.of(["weight", "bias"], [15, 7])  # as a checkpoint has it
    shapes = Layout.of(["weight", "bias"], [(3, 5), (7,)])
    assert sizes == shapes and hash(sizes) == hash(shapes) and {sizes: 1}[shapes] == 1
    assert sizes != Layout.of(["weight", "bias"], [14, 8])
