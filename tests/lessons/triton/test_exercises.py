"""The puzzles of notebook 05: other right answers, and wrong ones whose result is right."""

import inspect
import linecache
import runpy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import triton
import triton.language as tl

from lib.lessons.exercise import draw_inputs, edited, verdict
from lib.lessons.triton import exercises, kernels, solutions_triton
from lib.lessons.triton.recorder_triton import plain


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


@triton.jit
def copy_by_descriptor(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Descriptors know where a tensor ends, so that no mask is needed."""
    x = tl.make_tensor_descriptor(x_ptr, [n], [1], [BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [n], [1], [BLOCK])
    start = tl.program_id(0) * BLOCK
    y.store([start], x.load([start]))


def verdict_on(name, kernel):
    return verdict(getattr(exercises, name), plain(kernel))


BY_PYTORCH = {
    "copy": lambda x: x,
    "add_bias": lambda x, bias: x + bias,
    "transpose": lambda x: x.T,
    "row_sums": lambda x: x.sum(1),
    "softmax": lambda x: x.softmax(1),
    "rms_norm": lambda x, eps: F.rms_norm(x, x.shape[1:], eps=eps),
    "matmul": lambda a, b: a @ b,
}


@pytest.mark.parametrize("name", BY_PYTORCH)
def test_solutions_are_what_pytorch_computes(name):
    puzzle = getattr(exercises, name)
    for given in draw_inputs(puzzle, seed=0):
        (found,) = puzzle.harness(puzzle.solve, *given).values()
        torch.testing.assert_close(found, BY_PYTORCH[name](*given), rtol=1e-4, atol=1e-5)


def test_other_right_kernels_pass():
    assert verdict_on("copy", copy_by_descriptor).startswith("right")
    assert verdict_on("copy", copy_by_striding).startswith("right")
    assert verdict_on("transpose", transpose_in_registers).startswith("right")


def softmax_by_one_call(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=float("-inf"))
    tl.store(y_ptr + row * N + columns, tl.softmax(x), mask=columns < N)


def softmax_with_powers_of_two(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=float("-inf"))
    weights = tl.exp2((x - tl.max(x, axis=0)) * 1.4426950408889634)
    tl.store(y_ptr + row * N + columns, weights / tl.sum(weights, axis=0), mask=columns < N)


def test_a_softmax_is_written_out_and_masked_by_what_is_below_all_numbers():
    assert "tl.softmax does all of it; write it out" in verdict_on("softmax", softmax_by_one_call)
    masked = edited(solutions_triton.softmax.solve, 'float("-inf")', "-10000.0")
    assert verdict_on("softmax", masked).startswith("not yet")


def test_an_autotuned_kernel_is_checked_and_a_plain_function_told_to_be_jitted(capsys):
    configs = [triton.Config({}, num_warps=2), triton.Config({}, num_warps=4)]
    tuned = triton.autotune(configs=configs, key=["N"])(triton.jit(softmax_with_powers_of_two))
    exercises.check(tuned, "softmax")
    told = capsys.readouterr().out
    assert told.startswith("right")
    assert "compiled for an A100" in told
    exercises.check(softmax_with_powers_of_two, "softmax")
    told = capsys.readouterr().out
    assert told == (
        "not yet: `softmax_with_powers_of_two` can't be launched; put `@triton.jit` above it\n"
    )


def test_a_launch_without_sizes_takes_those_of_the_first_configuration():
    sizes = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 16}
    kernel = solutions_triton.linear_relu_kernel
    tuned = triton.autotune(configs=[triton.Config(sizes)], key=["M", "N", "K"])(kernel)

    def launch(x, w, bias):
        (M, K), N = x.shape, w.shape[1]
        y = x.new_empty(M, N)

        def grid(meta):
            return triton.cdiv(M, meta["ROWS"]), triton.cdiv(N, meta["COLUMNS"])

        tuned[grid](x, w, bias, y, M, N, K)
        return y

    x, w, bias = torch.randn(20, 8), torch.randn(8, 40), torch.randn(40)
    result, (run,) = exercises.recorded(launch, x, w, bias)
    torch.testing.assert_close(result, torch.relu(x @ w + bias))
    assert run.grid == (2, 2)


def test_an_output_is_stored_once():
    last = '        total = tl.dot(a, b, total, input_precision="ieee")\n'
    store = "tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask="
    inside = "(rows < M)[:, None] & (columns < N)[None, :]"
    in_loop = edited(solutions_triton.matmul.solve, last, f"{last}        {store}{inside})\n")
    assert "store each element once, after the loop that it needs" in verdict_on("matmul", in_loop)


def test_a_matmul_too_thin_to_compile_is_refused():
    def thin(x, w, bias):
        (M, K), N = x.shape, w.shape[1]
        y = x.new_empty(M, N)
        grid, tile = (triton.cdiv(M, 32), triton.cdiv(N, 32)), {"ROWS": 32, "COLUMNS": 32}
        kernel = solutions_triton.linear_relu_kernel
        kernel[grid](x, w, bias, y, M, N, K, **tile, DEPTH=1)
        return y

    told = verdict(exercises.linear_relu, exercises.launches(thin))
    assert "tl.dot has to add up at least 16 products, got 1" in told


def test_a_race_is_a_fault_though_the_result_is_right():
    told = verdict_on("copy", copy_by_all)
    assert "programs 0 and 1 both store element 0 of y" in told


def test_the_reason_why_a_kernel_does_not_compile_comes_with_its_line(tmp_path):
    source = inspect.getsource(solutions_triton).replace("squares = 0.0", "squares = 0")
    file = tmp_path / "kernels.py"
    file.write_text(source, encoding="utf-8")
    kernel = triton.jit(runpy.run_path(str(file))["rms_norm"].solve)
    launch = solutions_triton.rms_norm.harness.plan(torch.ones(3, 20), 1e-5)
    words = kernels.with_compilation("right", kernel, launch)
    assert words.startswith("not yet")
    assert "does not compile\n  in `for start in range(0, N, BLOCK):" in words
    assert "Loop-carried variable squares" in words


def with_tiles(rows, columns, depth):
    """A launch of the last puzzle with these tiles."""

    def linear_relu(x, w, bias):
        (M, K), N = x.shape, w.shape[1]
        y = x.new_empty(M, N)
        grid = (triton.cdiv(M, rows), triton.cdiv(N, columns))
        kernel = solutions_triton.linear_relu_kernel[grid]
        kernel(x, w, bias, y, M, N, K, ROWS=rows, COLUMNS=columns, DEPTH=depth)
        return y

    return exercises.launches(linear_relu)


@pytest.mark.parametrize(("sizes", "kilobytes"), [((16, 16, 16), 148), ((32, 32, 16), 82.4)])
def test_larger_tiles_ask_for_less(sizes, kilobytes):
    text = verdict(exercises.linear_relu, with_tiles(*sizes))
    assert f"yours {kilobytes} KB, the solution 148 KB" in text


def test_tiles_have_a_limit_and_a_kernel_has_to_be_launched():
    too_large = with_tiles(64, 32, 16)
    assert "at most 1,024 numbers, got 2,048" in verdict(exercises.linear_relu, too_large)
    rounded_down = with_kernel("triton.cdiv(M, 32)", "M // 32")
    assert "no program ran: the grid is (0, " in verdict(exercises.linear_relu, rounded_down)
    by_torch = exercises.launches(lambda x, w, bias: torch.relu(x @ w + bias))
    assert "no kernel was launched" in verdict(exercises.linear_relu, by_torch)


def with_kernel(old, new):
    """The last puzzle with tiles of 32 and an edit of the kernel or its launch."""
    source = inspect.getsource(solutions_triton).replace("16", "32")
    assert source.count(old) >= 1
    code, file = source.replace(old, new), f"<edited {hash((old, new))}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    names = {"__name__": "edited"}
    exec(compile(code, file, "exec"), names)
    return exercises.launches(names["linear_relu"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(0, K, DEPTH)", "range(0, 1, DEPTH)"),
        ("tl.dot(x, w, total, ", "tl.dot(x, w, "),
        ("k = start + ", "k = "),
        ("(triton.cdiv(M, 32), triton.cdiv(N, 32))", "(triton.cdiv(N, 32), triton.cdiv(M, 32))"),
        ("tl.program_id(0) * ROWS + ", ""),
        ('total, input_precision="ieee")', "total)"),
        ("return y", "return torch.relu(x @ w + bias)"),
        ("return y", "return y.clamp_(min=0)"),
    ],
)
def test_wrong_layers_with_tiles_of_32_are_found(old, new):
    assert verdict(exercises.linear_relu, with_kernel(old, new)).startswith("not yet")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["copy", "add_bias", "transpose", "row_sums", "softmax"])
def test_compiled_kernels_pass_too(name):
    kernel = triton.jit(getattr(exercises, name).solve)
    assert exercises.take(kernel) is kernel


def test_a_right_kernel_is_given_back_and_the_solution_in_place_of_another(capsys):
    right = triton.jit(solutions_triton.row_sums.solve)
    assert exercises.take(right) is right
    taken = exercises.take(triton.jit(softmax_by_one_call), "softmax")
    assert taken.fn is solutions_triton.softmax.solve
    exercises.check(triton.jit(softmax_by_one_call))
    assert (
        "no exercise is called softmax_by_one_call, but add_bias, copy" in capsys.readouterr().out
    )


def test_groups_of_programs_cover_each_tile_once():
    tiles = [exercises.grouped.solve(program, 5, 3, 2) for program in range(15)]
    assert sorted(tiles) == [(row, column) for row in range(5) for column in range(3)]
    # down the first column of a group of two rows, then down the next
    assert tiles[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
