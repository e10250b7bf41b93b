"""Shared by the tests of benchmarks on several ranks: small settings, and cases."""

from typing import Any

import pytest
import torch

from lib.tools.benchmarks.harness import for_group
from lib.tools.benchmarks.lm_matrix import LmMatrixConfig, matrix_cases
from lib.tools.benchmarks.sharding import sharding_cases
from lib.tools.benchmarks.sweep import Case

SMALL = {
    "context_length": 16,
    "tr_batch_size": 2,
    "epochs": 3,
    "timed_epochs": 2,
    "steps_per_epoch": 2,
    "trace_steps": 1,
    "timeout": 60.0,
}


def cases_of(cls: type, *, on_gpu: bool = False, **settings: Any) -> list[Case]:
    """The cases that a config of two ranks asks for."""
    groups_of = matrix_cases if cls is LmMatrixConfig else sharding_cases
    config = for_group(cls(**settings), 2, "nccl" if on_gpu else "gloo")
    with pytest.MonkeyPatch.context() as patch:
        # as on a Hopper chip; nothing runs there
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        found = groups_of(config, torch.device(config.device))
    return [case for group in found for case in group]
