"""What each optimization gained: the ladder of kernels, records, report and figure."""

import dataclasses
import importlib
import math
import sys
import types
from typing import NamedTuple

import pytest
import torch

import lib.benchmarks.attention_steps as steps
from lib.benchmarks.attention import make_inputs
from lib.benchmarks.attention_steps import NAMES, AttentionStepsConfig, steps_of
from lib.core.records import read_records
from lib.flash_attention.tiles import backward_tiles, forward_tiles
from lib.model.attention import attention

pytestmark = pytest.mark.usefixtures("one_core")

CPU = torch.device("cpu")
CASE = dataclasses.replace(steps.steps_case(3, 2, 24, 16, "forward", 3), warmup=1)
BACKWARD = dataclasses.replace(CASE, direction="backward")


# Our steps by direction, with the schedules below.
PORTABLE = ["portable", "portable_pipelined", "hopper"]
OURS = {
    "forward": [*PORTABLE, "hopper_warpgroups", "hopper_persistent", "hopper_ordered"],
    "backward": [*PORTABLE, "hopper_persistent", "hopper_kept"],
}


class Schedule(NamedTuple):
    warpgroups: int
    keys: int
    stages: int
    is_ordered: bool = False
    is_persistent: bool = True
    kept: int = 0


def by_formula(q, k, v, *rest, **settings):
    return attention(q, k, v, kernel="vectorized_torch"), None


