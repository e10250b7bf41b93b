"""Records: appended safely, read back, resumed from, shown as tables; their provenance."""

import contextlib
import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import lib.core.records
from lib.core.files import ROOT
from lib.core.records import (
    append_record,
    format_value,
    new_record,
    provenance,
    read_records,
    records,
    remaining,
    to_csv,
    to_markdown,
)
from lib.data.prepare import TokenizeConfig


def test_records_come_back_in_the_order_written(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    assert read_records(path) == []
    made = [new_record({"ms": 1.5, "note": "é"}, seed=i) for i in range(3)]
    for record in made:
        append_record(path, record)
    assert read_records(path) == made


@pytest.mark.parametrize("kept", [0, 1, 12])
def test_a_torn_last_line_is_skipped_and_does_not_swallow_the_next(tmp_path, kept):
    path = tmp_path / "records.jsonl"
    for value in (1, 2):
        append_record(path, {"figures": {"a": value}})
    first, second = path.read_bytes().splitlines(keepends=True)
    # with nothing of the second, the first lacks its newline
    path.write_bytes(first + second[:kept] if kept else first[:-1])
    append_record(path, {"figures": {"a": 3}})
    torn = pytest.warns(UserWarning, match=r"records\.jsonl:2 is not a record")
    with torn if kept else contextlib.nullcontext():
        assert [record["figures"]["a"] for record in read_records(path)] == [1, 3]


def test_numpy_values_configs_and_paths_are_written_as_plain_json(tmp_path):
    path = tmp_path / "records.jsonl"
    record = {"a": np.float32(0.5), "b": np.arange(2), "c": Path("x/y"), "d": TokenizeConfig()}
    append_record(path, record)
    (read,) = read_records(path)
    assert read.pop("d")["vocab_size"] == 4096
    assert read == {"a": 0.5, "b": [0, 1], "c": "x/y"}


def test_only_configs_without_a_record_remain(tmp_path):
    path = tmp_path / "records.jsonl"
    configs = [TokenizeConfig(vocab_size=size) for size in (300, 400, 500)]
    append_record(path, new_record({}, config=configs[1]))
    assert remaining(configs, read_records(path)) == [configs[0], configs[2]]
    assert remaining([{"b": 1, "a": 2}], [{"config": {"a": 2, "b": 1}}]) == []


def test_csv_has_a_row_for_each_record_and_a_column_for_each_key(tmp_path):
    records = [{"config": {"n": 1}, "figures": {"ms": 0.1}}, {"figures": {"ms": None, "oom": True}}]
    text = to_csv(records, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == text
    assert list(csv.DictReader(io.StringIO(text))) == [
        {"config.n": "1", "figures.ms": "0.1", "figures.oom": ""},
        {"config.n": "", "figures.ms": "", "figures.oom": "True"},
    ]


def test_markdown_table_is_aligned_with_numbers_to_the_right():
    rows = [{"name": "a|b\r\nc", "x": {"ms": 1234.5}}, {"name": "long name", "x": {"ms": 0.5}}]
    assert to_markdown(rows, {"name": "Name", "x.ms": "time (ms)"}) == (
        "| Name      | time (ms) |\n"
        "| --------- | --------: |\n"
        "| a\\|b  c   |     1,234 |\n"
        "| long name |     0.500 |\n"
    )
    with pytest.raises(ValueError, match="columns must be among x, got 'y'"):
        to_markdown([{"x": 1}], ["y"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (9.999, "10.0"),
        (99.96, "100"),
        (-3.14159, "-3.14"),
        (1234.5, "1,234"),
        (0.00012, "0.000120"),
        (0.000012, "1.20e-05"),
        (1.5e13, "1.50e+13"),
        (1234567, "1,234,567"),
        (np.float32(1.23456), "1.23"),
        (np.int64(1234567), "1,234,567"),
        (None, "–"),
        (True, "yes"),
        ("oom", "oom"),
    ],
)
def test_values_are_shown_with_three_digits(value, text):
    assert format_value(value) == text


def test_records_in_a_frame_are_those_with_the_values_asked_for(tmp_path):
    path = tmp_path / "r.jsonl"
    for size, kernel in ((1, "a"), (2, "a"), (1, "b")):
        append_record(path, new_record({"ms": 1.5 * size}, config={"size": size, "kernel": kernel}))
    assert list(records(path)["ms"]) == [1.5, 3.0, 1.5]
    assert list(records(path, size=1, kernel="b")["kernel"]) == ["b"]
    assert list(records(path, kernel=["b", "c"], ms=1.5)["size"]) == [1]
    with pytest.raises(ValueError, match=r"r\.jsonl must have 'sise' in a record, got size"):
        records(path, sise=1)
    # by name, those of the repository
    assert set(records("sharding_benchmark", backend="nccl", ranks=4)["ranks"]) == {4}
    with pytest.raises(FileNotFoundError, match=r"did you mean 'sharding_benchmark'\?"):
        records("sharding_benchmrak")


# Provenance


def test_provenance_survives_json_and_names_the_software_and_the_machine():
    record = provenance(seed=3, config=TokenizeConfig(), device="cpu")
    assert json.loads(json.dumps(record)) == record
    assert (record["seed"], record["config"]["vocab_size"]) == (3, 4096)
    assert {"commit", *record, "figures"} == new_record({}, config={"a": 1}).keys()
    assert record["device"] == record["cpu"]
    assert record["cores"] >= 1
    assert record["versions"]["numpy"] == np.__version__
    assert record["versions"]["torch"] == torch.__version__
    assert record["date"].endswith("+00:00")


def test_provenance_names_the_gpu_when_torch_is_loaded_and_sees_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert provenance()["device"] == "NVIDIA H200"
    assert provenance(device="cpu")["device"] == provenance()["cpu"]


def test_provenance_imports_neither_torch_nor_numpy_nor_pandas():
    code = (
        "import sys; from lib.core.records import provenance; record = provenance();"
        "print({'torch', 'numpy', 'pandas'} & {*sys.modules}, record['versions']['torch'])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert output.split() == ["set()", torch.__version__]


def test_commit_is_of_this_checkout_and_dirty_looks_at_the_code_only(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    nothing = {"commit": None, "dirty": None}
    monkeypatch.setattr(lib.core.records, "ROOT", tmp_path.resolve())
    assert lib.core.records._git_state() == nothing
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "result.csv").write_text("1")
    assert lib.core.records._git_state() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "lib" / "a.py").write_text("2")
    assert lib.core.records._git_state()["dirty"] is True
    # a folder inside somebody else's checkout
    monkeypatch.setattr(lib.core.records, "ROOT", (tmp_path / "lib").resolve())
    assert lib.core.records._git_state() == nothing


# the last is what `append_record` refuses to write
@pytest.mark.parametrize("line", [b"\0" * 4096, b"[1]", b"\xff\xfe{}", b'{"ms": -Infinity}'])
def test_a_line_that_is_no_record_is_skipped_by_its_number(tmp_path, line):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n' + line + b'\n{"b": 2}')
    with pytest.warns(UserWarning, match=r"records\.jsonl:3 is not a record, skipped: ") as caught:
        assert read_records(path) == [{"a": 1}, {"b": 2}]
    assert len(caught) == 1


def test_a_record_that_json_cannot_hold_is_refused_with_its_file_and_leaves_none(tmp_path):
    path = tmp_path / "r.jsonl"
    for record, said in (({"a": {1, 2}}, ""), ({"a": {"loss": math.nan}}, r".*a\.loss is nan")):
        with pytest.raises(ValueError, match=r"record for .*r\.jsonl: " + said):
            append_record(path, record)
    assert not path.exists()
    # a path with bytes that are no text costs no measurement
    append_record(path, {"output": "/data/\udcff"})
    assert read_records(path) == [{"output": "/data/\udcff"}]
