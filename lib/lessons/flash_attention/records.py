"""The same training with different attention kernels, from `artifacts/`, for notebook 06."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lib.core.records import Record


def differences(records: Sequence[Record]) -> list[dict[str, Any]]:
    """How far apart two runs are that differ only in the kernel, or only in the seed.

    Mean absolute differences, over all such pairs, of the training losses in the first and in the
    second half of the steps, and of the final validation losses.
    """
    rows = []
    for what, same, other in (("kernel", _seed_of, _kernel_of), ("seed", _kernel_of, _seed_of)):
        pairs = [
            (a["figures"], b["figures"])
            for a, b in itertools.combinations(records, 2)
            if same(a) == same(b) and other(a) != other(b)
        ]
        gaps = np.abs([np.subtract(a["losses"], b["losses"]) for a, b in pairs])  # (pairs, steps)
        half = gaps.shape[1] // 2
        validation = [abs(a["validation_loss"] - b["validation_loss"]) for a, b in pairs]
        rows.append(
            {
                "another": what,
                "pairs": len(pairs),
                "first half": float(gaps[:, :half].mean()),
                "second half": float(gaps[:, half:].mean()),
                "validation": float(np.mean(validation)),
            }
        )
    return rows


def _kernel_of(record: Record) -> str:
    return record["config"]["model"]["attention_kernel"]


def _seed_of(record: Record) -> int:
    return record["config"]["seed"]
