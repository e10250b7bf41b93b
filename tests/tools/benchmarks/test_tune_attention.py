"""Tuning the attention kernels: candidates, the fastest of them, and what fits no GPU."""

import contextlib
import time
import types

import pytest
import torch

from lib.flash_attention import tiles

pytest.importorskip("triton")
tune = pytest.importorskip("lib.tools.benchmarks.tune_attention")
DEVICE = torch.device("cuda:0")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_candidates_begin_with_the_tables_and_all_differ(monkeypatch, capability, dtype):
    monkeypatch.setattr(tune, "compute_capability", lambda device: capability)
    q = torch.empty(1, 1, 1, 64, dtype=getattr(torch, dtype), device="meta")
    precision = tiles.usable_precision(q, "tf32x3", capability)
    table = (
        tiles.forward_tiles(q, capability, precision),
        *tiles.backward_tiles(q, capability, precision),
    )
    for kind, first in zip(tune.KINDS, table):
        found = tune.candidates(tune.Choice(kind, 64, dtype), DEVICE)
        assert len(set(found)) == len(found) > 3
        assert found[0] == first


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which every candidate takes 2 ms; notes the tiles that are kept."""
    kept = {}

    def measure(functions, **settings):
        return [types.SimpleNamespace(median_ms=fn()) for fn in functions]

    def functions(choice, tried, *sizes):
        return [lambda t=t: 1.0 if t == chosen(choice.kind) else 2.0 for t in tried]

    monkeypatch.setattr(tune, "pick_device", lambda device: DEVICE)
    monkeypatch.setattr(tune, "pick_dtype", lambda device, name: torch.bfloat16)
    monkeypatch.setattr(tune, "compute_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tune, "_functions", functions)
    monkeypatch.setattr(tune, "measure_interleaved", measure)
    monkeypatch.setattr(tune, "keep_tiles", lambda device, found: kept.update(found))
    return kept


def chosen(kind: str) -> tiles.Tiles:
    """The third candidate, which is made the fastest."""
    return tune.candidates(tune.Choice(kind, 64, "bfloat16"), DEVICE)[2]


def is_first(job) -> bool:
    """Whether a job's tiles are those of the table."""
    choice, tried = job
    return tried == tune.candidates(choice, DEVICE)[0]


@pytest.mark.parametrize(
    ("fits", "table_ms", "best_ms"),
    [
        (lambda job: True, 2.0, 1.0),
        (lambda job: not is_first(job), None, 1.0),
        (lambda job: False, None, None),
    ],
)
def test_the_fastest_that_fits_is_kept(gpu, monkeypatch, fits, table_ms, best_ms):
    monkeypatch.setattr(tune, "compile_all", lambda jobs: {*filter(fits, jobs)})
    rows = tune.tune(tune.TuneConfig(head_dims=(64,)))
    assert [(row["ms"], row["best ms"]) for row in rows] == [(table_ms, best_ms)] * 3
    best = {kind: chosen(kind) for kind in tune.KINDS if best_ms}
    assert gpu == {f"{kind} bfloat16 64": found for kind, found in best.items()}
    words = [str(tuple(best[kind])) if best else "none fits" for kind in tune.KINDS]
    assert [row["best"] for row in rows] == words


def test_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(tune, "pick_device", lambda device: torch.device("cpu"))
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        tune.tune(tune.TuneConfig())


@pytest.mark.gpu
@pytest.mark.serial
def test_tuning_takes_less_than_a_minute_and_is_never_slower(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    tiles.found_tiles.cache_clear()
    compiled = lambda: len(list((tmp_path / "triton").glob("*/*.cubin")))  # noqa: E731
    in_parallel, compile_all = [], tune.compile_all

    def counted(jobs):
        usable = compile_all(jobs)
        in_parallel.append(compiled())
        return usable

    monkeypatch.setattr(tune, "compile_all", counted)
    start = time.monotonic()
    rows = tune.tune(tune.TuneConfig())
    assert time.monotonic() - start < 60
    # everything that is measured was compiled before
    assert in_parallel == [compiled()]
    assert all(row["best ms"] <= (row["ms"] or row["best ms"]) for row in rows)
    tiles.found_tiles.cache_clear()
