"""Steps timed on GPUs, on two processes: right gradients, right attention, a record of each."""

import pytest

from lib.core.records import read_records
from lib.ddp import launch
from lib.lessons.mesh.gpus import record_mesh_steps


def test_pipelines_and_rings_equal_one_process_and_are_recorded(tmp_path):
    path = tmp_path / "records.jsonl"
    sizes = {"micro_batches": (1, 3), "tokens": (6,), "heads": 2, "head_dim": 8}
    shape = ("tiny", 2, 16, *sizes.values(), path)
    launch(record_mesh_steps, 2, *shape, backend="gloo", timeout=60)

    one, three, ring = (record["figures"] for record in read_records(path))
    assert (one["gradients_off_by"], three["gradients_off_by"]) == (0, 0)
    assert (one["predicted_bubble"], three["predicted_bubble"]) == (1 / 2, 1 / 4)
    assert three["predicted_ms"] == pytest.approx(4 / 3 * three["alone_ms"])
    assert ring["rms_error"]["ring"] < 2 * ring["rms_error"]["pytorch"]
    # two steps, in each of which half of all 6 · 6 pairs count; K and V of 6 tokens, two heads of 8
    assert (ring["flops"], ring["bytes_sent"]) == (2 * 36 / 2 * 2 * 2 * 2 * 8, 2 * 6 * 2 * 8 * 4)


def test_one_rank_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must run on several ranks, started by torchrun"):
        record_mesh_steps(path=tmp_path / "records.jsonl")
