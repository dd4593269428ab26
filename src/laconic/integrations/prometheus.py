"""Prometheus: export(session), an endpoint that shows what a session or a follower does."""

import os
from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from laconic.integrations import Either

_PORT = 9400
_COUNTED = {"step": "steps", "bytes_out_total": "bytes_out", "bytes_in_total": "bytes_in"}  # all else is of a step


def export(
    session: Either, port: int | None = None, *, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None
) -> Callable[[], None]:
    """Show session.metrics() at http://host:port/metrics, from a thread that reads it when Prometheus asks.

    `laconic_steps_total`, `laconic_bytes_out_total` and `laconic_bytes_in_total` count; `laconic_step_bytes_out` and
    its like are of the step that is the last then.

    Args:
        session: What attach() or follow() returned.
        port: Where this rank answers; 9400 + LOCAL_RANK unless given, so that each process of a machine has its own.
        host: The address that it answers on; "0.0.0.0" where Prometheus runs on another machine.
        labels: Of all its figures, beside `rank`.

    Returns:
        A function that ends the endpoint.

    Example:
        >>> stop = export(laconic.attach(ddp, "topk:rho=0.01"))
    """
    if port is None:
        port = _PORT + int(os.environ.get("LOCAL_RANK", "0"))
    rank = dist.get_rank() if dist.is_initialized() else 0
    registry = CollectorRegistry()
    registry.register(_Collector(session, {"rank": str(rank), **(labels or {})}))
    server, thread = start_http_server(port, host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class _Collector:
    """Asks the session when Prometheus asks."""

    def __init__(self, session: Either, labels: Mapping[str, str]) -> None:
        self._session = session
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Counters, and gauges of the last step."""
        for name, value in self._session.metrics().items():
            family: CounterMetricFamily | GaugeMetricFamily
            if name in _COUNTED:
                family = CounterMetricFamily(f"laconic_{_COUNTED[name]}", "since it began", labels=[*self._labels])
            else:
                family = GaugeMetricFamily(f"laconic_step_{name}", "of the last step", labels=[*self._labels])
            family.add_metric([*self._labels.values()], value)
            yield family
