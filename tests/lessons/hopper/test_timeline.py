"""The recorded timeline of the Hopper kernel, and speeds beside other libraries."""

import pytest

pytest.importorskip("triton")

from lib.lessons.hopper import timeline
from lib.lessons.hopper.figures import peer_speeds


def recorded(is_ordered: bool) -> dict:
    """Steps of 100 clocks: 10 ordering, 20 waiting for scores, 40 of softmax, 5 for the rest."""
    steps = [[100 * i + x for x in (0, 10, 30, 70, 75)] for i in range(8)]
    return {"figures": {"is_ordered": is_ordered, "clocks": [steps] * 3}}


def test_shares_of_a_timeline_are_times_between_stamps():
    shares = timeline.shares(recorded(True))
    assert list(shares.values()) == pytest.approx([0.1, 0.2, 0.4, 0.05, 0.25])


def test_tensor_cores_are_busy_for_their_matmuls_at_the_peak():
    record = recorded(True) | {"config": {"head_dim": 64}}
    # three warpgroups, 64 queries, 128 keys
    assert timeline.mean_step(record) == 100
    assert timeline.busy_share(record) == 3 * 4 * 64 * 128 * 64 / 4096 / 100


def test_speeds_are_of_kernels_that_were_measured():
    row = {"direction": "forward", "head_dim": 64, "mask": "causal", "queries": 8, "keys": 8}
    rows = [row | {"kernel": "flash_attention_triton", "tflops": 3.0}]
    rows += [row | {"kernel": "sdpa_cudnn", "tflops": 2.0}, row | {"kernel": "sdpa_flash"}]
    rows += [row | {"kernel": "fa4", "tflops": 4.0, "keys": 9}]
    rows += [row | {"kernel": "sdpa_cudnn", "tflops": 9.0, "mask": "full"}]
    found = peer_speeds(rows, "forward", 64)
    assert found == {"ours": {8: 3.0}, "cuDNN": {8: 2.0}}