def gradients(grad_out, q, k, v, *rest, **settings):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, kernel="sdpa"), leaves, grad_out)


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for the modules that need Triton; notes the settings that functions are given."""
    calls = []

    def noted(function):
        def run(*arguments, **settings):
            calls.append(settings)
            return function(*arguments, **settings)

        return run

    functions = {"flash_forward": noted(by_formula), "flash_backward": noted(gradients)}
    modules = {
        "lib.flash_attention.triton_attention": types.SimpleNamespace(**functions),
        "lib.flash_attention.hopper.launch": types.SimpleNamespace(
            **functions,
            forward_schedule=lambda head_dim: Schedule(3, 128, 3, is_ordered=True),
            backward_schedules=lambda head_dim: (Schedule(3, 64, 4, kept=1), Schedule(2, 64, 4)),
        ),
    }
    for path, module in modules.items():
        package, _, name = path.rpartition(".")
        monkeypatch.setitem(sys.modules, path, module)
        monkeypatch.setattr(importlib.import_module(package), name, module, raising=False)
    return types.SimpleNamespace(calls=calls, hopper=modules["lib.flash_attention.hopper.launch"])


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


def test_a_feature_that_was_not_chosen_has_no_step_and_both_backward_kernels_step_together():
    found = steps.schedule_steps((Schedule(2, 128, 2),), warpgroups=2)
    assert list(found) == ["hopper", "hopper_persistent"]
    tuned = (Schedule(3, 64, 4, kept=1), Schedule(2, 64, 3))
    found = steps.schedule_steps(tuned)
    assert list(found) == ["hopper", "hopper_persistent", "hopper_kept"]
    assert found["hopper"] == tuple(s._replace(is_persistent=False, kept=0) for s in tuned)
    assert found["hopper_kept"] == tuned


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=lambda case: case.direction)
def test_the_ladder_goes_from_naive_attention_to_the_peer(kernels, case):
    inputs = make_inputs(case, CPU, 0)
    ladder = steps.ladder(case, inputs)
    kernels.calls.clear()
    results = [function() for name, (_, function) in ladder.items() if name in OURS[case.direction]]
    assert list(ladder) == ["textbook", *OURS[case.direction], "cudnn"]
    if case.direction == "forward":
        tiles, num_results = forward_tiles(inputs[0]), 1
        first, last = tiles._replace(num_stages=1), {"schedule": Schedule(3, 128, 3, True)}
        assert ladder["hopper_ordered"][0] == str(last["schedule"])
    else:
        tiles, num_results = backward_tiles(inputs[0]), 3
        first = tuple(tile._replace(num_stages=1) for tile in tiles)
        last = {"schedules": (Schedule(3, 64, 4, kept=1), Schedule(2, 64, 4))}
    assert kernels.calls[:2] == [{"tiles": first}, {"tiles": tiles}]
    assert kernels.calls[-1] == last
    assert {len(result) for result in results} == {num_results}


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=lambda case: case.direction)
def test_a_case_on_a_cpu_is_measured_and_right(kernels, case):
    figures = steps.measure_case(case, device=CPU)["steps"]
    # cuDNN needs a GPU
    assert figures.pop("cudnn")["status"] == "unsupported"
    for row in figures.values():
        assert row["status"] == "ok"
        assert row["error"] < 0.02
        assert row["samples"] == 3
        assert math.isclose(row["tflops"], case.flops / row["median_ms"] / 1e9)


def test_a_step_with_other_results_is_wrong_and_has_no_speed(kernels):
    def spoiled(q, k, v, *rest, schedule, **settings):
        out, _ = by_formula(q, k, v)
        # only in one head, and NaN in the first step
        out[-1, -1] *= 1.2 if schedule.is_persistent else math.nan
        return out, None

    kernels.hopper.flash_forward = spoiled
    figures = steps.measure_case(CASE, device=CPU)["steps"]
    assert (figures["hopper"]["status"], figures["hopper"]["error"]) == ("wrong", None)
    assert figures["hopper_persistent"]["status"] == "wrong"
    assert not {"tflops", "median_ms"} & figures["hopper_persistent"].keys()
    assert figures["portable"]["status"] == "ok"


@pytest.mark.parametrize("shape", [(1, 1), (4, 5)])
def test_corners_are_the_first_and_last_heads(shape):
    numbers = torch.arange(math.prod(shape)).reshape(*shape, 1, 1)
    found = steps.corners(numbers).flatten().tolist()
    expected = {b * shape[1] + h for b in (0, shape[0] - 1) for h in (0, shape[1] - 1)}
    assert (found[0], found[-1]) == (0, numbers.max())
    assert set(found) == expected


def test_a_machine_without_a_hopper_gpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"device must be a Hopper GPU .*, got 'cpu'"):
        steps.measure_steps(AttentionStepsConfig(device="cpu", output=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def hopper_gpu(monkeypatch):
    """A machine that passes for one with a Hopper GPU, with made-up measurements."""
    asked = []

    def measure(case, *, device):
        asked.append(case)
        figures = {}
        for index, name in enumerate(NAMES):
            ms = case.flops / (100 + 40 * index) / 1e9
            figures[name] = {"settings": "Schedule(…)", "status": "ok", "samples": 9}
            figures[name] |= {"median_ms": ms, "tflops": case.flops / ms / 1e9}
        if case.direction == "backward":
            del figures["hopper_ordered"]
        figures["textbook"] = {"settings": "", "status": "oom"}
        return {"steps": figures}

    monkeypatch.setattr(steps, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(steps, "measure_case", measure)
    return asked


def test_every_shape_and_direction_becomes_a_record_and_a_table(hopper_gpu, tmp_path):
    config = AttentionStepsConfig(output=tmp_path)
    records = steps.measure_steps(config)
    asked = [(c.batch_size, c.heads, c.queries, c.head_dim, c.direction) for c in hopper_gpu]
    assert asked == [(*s, d) for s in steps.SHAPES for d in ("forward", "backward")]
    assert read_records(tmp_path / "attention_steps.jsonl") == records
    assert [r["figures"]["flops"] for r in records] == [case.flops for case in hopper_gpu]
    # nothing is measured twice
    assert steps.measure_steps(config) == records
    assert len(hopper_gpu) == len(records)

    text = (tmp_path / "attention_steps.md").read_text()
    assert text.count("\n## ") == 6
    assert "## backward, causal, 4,096 × 4,096, head_dim 128, bfloat16, 4 × 16 heads" in text
    assert text.count(" oom |") == 6
    assert (tmp_path / "attention_steps.png").stat().st_size > 10_000

    # a case without memory for its inputs
    records[0]["figures"] = {"status": "oom", "flops": 1, "steps": {}}
    assert steps_of(records[:1]) == []


def test_a_gain_is_over_the_step_before_and_the_peer_has_none():
    rows = steps.table(
        {"step": step, "name": step, "tflops": tflops, "status": status, "settings": ""}
        for step, tflops, status in (
            ("textbook", 50.0, "ok"),
            ("portable", None, "oom"),
            ("hopper", 75.0, "ok"),
            ("cudnn", 90.0, "ok"),
        )
    )
    assert [row["gain"] for row in rows] == [None, None, 1.5, None]
    assert [row["TFLOP/s"] for row in rows] == [50.0, "oom", 75.0, 90.0]


@pytest.mark.gpu
def test_the_ladder_runs_on_a_hopper_gpu():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for direction in ("forward", "backward"):
        case = dataclasses.replace(steps.steps_case(1, 2, 512, 64, direction, 3), warmup=1)
        figures = steps.measure_case(case, device=torch.device("cuda"))["steps"]
        assert {row["status"] for name, row in figures.items() if name != "cudnn"} == {"ok"}
