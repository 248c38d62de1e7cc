from __future__ import annotations

import pytest
from pydantic import ValidationError
from test_cells import META

from benchmarks import tables
from benchmarks.results.schema import RESULTS, OverheadRow, Results, load


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_meet_the_schema(path):
    results = load(path)
    assert results.rows, "a results file without rows says nothing"
    assert results.meta.gpu != "simulated", "rehearsals are not results"


def test_tables_in_documents_are_up_to_date():
    stale = [path.name for path in tables.documents() if tables.rendered(path.read_text()) != path.read_text()]
    assert stale == [], "python -m benchmarks.tables makes them anew"


def overhead(added: float) -> Results:
    row = OverheadRow(what="launch", ns_median=2900.0, ns_p99=4000.0, baseline_ns_median=2850.0, added_ns_median=added)
    return Results(meta=META, rows=[row])


def test_a_marker_becomes_a_table_and_goes_stale_with_its_results(tmp_path):
    overhead(50).write(tmp_path / "overhead.json")
    document = "before\n<!-- table:overhead -->\nold\n<!-- end -->\nafter\n"
    new = tables.rendered(document, tmp_path)
    assert "| launch | 2900 | 4000 | 2850 | +50 |" in new
    assert "old" not in new and new.startswith("before\n") and new.endswith("<!-- end -->\nafter\n")
    assert tables.rendered(new, tmp_path) == new
    overhead(60).write(tmp_path / "overhead.json")
    assert tables.rendered(new, tmp_path) != new


def test_a_marker_without_results_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="table:nothing"):
        tables.rendered("<!-- table:nothing -->\n<!-- end -->", tmp_path)


def test_a_misspelt_field_is_an_error(tmp_path):
    path = tmp_path / "overhead.json"
    path.write_text(overhead(50).model_dump_json().replace("ns_p99", "ns_p98", 1))
    with pytest.raises(ValidationError):
        load(path)
