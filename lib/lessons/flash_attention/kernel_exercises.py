"""Kernels to write in notebook 06, forward and backward, and their launch from PyTorch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.lessons.exercise import Exercise, edited
from lib.lessons.flash_attention import solutions_triton as solutions
from lib.lessons.flash_attention.kernel_task import (
    CASES,
    KernelTask,
    Tiling,
    attention_and_lse,
    draw_heads,
    kernel_exercise,
    side_by_side,
)
from lib.lessons.triton.exercises import check_run
from lib.lessons.triton.recorder_triton import watched


def full_attention(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Tensor:
    return side_by_side(*attention_and_lse(q, k, v, is_causal=False))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Tensor:
    return side_by_side(*attention_and_lse(q, k, v, is_causal=True))


# Settings of a launch, written into the kernel.
SIZE_MISTAKES = {
    "head_dim is taken to be 64; it is `D`": (
        "    query, channel =",
        "    D = 64\n    query, channel =",
    ),
    "a tile has 64 columns; it has `D`": ("tl.arange(0, D)", "tl.arange(0, 64)"),
    "the scale is taken to be 1/8, that of a head_dim of 64; it is `scale`": (
        "    query, channel =",
        "    scale = 0.125\n    query, channel =",
    ),
}
STATE_MISTAKES = {
    **SIZE_MISTAKES,
    "the scale is missing": (") * scale  # (BQ, BK)", ")  # (BQ, BK)"),
    "neither the sum nor the output so far is rescaled when the maximum grows (if you do rescale "
    "them: the maximum before this tile must still be known there)": (
        "tl.exp(m - new_m)",
        "tl.exp(new_m - new_m)",
    ),
    "the output so far is not rescaled when the maximum grows": ("out * shrink[:, None]", "out"),
    "the sum so far is not rescaled when the maximum grows": ("l * shrink", "l"),
    "all is NaN because the earlier sums are rescaled the wrong way round (the factor is exp(old "
    "maximum - new maximum)), or a mask is multiplied by infinity (0 · inf is NaN; use "
    "tl.where)": ("m - new_m)\n", "new_m - m)\n"),
    "the exponentials are relative to the maximum before this tile; the new one is at least as "
    "large as all scores": ("scores - new_m[:, None]", "scores - m[:, None]"),
    "each tile's exponentials are relative to the tile's own maximum; use the maximum so far, with "
    "tl.maximum, as Python's max cannot compare tiles number by number": (
        "tl.maximum(m, tl.max(scores, 1))",
        "tl.max(scores, 1)",
    ),
    "the new maximum is not kept for the next tile": ("        m = new_m\n", ""),
    "no maximum is subtracted inside exp, so large scores overflow": (
        "tl.exp(scores - new_m[:, None])",
        "tl.exp(scores)",
    ),
    "the maximum starts at 0, too large if all scores of a row are below 0; start at -inf": (
        'float("-inf"), tl.float32',
        "0.0, tl.float32",
    ),
    "the division by the sum at the end is missing": ("out / l[:, None]", "out"),
    "the output is divided by the sum in each step; divide once, behind the loop": (
        "        m = new_m\n    tl.store(out_ptr + q_rows, out / l[:, None]",
        "        out = out / l[:, None]\n        m = new_m\n    tl.store(out_ptr + q_rows, out",
    ),
    "lse lacks the maximum: it is m + log(l)": ("m + tl.log(l)", "tl.log(l)"),
    "lse lacks the logarithm of the sum: it is m + log(l)": ("m + tl.log(l)", "m"),
    "lse lacks the maximum and the logarithm: it is m + log(l)": ("m + tl.log(l)", "l"),
    "the maximum in lse is that of scores that are not scaled": (
        "m + tl.log(l)",
        "m / scale + tl.log(l)",
    ),
    "all programs work on the first head: use tl.program_id(1)": ("tl.program_id(1) * n", "0"),
    "all programs take keys and values of the first head": (
        "k_rows = (head + key[:, None])",
        "k_rows = key[:, None]",
    ),
    "a head is taken to begin one row after the one before; it has n rows": (
        "tl.program_id(1) * n",
        "tl.program_id(1)",
    ),
    "the axes of the grid are exchanged: tl.program_id(0) is the tile, tl.program_id(1) the head": (
        "tl.program_id(1) * n  # rows of the heads before this one\n"
        "    query, channel = tl.program_id(0)",
        "tl.program_id(0) * n\n    query, channel = tl.program_id(1)",
    ),
    "the maximum is one number for the whole tile; each row has its own, tl.max(scores, 1)": (
        "tl.max(scores, 1)",
        "tl.max(scores)",
    ),
    "the sum is one number for the whole tile; each row has its own, tl.sum(p, 1)": (
        "tl.sum(p, 1)",
        "tl.sum(p)",
    ),
    "values beyond the last are loaded without other=0.0; lanes that are off hold anything, also "
    "NaN, and 0 · NaN is NaN": (
        "v_ptr + k_rows, mask=key[:, None] < n, other=0.0",
        "v_ptr + k_rows, mask=key[:, None] < n",
    ),
    "each program takes the first tile of queries: use tl.program_id(0)": (
        "query, channel = tl.program_id(0) * BQ",
        "query, channel = 0",
    ),
    "each step loads the first tile of keys": ("key = start + tl", "key = tl"),
    "keys beyond the last are loaded; mask them": (
        "k_ptr + k_rows, mask=key[:, None] < n",
        "k_ptr + k_rows, mask=key[:, None] >= 0",
    ),
    "rows of the output beyond the last are stored; mask them": (
        "out / l[:, None], mask=query[:, None] < n",
        "out / l[:, None]",
    ),
}
# Two lines of a forward kernel.
HIDE = '        scores = tl.where({0}, scores, float("-inf"))\n'
GROW = "        new_m = tl.maximum(m, tl.max(scores, 1))\n"
FORWARD_TASK = KernelTask(solutions.flash_forward, ("out", "lse"), "k", is_causal=False)
FORWARD = kernel_exercise(
    full_attention,
    FORWARD_TASK,
    draw_heads,
    {
        **STATE_MISTAKES,
        "keys beyond the last have a score of 0, and exp(0) is 1; give them -inf": (
            'tl.where(key[None, :] < n, scores, float("-inf"))',
            "scores",
        ),
        "the maximum is taken before keys beyond the last are hidden, whose scores are 0": (
            HIDE.format("key[None, :] < n") + GROW,
            GROW + HIDE.format("key[None, :] < n"),
        ),
        "there is a causal mask; here all queries see all keys": (
            "key[None, :] < n, scores",
            "key[None, :] <= query[:, None], scores",
        ),
        "a last tile of fewer keys is left out": ("range(0, n, BK)", "range(0, n // BK * BK, BK)"),
        "the last key is left out; `range` excludes its end, so that is n": (
            "range(0, n, BK)",
            "range(0, n - 1, BK)",
        ),
        "only the first tile of keys is visited; all queries see all keys": (
            "range(0, n, BK)",
            "range(0, BK, BK)",
        ),
    },
)
# Where the loop over tiles of keys ends, of kernels that skip those behind the diagonal.
LOOP_END_MISTAKES = {
    "the last tile of queries reaches beyond n, and so does the loop: let it end at "
    "tl.minimum(…, n)": (
        "tl.minimum((tl.program_id(0) + 1) * BQ, n)",
        "(tl.program_id(0) + 1) * BQ",
    ),
    "the last tile is left out if a single key is in it; `range` excludes its end, so that is "
    "(i + 1) * BQ, or n": (
        "tl.minimum((tl.program_id(0) + 1) * BQ, n)",
        "tl.minimum((tl.program_id(0) + 1) * BQ - 1, n - 1)",
    ),
    "the loop ends at (i + 1) * BK; program i has queries up to (i + 1) * BQ": (
        "(tl.program_id(0) + 1) * BQ, n",
        "(tl.program_id(0) + 1) * BK, n",
    ),
}
CAUSAL_TASK = KernelTask(solutions.causal_forward, ("out", "lse"), "k")
CAUSAL = kernel_exercise(
    causal_attention,
    CAUSAL_TASK,
    draw_heads,
    {
        "the result is right, but tiles behind the diagonal are loaded too: let the loop end with "
        "the last query of the tile": ("range(0, end, BK)", "range(0, n, BK)"),
        "there is no mask": ("key[None, :] <= query[:, None]", "key[None, :] < n"),
        "a query does not see its own key; key j is visible if j ≤ i": (
            "key[None, :] <= query",
            "key[None, :] < query",
        ),
        "the mask is turned around: it hides earlier keys": (
            "key[None, :] <= query",
            "key[None, :] >= query",
        ),
        "the mask is turned around: it hides earlier keys, and those beyond the last": (
            "key[None, :] <= query[:, None]",
            "(key[None, :] >= query[:, None]) & (key[None, :] < n)",
        ),
        "`a <= b & c < d` is read as `a <= (b & c) < d`; put each comparison into parentheses": (
            "key[None, :] <= query[:, None]",
            "key[None, :] <= query[:, None] & key[None, :] < n",
        ),
        "`a <= b & (c < d)` is read as `a <= (b & (c < d))`; put each comparison into "
        "parentheses": (
            "key[None, :] <= query[:, None]",
            "key[None, :] <= query[:, None] & (key[None, :] < n)",
        ),
        "the mask counts the keys of each tile from 0; key j is number start + j": (
            "key[None, :] <= query",
            "tl.arange(0, BK)[None, :] <= query",
        ),
        "the mask compares keys with rows that count those of other heads, too": (
            "key[None, :] <= query[:, None]",
            "key[None, :] <= head + query[:, None]",
        ),
        "the maximum is taken over hidden scores, too; hide them before": (
            HIDE.format("key[None, :] <= query[:, None]") + GROW,
            GROW + HIDE.format("key[None, :] <= query[:, None]"),
        ),
        **LOOP_END_MISTAKES,
        "masked scores become 0, and exp(0) is 1; use -inf": (
            'scores, float("-inf"))',
            "scores, 0.0)",
        ),
        "the loop ends before the diagonal; it must go on to the tile's last query": (
            "(tl.program_id(0) + 1) * BQ, n",
            "tl.program_id(0) * BQ, n",
        ),
        "the loop ends one tile of keys behind the tile's first query, but tiles of queries may "
        "be longer than those of keys": (
            "(tl.program_id(0) + 1) * BQ, n",
            "tl.program_id(0) * BQ + BK, n",
        ),
    },
)


def draw_for_backward(generator: random.Random, size: int) -> tuple[Any, ...]:
    """q, k, v, dO, lse and delta, as the backward kernels get them, and a Tiling."""
    q, k, v, tiling = draw_heads(generator, size)
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    # so large that weights are 0 and 1, gradients would be 0
    q = q.clamp(-3, 3)
    grad_out = torch.randn(q.shape, generator=seeded)
    out, lse = attention_and_lse(q, k, v, is_causal=True)
    return q, k, v, grad_out, lse, (grad_out * out).sum(-1), tiling


def gradients(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """dQ, dK and dV by autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.autograd.grad(out, (q, k, v), grad_out)


