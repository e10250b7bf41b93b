"""The ladder of notebooks 06 and 07: causal attention from PyTorch to `lib`'s fastest kernel.

Each version changes one thing. Versions 2 to 6 are the kernel that readers write; they run in
Triton's interpreter and on any GPU. Versions 7 to 10 run on Hopper GPUs.
`lib.lessons.flash_attention.ladder_record` measures them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lib.lessons.flash_attention.solutions_triton import causal_forward as causal_exercise
from lib.model.attention import scaled_dot_product_attention

if TYPE_CHECKING:
    from IPython.display import Markdown


def mask_on_diagonal(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    n,
    scale,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Output and log-sum-exp of a tile of queries, which see no later key."""
    head = tl.program_id(1) * n  # rows of the heads before this one
    query, channel = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    q_rows = (head + query[:, None]) * D + channel[None, :]  # (BQ, D)
    q = tl.load(q_ptr + q_rows, mask=query[:, None] < n, other=0.0)
    m, l = tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    out = tl.zeros((BQ, D), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BQ, n)  # no tile behind the diagonal
    plain_end = tl.program_id(0) * BQ // BK * BK  # all queries of the tile see the keys before
    for phase in tl.static_range(2):  # the loop is compiled twice: without a mask, and with one
        for start in range(plain_end if phase else 0, end if phase else plain_end, BK):
            key = start + tl.arange(0, BK)
            k_rows = (head + key[:, None]) * D + channel[None, :]  # (BK, D)
            k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
            v = tl.load(v_ptr + k_rows, mask=key[:, None] < n, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BQ, BK)
            if phase:
                scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
            new_m = tl.maximum(m, tl.max(scores, 1))
            p, shrink = tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)
            l = l * shrink + tl.sum(p, 1)
            out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = new_m
    tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)
    tl.store(lse_ptr + head + query, m + tl.log(l), mask=query < n)


# Old and new text of a kernel whose exponentials are powers of 2: the scale joins their factor
# log2(e), and a multiply-add takes both.
LOOP = "    for phase in tl.static_range(2):"
IN_BASE_2 = (
    LOOP,
    "    scale_log2 = scale * 1.4426950408889634  # times log2(e): exp2 is one instruction\n"
    + LOOP,
    " * scale  # (BQ, BK)",
    "  # (BQ, BK)",
    "tl.max(scores, 1))",
    "tl.max(scores, 1) * scale_log2)",
    "tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)",
    "tl.exp2(scores * scale_log2 - new_m[:, None]), tl.exp2(m - new_m)",
    "m + tl.log(l)",
    "m * 0.6931471805599453 + tl.log(l)",
)


def edited_kernel(name: str, kernel: Callable, *texts: str) -> Callable:
    """`kernel` as `name`, with text of its source replaced; `texts` are old, new, and so on."""
    source = inspect.getsource(kernel)
    # without what is above it, as `@exercise` is
    source = source[source.index("def ") :].replace(f"def {kernel.__name__}(", f"def {name}(")
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if source.count(old) != 1:
            raise ValueError(f"{old!r} must occur once, found {source.count(old)} times")
        source = source.replace(old, new)
    # Triton reads the source of what it compiles
    file, names = f"<{name}>", dict(kernel.__globals__)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names[name]


causal_forward = causal_exercise.solve
every_tile = edited_kernel("every_tile", causal_forward, "range(0, end, BK)", "range(0, n, BK)")
base_2 = edited_kernel("base_2", mask_on_diagonal, *IN_BASE_2)


@dataclass(frozen=True)
class Rung:
    """A version of causal attention."""

    name: str
    step: str
    """Its name in records."""

    kernel: Callable | None = None
    """The Triton kernel, not yet compiled; None for PyTorch and for Hopper kernels."""

    launch: Mapping[str, Any] | None = None
    """Settings of its launch: of a Triton kernel, or of a Hopper schedule; None for PyTorch."""

    @property
    def is_hopper(self) -> bool:
        """Whether it runs on Hopper GPUs only."""
        return self.kernel is None and self.launch is not None

    @property
    def tiles(self) -> str:
        """Its queries × keys, and the warps that work on them."""
        if self.launch is None:
            return ""
        if self.is_hopper:
            return f"{64 * self.launch['warpgroups']} × 128, {4 * self.launch['warpgroups'] + 1}"
        return "{BQ} × {BK}, {num_warps}".format(**self.launch)

    def text(self) -> list[str]:
        """Its code: the body of the kernel, and the settings of its launch."""
        lines = inspect.getsource(self.kernel).splitlines() if self.kernel else []
        start = next((i for i, line in enumerate(lines) if '"""' in line), -1)
        settings = [f"{name}={value}" for name, value in (self.launch or {}).items()]
        return [*lines[start + 1 :], *settings]


