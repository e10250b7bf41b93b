"""The puzzles of notebook 05: other right answers, and wrong ones whose result is right."""

import inspect
import linecache
import runpy

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from lib.lessons.exercise import edited, verdict
from lib.lessons.triton import exercises, solutions_triton


@triton.jit
def copy_by_striding(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Tiles that interleave: program i starts at i, and steps by the number of programs."""
    offsets = tl.program_id(0) + tl.arange(0, BLOCK) * tl.num_programs(0)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, offsets < n), offsets < n)


@triton.jit
def transpose_in_registers(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_mask = (rows < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :], mask=x_mask)
    y_mask = (columns < N)[:, None] & (rows < M)[None, :]
    tl.store(y_ptr + columns[:, None] * M + rows[None, :], tl.trans(x), mask=y_mask)


@triton.jit
def copy_by_all(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Every program copies everything."""
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, offsets < n), offsets < n)


def test_other_right_kernels_pass():
    attempt = exercises.runner(copy_by_striding, exercises.launch_copy)
    assert verdict(exercises.COPY, attempt).startswith("right")
    attempt = exercises.runner(transpose_in_registers, exercises.launch_transpose)
    assert verdict(exercises.TRANSPOSE, attempt).startswith("right")


def softmax_by_one_call(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=float("-inf"))
    tl.store(y_ptr + row * N + columns, tl.softmax(x), mask=columns < N)


def softmax_with_powers_of_two(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=float("-inf"))
    weights = tl.exp2((x - tl.max(x, axis=0)) * 1.4426950408889634)
    tl.store(y_ptr + row * N + columns, weights / tl.sum(weights, axis=0), mask=columns < N)


def softmax_verdict(kernel):
    return verdict(exercises.SOFTMAX, exercises.runner(kernel, exercises.launch_softmax))


def test_a_softmax_is_written_out_and_masked_by_what_is_below_all_numbers():
    assert "tl.softmax does all of it; write it out" in softmax_verdict(softmax_by_one_call)
    masked = edited(solutions_triton.softmax, 'float("-inf")', "-10000.0")
    assert softmax_verdict(masked).startswith("not yet")


def test_an_autotuned_kernel_is_checked_and_a_plain_function_told_to_be_jitted(capsys):
    configs = [triton.Config({}, num_warps=2), triton.Config({}, num_warps=4)]
    tuned = triton.autotune(configs=configs, key=["N"])(triton.jit(softmax_with_powers_of_two))
    exercises.check_softmax(tuned)
    told = capsys.readouterr().out
    assert told.startswith("right")
    assert "compiled for an A100" in told
    exercises.check_softmax(softmax_with_powers_of_two)
    told = capsys.readouterr().out
    assert told == (
        "not yet: `softmax_with_powers_of_two` can't be launched; put `@triton.jit` above it\n"
    )


def test_a_race_is_a_fault_though_the_result_is_right():
    attempt = exercises.runner(copy_by_all, exercises.launch_copy)
    assert "programs 0 and 1 both store element 0 of y" in verdict(exercises.COPY, attempt)


def test_the_reason_why_a_kernel_does_not_compile_comes_with_its_line(tmp_path):
    source = inspect.getsource(solutions_triton).replace("squares = 0.0", "squares = 0")
    file = tmp_path / "kernels.py"
    file.write_text(source, encoding="utf-8")
    kernel = triton.jit(runpy.run_path(str(file))["rms_norm"])
    words = exercises.compiled_words(kernel, exercises.launch_rms_norm(torch.ones(3, 20), 1e-5))
    assert "does not compile\n    in `for start in range(0, N, BLOCK):`" in words
    assert "Loop-carried variable squares" in words


def with_tiles(rows, columns, depth):
    """A launch of the last puzzle with these tiles."""

    def linear_relu(x, w, bias):
        (M, K), N = x.shape, w.shape[1]
        y = torch.empty(M, N)
        grid = (triton.cdiv(M, rows), triton.cdiv(N, columns))
        kernel = solutions_triton.linear_relu_kernel[grid]
        kernel(x, w, bias, y, M, N, K, ROWS=rows, COLUMNS=columns, DEPTH=depth)
        return y

    return exercises.launches(linear_relu)


@pytest.mark.parametrize(("sizes", "kilobytes"), [((16, 16, 16), 148), ((32, 32, 16), 82.4)])
def test_larger_tiles_ask_for_less(sizes, kilobytes):
    text = verdict(exercises.LINEAR_RELU, with_tiles(*sizes))
    assert f"yours {kilobytes} KB, the solution 148 KB" in text


def test_tiles_have_a_limit_and_a_kernel_has_to_be_launched():
    too_large = with_tiles(64, 32, 16)
    assert "at most 1,024 numbers, got 2,048" in verdict(exercises.LINEAR_RELU, too_large)
    rounded_down = with_kernel("triton.cdiv(M, 32)", "M // 32")
    assert "no program ran: the grid is (0, " in verdict(exercises.LINEAR_RELU, rounded_down)
    by_torch = exercises.launches(lambda x, w, bias: torch.relu(x @ w + bias))
    assert "no kernel was launched" in verdict(exercises.LINEAR_RELU, by_torch)


def with_kernel(old, new):
    """The last puzzle with tiles of 32 and an edit of the kernel or its launch."""
    source = inspect.getsource(solutions_triton).replace("16", "32")
    assert source.count(old) >= 1
    code, file = source.replace(old, new), f"<edited {hash((old, new))}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    names = {"__name__": "edited"}
    exec(compile(code, file, "exec"), names)
    return exercises.launches(names["linear_relu"])


def test_layers_with_tiles_of_32_pass():
    assert verdict(exercises.LINEAR_RELU, with_kernel("32", "32")).startswith("right")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(0, K, DEPTH)", "range(0, 1, DEPTH)"),
        ("(triton.cdiv(M, 32), triton.cdiv(N, 32))", "(triton.cdiv(N, 32), triton.cdiv(M, 32))"),
        ("tl.program_id(0) * ROWS + ", ""),
        ('total, input_precision="ieee")', "total)"),
        ("return y", "return torch.relu(x @ w + bias)"),
        ("return y", "return y.clamp_(min=0)"),
    ],
)
def test_wrong_layers_with_tiles_of_32_are_found(old, new):
    assert verdict(exercises.LINEAR_RELU, with_kernel(old, new)).startswith("not yet")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["copy", "add_bias", "transpose", "row_sums", "softmax"])
def test_compiled_kernels_pass_too(name):
    kernel = triton.jit(getattr(solutions_triton, name))
    attempt = exercises.runner(kernel, getattr(exercises, f"launch_{name}"))
    assert verdict(getattr(exercises, name.upper()), attempt).startswith("right")
