"""Tiles that were found on a GPU: kept in a file, and taken from there."""

import json

import pytest
import torch

from lib import flash_attention_tiles as tiles
from lib.flash_attention_tiles import Tiles

pytest.importorskip("triton")
DEVICE = torch.device("cuda:0")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPUs")


@pytest.fixture
def on_a_gpu(tmp_path, monkeypatch):
    """A GPU of which only the name is asked, and an empty folder for caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for cached in (tiles.found_tiles, tiles.compute_capability):
        cached.cache_clear()
    yield tmp_path
    for cached in (tiles.found_tiles, tiles.compute_capability):
        cached.cache_clear()


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self):
        return DEVICE


def heads(head_dim: int, dtype=torch.bfloat16):
    return torch.empty(1, 1, 1, head_dim, dtype=dtype).as_subclass(OnGPU)


def test_without_a_file_the_table_holds(on_a_gpu):
    q = heads(64)
    assert tiles.forward_tiles(q) == tiles.forward_tiles(q, (8, 0))
    assert tiles.backward_tiles(q) == tiles.backward_tiles(q, (8, 0))


def test_what_was_found_is_taken(on_a_gpu):
    best = Tiles(16, 128, 2, 5)
    path = tiles.keep_tiles(DEVICE, {"forward bfloat16 64": best})
    assert path.is_relative_to(on_a_gpu)
    assert tiles.forward_tiles(heads(64)) == best
    # heads that take as wide a tile
    assert tiles.forward_tiles(heads(40)) == best
    assert tiles.forward_tiles(heads(128)) == tiles.forward_tiles(heads(128), (8, 0))
    assert tiles.forward_tiles(heads(64, torch.float16)) != best
    # for a chip that is named the table holds
    assert tiles.forward_tiles(heads(64), (8, 0)) != best


def test_gradients_need_both_kernels(on_a_gpu):
    best = Tiles(16, 128, 2, 5)
    tiles.keep_tiles(DEVICE, {"queries bfloat16 64": best})
    assert tiles.backward_tiles(heads(64)) == tiles.backward_tiles(heads(64), (8, 0))
    tiles.keep_tiles(DEVICE, {"keys bfloat16 64": best})
    assert tiles.backward_tiles(heads(64)) == (best, best)


def test_products_of_float32_are_told_apart(on_a_gpu):
    best = Tiles(16, 128, 2, 5)
    tiles.keep_tiles(DEVICE, {"forward float32 64 tf32x3": best})
    assert tiles.forward_tiles(heads(64, torch.float32)) == best
    assert tiles.forward_tiles(heads(64, torch.float32), precision="ieee") != best


def test_other_gpus_keep_theirs(on_a_gpu, monkeypatch):
    tiles.keep_tiles(DEVICE, {"forward bfloat16 64": Tiles(16, 128, 2, 5)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another")
    tiles.found_tiles.cache_clear()
    assert tiles.forward_tiles(heads(64)) == tiles.forward_tiles(heads(64), (8, 0))
    tiles.keep_tiles(DEVICE, {"forward bfloat16 64": Tiles(64, 64, 4, 1)})
    known = json.loads(tiles.tiles_file().read_text())
    assert [name.split(",")[0] for name in known] == ["Some GPU", "Another"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"GPU": {"forward bfloat16 64": [1, 2, 3]}}'])
def test_a_damaged_file_is_told_and_replaced(on_a_gpu, text):
    best = Tiles(16, 128, 2, 5)
    tiles.tiles_file().parent.mkdir(parents=True)
    tiles.tiles_file().write_text(text)
    with pytest.warns(UserWarning, match=r"attention_tiles.json is damaged and not used"):
        assert tiles.forward_tiles(heads(64)) == tiles.forward_tiles(heads(64), (8, 0))
    with pytest.warns(UserWarning, match="damaged"):
        tiles.keep_tiles(DEVICE, {"forward bfloat16 64": best})
    assert tiles.forward_tiles(heads(64)) == best


def test_the_interpreter_looks_in_no_file(on_a_gpu, monkeypatch):
    monkeypatch.setattr(tiles, "tiles_file", lambda: pytest.fail("looked"))
    tiles.forward_tiles(torch.empty(1, 1, 1, 64))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_candidates_begin_with_the_tables_and_are_all_different(monkeypatch, capability, dtype):
    tune = pytest.importorskip("lib.flash_attention_tune")
    monkeypatch.setattr(tune, "compute_capability", lambda device: capability)
    q = torch.empty(1, 1, 1, 64, dtype=getattr(torch, dtype), device="meta")
    for kind in tune.KINDS:
        found = tune.candidates(tune.Choice(kind, 64, dtype), DEVICE)
        assert len(set(found)) == len(found) > 3
        precision = tiles.usable_precision(q, "tf32x3", capability)
        table = (
            tiles.forward_tiles(q, capability, precision),
            *tiles.backward_tiles(q, capability, precision),
        )
        assert found[0] == table[tune.KINDS.index(kind)]


def test_the_fastest_is_kept(on_a_gpu, monkeypatch):
    tune = pytest.importorskip("lib.flash_attention_tune")
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    chosen = {
        kind: tune.candidates(tune.Choice(kind, 64, "bfloat16"), DEVICE)[2] for kind in tune.KINDS
    }

    class Time:
        def __init__(self, median_ms):
            self.median_ms = median_ms

    monkeypatch.setattr(tune, "pick_device", lambda device: DEVICE)
    monkeypatch.setattr(tune, "pick_dtype", lambda device, dtype: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    monkeypatch.setattr(tune, "_heads", lambda choice, tokens, heads: [q])
    # the second candidate does not fit
    monkeypatch.setattr(
        tune,
        "compile_all",
        lambda jobs: {
            job for i, job in enumerate(jobs) if job[1] != tune.candidates(job[0], DEVICE)[1]
        },
    )
    monkeypatch.setattr(
        tune, "_functions", lambda choice, tiles, *sizes: [(choice, t) for t in tiles]
    )
    monkeypatch.setattr(
        tune,
        "take_turns",
        lambda jobs, **settings: [Time(1.0 if t == chosen[c.kind] else 2.0) for c, t in jobs],
    )
    rows = tune.tune((64,), ("bfloat16",))
    assert [row["best"] for row in rows] == [str(tuple(chosen[kind])) for kind in tune.KINDS]
    assert all((row["ms"], row["best ms"]) == (2.0, 1.0) for row in rows)
    assert tiles.forward_tiles(heads(64)) == chosen["forward"]
    assert tiles.backward_tiles(heads(64)) == (chosen["queries"], chosen["keys"])


def test_where_nothing_fits_the_row_says_so_and_nothing_is_kept(on_a_gpu, monkeypatch):
    tune = pytest.importorskip("lib.flash_attention_tune")
    monkeypatch.setattr(tune, "pick_device", lambda device: DEVICE)
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    monkeypatch.setattr(tune, "compile_all", lambda jobs: set())
    rows = tune.tune((64,), ("bfloat16",))
    assert [(row["best"], row["ms"]) for row in rows] == [("none fits", None)] * 3
    assert tiles.forward_tiles(heads(64)) == tiles.forward_tiles(heads(64), (8, 0))


def test_a_cpu_is_refused():
    tune = pytest.importorskip("lib.flash_attention_tune")
    with pytest.raises(ValueError, match="device is cpu; right is: a CUDA device"):
        tune.tune(device="cpu")


@needs_no_gpu
def test_the_command_says_in_a_line_that_it_needs_a_gpu(capsys):
    tune = pytest.importorskip("lib.flash_attention_tune")
    assert tune.main(["64"]) == 2
    assert capsys.readouterr().err == "error: device is cpu; right is: a CUDA device\n"


@pytest.mark.gpu
@pytest.mark.serial
def test_tuning_takes_less_than_a_minute_and_is_never_slower(tmp_path, monkeypatch):
    import time

    from lib import flash_attention_tune as tune

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
    rows = tune.tune()
    assert time.monotonic() - start < 60
    # what is measured was compiled before
    assert in_parallel == [compiled()]
    assert all(row["best ms"] <= (row["ms"] or row["best ms"]) for row in rows)
    tiles.found_tiles.cache_clear()
