"""Records: appended safely, read back, resumed from, shown as tables."""

import csv
import io
import warnings
from pathlib import Path

import numpy as np
import pytest

from lib.config import TokenizeConfig
from lib.report import (
    append_record,
    format_value,
    new_record,
    read_records,
    remaining,
    to_csv,
    to_markdown,
)


def test_records_come_back_in_the_order_written(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    records = [new_record({"ms": 1.5, "note": "é"}, seed=i) for i in range(3)]
    for record in records:
        append_record(path, record)
    assert read_records(path) == records


def test_a_record_has_the_keys_that_every_record_has():
    record = new_record({}, config={"a": 1}, seed=0)
    assert {"config", "figures", "device", "versions", "commit", "seed", "date"} <= record.keys()


def test_no_file_means_no_records(tmp_path):
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("kept", [1, 5, 12])
def test_a_torn_last_line_is_skipped_with_a_warning(tmp_path, kept):
    path = tmp_path / "records.jsonl"
    append_record(path, {"figures": {"a": 1}})
    append_record(path, {"figures": {"a": 2}})
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole[0] + whole[1][:kept])
    with pytest.warns(UserWarning, match=r"records\.jsonl:2 is no record"):
        assert read_records(path) == [{"figures": {"a": 1}}]


def test_a_record_appended_behind_a_torn_line_is_whole(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"figures": {"a": 1}}\n{"figu')
    append_record(path, {"figures": {"a": 3}})
    with pytest.warns(UserWarning, match=":2 "):
        assert [record["figures"]["a"] for record in read_records(path)] == [1, 3]


def test_a_last_line_that_only_lacks_its_end_counts(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"a": 1}')
    append_record(path, {"a": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_records(path) == [{"a": 1}, {"a": 2}]


def test_numpy_numbers_and_paths_are_written_plain(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, {"a": np.float32(0.5), "b": np.arange(2), "c": Path("x/y")})
    assert read_records(path) == [{"a": 0.5, "b": [0, 1], "c": "x/y"}]


def test_numbers_that_are_none_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"figures\.loss is nan"):
        append_record(tmp_path / "records.jsonl", {"figures": {"loss": float("nan")}})
    assert read_records(tmp_path / "records.jsonl") == []


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
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows == [
        {"config.n": "1", "figures.ms": "0.1", "figures.oom": ""},
        {"config.n": "", "figures.ms": "", "figures.oom": "True"},
    ]


def test_markdown_table_is_aligned_with_numbers_to_the_right():
    rows = [{"name": "a|b", "x": {"ms": 1234.5}}, {"name": "long name", "x": {"ms": 0.5}}]
    assert to_markdown(rows, {"name": "Name", "x.ms": "time (ms)"}) == (
        "| Name      | time (ms) |\n"
        "| --------- | --------: |\n"
        "| a\\|b      |     1,234 |\n"
        "| long name |     0.500 |\n"
    )


def test_markdown_names_a_column_that_is_not_there():
    with pytest.raises(ValueError, match="column is 'y'; right is one of: x"):
        to_markdown([{"x": 1}], ["y"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (9.999, "10.0"),
        (99.96, "100"),
        (0.1, "0.100"),
        (-3.14159, "-3.14"),
        (1234.5, "1,234"),
        (0.00012, "0.000120"),
        (0.000012, "1.20e-05"),
        (1.5e13, "1.50e+13"),
        (1234567, "1,234,567"),
        (None, "–"),
        (True, "yes"),
        ("oom", "oom"),
    ],
)
def test_values_are_shown_with_three_digits(value, text):
    assert format_value(value) == text
