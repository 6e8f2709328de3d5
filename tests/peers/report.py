"""``docs/compatibility.md``, made from a run of all cases."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
_NOT_PARAMETERS = {"server", "peer"}
HEAD = """# Servers we did not write

One suite of cases, `tests/peers/`, runs against our `mcp-server` and against real servers, over HTTP and gRPC: Triton 2.51
(from the wheel of nvidia-pytriton 0.7.0, models of its Python backend), MLServer 1.7.1 and KServe's Python server 0.21.0
(custom models). `make test-peers` installs and starts them all and runs it; this page comes from the run (`make test-peers
ARGS=--write-compatibility`), and CI fails where it would come out otherwise.

**yes**: it works. **no**: the server can't, for the reason in the note. **partly**: some of it can't. Where the server can't, the
client ends in one of its own errors, unless the note says otherwise.
"""


@dataclass(frozen=True)
class Case:
    """One test against one peer over one protocol. ``row``: where its outcome goes in the table."""

    peer: str
    protocol: str
    name: str
    row: str


def case_of(item: pytest.Item) -> Case | None:
    """The case that a test is; ``None`` for one that needs no peer."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or "peer" not in callspec.params:
        return None
    assert isinstance(item, pytest.Function)
    rest = {name: str(value) for name, value in callspec.params.items() if name not in _NOT_PARAMETERS}
    name = " ".join([item.originalname.removeprefix("test_"), *rest.values()])
    title = (inspect.getdoc(item.function) or item.originalname).splitlines()[0].rstrip(".")
    row = f"{title}: {rest['datatype']}" if "datatype" in rest else title
    return Case(str(callspec.params["server"]), str(callspec.params["peer"]), name, row)


class Recorder:
    """A pytest plugin: notes what came of each case, and at the end compares or writes the page."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cases: dict[str, Case] = {}
        self._outcomes: dict[Case, str] = {}  # "" where it worked, else the reason why not
        self._complaints: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            case = case_of(item)
            if case is not None:
                self._cases[item.nodeid] = case

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self._cases.get(report.nodeid)
        if case is None or report.when != "call":
            return
        if report.passed:
            self._outcomes[case] = ""
        elif report.skipped and hasattr(report, "wasxfail"):
            self._outcomes[case] = report.wasxfail.removeprefix("reason: ")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        here = Path(__file__).parent
        all_of_it = [Path(arg).resolve() for arg in self._config.args] == [here] and not (
            self._config.option.keyword or self._config.option.markexpr or self._config.option.lf
        )
        if exitstatus != 0 or not all_of_it or len(self._outcomes) != len(self._cases):
            return
        from .incapable import TABLE

        for line in TABLE:
            if not any(line.covers(case) for case in self._cases.values()):
                self._complaints.append(f"incapable.py: nothing matches {line}")
        page = write_page(self._outcomes)
        if self._config.option.write_compatibility:
            PAGE.write_text(page)
        elif not PAGE.exists() or PAGE.read_text() != page:
            self._complaints.append(
                "docs/compatibility.md is not what this run gives; make test-peers ARGS=--write-compatibility writes it"
            )
        if self._complaints:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for complaint in self._complaints:
            terminalreporter.write_line(f"ERROR {complaint}", red=True)


def write_page(outcomes: dict[Case, str]) -> str:
    """The page as Markdown: a row for each kind of case, a column for each peer and protocol, notes on what is missing."""
    peers = list(dict.fromkeys(case.peer for case in outcomes))
    columns = sorted(
        {(case.peer, case.protocol) for case in outcomes},
        key=lambda it: (peers.index(it[0]), it[1] != "http"),
    )
    rows = list(dict.fromkeys(case.row for case in outcomes))
    notes: dict[str, int] = {}
    lines = ["| | " + " | ".join(f"{peer} {protocol}" for peer, protocol in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for row in rows:
        cells = []
        for column in columns:
            here = [
                why
                for case, why in outcomes.items()
                if case.row == row and (case.peer, case.protocol) == column
            ]
            cells.append(_cell(here, notes))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    numbered = [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join([HEAD, *lines, "", *numbered]) + "\n"


def _cell(reasons: list[str], notes: dict[str, int]) -> str:
    why = sorted({notes.setdefault(reason, len(notes) + 1) for reason in reasons if reason})
    if not why:
        return "yes" if reasons else ""
    word = "no" if all(reasons) else "partly"
    return f"{word} ({', '.join(map(str, why))})"
