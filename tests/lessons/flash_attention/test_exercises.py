"""The kernels of notebook 06 against PyTorch, and their checks; answers: test_answers.py."""

import runpy
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from lib.lessons.exercise import draw_inputs, verdict  # noqa: E402
from lib.lessons.flash_attention import (  # noqa: E402
    exercises,
    kernel_task,
    ladder_triton,
    solutions_triton,
)
from lib.lessons.flash_attention.kernel_task import Tiling  # noqa: E402
from tests.lessons.answers.flash_attention import by_autograd  # noqa: E402

KERNELS = {
    name: getattr(exercises, name)
    for name in ("flash_forward", "causal_forward", "backward_queries", "backward_keys")
}


def close(found, expected):
    assert len(found) == len(expected)
    for mine, right in zip(found, expected):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_solutions_are_what_pytorch_computes():
    for q, k, v, tiling in draw_inputs(KERNELS["flash_forward"], 0):
        for name, is_causal in (("flash_forward", False), ("causal_forward", True)):
            found = KERNELS[name].harness(KERNELS[name].solve, q, k, v, tiling)
            factor = KERNELS[name].harness.scale(q.shape[-1]) * q.shape[-1] ** 0.5
            expected = kernel_task.attention_and_lse(factor * q, k, v, is_causal=is_causal)
            close(list(found.values()), expected)
    for given in draw_inputs(KERNELS["backward_queries"], 0):
        right = by_autograd(*given[:4], is_causal=True)
        names = ("backward_queries", "backward_keys")
        found = [KERNELS[name].harness(KERNELS[name].solve, *given) for name in names]
        close([x for one in found for x in one.values()], right)
    for q, k, v, BQ, BK in draw_inputs(exercises.tiled_forward, 0):
        found = exercises.tiled_forward.solve(q, k, v, BQ, BK)
        close(found, kernel_task.attention_and_lse(q, k, v, is_causal=False))
    for q, k, v, out, lse, grad_out, *tile in draw_inputs(exercises.tiled_backward, 0):
        found = exercises.tiled_backward.solve(q, k, v, out, lse, grad_out, *tile)
        right = by_autograd(*(x[None] for x in (q, k, v, grad_out)), is_causal=False)
        close([x[None] for x in found], right)


def test_online_softmax_gives_the_maximum_and_the_sum_of_the_row():
    for (tiles,) in draw_inputs(exercises.add_tile, 0):
        found = exercises.one_after_another(exercises.add_tile.solve, tiles)
        row = torch.cat(tiles).double()
        torch.testing.assert_close(found["m"].double(), row.max())
        total = (row - row.max()).exp().sum()
        torch.testing.assert_close(found["l"].double(), total, rtol=1e-5, atol=0)


def test_of_a_kernel_that_skips_nothing_the_program_that_loads_too_much_is_named():
    text = verdict(exercises.causal_forward, ladder_triton.every_tile)
    assert "heads=2, n=33, D=32, BQ=16, BK=32" in text
    assert "program (0, 0) loads 2 tiles of k; only 1 has a pair that is visible" in text
    assert "let the loop end with the last query of the tile" in text


@pytest.mark.parametrize("tiling", [Tiling(32, 16), Tiling(16, 32)], ids=str)
@pytest.mark.parametrize("name", ["causal_forward", "backward_keys"])
def test_tiles_with_a_visible_pair_are_counted(name, tiling):
    task, side = getattr(exercises, name).harness, int(name == "backward_keys")
    for n in (1, 16, 17, 33, 40, 64):
        pairs = [rows.split(tiling.BK, 1) for rows in torch.ones(n, n).tril().split(tiling.BQ)]
        seen = torch.tensor([[bool(tile.any()) for tile in row] for row in pairs])
        found = [task.tiles_seen(tile, n, tiling) for tile in range(seen.shape[side])]
        assert found == seen.sum(1 - side).tolist()


def kernel_in_a_file(folder: Path, name: str, old: str, new: str):
    """The solution `name` with `old` replaced by `new`: Triton compiles what is in a file."""
    file = folder / "wrong_kernels.py"
    source = Path(solutions_triton.__file__).read_text(encoding="utf-8")
    file.write_text(source.replace(old, new), encoding="utf-8")
    return triton.jit(runpy.run_path(str(file))[name].solve)


SCORES = 'tl.where(key[None, :] < n, scores, float("-inf"))'


@pytest.mark.parametrize(
    ("old", "new", "cure"),
    [
        (f"scores = {SCORES}", 'scores[:, key >= n] = float("-inf")', "`tl.where(condition"),
        (SCORES, 'scores.masked_fill(key >= n, float("-inf"))', "`tl.where(condition"),
        ("m + tl.log(l)", '__import__("math").log(l)', "not PyTorch's"),
        ("m + tl.log(l)", '__import__("torch").log(l)', "not PyTorch's"),
        ("scores - new_m[:, None]", "scores - new_m", "`x[:, None]` goes with its rows"),
        ("tl.trans(k)", "k", "`tl.trans` turns"),
    ],
)
def test_an_error_names_its_line_in_the_kernel_and_a_cure(old, new, cure, tmp_path, capsys):
    source = Path(solutions_triton.__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(source) if old in text)
    exercises.take(kernel_in_a_file(tmp_path, "flash_forward", old, new))
    words = capsys.readouterr().out
    assert f"line {line} of the cell raised" in words
    assert cure in words


def test_a_kernel_that_rounds_float32_is_told_why_it_is_off(tmp_path, capsys):
    exercises.take(triton.jit(exercises.flash_forward.solve))
    assert "rounds" not in capsys.readouterr().out
    old = 'tl.trans(k), input_precision="ieee"'
    kernel = kernel_in_a_file(tmp_path, "flash_forward", old, "tl.trans(k)")
    assert exercises.take(kernel) is not kernel
    words = capsys.readouterr().out
    assert words.startswith("not yet")
    assert "`tl.dot` rounds float32 unless" in words


LOOP = "for start in range(0, end, BK):\n"


@pytest.mark.parametrize(
    ("old", "new", "line", "cure"),
    [
        ("p.to(v.dtype)", "p", "in `out = out * shrink[:, None] + tl.dot(p, v", "`p.to(v.dtype)`"),
        ("(BQ, D), tl.float32", "(BQ, D), tl.float16", "in `", ""),
        (
            LOOP,
            LOOP.replace("end", "n") + "        if start >= end:\n            break\n",
            "in `break`",
            "put the end into `range(…)`",
        ),
        ('tl.full((BQ,), float("-inf"), tl.float32)', 'float("-inf")', "in `", "start with a tile"),
        (
            "        m = new_m",
            "        print(m)\n        m = new_m",
            "print",
            "take out the `print`",
        ),
    ],
    ids=["cast", "accumulator", "break", "start", "print"],
)
def test_a_kernel_that_does_not_compile_for_16_bits_is_not_right(
    old, new, line, cure, tmp_path, capsys
):
    wrong = kernel_in_a_file(tmp_path, "causal_forward", old, new)
    assert exercises.take(wrong).fn is exercises.causal_forward.solve
    words = capsys.readouterr().out
    assert "not yet: right in the interpreter, but for bfloat16 it does not" in words
    assert line in words
    assert cure in words
