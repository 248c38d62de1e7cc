"""cudasched's metrics, for people and for monitoring: in Python and for Prometheus and OpenTelemetry.

`metrics` has this process's counters, `clients` those of every client on this machine; `prometheus` and `opentelemetry`
export both by the names of `names`. ``docs/metrics.md`` lists all. ``prometheus-client``, ``nvidia-ml-py`` and
OpenTelemetry's SDK are extras, loaded when used.
"""

from __future__ import annotations

from cudasched.observe._gpus import Foreign, Gpu, GpuShare, gpus, of_status
from cudasched.observe._metrics import Metrics, Predictions, Process, RegionMetrics, Times, clients, metrics

__all__ = [
    "Foreign",
    "Gpu",
    "GpuShare",
    "Metrics",
    "Predictions",
    "Process",
    "RegionMetrics",
    "Times",
    "clients",
    "gpus",
    "metrics",
    "of_status",
]
