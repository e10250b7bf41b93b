"""Helpers and checkers of notebook 04's exercises; test_answers.py has the answers to them."""

import inspect
import subprocess
import sys

import pytest

from lib.lessons.profiling.exercises import naive_adamw
from lib.lessons.profiling.records import anonymous_traces
from lib.lessons.profiling.simulated import ToyTrainer
from tests.lessons.answers.profiling import diagnose_by_category
from tests.lessons.page import read_page


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss: loss > 0,
        float,
        lambda loss: f"{loss:.2f}",
        lambda loss: loss.item(),
    ],
)
def test_whatever_needs_a_loss_on_the_host_waits_for_it(ask):
    gpu = ToyTrainer()
    loss = gpu.step(gpu.load(3))
    total = loss + 1
    assert gpu.now == 2 + 1 + 1
    ask(total)
    # 2 ms to load and 1 to launch, then 4 on the device
    assert gpu.now == 7
    assert gpu.spans[-1] == ("wait", 4, 7)


def test_the_three_traces_are_of_three_kinds():
    found = {name: diagnose_by_category(kernels) for name, kernels in anonymous_traces().items()}
    assert found == {"A": "memory-bound", "B": "launch-bound", "C": "compute-bound"}


def test_the_naive_update_is_the_one_of_the_notebook():
    lines = ["def naive_adamw(p, g, m, v, lr):", *inspect.getsource(naive_adamw).splitlines()[2:]]
    assert "\n".join(lines) in read_page("04_profiling").source


def test_a_timed_call_imports_nothing():
    """Importing takes PyTorch more than a second, most of the time limit."""
    code = """if True:
        import random, sys
        from lib.lessons.profiling.exercises import frugal, loss_in_chunks
        arguments = loss_in_chunks.draw(random.Random(0), 1)
        loaded = set(sys.modules)
        frugal(loss_in_chunks.solve, *arguments)
        print(len(set(sys.modules) - loaded))
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "0", result.stderr
