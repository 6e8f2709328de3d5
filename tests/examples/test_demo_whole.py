"""The demo as a whole, made small: real servers, real model, real kills; and what it tells of its outcome."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from examples import quickstart
from examples.demo import __main__ as demo
from examples.demo.charts import Line, curves
from examples.demo.library import Document
from examples.demo.play import Answered
from examples.demo.report import page
from examples.demo.scenario import Ledger, Offline, Outcome, Run, Size
from examples.demo.table import rows

needs_models = pytest.mark.skipif(
    find_spec("rapidocr_onnxruntime") is None, reason="pip install --no-deps rapidocr-onnxruntime==1.4.4"
)


def _run(name: str, *sources: str) -> Run:
    answers = tuple(
        Answered(float(at), f"/doc/a/page/{at}", source, 1.0 + at, characters=10, errors=1)
        for at, source in enumerate(sources)
    )
    return Run(name, f"run {name}", answers, seconds=1.0, overfetch=0.25, precision=0.5)


@pytest.fixture
def outcome() -> Outcome:
    white = np.full((96, 320), 255, np.uint8)
    marks = (
        (1.0, "mcp-server killed"),
        (2.0, "mcp-profile killed"),
        (4.0, "servers back"),
    )
    return Outcome(
        size=Size(1, 1, 4, 4, 2),
        runs=(
            _run("none", "server", "server", "server", "server"),
            _run("lru", "server", "cache", "server", "server"),
            _run("full", "server", "cache", "prefetch", "prefetch"),
        ),
        offline=Offline(
            (
                Answered(1.5, "/doc/a/page/1", "edge", 40.0, 10, 0),
                Answered(4.5, "/doc/a/page/2", "server", 30.0, 10, 0),
            ),
            marks,
            ("ppocr_rec",),
        ),
        ledger=Ledger(recorded=10, stored=10, distinct=10, batches=2, resent=0),
        library_bytes=800,
        budget_bytes=100,
        profile={},
        seconds=9.0,
        sample=Document("a", (("x",),), (white,), ("a",), white),
        sample_text=("<read>",),
    )


def test_a_hit_is_an_answer_from_the_cache_or_a_prefetch(outcome: Outcome) -> None:
    assert [run.hit_ratio for run in outcome.runs] == [0, 0.25, 0.75]


def test_the_ledger_tells_lost_events_from_those_counted_twice() -> None:
    ledger = Ledger(recorded=10, stored=11, distinct=9, batches=1, resent=0)  # one lost, two stored twice
    assert (ledger.lost, ledger.double) == (1, 2)


def test_the_figures_have_the_names_that_the_benchmark_promises(outcome: Outcome) -> None:
    figures = json.loads(json.dumps(outcome.figures()))
    runs = {"none", "lru", "full"}
    assert [set(figures[name]) for name in ("p50_ms", "p95_ms", "hit_ratio")] == [runs, runs, runs]
    assert {name: figures[name] for name in list(figures)[3:]} == {
        "overfetch": 0.25,
        "prefetch_precision": 0.5,
        "offline_errors": 0,
        "events_lost": 0,
        "events_double": 0,
    }


def test_the_table_has_a_column_per_run_and_a_row_per_figure(outcome: Outcome) -> None:
    table = rows(outcome)
    assert {len(row) for row in table} == {5}
    assert ("from prefetch", "0", "0", "2", "0") in table
    assert ("from edge", "0", "0", "0", "1") in table


def test_the_report_is_one_file_that_loads_nothing(outcome: Outcome) -> None:
    html = page(outcome)
    assert "http" not in html
    assert "<script" not in html
    assert "&lt;read&gt;" in html
    assert html.count("<svg") == 4


def test_the_report_shows_runs_in_which_nothing_happened(outcome: Outcome) -> None:
    assert "<svg" in page(
        replace(outcome, runs=(_run("none", "server"), _run("lru", "server"), _run("full", "server")))
    )


def test_a_chart_is_sound_xml_and_has_a_curve_per_line() -> None:
    lines = [Line("a & b", "lru", [(1, 0.5), (100, 1)]), Line("c", "full", [(0.001, 0), (10, 1)])]
    svg = ElementTree.fromstring(curves(lines, x_label="x", y_label="y", log_x=True))
    assert len(svg.findall("polyline")) == 2


@needs_models
def test_the_whole_demo_made_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "QUICK", Size(documents=2, pages=5, training=20, turns=16, offline=15))
    assert demo.main(["--quick", "--json", "--out", str(tmp_path)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["hit_ratio"]["full"] >= figures["hit_ratio"]["lru"] >= figures["hit_ratio"]["none"] == 0
    assert (figures["offline_errors"], figures["events_lost"], figures["events_double"]) == (0, 0, 0)
    assert figures["overfetch"] <= 0.5
    assert (tmp_path / "demo-report.html").read_text("utf-8").startswith("<!doctype html>")
    assert not os.path.exists(os.environ["MCP_STATE_DIR"])


@needs_models
def test_the_quickstart_shows_a_server_a_cache_and_a_prefetch(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart.main()
    told = capsys.readouterr().out.splitlines()
    assert "source=server" in told[0]
    assert "source=cache" in told[1]
    assert any("source=prefetch" in line for line in told[2:])
