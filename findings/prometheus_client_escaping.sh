#!/usr/bin/env bash
# prometheus_client's histograms are of unknown type where the server asks for `escaping=values` or `escaping=dots`.
#
# The schemes are for names with characters such as dots. `values` leaves a plain name alone in the HELP and TYPE lines
# and in the text format, but the samples of OpenMetrics get its prefix and doubled underscores: the series has another
# name by the format that the server takes. `dots` escapes the suffix with the name (`__bucket`). A sample's name must be
# that of its TYPE line and a suffix, so no sample belongs to the histogram any more; prometheus_client's own parsers read
# it as unknown, without an error. The other two schemes are right: set `metric_name_escaping_scheme` to one of them.
#
# Seen with prometheus_client 0.26.0, CPython 3.11.7, 2026-11-29:
#     underscores, text: histogram gpu_time, bucket gpu_time_bucket, read as histogram
#     underscores, OpenMetrics: histogram gpu_time, bucket gpu_time_bucket, read as histogram
#     allow-utf-8, text: histogram gpu_time, bucket gpu_time_bucket, read as histogram
#     allow-utf-8, OpenMetrics: histogram gpu_time, bucket gpu_time_bucket, read as histogram
#     values, text: histogram gpu_time, bucket gpu_time_bucket, read as histogram
#     values, OpenMetrics: histogram gpu_time, bucket U__gpu__time__bucket, read as unknown
#     dots, text: histogram gpu__time, bucket gpu__time__bucket, read as unknown
#     dots, OpenMetrics: histogram gpu__time, bucket gpu__time__bucket, read as unknown
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check prometheus_client==0.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata
import platform
import re
import sys

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

registry = CollectorRegistry()
Histogram("gpu_time", "", registry=registry, buckets=[1]).observe(0.5)
print(f"prometheus_client {importlib.metadata.version('prometheus_client')}, Python {platform.python_version()}")
formats = {
    "text": ("text/plain;version=1.0.0", parse_text),
    "OpenMetrics": ("application/openmetrics-text;version=1.0.0", parse_openmetrics),
}
right = set()
for scheme in "underscores", "allow-utf-8", "values", "dots":
    for kind, (accept, parse) in formats.items():
        encode, _ = choose_encoder(f"{accept};escaping={scheme}")
        text = encode(registry).decode()
        declared = re.search("# TYPE ([^ ]*) histogram", text)[1]
        sample = re.search(".*(?=[{]le)", text)[0]
        try:
            read = next(family.type for family in parse(text) if sample in {one.name for one in family.samples})
        except ValueError as error:
            read = f"ValueError: {error}"
        print(f"{scheme}, {kind}: histogram {declared}, bucket {sample}, read as {read}")
        if read == "histogram":
            right.add((scheme, kind))
expected = {("underscores", "text"), ("underscores", "OpenMetrics"), ("allow-utf-8", "text"), ("allow-utf-8", "OpenMetrics")}
sys.exit(0 if right == {*expected, ("values", "text")} else 1)
PYTHON
