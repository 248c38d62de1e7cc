from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cells import META
from test_figures import row

from benchmarks import spans, tables
from benchmarks.results.schema import ColocationRow, FigureRow, Results

SLOW = row("processes", "gemm", p99_ratio=6.0, best_effort_per_s=200.0)
ROWS = [
    row("cudasched_mps", "gemm", "mps", p99_ratio=1.256, best_effort_per_s=150.0),
    row("cudasched_mps", "resnet50", "mps", p99_ratio=1.5, best_effort_per_s=90.0),
    row("cudasched_mps", "elementwise", "mps", p99_ratio=2.0, best_effort_per_s=None),
    SLOW,
    row("processes", "resnet50", p99_ratio=4.0, best_effort_per_s=60.0),
]


def colocations(*rows: ColocationRow) -> Results:
    return Results(meta=META, rows=list(rows or ROWS))


def document(query: str, was: str = "old") -> str:
    return f"P99 is <!-- figure:few {query} -->{was}<!-- end --> x alone.\n"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("p99_ratio arm=cudasched_mps best_effort_load=gemm .2f", "1.26"),
        (".1f max p99_ratio", "6.0"),
        ("median p99_ratio arm=cudasched_mps", "1.5"),
        ("latency_ms.p99 arm=processes best_effort_load=gemm .2f", "0.80"),
        ("min best_effort_of_time_slices arm=cudasched_mps .0%", "75%"),
        ("count best_effort_of_time_slices<0.97 arm=cudasched_mps", "1"),
        ("count arm=cudasched_mps,processes", "5"),
        ("count p99_ratio>1.9", "3"),
        ("max p99_of_bound .1f", "1.0"),
        ("max p50_of_alone .1f", "1.2"),
        ("best_effort_of_alone arm=processes best_effort_load=gemm .1f", "2.0"),
    ],
)
def test_a_query_says_one_figure(query, says):
    assert spans.figure(colocations(), query) == says


def test_a_stale_span_is_named_with_its_line_and_both_figures(tmp_path):
    colocations().write(tmp_path / "few.json")
    stale: list[str] = []
    text = "first line\n" + document("p99_ratio arm=processes best_effort_load=gemm .1f", "1.2")
    new = tables.rendered(text, tmp_path, stale)
    assert new == text.replace("1.2", "6.0")
    assert stale == ["2: figure:few p99_ratio arm=processes best_effort_load=gemm .1f: 1.2 is 6.0 now"]
    stale.clear()
    assert tables.rendered(new, tmp_path, stale) == new and stale == []


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("p99_ratio arm=nothing", "there is no row with arm=nothing"),
        (
            "p99_ratio arm=processes best_effort_load=bert_training",
            "there is no row with best_effort_load=bert_training",
        ),
        ("p99_ratio arm=processes", "2 rows meet it"),
        ("p99_share arm=processes", "no row has a field p99_share"),
        ("arm=processes", "none is named"),
        ("p99_ratio p50_ratio", "it names two values"),
        ("best_effort_per_s best_effort_load=elementwise", "was not measured"),
        ("p99_ratio best_effort_load=gemm arm=processes arm=mps", "there is no row with arm=mps"),
    ],
)
def test_a_span_without_its_row_is_an_error_that_names_it(tmp_path, query, error):
    colocations().write(tmp_path / "few.json")
    with pytest.raises(spans.SpanError, match=error) as raised:
        tables.rendered(document(query), tmp_path)
    assert f"figure:few {query}" in str(raised.value)


def test_a_span_of_a_file_that_is_not_there_or_is_broken_is_an_error(tmp_path):
    with pytest.raises(spans.SpanError, match="figure:few count"):
        tables.rendered(document("count"), tmp_path)
    (tmp_path / "few.json").write_text("{}")
    with pytest.raises(spans.SpanError, match="figure:few count"):
        tables.rendered(document("count"), tmp_path)


