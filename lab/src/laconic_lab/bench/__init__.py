"""Measurements of single parts, each as a ratio or against a floor."""

from laconic_lab.bench.common import DISTRIBUTIONS
from laconic_lab.bench.select import bench_select
from laconic_lab.bench.step import bench_step

__all__ = ["DISTRIBUTIONS", "bench_select", "bench_step"]
