"""The open exercise of notebook 06: a reader's kernel against PyTorch's FlashAttention-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lib.core.records import append_record, new_record
from lib.lessons.notebook import workspace
from lib.profiling.measurement import measure_interleaved


def race(
    kernel: Any, *, heads: int, n: int, head_dim: int, BQ: int, BK: int, **launch: int
) -> None:
    """Time a causal forward kernel beside `sdpa`'s FlashAttention-2, and keep the result.

    Without a GPU on which FlashAttention-2 runs (Ampere, 2020, or newer), say so.

    Args:
        kernel: arguments as for `causal_forward` in the notebook.
        launch: settings such as `num_warps` and `num_stages`.

    Raises:
        AssertionError: the kernel's output is wrong.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8:
        print("This race needs a GPU of the Ampere generation (2020) or newer.")
        return
    q, k, v = torch.randn(3, heads, n, head_dim, device="cuda", dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(heads, n, device="cuda")
    grid = (-(-n // BQ), heads)

    def yours() -> None:
        settings = {"D": head_dim, "BQ": BQ, "BK": BK, **launch}
        kernel[grid](q, k, v, out, lse, n, head_dim**-0.5, **settings)

    def flash_attention_2() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    yours()
    torch.testing.assert_close(out, flash_attention_2(), atol=2e-2, rtol=2e-2)
    found = measure_interleaved([yours, flash_attention_2], device="cuda")
    flops = 2 * heads * n * n * head_dim
    speeds = [flops / one.median_ms / 1e9 for one in found]
    figures: dict[str, Any] = dict(zip(("yours_tflops", "flash_attention_2_tflops"), speeds))
    config = {"heads": heads, "n": n, "head_dim": head_dim, "BQ": BQ, "BK": BK, **launch}
    path = workspace() / Path("artifacts/local/attention_race.jsonl")
    append_record(path, new_record(figures, config=config, device="cuda"))
    words = "you win" if speeds[0] > speeds[1] else "FlashAttention-2 wins"
    print(f"yours {speeds[0]:.0f} TFLOP/s, FlashAttention-2 {speeds[1]:.0f}: {words}")