# The fastest tiles in artifacts/attention_tiles.jsonl.
PLAIN = {"BQ": 64, "BK": 64, "num_warps": 4, "num_stages": 1}
AHEAD = PLAIN | {"num_stages": 3}
TWO = {"warpgroups": 2, "is_persistent": False, "is_ordered": False}
THREE = TWO | {"warpgroups": 3}
LADDER = (
    Rung("1 · naive: scores in memory", "textbook"),
    Rung("2 · one kernel, in tiles", "every_tile", every_tile, PLAIN),
    Rung("3 · hidden tiles skipped", "skipping", causal_forward, PLAIN),
    Rung("4 · mask on the diagonal only", "diagonal", mask_on_diagonal, PLAIN),
    Rung("5 · powers of 2", "portable", base_2, PLAIN),
    Rung("6 · prefetching", "portable_pipelined", base_2, AHEAD),
    Rung("7 · warp specialization", "hopper", launch=TWO),
    Rung("8 · a third warpgroup", "hopper_warpgroups", launch=THREE),
    Rung("9 · persistent", "hopper_persistent", launch=THREE | {"is_persistent": True}),
    Rung(
        "10 · ping-pong",
        "hopper_ordered",
        launch=THREE | {"is_persistent": True, "is_ordered": True},
    ),
)


def diff(number: int) -> list[str]:
    """The lines that a Triton version, 3 to 6, changes, with `-` and `+` before them.

    Lines that are only indented otherwise are left out, but for one under a new `if`.
    """
    old, new = LADDER[number - 2].text(), LADDER[number - 1].text()
    plain = [[line.strip() for line in lines] for lines in (old, new)]
    changed = []
    for kind, a, b, c, d in difflib.SequenceMatcher(
        a=plain[0], b=plain[1], autojunk=False
    ).get_opcodes():
        if kind != "equal":
            changed += [f"-{line}" for line in old[a:b]] + [f"+{line}" for line in new[c:d]]
        elif changed and changed[-1].lstrip("+ ").startswith("if "):
            # an old line, now under a new `if`
            changed.append(f" {new[c]}")
    return changed


def show_diff(number: int) -> Markdown:
    """Show `diff(number)`."""
    from IPython.display import Markdown

    name = LADDER[number - 1].name
    return Markdown("\n".join([f"**{name}**", "", "```diff", *diff(number), "```"]))


def runs_on(rung: Rung, device: torch.device) -> bool:
    """Whether a version runs on `device`, interpreted if it is a CPU."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper or not rung.is_hopper


def run_rung(rung: Rung, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by this version: (batch, heads, tokens, head_dim), contiguous, 16-bit on a
    Hopper GPU."""
    if rung.is_hopper:
        from lib.flash_attention.hopper import launch as hopper

        schedule = hopper.Schedule(keys=128, stages=3, **(rung.launch or {}))
        return hopper.flash_forward(q, k, v, True, q.shape[3] ** -0.5, schedule=schedule)[0]
    if rung.kernel is None:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return scaled_dot_product_attention(q, k, v, mask=hidden)
    return launch_kernel(rung.kernel, q, k, v, **(rung.launch or {}))[0]


def launch_kernel(
    kernel: Callable, q: Tensor, k: Tensor, v: Tensor, *, BQ: int, BK: int, **settings: int
) -> tuple[Tensor, Any]:
    """The output of a forward kernel, and what its launch returns: the compiled kernel."""
    heads = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    (count, n, head_dim), like = heads[0].shape, heads[0]
    out, lse = torch.empty_like(like), like.new_empty((count, n), dtype=torch.float32)
    sizes = {"D": head_dim, "BQ": BQ, "BK": BK}
    grid, scale = (triton.cdiv(n, BQ), count), head_dim**-0.5
    made = _jitted(kernel)[grid](*heads, out, lse, n, scale, **sizes, **settings)
    return out.view_as(q), made


# Making one takes milliseconds, longer than the kernels themselves.
_jitted = functools.cache(triton.jit)
