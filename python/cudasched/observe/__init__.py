"""What cudasched does, for people and for monitoring: metrics, in Python and for Prometheus and OpenTelemetry.

`metrics` says what this process has counted, `clients` what every client on this machine has; `prometheus` and
`opentelemetry` export both by the names of `names`. ``docs/metrics.md`` has them all. ``prometheus-client``,
``nvidia-ml-py`` and OpenTelemetry's SDK are extras, loaded when used.
"""

from __future__ import annotations

from cudasched.observe._metrics import Metrics, Predictions, Process, RegionMetrics, Times, clients, metrics

__all__ = ["Metrics", "Predictions", "Process", "RegionMetrics", "Times", "clients", "metrics"]
