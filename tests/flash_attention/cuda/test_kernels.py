"""The CUDA C++ kernels, emulated on a CPU, and on a GPU as code of the chip and of a T4.

What they have in common with other implementations is in `test_every_implementation`.
"""

import dataclasses
import math
import re

import pytest
import torch
from torch import Tensor

from lib.flash_attention.cuda import attention, launch
from tests.flash_attention.cases import (
    EMPTY,
    Case,
    assert_error_at_most_twice_pytorchs,
    formula,
    make_inputs,
    with_gradients,
)
from tests.flash_attention.cuda import emulator
from tests.flash_attention.cuda.emulator import NEEDS_COMPILER, emulate

GPU = pytest.mark.gpu


@pytest.fixture
def emulated(monkeypatch) -> str:
    """The CPU, on which the kernels are emulated in this test."""
    return emulate(monkeypatch)


@pytest.fixture(params=["native", "compute_75"])
def gpu(request, monkeypatch) -> str:
    """A GPU, for whose chip or for a T4's the kernels are compiled."""
    if request.param != "native":
        monkeypatch.setenv("WORKBOOK_CUDA_ARCHITECTURE", request.param)
    return "cuda"


@NEEDS_COMPILER
def test_the_class_under_autocast_gives_the_functions_results_and_saves_the_natural_lse(emulated):
    """As the tests of Stanford's CS336, assignment 2, call it: with float32 inputs, one head."""
    case = Case(150, 90, 32, heads=1, key_heads=1)
    *leaves, grad_out = (x.detach() for x in make_inputs(case, torch.float32))
    short = [x.half().requires_grad_() for x in leaves]
    right = with_gradients(attention.flash_attention, (*short, grad_out.half()))
    wide = [x.squeeze(1).requires_grad_() for x in leaves]
    with torch.autocast(emulated, torch.float16):
        out = attention.FlashAttentionCUDA.apply(*wide, True)
    (lse,) = (x for x in out.grad_fn.saved_tensors if x.shape == out.shape[:2])
    gradients = torch.autograd.grad(out, wide, grad_out.squeeze(1).half())
    for ours, theirs in zip((out, *gradients), right):
        assert ours.equal(theirs.squeeze(1).to(ours.dtype))
    exact = formula(*(x.detach().double() for x in short), case)[1].squeeze(1)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


@GPU
def test_the_kernels_run_inside_a_cuda_graph(gpu):
    inputs = [x.detach() for x in make_inputs(Case(300, 300), torch.float16, gpu)]
    right = attention.flash_attention(*inputs[:3])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.flash_attention(*inputs[:3])
    out.zero_()
    graph.replay()
    assert out.equal(right)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "head_dim", [32, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 96, 128))]
)
def test_no_bank_of_shared_memory_is_asked_twice_at_once(emulated, head_dim):
    case = Case(130, 130, head_dim, batch=1, heads=1, key_heads=1)
    with_gradients(attention.flash_attention, make_inputs(case, torch.float16))
    kernels = {launch.name: launch.counters for launch in emulator.LAUNCHES}
    assert set(kernels) == set(launch.FILES)
    for name, counters in kernels.items():
        assert (counters.load_conflicts, counters.store_conflicts) == (0, 0), name
        assert counters.loads == 0 or counters.stores > 0, name


@NEEDS_COMPILER
def test_tiles_that_the_mask_hides_are_skipped(emulated):
    def multiplies(is_causal: bool) -> dict[str, int]:
        emulator.LAUNCHES.clear()
        case = Case(512, 512, 32, is_causal, heads=1, key_heads=1, batch=1)
        with_gradients(
            lambda q, k, v: attention.flash_attention(q, k, v, is_causal=is_causal),
            make_inputs(case, torch.float16),
        )
        return {launch.name: launch.counters.multiplies for launch in emulator.LAUNCHES}

    causal, full = multiplies(True), multiplies(False)
    for name in ("forward", "grad_queries", "grad_keys"):
        # half of the scores, and the upper halves of the tiles on the diagonal
        assert 0.5 < causal[name] / full[name] < 0.58, name


