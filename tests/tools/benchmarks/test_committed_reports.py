"""The committed reports are what their records give: the golden report of each benchmark."""

import importlib

import pytest

from lib.core.files import ROOT
from lib.core.records import read_records
from lib.tools.benchmarks.sections import Chart

ARTIFACTS = ROOT / "artifacts"
BENCHMARKS = ["attention", "communication", "lm_matrix", "sharding", "step", "tokenizer"]
BENCHMARKS += ["training", "scaling"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_committed_report_is_what_its_records_give(name, tmp_path, monkeypatch):
    room = "tools" if name == "scaling" else "tools.benchmarks"
    report = importlib.import_module(f"lib.{room}.{name}").REPORT
    # figures differ between versions of matplotlib
    drawn: list[str] = []
    monkeypatch.setattr(Chart, "save", lambda self, frame, path: drawn.append(path.name))
    report.write(read_records(ARTIFACTS / f"{report.stem}.jsonl"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    for made in tmp_path.iterdir():
        assert made.read_text() == (ARTIFACTS / made.name).read_text(), made.name
    assert all((ARTIFACTS / file).exists() for file in drawn)
    assert bool(drawn) == (name in ("attention", "lm_matrix"))
