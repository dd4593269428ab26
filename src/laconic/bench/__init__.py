"""Measurements of single parts, each as a ratio or against a floor."""

from laconic.bench.gradients import DISTRIBUTIONS
from laconic.bench.kernels import bench_kernels
from laconic.bench.select import bench_select
from laconic.bench.wire import bench_wire

__all__ = ["DISTRIBUTIONS", "bench_kernels", "bench_select", "bench_wire"]