def gradient_of_queries(q, k, v, grad_out, lse, delta, tiling) -> Tensor:
    return gradients(q, k, v, grad_out)[0]


def gradients_of_keys(q, k, v, grad_out, lse, delta, tiling) -> Tensor:
    return side_by_side(*gradients(q, k, v, grad_out)[1:])


# Where a backward kernel loads them, with a head's offset.
LOADED = (
    "lse = tl.load(lse_ptr + {0}query, mask=query < n, other=0.0)\n"
    "    delta = tl.load(delta_ptr + {0}query"
)
HEAD_MISTAKES = {
    "all programs load lse of the first head; a head has n of them": (
        "lse_ptr + head + query",
        "lse_ptr + query",
    ),
    "all programs load delta of the first head; a head has n of them": (
        "delta_ptr + head + query",
        "delta_ptr + query",
    ),
}
UNMASKED_MISTAKES = {
    f"{name} is loaded without a mask; queries beyond the last need mask=query < n, other=0.0": (
        f"{name}_ptr + head + query, mask=query < n, other=0.0",
        f"{name}_ptr + head + query",
    )
    for name in ("lse", "delta")
}
QUERIES_TASK = KernelTask(solutions.backward_queries, ("grad_q",), "k")
BACKWARD_QUERIES = kernel_exercise(
    gradient_of_queries,
    QUERIES_TASK,
    draw_for_backward,
    {
        **SIZE_MISTAKES,
        "delta is missing: dS is P ∘ (dP - delta)": (" - delta[:, None]", ""),
        "lse is not subtracted: P is exp(score - lse)": (" - lse[:, None]", ""),
        "there is no mask": ("key[None, :] <= query[:, None]", "key[None, :] < n"),
        "a query does not see its own key": ("key[None, :] <= query", "key[None, :] < query"),
        "tiles behind the diagonal are loaded too": ("range(0, end, BK)", "range(0, n, BK)"),
        **LOOP_END_MISTAKES,
        "delta is summed over the keys of this tile; the one that is loaded covers the whole row": (
            "grad_p - delta[:, None]",
            "grad_p - tl.sum(p * grad_p, 1)[:, None]",
        ),
        "all programs load lse and delta of the first head; a head has n of them": (
            LOADED.format("head + "),
            LOADED.format(""),
        ),
        **HEAD_MISTAKES,
        **UNMASKED_MISTAKES,
        "hidden scores are 0, and so their weights are not; mask P, with 0": (
            "p = tl.exp(scores - lse[:, None])\n"
            "        p = tl.where(key[None, :] <= query[:, None], p, 0.0)",
            "scores = tl.where(key[None, :] <= query[:, None], scores, 0.0)\n"
            "        p = tl.exp(scores - lse[:, None])",
        ),
        "the softmax runs over this tile alone; P is exp(score - lse), where lse covers the whole "
        "row": (
            "p = tl.exp(scores - lse[:, None])\n"
            "        p = tl.where(key[None, :] <= query[:, None], p, 0.0)",
            'scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))\n'
            "        p = tl.exp(scores - tl.max(scores, 1)[:, None])\n"
            "        p = p / tl.sum(p, 1)[:, None]",
        ),
        "keys or values beyond the last are loaded without other=0.0; lanes that are off hold "
        "anything, also NaN, and 0 · NaN is NaN": (
            "v_ptr + k_rows, mask=key[:, None] < n, other=0.0",
            "v_ptr + k_rows, mask=key[:, None] < n",
        ),
        "the scores are not scaled": (") * scale  # (BQ, BK)", ")  # (BQ, BK)"),
        "dQ is not scaled: S is scale · Q Kᵀ": ("grad_q * scale", "grad_q"),
        "dQ is scaled twice; the scale comes once in the scores, and once at the end": (
            "grad_q * scale",
            "grad_q * scale * scale",
        ),
        "P multiplies the keys; dQ is dS K": ("grad_scores.to(k.dtype), k,", "p.to(k.dtype), k,"),
        "dP multiplies dO with the keys; it is dO Vᵀ": (
            "tl.dot(grad_out, tl.trans(v)",
            "tl.dot(grad_out, tl.trans(k)",
        ),
        "dS multiplies the values; dQ is dS K": (
            "grad_scores.to(k.dtype), k,",
            "grad_scores.to(k.dtype), v,",
        ),
        "the factor P is missing: dS is P ∘ (dP - delta)": ("p * (grad_p", "(grad_p"),
        "each tile of keys overwrites dQ; add to it": ("grad_q += ", "grad_q = "),
        "all programs work on the first head": ("tl.program_id(1) * n", "0"),
    },
)
KEYS_TASK = KernelTask(solutions.backward_keys, ("grad_k", "grad_v"), "q")
BACKWARD_KEYS = kernel_exercise(
    gradients_of_keys,
    KEYS_TASK,
    draw_for_backward,
    {
        "delta is missing: dS is P ∘ (dP - delta)": (" - delta[None, :]", ""),
        "delta belongs to queries, which are columns here: delta[None, :]": (
            "grad_p - delta[None, :]",
            "grad_p - tl.sum(delta) / BQ",
        ),
        "delta is summed over the keys of this tile; the one that is loaded covers the whole row": (
            "grad_p - delta[None, :]",
            "grad_p - tl.sum(p * grad_p, 0)[None, :]",
        ),
        "lse is not subtracted: P is exp(score - lse)": (" - lse[None, :]", ""),
        "all programs load lse and delta of the first head; a head has n of them": (
            LOADED.replace("    delta", "        delta").format("head + "),
            LOADED.replace("    delta", "        delta").format(""),
        ),
        **HEAD_MISTAKES,
        **UNMASKED_MISTAKES,
        "what belongs to queries beyond the last is loaded without other=0.0; lanes that are off "
        "hold anything, also NaN, and 0 · NaN is NaN": (
            "lse_ptr + head + query, mask=query < n, other=0.0",
            "lse_ptr + head + query, mask=query < n",
        ),
        "delta is loaded without other=0.0; lanes that are off hold anything, also NaN, and "
        "0 · NaN is NaN": (
            "delta_ptr + head + query, mask=query < n, other=0.0",
            "delta_ptr + head + query, mask=query < n",
        ),
        "head_dim is taken to be 64; it is `D`": (
            "    key, channel =",
            "    D = 64\n    key, channel =",
        ),
        "a tile has 64 columns; it has `D`": SIZE_MISTAKES["a tile has 64 columns; it has `D`"],
        "the scale is taken to be 1/8, that of a head_dim of 64; it is `scale`": (
            "    key, channel =",
            "    scale = 0.125\n    key, channel =",
        ),
        "a program keeps BQ keys, counted from i * BQ; it keeps BK, from i * BK": (
            "    key, channel = first +",
            "    BK = BQ\n    key, channel = tl.program_id(0) * BQ +",
        ),
        "a query does not see its own key": ("key[:, None] <= query", "key[:, None] < query"),
        "the loop starts at `first // BQ`, the number of a tile; its first query is that times "
        "BQ": ("range(first // BQ * BQ, n, BQ)", "range(first // BQ, n, BQ)"),
        "the last tile is left out if a single query is in it; `range` excludes its end, so that "
        "is n": (
            "range(first // BQ * BQ, n, BQ)",
            "range(first // BQ * BQ, n - 1, BQ)",
        ),
        "P multiplies the queries; dK is dS Q": (
            "grad_scores.to(q.dtype), q,",
            "p.to(q.dtype), q,",
        ),
        "dK is scaled twice; the scale comes once in the scores, and once at the end": (
            "grad_k * scale",
            "grad_k * scale * scale",
        ),
        "a last tile of fewer queries is left out": (
            "range(first // BQ * BQ, n, BQ)",
            "range(first // BQ * BQ, n // BQ * BQ, BQ)",
        ),
        "the loop starts at i * BQ; the keys of program i start at i * BK": (
            "range(first // BQ * BQ, n, BQ)",
            "range(tl.program_id(0) * BQ, n, BQ)",
        ),
        "the loop starts with the next full tile of queries, but those of the tile before may see "
        "these keys, too: round down": (
            "range(first // BQ * BQ, n, BQ)",
            "range(tl.cdiv(first, BQ) * BQ, n, BQ)",
        ),
        "the keys of program i are counted from i * BQ; they start at i * BK": (
            "first = tl.program_id(0) * BK",
            "first = tl.program_id(0) * BQ",
        ),
        "dK and dV are stored in each other's place": (
            "grad_k_ptr + k_rows, grad_k * scale, mask=key[:, None] < n)\n"
            "    tl.store(grad_v_ptr + k_rows, grad_v,",
            "grad_k_ptr + k_rows, grad_v, mask=key[:, None] < n)\n"
            "    tl.store(grad_v_ptr + k_rows, grad_k * scale,",
        ),
        "dV comes from dS; it is P dO": (
            "p.to(q.dtype), grad_out,",
            '(p * (tl.dot(v, tl.trans(grad_out), input_precision="ieee") - delta[None, :]))'
            ".to(q.dtype), grad_out,",
        ),
        "there is no mask": ("key[:, None] <= query[None, :]", "key[:, None] >= 0"),
        "the mask is that of (queries, keys); these scores are (keys, queries)": (
            "key[:, None] <= query[None, :]",
            "key[:, None] >= query[None, :]",
        ),
        # the same in a loop that starts with the first key's own number
        "there is no mask: not all queries of the first tile see all of these keys": (
            "first // BQ * BQ",
            "first",
            "key[:, None] <= query[None, :]",
            "key[:, None] >= 0",
        ),
        "the mask is turned around: these scores are (keys, queries)": (
            "first // BQ * BQ",
            "first",
            "key[:, None] <= query[None, :]",
            "key[:, None] >= query[None, :]",
        ),
        "tiles of queries before the diagonal are loaded too; none of them sees these keys": (
            "range(first // BQ * BQ, n, BQ)",
            "range(0, n, BQ)",
        ),
        "the loop starts behind the queries that see only a part of these keys": (
            "range(first // BQ * BQ, n, BQ)",
            "range((first + BQ) // BQ * BQ, n, BQ)",
        ),
        "the scores are not scaled": (") * scale  # (BK, BQ)", ")  # (BK, BQ)"),
        "dK is not scaled: S is scale · Q Kᵀ": ("grad_k * scale", "grad_k"),
        "dV is scaled; only S, and so dQ and dK, have the scale": (
            "k_rows, grad_v,",
            "k_rows, grad_v * scale,",
        ),
        "dP multiplies dO with the keys; it is V dOᵀ": (
            "tl.dot(v, tl.trans(grad_out)",
            "tl.dot(k, tl.trans(grad_out)",
        ),
        "dS multiplies dO; dK is dS Q": (
            "grad_scores.to(q.dtype), q,",
            "grad_scores.to(q.dtype), grad_out,",
        ),
        "dV multiplies the queries; it is P dO": (
            "p.to(q.dtype), grad_out,",
            "p.to(q.dtype), q,",
        ),
        "each tile of queries overwrites dV; add to it": ("grad_v += ", "grad_v = "),
        "each tile of queries overwrites dK; add to it": ("grad_k += ", "grad_k = "),
    },
)


