"""The puzzles of notebook 05 against PyTorch, and their checks; answers: test_answers.py."""

import inspect
import runpy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import triton
import triton.language as tl

from lib.lessons.exercise import draw_inputs
from lib.lessons.triton import exercises, kernels, solutions_triton
from tests.lessons.answers.triton import softmax_by_one_call

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


def softmax_with_powers_of_two(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=float("-inf"))
    weights = tl.exp2((x - tl.max(x, axis=0)) * 1.4426950408889634)
    tl.store(y_ptr + row * N + columns, weights / tl.sum(weights, axis=0), mask=columns < N)


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
