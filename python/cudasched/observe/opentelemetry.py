"""Metrics for OpenTelemetry, by the names that Prometheus has.

::

    from opentelemetry import metrics
    import cudasched.observe.opentelemetry

    cudasched.observe.opentelemetry.register(metrics.get_meter_provider())

The program chooses the SDK, its reader and exporter; this asks for its API alone. Everything is read from the client
tables when the reader collects. A histogram is three counters, ``..._bucket`` with the attribute ``le``, ``..._sum``
and ``..._count``. OpenTelemetry has no instrument for a histogram that was counted elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from cudasched._version import __version__
from cudasched.errors import ConfigError, Error
from cudasched.observe._gpus import with_gpus
from cudasched.observe._metrics import Device, Process, Times, clients
from cudasched.observe.names import BUCKET_LABELS, Exported, cumulative, exports, unique

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

__all__ = ["register"]

_FRESH_S = 0.2
"""One collection asks for each metric by itself: so long, one read of the tables serves all metrics."""

_UNITS = {"seconds": "s", "bytes": "By", "hertz": "Hz", "watts": "W", "ratio": "1", "": "1"}


class _Tables:
    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = directory
        self._read: tuple[list[Device], list[Process]] = ([], [])
        self._at = -float("inf")

    def read(self) -> tuple[list[Device], list[Process]]:
        now = time.monotonic()
        if now - self._at > _FRESH_S:
            try:
                devices, processes = clients(self._directory)
                self._read = with_gpus(devices, processes), processes
            except Error:
                self._read = ([], [])
            self._at = time.monotonic()
        return self._read


def register(provider: MeterProvider | None = None, *, directory: str | os.PathLike[str] | None = None) -> None:
    """Adds every client's metrics to a meter provider of this program.

    Args:
        provider: OpenTelemetry's; None: the global one.
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.

    Raises:
        ConfigError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import metrics
    except ImportError:
        raise ConfigError("metrics for OpenTelemetry need its API: pip install opentelemetry-sdk") from None
    meter = (provider or metrics.get_meter_provider()).get_meter("cudasched", __version__)
    tables = _Tables(directory)

    def observed(exported: Exported, part: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for series in unique(exported.read(*tables.read())):
                attributes = dict(zip(exported.labels, series.labels, strict=True))
                if not isinstance(series.value, Times):
                    yield metrics.Observation(series.value, attributes)
                elif part == "_sum":
                    yield metrics.Observation(series.value.sum_s, attributes)
                elif part == "_count":
                    yield metrics.Observation(series.value.count, attributes)
                else:
                    for bound, count in zip(BUCKET_LABELS, cumulative(series.value), strict=True):
                        yield metrics.Observation(count, {**attributes, "le": bound})

        return observe

    for exported in exports():
        unit = _UNITS[exported.unit]
        create: Any = meter.create_observable_gauge
        parts = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}[exported.kind]
        if exported.kind != "gauge":
            create = meter.create_observable_counter
        for part in parts:
            in_unit = unit if part in ("", "_total", "_sum") else "1"
            create(exported.name + part, [observed(exported, part)], unit=in_unit, description=exported.help)