def _draw_saved(generator: random.Random, size: int) -> tuple:
    """q, k, v, out and lse, as a forward pass saves them, and dO, which is not contiguous."""
    q, k, v, grad_out, lse, _, _ = draw_for_backward(generator, size)
    out, _ = attention_and_lse(q, k, v, is_causal=True)
    return q, k, v, out, lse, grad_out.transpose(0, 1).contiguous().transpose(0, 1)


def saved_gradients(q, k, v, out, lse, grad_out) -> Tensor:
    return side_by_side(*gradients(q, k, v, grad_out))


def launching(function: Callable) -> Callable[..., Tensor]:
    """`function` of tensors and the two backward kernels, interpreted; on a GPU compiled, too.

    Raises:
        ValueError: not two kernels are launched, or one has no programs, or the result is not what
            they stored.
    """
    import triton

    @functools.wraps(function)
    def run(*tensors: Tensor) -> Tensor:
        kernels = [triton.jit(task.solution) for task in (QUERIES_TASK, KEYS_TASK)]
        with watched() as runs:
            found = function(*tensors, *kernels)
        for launch in runs:
            check_run(launch)
        if len(runs) != 2:
            raise ValueError(f"each of the two kernels must be launched once, got {len(runs)}")
        stored = [run.tensors[access.tensor] for run in runs for access in run.of("store")]
        for gradient in found if isinstance(found, (list, tuple)) else ():
            if not any(memory.still_holds(gradient) for memory in stored):
                raise ValueError("the gradients must be what the kernels stored, unchanged")
        if torch.cuda.is_available():
            found = function(*(x.cuda() for x in tensors), *kernels)
        return side_by_side(*found)

    return run


