"""The ladder of notebooks 06 and 07, and its records."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from lib.core.records import new_record, read_records, records
from lib.lessons.flash_attention import ladder_record
from lib.lessons.flash_attention.ladder_triton import LADDER, base_2, diff, every_tile, run_rung
from lib.lessons.triton.compile_triton import compile_for
from lib.lessons.triton.recorder_triton import watch

ROOT = Path(__file__).resolve().parents[3]
TRITON = LADDER[1:6]


def heads(n: int) -> list[torch.Tensor]:
    return list(torch.randn(3, 1, 2, n, 16, generator=torch.Generator().manual_seed(0)).unbind())


@pytest.mark.parametrize("n", [33, 48])
def test_versions_agree_and_from_the_third_on_none_loads_what_the_mask_hides(n):
    q, k, v = heads(n)
    expected, loaded = run_rung(LADDER[0], q, k, v), []
    for rung in TRITON:
        out, lse, sizes = torch.empty_like(q[0]), torch.empty(2, n), {"D": 16, "BQ": 16, "BK": 16}
        given = q[0], k[0], v[0], out, lse, n, 16**-0.5
        run = watch(rung.kernel, (-(-n // 16), 2), *given, **sizes)
        torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
        assert run.faults() == []
        loaded.append(len(run.of("load", "k")))
    assert loaded == [2 * 9, *[2 * 6] * 4]


def test_a_version_changes_its_code_or_one_setting_of_its_launch_but_not_both():
    for old, new in pairwise(LADDER[1:]):
        changed = {name for name in new.launch if new.launch[name] != (old.launch or {}).get(name)}
        if new.is_hopper and not old.is_hopper:
            continue
        # tiles are one setting
        settings = changed - {"BK", "num_warps"} or changed
        assert (new.kernel != old.kernel) + len(settings) == 1, new.name


def test_a_diff_is_short_and_leaves_out_what_is_only_indented_otherwise():
    assert all(1 <= len(diff(number)) <= 12 for number in range(3, 7))
    lines = diff(4)
    assert not any("key = start + tl.arange" in line for line in lines)
    # but the old line under a new `if` is there
    following = lines[lines.index("+            if phase:") + 1]
    assert following.startswith(" ")
    assert "tl.where(" in following
    assert diff(6) == ["-num_stages=1", "+num_stages=3"]


def test_kernels_made_by_edits_compile():
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    types = pointers | {"lse_ptr": "*fp32", "n": "i32", "scale": "fp32"}
    for kernel in (every_tile, base_2):
        assert compile_for(90, kernel, types, D=64, BQ=64, BK=64).spilled_bytes == 0


MEASURE = """
from pathlib import Path
from lib.lessons.flash_attention import ladder_record
ladder_record.QUERIES, ladder_record.KEYS = (16, 32), (16,)
ladder_record.measure_tiles(Path("tiles.jsonl"), (1, 1, 20, 16))
ladder_record.measure_ladder(Path("ladder.jsonl"), (1, 1, 20, 16))
"""


def test_records_are_made_of_all_tiles_and_of_all_versions_that_run_here(tmp_path):
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", MEASURE], cwd=tmp_path, env=interpreted, check=True)
    tiles, (ladder,) = (read_records(tmp_path / f"{name}.jsonl") for name in ("tiles", "ladder"))
    sizes = [tuple(r["config"][name] for name in ("BQ", "BK", "num_warps")) for r in tiles]
    assert sizes == [(16, 16, 4), (16, 16, 8), (32, 16, 4), (32, 16, 8)]
    assert all(record["figures"]["tflops"] > 0 for record in tiles)
    assert {rung.step for rung in LADDER[:6]} <= ladder["figures"]["steps"].keys()
    assert ladder["figures"]["steps"]["skipping"]["tiles"] == "64 × 64, 4"


def test_the_ladder_has_the_fastest_tiles_on_record():
    rows = records("attention_tiles").dropna(subset="tflops")
    best = rows.sort_values("tflops").iloc[-1]
    assert all(best[name] == LADDER[5].launch[name] for name in LADDER[5].launch)


def test_the_ladder_shows_the_newest_runs_and_gains_within_a_run(tmp_path):
    def run(commit, **speeds):
        figures = {"steps": {step: {"tflops": speed} for step, speed in speeds.items()}}
        return new_record(figures) | {"device": "GPU", "cpu": "CPU", "commit": commit}

    path = tmp_path / "ladder.jsonl"
    runs = [run("old", textbook=1.0)]
    runs += [run("new", textbook=1.0 + i, skipping=10.0 + i) for i in range(2)]
    path.write_text("".join(json.dumps(one) + "\n" for one in runs))
    rows, found = ladder_record.recorded_ladder(LADDER[:3], path)
    assert found == runs[1:]
    assert [row["TFLOP/s"] for row in rows] == ["1.5 (1 to 2)", "not measured", "10.5 (10 to 11)"]
    assert [row["gain"] for row in rows] == [None, None, "7.75 (5.5 to 10)"]


def test_without_a_hopper_gpu_a_recording_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder_record, "heads_for", lambda shape: (torch.device("cpu"), "qkv"))
    with pytest.raises(ValueError, match="the ladder needs a Hopper GPU"):
        ladder_record.measure_ladder(tmp_path / "records.jsonl")
