#!/usr/bin/env bash
# OpenTelemetry's Prometheus exporter puts one library's label values under another's label names.
#
# Two libraries of a program may count under one name, as by the semantic conventions; each meter is a scope, and the
# exporter tells them apart by labels (otel_scope_name). It makes one family of both, with the label names of the scope
# that comes first. The second's values are put there by position: where its attributes have other names, the values land
# under wrong ones, and what is left over is cut off. Nothing is raised or logged, the page parses, and a rate by label
# counts what never was. Within one scope missing labels are filled in. Have the same attribute names in each scope, or
# rename one of the two with a view.
#
# Seen with opentelemetry-sdk 1.45.2, opentelemetry-exporter-prometheus 0.66b2, prometheus_client 0.26.0, CPython 3.11.7,
# 2026-11-30:
#     two scopes: model=resnet name=batcher; model=0 name=bert schema_url=server, wrong
#     in the other order: gpu=0 model=bert name=server; gpu=resnet model=batcher, wrong
#     the same names: model=resnet name=batcher; gpu=0 model=bert name=server
#     renamed: model=resnet name=batcher; gpu=0 model=bert name=server
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  opentelemetry-sdk==1.45.2 opentelemetry-exporter-prometheus==0.66b2 prometheus_client==0.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata
import platform
import sys

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import View
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

names = "opentelemetry-sdk", "opentelemetry-exporter-prometheus", "prometheus_client"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))


def exported(scopes, views=()):
    """The labels on the page for each scope's counter of 1, 2 ..., but empty ones."""
    reader = PrometheusMetricReader(disable_target_info=True)
    provider = MeterProvider(metric_readers=[reader], views=views)
    for number, (scope, attributes) in enumerate(scopes.items(), 1):
        provider.get_meter(scope).create_counter("requests").add(number, attributes)
    page = generate_latest(REGISTRY).decode()
    provider.shutdown()
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    return [
        {name.removeprefix("otel_scope_"): text for name, text in sorted(one.labels.items()) if text}
        for one in sorted(samples, key=lambda one: one.value)
        if "requests" in one.name
    ]


def written(labels):
    return " ".join(f"{name}={text}" for name, text in labels.items())


batcher, server = {"model": "resnet"}, {"gpu": "0", "model": "bert"}
right = []
for title, scopes, views in (
    ("two scopes", {"batcher": batcher, "server": server}, ()),
    ("in the other order", {"server": server, "batcher": batcher}, ()),
    ("the same names", {"batcher": {"gpu": "", **batcher}, "server": server}, ()),
    ("renamed", {"batcher": batcher, "server": server}, [View(meter_name="server", name="server_requests")]),
):
    seen = exported(scopes, views)
    wanted = [{**{k: v for k, v in one.items() if v}, "name": scope} for scope, one in scopes.items()]
    right.append(seen == wanted)
    print(f"{title}: {'; '.join(map(written, seen))}{'' if right[-1] else ', wrong'}")
sys.exit(0 if right == [False, False, True, True] else 1)
PYTHON
