"""`doctor` on the command line prints what `examine` concludes."""

import json

import pytest

from ddtree_compile.cli import main
from ddtree_compile.doctor import Facts, judge


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    report = judge(Facts(python="3.11.7", system="Linux x86_64", cores=2, memory_bytes=16 << 30, packages={}))
    monkeypatch.setattr("ddtree_compile.doctor.examine", lambda: report)


def test_it_prints_both_tables_and_every_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "this machine has" in out and "so this works" in out
    assert "pip install -e '.[cuda]'" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"version", "has", "works"}
    assert {row["status"] for row in report["works"]} == {"no"}