BACKWARD_LAUNCHES = {
    "delta is missing its sum over the channels of a row, dim=-1": (".sum(-1)", ".sum(1)"),
    "delta is made of the output alone; it is the sum of each row of dO ∘ O": (
        "(grad_out * out)",
        "(out * out)",
    ),
    "the gradient of the output may have any strides, but the kernels count on rows that follow "
    "each other: pass grad_out.contiguous()": ("grad_out.contiguous()", "grad_out"),
    "lse and delta are passed in each other's place": ("lse, delta)", "delta, lse)"),
    "the gradient of the output and the output are mixed up: the kernels take dO": (
        "grad_out.contiguous()",
        "out",
    ),
    "the gradients are not in the order of q, k and v": (
        "return grad_q, grad_k, grad_v",
        "return grad_k, grad_v, grad_q",
    ),
    "dK and dV are swapped, in the launch or in what is returned": (
        "grad_k, grad_v, n",
        "grad_v, grad_k, n",
    ),
    "the scale is the root of D; it is 1 over that": ("D**-0.5", "D**0.5"),
    "the axes of the grid are exchanged: tiles come first, then heads": (
        "(triton.cdiv(n, 16), heads)",
        "(heads, triton.cdiv(n, 16))",
    ),
}


def _launched_wrongly(edit: tuple[str, str]) -> Callable[..., Tensor]:
    # edited when it is needed
    @functools.wraps(solutions.attention_backward)
    def run(*tensors: Tensor) -> Tensor:
        return launching(edited(solutions.attention_backward, *edit))(*tensors)

    return run


BACKWARD = Exercise(
    saved_gradients,
    _draw_saved,
    {sentence: _launched_wrongly(edit) for sentence, edit in BACKWARD_LAUNCHES.items()},
    "core",
    trials=len(CASES),
    seconds=20,
    describe=KernelTask(solutions.attention_backward, ("grad_q", "grad_k", "grad_v"), "k").describe,
    show=lambda q, *others: "heads={}, n={}, D={}".format(*q.shape),
)
