"""Where tests of Triton kernels run: on a GPU, or on the CPU in Triton's interpreter.

The tests that take `device` try kernels. In a process of its own, where TRITON_INTERPRET=1 is set
before Triton is imported, they run on the CPU.
"""

import os
import subprocess

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
ON_KERNEL_DEVICES = pytest.mark.parametrize(
    "device", ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]
)
# The interpreter gets bfloat16 wrong.
SHORT_TYPES = [torch.float16] if INTERPRETING else [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *SHORT_TYPES]
ON_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OUTSIDE_THE_INTERPRETER = pytest.mark.skipif(INTERPRETING, reason="this is the process inside")


def assert_passed(tried: subprocess.CompletedProcess) -> None:
    """Check that the tests of the process that `tried_in_interpreter` gives passed."""
    assert tried.returncode == 0, tried.stdout[-4000:] + tried.stderr[-2000:]
