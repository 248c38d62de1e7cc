#!/usr/bin/env bash
# pyarrow loses rows of Parquet files, or counts too many, where a filter meets NaN or a group of zeros.
#
# It takes a row group's minimum and maximum for bounds of all its values. By the format they leave out NaN, and zeros
# have -0.0 as the minimum and 0.0 as the maximum. So `count_rows` counts NaN with the numbers, and a comparison that
# only NaN passes skips the group. Where minimum and maximum are equal, pyarrow takes each row for that value: `is_nan`
# finds none, and `isin([0.0])`, which tells -0.0 from 0.0, loses all zeros (Arrow's issue 46183, open since 2025). A
# table in memory and a file without statistics are right. Nothing is raised. Write such columns with
# `write_statistics=False`, or filter and count after the read.
#
# Seen with pyarrow 26.0.1, NumPy 2.4.6, CPython 3.11.7, 2026-11-30 (the rows of a table, of a file, of one without
# statistics, each read and counted):
#     1 NaN 2 3, x >= 0: table 3 3, file 3 4, without statistics 3 3
#     1 NaN 2 3, ~(x <= 5): table 1 1, file 0 0, without statistics 1 1
#     1 NaN 2 3, is_nan(x): table 1 1, file 1 1, without statistics 1 1
#     1 NaN 1 1, is_nan(x): table 1 1, file 0 0, without statistics 1 1
#     1 NaN 1 1, x != 1: table 1 1, file 0 0, without statistics 1 1
#     0 0 0 0, x isin [0]: table 4 4, file 0 0, without statistics 4 4
#     0 0 0 0, x == 0: table 4 4, file 4 4, without statistics 4 4
#     0 0 0 1, x isin [0]: table 3 3, file 3 3, without statistics 3 3
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pyarrow==26.0.1 numpy==2.4.6
cat > "$folder/filter.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import pyarrow
from pyarrow import compute, dataset, parquet

names = "pyarrow", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
x, nan = compute.field("x"), float("nan")
cases = (
    ([1, nan, 2, 3], "x >= 0", x >= 0.0),
    ([1, nan, 2, 3], "~(x <= 5)", ~(x <= 5.0)),
    ([1, nan, 2, 3], "is_nan(x)", compute.is_nan(x)),
    ([1, nan, 1, 1], "is_nan(x)", compute.is_nan(x)),
    ([1, nan, 1, 1], "x != 1", x != 1.0),
    ([0, 0, 0, 0], "x isin [0]", x.isin([0.0])),
    ([0, 0, 0, 0], "x == 0", x == 0.0),
    ([0, 0, 0, 1], "x isin [0]", x.isin([0.0])),
)
seen = []
for values, said, condition in cases:
    table = pyarrow.table({"x": pyarrow.array(values, pyarrow.float64())})
    rows = [(table.filter(condition).num_rows, dataset.dataset(table).count_rows(filter=condition))]
    for file, statistics in (("with.parquet", True), ("without.parquet", False)):
        parquet.write_table(table, file, write_statistics=statistics)
        read = parquet.read_table(file, filters=condition).num_rows
        rows.append((read, dataset.dataset(file).count_rows(filter=condition)))
    whose = "table", "file", "without statistics"
    texts = (f"{who} {read} {counted}" for who, (read, counted) in zip(whose, rows, strict=True))
    numbers = " ".join("NaN" if value != value else str(value) for value in values)
    print(f"{numbers}, {said}: {', '.join(texts)}")
    assert rows[0][0] == rows[0][1] and rows[2] == rows[0], "memory or a file without statistics is wrong"
    seen.append((rows[0][0], *rows[1]))
wrong = [one for one in seen if len(set(one)) > 1]
sys.exit(0 if wrong == [(3, 3, 4), (1, 0, 0), (1, 0, 0), (1, 0, 0), (4, 0, 0)] else 1)
PYTHON
cd "$folder"
venv/bin/python filter.py
