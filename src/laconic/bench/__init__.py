"""Measurements of single parts, each as a ratio or against a floor."""

from laconic.bench.wire import bench_wire

__all__ = ["bench_wire"]
