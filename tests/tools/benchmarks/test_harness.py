"""Sweeps: a record for each config, also after interruptions and when memory runs out."""

import itertools
import threading
import time
import weakref

import pytest
import torch

from lib.__main__ import MEASURE, load
from lib.core.files import lock_file
from lib.core.records import append_record, read_records
from lib.tools.benchmarks import sweep
from lib.tools.benchmarks.harness import Benchmark, SamplingConfig, grid
from lib.tools.benchmarks.sections import Report
from lib.tools.benchmarks.sweep import Store, code_version, differences, records_like

CASES = grid(size=(0, 1, 2, 3, 4), name="a")


def run_sweep(path, cases, measure, **options):
    """A sweep of one case at a time."""
    groups = [case if isinstance(case, list) else [case] for case in cases]
    one = lambda group: [{"status": "ok", **measure(group[0])}]  # noqa: E731
    store = Store(path, seed=options.pop("seed", 0))
    return sweep.run_sweep(store, groups, one, **options)


def sizes(records):
    return [record["config"]["size"] for record in records]


def test_a_sweep_leaves_a_record_of_each_config_and_prints_a_line_for_it(tmp_path, capsys):
    path = tmp_path / "new" / "records.jsonl"
    show = lambda record: f"square {record['figures']['square']}"  # noqa: E731
    # a config given twice is measured once
    configs = [*CASES, CASES[1]]
    records = run_sweep(path, configs, lambda c: {"square": c.size**2}, seed=3, line=show)
    assert records == read_records(path)
    assert [r["figures"] for r in records] == [{"status": "ok", "square": n * n} for n in range(5)]
    keys = {"config", "figures", "device", "versions", "commit", "seed", "date", "code"}
    assert all(keys <= record.keys() and record["seed"] == 3 for record in records)
    assert capsys.readouterr().out == "".join(f"size {n}: square {n * n}\n" for n in range(5))


def test_a_bar_names_what_sets_the_row_apart_that_is_being_measured():
    names = differences([{"size": 1, "seed": 0, "mask": ["a"]}, {"size": 2, "seed": 0, "mask": []}])
    assert names == ["size 1, mask ['a']", "size 2, mask []"]
    assert differences([{"size": 1}]) == [""]
    assert differences([]) == []


def test_a_grid_has_each_combination_and_the_last_axis_varies_fastest():
    cases = [
        (case.size, case.name, case.both) for case in grid(size=(1, 2), name=("a", "b"), both=[3])
    ]
    assert cases == [(1, "a", [3]), (1, "b", [3]), (2, "a", [3]), (2, "b", [3])]


def test_memory_that_runs_out_leaves_later_cases_unaffected(tmp_path):
    held = []

    def measure(case, config, device):
        tensor = torch.ones(1000)
        held.append(weakref.ref(tensor))
        # everything held by an earlier case is free
        assert [reference() is None for reference in held[:-1]] == [True] * case.size
        if case.size == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return {"sum": float(tensor.sum())}

    benchmark = Benchmark(
        Report("squares", "Squares", {"sum": "sum"}),
        lambda config, device: CASES,
        measure,
    )
    records = benchmark(SamplingConfig(output=tmp_path, device="cpu"))
    figures = [record["figures"] for record in records]
    assert figures[2] == {"status": "oom"}
    for size in (0, 1, 3, 4):
        assert figures[size] == {"status": "ok", "sum": 1000.0}
    assert "| 1,000 |" in (tmp_path / "squares.md").read_text()


def test_cases_that_failed_are_named_and_if_all_did_that_is_an_error(tmp_path, caplog):
    def measure(group, config, device):
        failed = {"status": "refused", "reason": "too small"}
        yield from ({"sum": 1.0} if case.size else failed for case in group)

    def run(*sizes):
        cases = [grid(size=sizes, name="a")]
        benchmark = Benchmark(Report("s", "S", {"size": "n"}), lambda *_: cases, measure)
        return benchmark(SamplingConfig(output=tmp_path, device="cpu"))

    assert sizes(run(0, 1)) == [0, 1]
    assert "1 of 2 could not be measured" in caplog.text
    assert caplog.text.endswith("\n- size 0: refused: too small\n")
    with pytest.raises(ValueError, match=r"nothing could be measured .*: size 0: refused: too sm"):
        run(0)
    assert "refused" in (tmp_path / "s.csv").read_text()