@pytest.mark.parametrize(
    "broken", ["<!-- figure:few\ncount -->2<!-- end -->", "<!-- figure:few count -->2", "<!-- figure:few"]
)
def test_a_span_that_is_broken_off_is_an_error(tmp_path, broken):
    with pytest.raises(spans.SpanError, match="2: a figure's span does not end"):
        tables.rendered(f"first line\n{broken}\n<!-- end -->\n", tmp_path)
    assert tables.rendered(f"```\n{broken}\n```\n", tmp_path)


@given(
    value=st.floats(min_value=1e-3, max_value=1e6),
    spec=st.sampled_from([".0f", ".1f", ".2f", ".3g", ".0%", ".1%", ",.0f"]),
    was=st.text(alphabet=st.characters(exclude_characters="<>\n\r"), max_size=8),
)
def test_a_span_says_the_rows_value_in_its_format_and_then_stays(tmp_path_factory, value, spec, was):
    directory = tmp_path_factory.mktemp("results")
    figure = FigureRow(figure="a", value=value, goal=0, better="more", low=0, high=value, n=1, limited_by="")
    Results(meta=META, rows=[figure]).write(directory / "few.json")
    new = tables.rendered(document(f"value figure=a {spec}", was), directory)
    assert f"-->{format(value, spec)}<!-- end -->" in new
    assert tables.rendered(new, directory) == new
    assert spans.unmarked("README.md", new) == []


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        ("P99 is 1.16 x alone", ["1.16 x"]),
        ("training keeps 94 and 93% of it", ["94 and 93%"]),
        ("it takes 5 ms", ["5 ms"]),
        ("tails grow six to eight times", ["six to eight times"]),
        ("1.6 to <!-- figure:few count -->2<!-- end --> ms", ["1.6 to § ms"]),
        ("6 to <!-- figure:few count -->2<!-- end --> ms", ["6 to § ms"]),
        ("the worst was 2.68", ["2.68"]),
        ("see [10 ms](docs/10.5.md) and `2 ms`", ["10 ms"]),
        ("12 programs in 20 seconds, Python 3", []),
        ("slices of <!-- stated: the length that is set -->1 us<!-- end -->", []),
        ("slices of <!-- stated:  -->1 us<!-- end -->", ["1 us"]),
        ("```\nlast 1.5 ms\n```", []),
        ("<!-- table:few -->\n| 1.5 ms |\n<!-- end -->", []),
        ("## Install\nGCC 12.2\n## Results\n3 x", ["3 x"]),
    ],
)
def test_a_measured_figure_outside_of_spans_is_found(claim, found):
    assert [said.split("'")[1] for said in spans.unmarked("README.md", claim)] == found
    assert spans.unmarked("tuning.md", claim) == []


def test_a_found_figure_has_its_line():
    text = "one\n<!-- stated: given\n-->\n<!-- figure:few count -->2<!-- end -->\n```\ncode\n```\n3 ms\n"
    assert spans.unmarked("README.md", text) == ["8: '3 ms' is in no span"]


def test_of_results_only_the_first_screen_claims():
    assert len(spans.unmarked("results.md", "# Results\n3 ms\n## How to read the tables\n4 ms\n")) == 1


def test_documents_are_as_their_results_are_and_every_claim_is_marked(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("<!-- figure:core count -->13<!-- end --> figures", 0, ""),
        ("<!-- figure:core count -->14<!-- end --> figures", 1, "README.md:1: figure:core count: 14 is 13 now"),
        ("<!-- figure:core value figure=none -->1<!-- end --> x", 1, "there is no row with figure=none"),
        ("P99 is 2.4 x alone", 1, "README.md:1: '2.4 x' is in no span"),
    ],
)
def test_a_check_refuses_stale_unknown_and_unmarked_figures(tmp_path, monkeypatch, capsys, text, status, said):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "documents", lambda: [readme])
    assert tables.main(["--check"]) == status and readme.read_text() == text
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    tables.main([])
    assert "14" not in readme.read_text(), "without --check a stale figure is written"