@NEEDS_COMPILER
@pytest.mark.parametrize("head_dim", [16, 20])
def test_results_lie_in_memory_as_a_compiler_is_told(emulated, head_dim):
    """Also where rows are copied, since they are not chunks of 16 bytes."""
    case = Case(33, 33, head_dim, heads=3, key_heads=3, batch=1, layout="tokens first")
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.float16))
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(attention._flash_attention.forward, (q, k, v, True, 0.2), **checks)
    out, lse = attention._flash_attention.forward(q, k, v, True, 0.2)
    tensors = (grad_out, q, k, v, out, lse)
    torch.library.opcheck(attention._flash_attention.backward, (*tensors, True, 0.2), **checks)


@NEEDS_COMPILER
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_only_the_rows_of_the_results_are_written(emulated, layout, monkeypatch):
    """Each tensor that the kernels write lies amid numbers that must stay."""
    made = []

    def amid_sevens(x: Tensor) -> Tensor:
        batch, heads, tokens, head_dim = x.shape
        around = x.new_full((batch, heads, tokens + 4, head_dim + 16), 7)
        if layout == "tokens first":
            around = x.new_full((batch, tokens + 4, heads, head_dim + 16), 7).transpose(1, 2)
        made.append(around)
        return around[:, :, 2:-2, 8:-8]

    monkeypatch.setattr(launch, "empty_like_heads", amid_sevens)
    case = Case(97, 65, 24, False, batch=1)
    with_gradients(
        lambda q, k, v: attention.flash_attention(q, k, v, is_causal=False),
        make_inputs(case, torch.float16),
    )
    assert len(made) == 4
    for around in made:
        inside = torch.zeros_like(around, dtype=torch.bool)
        inside[:, :, 2:-2, 8:-8] = True
        assert (around[~inside] == 7).all()
        assert (around[inside] != 7).all()


@pytest.mark.parametrize(
    ("cuda", "capability", "dtype", "words"),
    [
        (None, (9, 4), torch.half, "needs PyTorch for CUDA"),
        ("12.8", (6, 0), torch.half, "7.5 or more, got Chip (compute capability 6.0); use sdpa"),
        ("12.8", (7, 5), torch.bfloat16, "float16 on Chip (compute capability 7.5), which has no"),
    ],
)
def test_devices_that_are_not_supported_are_named(monkeypatch, cuda, capability, dtype, words):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Chip")
    with pytest.raises(ValueError, match=re.escape(words)):
        attention.check_device(torch.device("cuda"), dtype)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_where_there_is_nothing_to_see_no_kernel_is_needed(case):
    q, k, v, _ = (x.detach() for x in make_inputs(case, torch.float16))
    out, lse = launch.flash_forward(q, k, v, case.is_causal, 1.0)
    assert not out.any()
    assert (lse == -math.inf).all()
    assert not any(x.any() for x in launch.flash_backward(out, q, k, v, out, lse, False, 1.0))


TILES = [
    # each warp computes 48 rows, which shows that 16 and 32 are no special cases
    launch.Tiles(rows=192, warps=4, columns=32, step=32, blocks=1),
    launch.Tiles(rows=32, warps=2, columns=16, step=16, blocks=1),
    launch.Tiles(rows=64, warps=1, columns=32, step=16, blocks=1),
    # as from sm_80 on
    launch.Tiles(rows=32, warps=2, columns=32, step=16, blocks=1, is_async=True, stages=2),
    launch.Tiles(
        rows=64, warps=2, columns=32, step=32, blocks=1, is_async=True, stages=2, shared_operands=2
    ),
    launch.Tiles(
        rows=64, warps=4, columns=32, step=16, blocks=1, is_async=True, stages=2, shared_operands=2
    ),
]


def check_tiles(monkeypatch, tiles: launch.Tiles, case: Case) -> None:
    forward = dataclasses.replace(tiles, step=tiles.columns, stages=1)
    monkeypatch.setitem(launch.TILES, ("forward", 32), forward)
    monkeypatch.setitem(launch.TILES, ("backward_queries", 32), tiles)
    monkeypatch.setitem(launch.TILES, ("backward_keys", 32), tiles)
    assert_error_at_most_twice_pytorchs(attention.flash_attention, case, torch.float16)


@NEEDS_COMPILER
def test_tiles_that_are_copied_without_registers_give_the_same(emulated, monkeypatch):
    check_tiles(monkeypatch, TILES[-2], Case(97, 130, 32, batch=1, key_heads=1))


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_kernels_are_right_in_any_tiles(emulated, monkeypatch, tiles, is_causal):
    check_tiles(monkeypatch, tiles, Case(97, 130, 32, is_causal))
