"""The harness: times and memory that are known beforehand, pairs, sweeps that are interrupted."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path

import pytest
import torch

import lib.benchmark as benchmark
from lib.allocations import (
    allocate_workspaces,
    allocated_bytes,
    count_launches,
    free_memory,
    is_out_of_memory,
)
from lib.benchmark import (
    Measurement,
    code_version,
    measure,
    measure_pair,
    run_sweep,
    take_turns,
)
from lib.report import append_record, read_records

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
GPU = torch.device("cuda")


def busy_wait(microseconds):
    def wait():
        end = time.perf_counter_ns() + 1000 * microseconds
        while time.perf_counter_ns() < end:
            pass

    return wait


# One function, in time


@pytest.mark.serial
def test_a_sleep_is_measured_right():
    measured = measure(lambda: time.sleep(0.02), device="cpu", warmup=1, samples=9)
    assert measured.median_ms == pytest.approx(20, rel=0.05)
    assert measured.calls_per_sample == 1


@pytest.mark.serial
@pytest.mark.parametrize("microseconds", [20, 200, 3000])
def test_a_busy_wait_is_measured_right(microseconds):
    measured = measure(busy_wait(microseconds), device="cpu", samples=15)
    assert measured.median_ms == pytest.approx(microseconds / 1e3, rel=0.05)


def test_a_sample_is_as_many_calls_as_take_a_while():
    measured = measure(busy_wait(20), device="cpu", samples=3, min_sample_ms=2)
    assert 50 <= measured.calls_per_sample <= 300
    assert measure(busy_wait(20), device="cpu", samples=1, min_sample_ms=0).calls_per_sample == 1


def test_what_the_first_calls_take_does_not_count():
    waits = iter([0.1, 0.1, 0.1])
    fn = lambda: time.sleep(next(waits, 0.001))  # noqa: E731
    assert max(measure(fn, device="cpu", warmup=3, samples=5).times_ms) < 50


def test_all_times_are_kept_and_summed_up():
    measured = Measurement("ok", times_ms=(4.0, 1.0, 2.0, 3.0, 10.0))
    assert (measured.samples, measured.median_ms, measured.mean_ms) == (5, 3.0, 4.0)
    assert measured.iqr_ms == 2.0
    figures = measured.figures()
    assert figures["times_ms"] == [4.0, 1.0, 2.0, 3.0, 10.0]
    assert json.loads(json.dumps(figures))["median_ms"] == 3.0


def test_long_calls_get_fewer_samples():
    measured = measure(lambda: time.sleep(0.02), device="cpu", samples=50, max_seconds=0.1)
    assert 3 <= measured.samples <= 5
    assert measure(busy_wait(9000), device="cpu", samples=2, max_seconds=1e-3).samples == 2


@pytest.mark.serial
def test_flushing_the_cache_is_not_timed():
    measured = measure(busy_wait(300), device="cpu", samples=3, flush_l2=True)
    assert measured.median_ms == pytest.approx(0.3, rel=0.1)
    assert measured.calls_per_sample == 1


def test_the_cache_is_flushed_before_each_sample(monkeypatch):
    calls = []
    monkeypatch.setattr(benchmark, "_cache_flush", lambda device: lambda: calls.append("flush"))
    measure(lambda: calls.append("call"), device="cpu", samples=3, flush_l2=True)
    assert calls[-6:] == ["flush", "call"] * 3


# Two functions


@pytest.mark.serial
@pytest.mark.parametrize("second", [100, 200])
def test_a_pair_has_the_ratio_of_its_times(second):
    pair = measure_pair(busy_wait(200), busy_wait(second), device="cpu", samples=11)
    assert pair.median_ratio == pytest.approx(200 / second, rel=0.05)
    assert len(pair.ratios) == pair.first.samples == pair.second.samples == 11


@pytest.mark.serial
def test_a_function_against_itself_has_ratio_1_within_its_spread():
    a = torch.ones(200, 200)
    pair = measure_pair(lambda: a @ a, lambda: a @ a, device="cpu", samples=40)
    assert abs(pair.median_ratio - 1) <= max(pair.iqr_ratio, 0.01)


def test_a_pair_alternates_which_goes_first():
    calls = []
    first, second = (lambda name=name: (calls.append(name), time.sleep(0.002)) for name in "ab")
    measure_pair(first, second, device="cpu", samples=4)
    assert "".join(calls[-8:]) == "abbaabba"


def test_ratios_are_those_of_the_pairs():
    pair = measure_pair(busy_wait(50), busy_wait(80), device="cpu", samples=5)
    expected = [a / b for a, b in zip(pair.first.times_ms, pair.second.times_ms)]
    assert list(pair.ratios) == expected


# Memory


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def test_memory_of_a_call_is_the_most_it_holds_at_a_time():
    def allocate():
        first = torch.ones(2_500_000)
        second = torch.ones(2_500_000)
        del first
        return second, torch.ones(1_250_000)

    assert allocated_bytes(allocate, CPU) == (20_000_000, None)
    assert measure(allocate, device="cpu", samples=1).peak_memory_bytes == 20_000_000
    assert allocated_bytes(lambda: None, CPU) == (0, None)


def test_memory_under_another_profiler_is_not_known():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert allocated_bytes(lambda: torch.ones(10), CPU) == (None, None)
        assert count_launches(lambda: torch.ones(10), CPU) is None


def test_memory_that_runs_out_is_a_status_and_what_the_call_held_is_free():
    held = []

    def fail():
        tensor = torch.ones(1000)
        held.append(weakref.ref(tensor))
        cycle = [tensor]
        cycle.append(cycle)
        out_of_memory()

    measured = measure(fail, device="cpu")
    assert measured == Measurement("oom")
    assert (measured.median_ms, measured.iqr_ms, measured.samples) == (None, None, 0)
    assert [reference() for reference in held] == [None]


def test_memory_may_run_out_in_any_call():
    calls = iter(range(100))
    measured = measure(
        lambda: out_of_memory() if next(calls) == 7 else None,
        device="cpu",
        warmup=1,
        samples=10,
        min_sample_ms=0,
    )
    assert measured.status == "oom"


def test_of_a_pair_one_may_run_out_of_memory():
    for functions in ((out_of_memory, busy_wait(50)), (busy_wait(50), out_of_memory)):
        pair = measure_pair(*functions, device="cpu", samples=3)
        assert sorted([pair.first.status, pair.second.status]) == ["ok", "oom"]
        assert (pair.ratios, pair.median_ratio, pair.iqr_ratio) == ((), None, None)


def test_a_cpu_whose_memory_is_full_is_out_of_memory():
    assert measure(lambda: torch.empty(1 << 55), device="cpu").status == "oom"
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_another_error_is_raised():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure(lambda: torch.ones(2, 3) @ torch.ones(2, 3), device="cpu")


def test_errors_that_led_to_the_last_are_forgotten_too():
    held = []

    def fail():
        tensor = torch.ones(10)
        held.append(weakref.ref(tensor))
        try:
            out_of_memory()
        except RuntimeError as error:
            raise RuntimeError("cannot allocate memory") from error

    try:
        fail()
    except RuntimeError as error:
        free_memory(error)
        assert held[0]() is None


def test_operators_of_a_call_are_counted():
    a = torch.ones(4, 4)
    assert count_launches(lambda: a + a, CPU) == 1
    assert count_launches(lambda: (a + a) * a, CPU) == 2


def test_operators_that_others_call_are_not_counted():
    a = torch.ones(4, 4)
    # softmax calls _softmax, linear calls t and addmm
    assert count_launches(lambda: a.softmax(-1), CPU) == 1
    assert count_launches(lambda: torch.nn.functional.linear(a, a, a[0]).softmax(-1), CPU) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 0}, "warmup is 0; right is: at least 1"),
        ({"samples": 0}, "samples is 0"),
        ({"min_sample_ms": -1}, "min_sample_ms is -1"),
        ({"max_seconds": 0}, "max_seconds is 0"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        take_turns([lambda: None], **{"device": "cpu", **settings})


# Sweeps


@dataclasses.dataclass(frozen=True)
class Case:
    size: int
    name: str = "a"


CASES = [Case(size) for size in range(5)]


def sizes(records):
    return [record["config"]["size"] for record in records]


def test_a_sweep_leaves_a_record_of_each_config(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    records = run_sweep(path, CASES, lambda case: {"square": case.size**2}, seed=3)
    assert records == read_records(path)
    assert [r["figures"] for r in records] == [{"status": "ok", "square": n * n} for n in range(5)]
    keys = {"config", "figures", "device", "versions", "commit", "seed", "date", "code"}
    assert all(keys <= record.keys() and record["seed"] == 3 for record in records)


def test_memory_that_runs_out_leaves_later_rows_unaffected(tmp_path):
    held = []

    def run_one(case):
        tensor = torch.ones(1000)
        held.append(weakref.ref(tensor))
        # what an earlier row held is free
        assert [reference() is None for reference in held[:-1]] == [True] * case.size
        if case.size == 2:
            out_of_memory()
        return {"sum": float(tensor.sum())}

    expect = lambda case: {"predicted": 10 * case.size}  # noqa: E731
    records = run_sweep(tmp_path / "records.jsonl", CASES, run_one, expect=expect)
    figures = [record["figures"] for record in records]
    assert figures[2] == {"status": "oom", "predicted": 20}
    for size in (0, 1, 3, 4):
        assert figures[size] == {"status": "ok", "predicted": 10 * size, "sum": 1000.0}


def test_an_interrupted_sweep_goes_on_without_repeating_or_losing_rows(tmp_path):
    path, calls = tmp_path / "records.jsonl", []

    def run_one(case):
        calls.append(case.size)
        if calls.count(2) == 1 and case.size == 2:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        run_sweep(path, CASES, run_one)
    assert sizes(read_records(path)) == [0, 1]
    assert sizes(run_sweep(path, CASES, run_one)) == [0, 1, 2, 3, 4]
    assert calls == [0, 1, 2, 2, 3, 4]
    assert sizes(read_records(path)) == [0, 1, 2, 3, 4]
    run_sweep(path, CASES, run_one)
    assert len(calls) == 6


def test_a_killed_sweep_goes_on_without_repeating_or_losing_rows(tmp_path):
    path = tmp_path / "records.jsonl"
    program = (
        "import os, signal, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from test_benchmark import CASES, run_sweep\n"
        "def run_one(case):\n"
        "    print(case.size, flush=True)\n"
        "    if case.size == 3 and sys.argv[1] == 'die':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return {'double': 2 * case.size}\n"
        f"run_sweep({str(path)!r}, CASES, run_one, seed=1)\n"
    )

    def sweep(how):
        command = [sys.executable, "-c", program, how]
        return subprocess.run(command, capture_output=True, text=True)

    killed = sweep("die")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # as a crash of the machine might leave it
    with open(path, "ab") as file:
        file.write(b'{"config": {"si')
    done = sweep("live")
    assert done.returncode == 0, done.stderr
    assert (killed.stdout.split(), done.stdout.split()) == (list("0123"), list("34"))
    with pytest.warns(UserWarning, match="is no record"):
        records = read_records(path)
    assert [r["figures"]["double"] for r in records] == [0, 2, 4, 6, 8]


def test_two_sweeps_into_one_file_at_the_same_time_measure_each_row_once(tmp_path):
    path = tmp_path / "records.jsonl"
    program = (
        "import sys, time\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from test_benchmark import CASES, run_sweep\n"
        "def run_one(case):\n"
        "    print(case.size, flush=True)\n"
        "    time.sleep(0.3)\n"
        "    return {}\n"
        f"print(len(run_sweep({str(path)!r}, CASES, run_one, seed=1)), 'records', flush=True)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sizes(read_records(path)) == [0, 1, 2, 3, 4]
    measured = sorted(line for out, _ in outputs for line in out.split("\n") if len(line) == 1)
    assert measured == list("01234")
    assert all(out.endswith("5 records\n") for out, _ in outputs)
    # the one that came second says so
    assert sum("waiting for another process" in err for _, err in outputs) == 1


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


def test_code_is_another_once_a_file_that_it_imports_is_changed(tmp_path):
    files = {
        "top": "from lib import middle as m\ndef f():\n    import lib.lazy\n",
        "middle": "from lib.bottom import x\nimport json\n",
        "bottom": "x = 1\n",
        "lazy": "from lib import top\n",
        "other": "from lib import top\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    before = {name: code_version(f"lib.{name}", tmp_path) for name in (*files, "elsewhere")}
    for name, changed in (
        ("other", {"other", "elsewhere"}),
        ("bottom", {"top", "middle", "bottom", "lazy", "other", "elsewhere"}),
        ("lazy", {"top", "lazy", "other", "elsewhere"}),
    ):
        (tmp_path / f"{name}.py").write_text(files[name] + "# changed\n")
        now = {key: code_version(f"lib.{key}", tmp_path) for key in before}
        assert {key for key in before if now[key] != before[key]} == changed
        (tmp_path / f"{name}.py").write_text(files[name])


def test_a_file_run_by_its_name_has_the_version_of_that_name(monkeypatch):
    spec = types.SimpleNamespace(name="lib.benchmark_attention_training")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert code_version("__main__") == code_version(spec.name) != code_version("elsewhere")
    # a script has no name
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert code_version("__main__") == code_version("elsewhere")


def test_a_file_that_cannot_be_written_is_found_out_before_anything_is_measured(tmp_path):
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        run_sweep(tmp_path, CASES, lambda case: pytest.fail("measured"))


def test_a_sweep_can_be_made_again(tmp_path):
    path = tmp_path / "records.jsonl"
    run_sweep(path, CASES, lambda case: {"n": 1})
    records = run_sweep(path, CASES[1:3], lambda case: {"n": 2}, restart=True)
    assert [record["figures"]["n"] for record in records] == [2, 2]
    assert len(read_records(path)) == 7
    # from then on the newest counts
    records = run_sweep(path, CASES, lambda case: {"n": 3})
    assert [record["figures"]["n"] for record in records] == [1, 2, 2, 1, 1]


def test_a_config_given_twice_is_measured_once(tmp_path):
    calls = []
    records = run_sweep(tmp_path / "r.jsonl", [CASES[1]] * 2, lambda c: calls.append(c) or {})
    assert (len(calls), len(records)) == (1, 1)


def test_a_sweep_prints_a_line_for_each_row(tmp_path, capsys):
    show = lambda record: f"size {record['config']['size']}"  # noqa: E731
    run_sweep(tmp_path / "r.jsonl", CASES[:2], lambda case: {}, show=show)
    assert capsys.readouterr().out == "size 0\nsize 1\n"


def test_a_sweep_that_cannot_write_measures_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    calls = []
    with pytest.raises(OSError, match="not a folder"):
        run_sweep(tmp_path / "file" / "r.jsonl", CASES, lambda case: calls.append(case) or {})
    assert not calls


def test_other_errors_end_a_sweep_and_keep_what_was_measured(tmp_path):
    def run_one(case):
        return {"inverse": 1 / (1 - case.size)}

    with pytest.raises(ZeroDivisionError):
        run_sweep(tmp_path / "r.jsonl", CASES, run_one)
    assert sizes(read_records(tmp_path / "r.jsonl")) == [0]


def test_a_figure_that_is_no_number_is_left_out_and_named(tmp_path):
    records = run_sweep(tmp_path / "r.jsonl", CASES[:2], lambda case: {"loss": math.nan, "n": 1.5})
    wanted = {"status": "not finite: loss", "loss": None, "n": 1.5}
    assert [record["figures"] for record in records] == [wanted] * 2


# The same on a GPU


@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.parametrize("cycles", [20_000, 20_000_000])
def test_a_kernel_of_known_duration_is_measured_right(cycles):
    def wait():
        torch.cuda._sleep(cycles)

    measured = measure(wait, device="cuda", samples=20)
    calls = max(20, 200_000_000 // cycles)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        wait()
    torch.cuda.synchronize()
    expected = (time.perf_counter() - start) / calls * 1e3
    assert measured.median_ms == pytest.approx(expected, rel=0.05)


@pytest.mark.gpu
@pytest.mark.serial
def test_products_keep_nothing_once_their_workspaces_are_there():
    allocate_workspaces(GPU)
    before = torch.cuda.memory_allocated(GPU)
    x = torch.ones(512, 512, device=GPU, requires_grad=True)
    (x @ x).sum().backward()
    del x
    assert torch.cuda.memory_allocated(GPU) == before


@pytest.mark.gpu
@pytest.mark.serial
def test_reading_is_slower_after_the_cache_was_flushed():
    # the norm of one row is the work of one block, which waits for every few kilobytes: its time is
    # that of the way to them, and so long that the launch does not count
    cache = torch.cuda.get_device_properties(GPU).L2_cache_size
    x = torch.ones(1, cache // 8 // 4, device=GPU)
    near, far = (
        measure(
            lambda: torch.layer_norm(x, x.shape[1:]), device="cuda", samples=50, flush_l2=flush
        ).times_ms
        for flush in (False, True)
    )
    assert min(far) > 1.1 * min(near)


@pytest.mark.gpu
def test_a_flush_writes_more_than_the_cache_holds():
    flushed = benchmark._cache_flush(GPU)()
    assert flushed.device.type == "cuda"
    assert flushed.nbytes >= 2 * torch.cuda.get_device_properties(GPU).L2_cache_size > 1 << 20


@pytest.mark.gpu
def test_memory_of_a_call_on_a_gpu_is_the_most_it_holds_at_a_time():
    kept = torch.ones(1 << 20, device=GPU)

    def allocate():
        first = torch.ones(1 << 22, device=GPU)
        second = torch.ones(1 << 22, device=GPU)
        del first
        return second, torch.ones(1 << 20, device=GPU)

    peak, total = allocated_bytes(allocate, GPU)
    assert peak == 2 << 24
    assert total >= peak + kept.nbytes
    measured = measure(allocate, device="cuda", samples=2, flush_l2=True)
    assert (measured.peak_memory_bytes, measured.total_memory_bytes) == (peak, total)


@pytest.mark.gpu
def test_kernels_of_a_call_are_counted():
    a = torch.ones(64, 64, device=GPU)

    def call():
        # a name is no kernel
        with torch.profiler.record_function("name"):
            torch.add(a, a).mul_(a)

    assert count_launches(call, GPU) == 2


@pytest.mark.gpu
def test_a_gpu_whose_memory_is_full_is_a_row_and_free_for_the_next(tmp_path):
    size = torch.cuda.get_device_properties(0).total_memory

    def run_one(case):
        # 0.4 of the memory at a time: the third does not fit beside the first two
        parts = [
            torch.empty(int(0.4 * size), dtype=torch.int8, device=GPU) for _ in range(case.size)
        ]
        return {"parts": len(parts)}

    records = run_sweep(tmp_path / "r.jsonl", [Case(3), Case(2), Case(4), Case(1)], run_one)
    assert [record["figures"]["status"] for record in records] == ["oom", "ok", "oom", "ok"]
    assert torch.cuda.memory_allocated() < size / 10
    measured = measure(lambda: run_one(Case(3)), device="cuda", samples=1)
    assert measured.status == "oom"
    assert torch.cuda.memory_reserved() < size / 10
