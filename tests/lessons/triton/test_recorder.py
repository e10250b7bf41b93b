"""What the recorder counts, and the mistakes that it finds: also where Triton interprets anyway.

Kernels are interpreted in the process of the test, though Triton was imported to compile them.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from lib.lessons.triton import solutions_triton as solutions  # noqa: E402
from lib.lessons.triton.compile_triton import compile_for  # noqa: E402
from lib.lessons.triton.recorder_triton import KernelError, watch  # noqa: E402
from lib.model.elementwise_triton import _swiglu_kernel  # noqa: E402
from tests.model.kernels import OUTSIDE_THE_INTERPRETER, assert_passed  # noqa: E402

# Whose tests of kernels are tried in the interpreter too.
INTERPRETED = (__file__,)


@triton.jit
def add_one(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets) + 1)


@triton.jit
def reduce(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < n)
    tl.store(y_ptr, x.sum(0))
    tl.store(y_ptr + 1, tl.max(x, 0) + tl.cdiv(n, 2))


def test_a_kernel_is_run_and_counted():
    x, y = torch.arange(12.0), torch.zeros(12)
    run = watch(add_one, (3,), x, y, 4, BLOCK=4)
    assert torch.equal(y, x + 1)
    assert run.faults() == []
    assert [access.program for access in run.of("load", "x")] == [0, 1, 2]
    assert run.bytes_moved("load") == run.bytes_moved("store") == run.least_bytes() / 2 == 48
    assert run.flops == {"other": 12}


def test_a_kernel_that_leaves_its_tensor_is_found_and_does_no_harm():
    storage = torch.zeros(8)
    x, y = torch.arange(4.0), storage[2:6]
    run = watch(add_one, (2,), x, y, 3, BLOCK=4)
    assert run.faults() == [
        "program 1 loads element 4 of x, which has 4 elements",
        "program 1 stores element 4 of y, which has 4 elements",
        "programs 0 and 1 both store element 3 of y",
    ]
    assert storage.tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
    before = watch(add_one, (2,), x, y, -3, BLOCK=4).faults()
    assert before[0] == "program 1 loads element -3 of x, which has 4 elements"
    with pytest.raises(KernelError, match="program 1 loads element 4 of x"):
        watch(add_one, (2,), x, y, 3, BLOCK=4, strict=True)
    with pytest.raises(KernelError, match="programs 0 and 1 both store element 0 of y"):
        watch(add_one, (2,), x, y, 0, BLOCK=4, strict=True)


def test_a_kernel_sees_a_view_and_nothing_between_its_rows():
    x, y = torch.arange(12.0).view(3, 4)[:, :2], torch.zeros(12)
    assert watch(add_one, (3,), x, y, 4, BLOCK=2).faults() == []
    assert y.tolist() == [1, 2, 0, 0, 5, 6, 0, 0, 9, 10, 0, 0]
    assert "element 2 of x" in watch(add_one, (3,), x, y, 4, BLOCK=4).faults()[0]


def test_lanes_that_a_kernel_masks_without_other_hold_anything():
    x, y = torch.arange(8.0), torch.zeros(2)
    watch(reduce, (1,), x, y, 8, BLOCK=8)
    assert y.tolist() == [28, 11]
    run = watch(reduce, (1,), x, y, 5, BLOCK=8)
    assert y[0].isnan()
    assert run.bytes_moved("load") == 20


@pytest.mark.parametrize("tile", [(8, 8), (16, 4)])
def test_a_matmul_kernel_loads_each_operand_once_for_each_tile_of_the_other(tile):
    a, b = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    c = torch.empty(32, 32)
    sizes = {"ROWS": tile[0], "COLUMNS": tile[1], "DEPTH": 16}
    grid = (32 // tile[0], 32 // tile[1])
    run = watch(solutions.matmul.solve, grid, a, b, c, 32, 32, 32, **sizes)
    torch.testing.assert_close(c, a @ b)
    assert run.flops["matmul"] == 2 * 32**3
    assert run.bytes_moved("load", "a") == a.nbytes * 32 / tile[1]
    assert run.bytes_moved("load", "b") == b.nbytes * 32 / tile[0]
    assert run.least_bytes() == 3 * a.nbytes


def test_a_kernel_of_the_library_does_the_same_when_it_is_recorded():
    x, out = torch.randn(3, 40).half(), torch.empty(3, 20).half()
    watch(_swiglu_kernel, (1,), x, out, 3, D_FF=20, ROWS=4, COLUMNS=32)
    gate, value = x.float().chunk(2, -1)
    torch.testing.assert_close(out, (torch.nn.functional.silu(gate) * value).half())


def test_a_kernel_compiles_before_and_after_it_was_interpreted(tmp_path, monkeypatch):
    # what Triton finds in its cache it doesn't compile
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "before"))
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
    before, language = compile_for(80, reduce, types, BLOCK=64), dict(vars(tl.core))
    watch(reduce, (1,), torch.ones(8), torch.zeros(2), 8, BLOCK=8)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "after"))
    # on a GPU, the next launch compiles
    assert vars(tl.core) == language
    assert compile_for(80, reduce, types, BLOCK=64).ptx == before.ptx
    assert "tt.reduce" in before.ttir
    assert "loc(" not in before.ttir


def test_a_kernel_in_bfloat16_is_refused():
    with pytest.raises(TypeError, match="x must be float16 or float32"):
        watch(add_one, (1,), torch.ones(4).bfloat16(), torch.ones(4), 4, BLOCK=4)


@pytest.mark.slow
@OUTSIDE_THE_INTERPRETER
def test_all_of_this_in_the_interpreter(tried_in_interpreter):
    assert_passed(tried_in_interpreter)