def test_a_group_is_measured_whole_unless_all_of_it_has_records_and_what_failed_is_not_tried_again(
    tmp_path,
):
    path, calls = tmp_path / "records.jsonl", []
    groups = [CASES[:3], CASES[3:]]

    def measure(group):
        calls.append([case.size for case in group])
        for case in group:
            if case.size == 2 and len(calls) == 1:
                raise KeyboardInterrupt
            yield {"status": "oom" if case.size == 1 else "ok"}

    with pytest.raises(KeyboardInterrupt):
        sweep.run_sweep(Store(path), groups, measure)
    assert sizes(read_records(path)) == [0, 1]
    records = sweep.run_sweep(Store(path), groups, measure)
    assert calls == [[0, 1, 2], [0, 2], [3, 4]]
    assert sweep.run_sweep(Store(path), groups, measure) == records
    assert len(calls) == 3
    assert [r["figures"]["status"] for r in records] == ["ok", "oom", "ok", "ok", "ok"]


def test_a_sweep_waits_for_another_one_into_its_file_and_measures_what_is_left(tmp_path, caplog):
    path, is_locked = tmp_path / "records.jsonl", threading.Event()
    others = run_sweep(tmp_path / "others.jsonl", CASES, lambda case: {})

    def sweep_until_this_one_waits():
        with lock_file(path):
            is_locked.set()
            while "waiting for another process" not in caplog.text:
                time.sleep(0.01)
            for record in others:
                append_record(path, record)

    threading.Thread(target=sweep_until_this_one_waits, daemon=True).start()
    is_locked.wait()
    assert run_sweep(path, CASES, lambda case: pytest.fail("measured again")) == others


@pytest.mark.parametrize(
    "change", [{"device": "another"}, {"code": "0"}, {"seed": 9}, {"versions": {}}, {"cores": 0}]
)
def test_records_made_elsewhere_or_by_other_code_do_not_count(tmp_path, change):
    path, calls = tmp_path / "records.jsonl", []
    (record,) = run_sweep(path, CASES[:1], lambda case: {"n": 1}, seed=0)
    path.unlink()
    append_record(path, record | change)
    records = run_sweep(path, CASES[:1], lambda case: calls.append(1) or {"n": 2}, seed=0)
    assert calls == [1]
    assert records[0]["figures"]["n"] == 2
    assert len(read_records(path)) == 2


def test_a_report_shows_one_device_and_its_versions_and_last_what_was_asked_for(
    tmp_path,
):
    path = tmp_path / "records.jsonl"
    record = {"device": "chip", "versions": {"torch": "2"}, "seed": 0}
    changes = ({}, {"device": "another"}, {"versions": {"torch": "3"}}, {"seed": 1})
    records = [record | change for change in changes]
    for each in records:
        append_record(path, each)
    assert records_like(path, [record]) == [records[0], records[3], records[0]]


def test_the_code_version_changes_with_every_file_of_code(tmp_path):
    files = [tmp_path / "lib" / name for name in ("room/step.py", "room/kernel.cu", "notes.md")]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    found = [code_version(tmp_path)]
    for path in files:
        path.write_text("x = 2\n")
        found.append(code_version(tmp_path))
    assert [a != b for a, b in itertools.pairwise(found)] == [True, True, False]
    files[0].rename(tmp_path / "lib/step.py")
    assert code_version(tmp_path) != found[-1]


def test_a_file_that_cannot_be_written_is_noticed_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path, tmp_path.name), (tmp_path / "file" / "r.jsonl", "folder")):
        with pytest.raises(OSError, match=message):
            run_sweep(path, CASES, lambda case: pytest.fail("measured"))


def test_a_sweep_can_be_made_again(tmp_path):
    path = tmp_path / "records.jsonl"
    run_sweep(path, CASES, lambda case: {"n": 1})
    records = run_sweep(path, CASES[1:3], lambda case: {"n": 2}, restart=True)
    assert [record["figures"]["n"] for record in records] == [2, 2]
    assert len(read_records(path)) == 7
    # from then on the newest counts
    records = run_sweep(path, CASES, lambda case: {"n": 3})
    assert [record["figures"]["n"] for record in records] == [1, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("cases", "figures", "error", "message"),
    [
        ([], {}, ValueError, "nothing to measure: a setting is empty"),
        (CASES[:1], None, TypeError, r"must be a mapping, such as \.figures\(\), got None"),
        (
            CASES[:1],
            {"ms": torch.ones(1)},
            TypeError,
            r"must be numbers, .*, got tensor\(\[1\.\]\)",
        ),
    ],
)
def test_what_a_benchmark_must_not_return_is_refused_by_name(
    cases, figures, error, message, tmp_path
):
    benchmark = Benchmark(Report("s", "S", {}), lambda *_: cases, lambda *_: figures)
    with pytest.raises(error, match=message):
        benchmark(SamplingConfig(output=tmp_path, device="cpu"))


def test_each_benchmark_has_records_of_its_own():
    found = [load(command.function) for command in MEASURE.values()]
    stems = [each.report.stem for each in found if isinstance(each, Benchmark)]
    assert len(stems) == len(set(stems)) > 5
