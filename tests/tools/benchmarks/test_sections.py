"""Records to rows, and sections to Markdown and CSV."""

from lib.tools.benchmarks.sections import (
    Section,
    Table,
    measured_on,
    newest,
    to_frame,
    to_rows,
    write_csv,
    write_report,
)


def record(date: str, samples: int = 3, device: str = "GPU", **figures) -> dict:
    config = {"size": figures.pop("size", 1), "samples": samples}
    about = {"device": device, "date": date, "versions": {"torch": "2.9", "triton": "3.5"}}
    return {"config": config, "figures": {"status": "ok", **figures}, **about}


def test_the_last_record_of_a_config_counts_on_each_device_whatever_its_samples():
    old, other = record("1"), record("2", size=2)
    cpu, new = record("3", device="CPU"), record("4", samples=9)
    assert newest([old, other, cpu, new]) == [new, other, cpu]
    assert newest([old, new], ignore=()) == [old, new]


def test_rows_keep_integers_dicts_and_lists_and_have_none_where_a_value_is_missing():
    frame = to_frame([record("1", samples_ms=[1.0], bytes=7), record("2", memory={"peak": 3})])
    first, second = to_rows(frame)
    assert (first["size"], first["bytes"], first["samples_ms"]) == (1, 7, [1.0])
    assert type(first["bytes"]) is int
    assert (second["bytes"], second["memory"]) == (None, {"peak": 3})
    assert (first["device"], first["torch"], first["commit"]) == ("GPU", "2.9", None)
    assert to_rows(to_frame([])) == []


def test_a_section_shows_text_and_the_columns_that_have_a_value(tmp_path):
    rows = [{"name": "a", "ms": 1.234, "gb": None}, {"name": "b", "ms": None, "gb": None}]
    columns = {"name": "what", "ms": "time (ms)", "gb": "memory (GB)", "other": "other"}
    sections = [
        Section("Report", ["Text.\n", ""], level=1),
        Section("Rows", [Table(rows, columns), Table([]), "- note"]),
        Section("Frame", [Table(to_frame([record("1", a=1)]).filter(["a", "size"]))]),
    ]
    write_report(tmp_path / "report.md", sections)
    assert (tmp_path / "report.md").read_text() == (
        "# Report\n\nText.\n\n## Rows\n\n"
        "| what | time (ms) |\n| ---- | --------: |\n| a    |      1.23 |\n| b    |         – |\n\n"
        "- note\n\n## Frame\n\n|   a | size |\n| --: | ---: |\n|   1 |    1 |\n"
    )


def test_csv_has_nested_values_and_no_lists(tmp_path):
    write_csv(tmp_path / "rows.csv", [{"a": 1, "times_ms": [1.0], "b": {"c": 2.5}}, {"a": None}])
    assert (tmp_path / "rows.csv").read_text() == "a,b.c\n1,2.5\n,\n"


def test_the_newest_record_says_where_and_when_it_was_measured():
    assert measured_on([record("2"), record("1")]) == "GPU, torch 2.9, 2"
    assert measured_on([record("2")], "triton") == "GPU, torch 2.9, triton 3.5, 2"
