"""The check of the loss in chunks sees logits that are made or kept, and is quick."""

import subprocess
import sys


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
