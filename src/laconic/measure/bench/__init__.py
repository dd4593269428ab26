"""Measurements of single parts, each as a ratio or against a floor."""

from laconic.measure.bench.gradients import DISTRIBUTIONS
from laconic.measure.bench.kernels import bench_kernels
from laconic.measure.bench.select import bench_select
from laconic.measure.bench.step import bench_step
from laconic.measure.bench.wire import bench_wire

__all__ = ["DISTRIBUTIONS", "bench_kernels", "bench_select", "bench_step", "bench_wire"]
