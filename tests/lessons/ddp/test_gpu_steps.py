"""Steps of each wrapper are timed and traced on ranks, and read back for notebook 08."""

from unittest import mock

import pytest

from lib.ddp.launcher import launch
from lib.ddp.process_group import rank
from lib.lessons.ddp import gpu_steps
from lib.lessons.ddp.gpu_steps import WRAPPERS, record_steps, recorded_steps

FEW = ("none", "flat", "fsdp")


def record_small_steps(folder):
    with mock.patch.multiple(gpu_steps, WRAPPERS=FEW, ROUNDS=2, TIMED_STEPS=1):
        # another rank's folder must stay empty
        return record_steps("tiny", 2, 16, folder / str(rank()), compiles=False)


@pytest.fixture(scope="module")
def folder(quick_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    launch(record_small_steps, 2, folder, backend="gloo")
    return folder


def test_each_wrapper_has_a_step_and_its_trace(folder):
    steps = recorded_steps(folder / "0")
    assert tuple(step.name for step in steps) == FEW
    for step in steps:
        assert step.step_ms > 0
        assert 0 < step.timeline.backward_ms < step.timeline.step_ms
        # a rank by itself sends nothing
        assert (step.timeline.communication_ms > 0) == (step.name != "none")


def test_only_rank_0_writes(folder):
    assert [path.name for path in folder.iterdir()] == ["0"]


def test_one_rank_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on several ranks, started by torchrun"):
        record_steps("tiny", 2, 16, tmp_path)


def test_the_committed_steps_are_complete():
    steps = recorded_steps()
    assert tuple(step.name for step in steps) == WRAPPERS
    for step in steps:
        # a trace may take longer, and starts on an idle GPU
        assert step.timeline.step_ms == pytest.approx(step.step_ms, rel=0.05)
