"""What each step gained: the ladder of kernels, its records, report and figure, without a GPU."""

import dataclasses
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import lib
import lib.benchmark_attention_steps as steps
from lib.attention import attention
from lib.benchmark_attention import make_inputs
from lib.flash_attention_tiles import backward_tiles, forward_tiles
from lib.plots_flash_attention import NAMES, steps_of
from lib.report import read_records

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
CASE = dataclasses.replace(steps.steps_case(3, 2, 24, 16, "forward", 3), warmup=1)


class Schedule(NamedTuple):
    warpgroups: int
    keys: int
    stages: int
    is_ordered: bool = False
    is_persistent: bool = True
    kept: int = 0


@pytest.fixture(autouse=True, scope="module")
def on_one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of_direction(direction):
    return dataclasses.replace(CASE, direction=direction)


def by_formula(q, k, v, *rest, **settings):
    return attention(q, k, v, kernel="vectorized_torch"), None


def gradients(grad_out, q, k, v, *rest, **settings):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, kernel="sdpa"), leaves, grad_out)


@pytest.fixture
def kernels(monkeypatch):
    """Modules in the place of those that need Triton; notes what their functions are given."""
    given = []

    def noted(function):
        def run(*arguments, **settings):
            given.append(settings)
            return function(*arguments, **settings)

        return run

    functions = {"flash_forward": noted(by_formula), "flash_backward": noted(gradients)}
    portable = types.SimpleNamespace(**functions)
    hopper = types.SimpleNamespace(
        **functions,
        forward_schedule=lambda head_dim: Schedule(3, 128, 3, is_ordered=True),
        backward_schedules=lambda head_dim: (Schedule(3, 64, 4, kept=1), Schedule(2, 64, 4)),
    )
    for name, module in (("triton", portable), ("hopper", hopper)):
        monkeypatch.setitem(sys.modules, f"lib.flash_attention_{name}", module)
        monkeypatch.setattr(lib, f"flash_attention_{name}", module, raising=False)
    return given


def test_each_step_adds_one_feature_and_the_last_is_as_tuned():
    tuned = Schedule(3, 128, 3, is_ordered=True, kept=1)
    found = steps.schedule_steps((tuned,), warpgroups=2)
    before = Schedule(2, 128, 3, is_persistent=False)
    assert found.pop("hopper") == (before,)
    assert list(found) == list(steps.FEATURES)
    for name, (schedule,) in found.items():
        changed = [f for f in Schedule._fields if getattr(schedule, f) != getattr(before, f)]
        assert changed == [steps.FEATURES[name]]
        before = schedule
    assert before == tuned


def test_a_feature_that_was_not_chosen_has_no_step():
    found = steps.schedule_steps((Schedule(2, 128, 2),), warpgroups=2)
    assert list(found) == ["hopper", "hopper_persistent"]


def test_both_backward_kernels_take_a_step_together():
    tuned = (Schedule(3, 64, 4, kept=1), Schedule(2, 64, 3))
    found = steps.schedule_steps(tuned)
    assert list(found) == ["hopper", "hopper_persistent", "hopper_kept"]
    assert found["hopper"] == tuple(s._replace(is_persistent=False, kept=0) for s in tuned)
    assert found["hopper_kept"] == tuned


def test_the_ladder_forward_goes_from_the_textbook_to_the_peer(kernels):
    q = make_inputs(CASE, CPU, 0)[0]
    ladder = steps.ladder(CASE, make_inputs(CASE, CPU, 0))
    ours = ["portable", "portable_pipelined", "hopper", *list(steps.FEATURES)[:3]]
    assert list(ladder) == ["textbook", *ours, "cudnn"]
    for name in ours:
        ladder[name][1]()
    tiles = forward_tiles(q)
    assert kernels[:2] == [{"tiles": tiles._replace(num_stages=1)}, {"tiles": tiles}]
    assert kernels[-1] == {"schedule": Schedule(3, 128, 3, is_ordered=True)}
    assert ladder["hopper_ordered"][0] == str(kernels[-1]["schedule"])


def test_the_ladder_backward_gives_both_kernels_their_settings(kernels):
    case = of_direction("backward")
    inputs = make_inputs(case, CPU, 0)
    ladder = steps.ladder(case, inputs)
    ours = ["portable", "portable_pipelined", "hopper", "hopper_persistent", "hopper_kept"]
    assert list(ladder) == ["textbook", *ours, "cudnn"]
    kernels.clear()
    for name in ours:
        assert len(ladder[name][1]()) == 3
    tiles = backward_tiles(inputs[0])
    assert kernels[1] == {"tiles": tiles}
    assert all(t.num_stages == 1 for t in kernels[0]["tiles"])
    assert kernels[-1]["schedules"] == (Schedule(3, 64, 4, kept=1), Schedule(2, 64, 4))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_case_on_a_cpu_is_measured_and_right(kernels, direction):
    case = of_direction(direction)
    figures = steps.measure_case(case, device=CPU)["steps"]
    # cuDNN needs a GPU
    assert figures.pop("cudnn")["status"] == "unsupported"
    for row in figures.values():
        assert row["status"] == "ok"
        assert row["error"] < 0.02
        assert row["samples"] == 3
        assert math.isclose(row["tflops"], case.flops / row["median_ms"] / 1e9)


def test_a_step_with_other_results_is_wrong_and_has_no_speed(kernels, monkeypatch):
    def late(q, k, v, *rest, schedule, **settings):
        out, _ = by_formula(q, k, v)
        # in one head alone
        out[-1, -1] *= 1.2 if schedule.is_persistent else 1
        return out, None

    monkeypatch.setattr(sys.modules["lib.flash_attention_hopper"], "flash_forward", late)
    figures = steps.measure_case(CASE, device=CPU)["steps"]
    assert figures["hopper"]["status"] == "ok"
    assert figures["hopper_persistent"]["status"] == "wrong"
    assert "tflops" not in figures["hopper_persistent"]


