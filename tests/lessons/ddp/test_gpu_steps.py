"""The recorded steps of notebook 08: each wrapper with its trace."""

import pytest

from lib.lessons.ddp.gpu_steps import WRAPPERS, recorded_steps


def test_the_committed_steps_are_complete():
    steps = recorded_steps()
    assert tuple(step.name for step in steps) == WRAPPERS
    for step in steps:
        # a trace may take longer, and starts on an idle GPU
        assert step.timeline.step_ms == pytest.approx(step.step_ms, rel=0.05)
        # a rank by itself sends nothing
        assert (step.timeline.communication_ms > 0) == (step.name != "none")
