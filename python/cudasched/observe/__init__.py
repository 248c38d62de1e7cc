"""What cudasched does, for people and for monitoring: metrics, in Python and for Prometheus and OpenTelemetry.

`metrics` says what this process has counted, `clients` what every client on this machine has; `prometheus` and
`opentelemetry` export both by the names of `names`. ``docs/metrics.md`` has them all. ``prometheus-client``,
``nvidia-ml-py`` and OpenTelemetry's SDK are extras, loaded when used.
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