def test_results_that_are_not_a_number_are_wrong(kernels, monkeypatch):
    nothing = lambda q, *rest, **settings: (torch.full_like(q, math.nan), None)  # noqa: E731
    monkeypatch.setattr(sys.modules["lib.flash_attention_hopper"], "flash_forward", nothing)
    figures = steps.measure_case(CASE, device=CPU)["steps"]
    assert figures["hopper"]["status"] == "wrong"
    assert figures["hopper"]["error"] is None


def test_a_step_without_memory_is_oom_and_another_fault_is_raised(kernels, monkeypatch):
    def fails(message):
        def run(*arguments, **settings):
            raise RuntimeError(message)

        return run

    hopper = sys.modules["lib.flash_attention_hopper"]
    monkeypatch.setattr(hopper, "flash_forward", fails("CUDA out of memory"))
    assert steps.measure_case(CASE, device=CPU)["steps"]["hopper"]["status"] == "oom"
    monkeypatch.setattr(hopper, "flash_forward", fails("misaligned address"))
    with pytest.raises(RuntimeError, match="misaligned"):
        steps.measure_case(CASE, device=CPU)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (4, 5)])
def test_corners_are_the_first_and_last_heads(shape):
    numbers = torch.arange(math.prod(shape)).reshape(*shape, 1, 1)
    found = steps.corners(numbers).flatten().tolist()
    right = {b * shape[1] + h for b in (0, shape[0] - 1) for h in (0, shape[1] - 1)}
    assert {found[0], found[-1]} <= right
    assert found[0] == 0
    assert found[-1] == numbers.max()


def test_a_machine_without_a_hopper_gpu_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"device is 'cpu'; right is: a Hopper GPU"):
        steps.measure_steps(tmp_path, device="cpu")
    assert steps.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: device is")
    assert not list(tmp_path.iterdir())


def fake_figures(case, **changed):
    present = [name for name in NAMES if case.direction == "forward" or name != "hopper_ordered"]
    figures = {}
    for place, name in enumerate(present):
        ms = case.flops / (100 + 40 * place) / 1e9
        figures[name] = {"settings": "Schedule(…)" * (name != "textbook"), "status": "ok"}
        figures[name] |= {"median_ms": ms, "iqr_ms": ms / 50, "samples": 9, "error": 0.003}
        figures[name] |= {"tflops": case.flops / ms / 1e9}
    return {"steps": figures | changed}


@pytest.fixture
def hopper_gpu(monkeypatch):
    """A machine that passes for one with a Hopper GPU; measuring is made up."""
    asked = []

    def measure(case, *, device):
        asked.append(case)
        return fake_figures(case, textbook={"settings": "", "status": "oom"})

    monkeypatch.setattr(steps, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(steps, "measure_case", measure)
    return asked


def test_every_shape_and_direction_becomes_a_record_and_none_is_made_twice(hopper_gpu, tmp_path):
    records = steps.measure_steps(tmp_path)
    asked = [(c.batch_size, c.heads, c.queries, c.head_dim, c.direction) for c in hopper_gpu]
    assert asked == [(*s, d) for s in steps.SHAPES for d in ("forward", "backward")]
    assert read_records(tmp_path / "attention_steps.jsonl") == records
    assert [r["figures"]["flops"] for r in records] == [case.flops for case in hopper_gpu]
    assert steps.measure_steps(tmp_path) == records
    assert len(hopper_gpu) == len(records)


def test_the_report_has_a_table_for_each_case_and_the_figure_is_drawn(hopper_gpu, tmp_path):
    steps.measure_steps(tmp_path)
    text = (tmp_path / "attention_steps.md").read_text()
    assert text.count("\n## ") == 6
    assert "## backward, causal, 4,096 × 4,096, head_dim 128, bfloat16, 4 × 16 heads" in text
    assert (tmp_path / "attention_steps.png").stat().st_size > 10_000


def test_a_gain_is_over_the_step_before_and_the_peer_has_none():
    rows = steps.table(
        [
            {"step": "textbook", "name": "a", "tflops": 50.0, "status": "ok", "settings": ""},
            {"step": "portable", "name": "b", "tflops": None, "status": "oom", "settings": ""},
            {"step": "hopper", "name": "c", "tflops": 75.0, "status": "ok", "settings": ""},
            {"step": "cudnn", "name": "d", "tflops": 90.0, "status": "ok", "settings": ""},
        ]
    )
    assert [row["gain"] for row in rows] == [None, None, 1.5, None]
    assert [row["TFLOP/s"] for row in rows] == [50.0, "oom", 75.0, 90.0]


def test_a_case_without_memory_for_anything_is_a_line_and_no_row(hopper_gpu, tmp_path):
    record = steps.measure_steps(tmp_path)[0]
    record["figures"] = {"status": "oom", "flops": 1, "steps": {}}
    assert steps.line(record) == "forward: oom"
    assert steps_of([record]) == []


@pytest.mark.gpu
def test_the_ladder_runs_on_a_hopper_gpu():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for direction in ("forward", "backward"):
        case = dataclasses.replace(steps.steps_case(1, 2, 512, 64, direction, 3), warmup=1)
        figures = steps.measure_case(case, device=torch.device("cuda"))["steps"]
        assert {row["status"] for name, row in figures.items() if name != "cudnn"} == {"ok"}


def test_as_a_program_it_says_what_it_needs(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine may have what it needs")
    command = [sys.executable, "-m", "lib.benchmark_attention_steps", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: device is 'cuda'")
