"""Activation checkpointing: keep less of the forward pass, and compute it again in backward.

A block keeps its input and drops what is between its operations (Chen et al. 2016,
arXiv:1604.06174, section 3); backward runs the block once more before it needs them. That costs up
to one more forward pass, a third of a step, and leaves the activations of one block at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lib.core.settings import require

Kept = Literal["input", "attention", "matmuls"]
# Operations whose outputs are kept, beside a block's input.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "workbook::flash_attention",
    "workbook::flash_attention_torch",
    "workbook::flash_attention_cuda",
    "workbook::rotated_attention",
}
OUTPUTS_KEPT: dict[str, set[str]] = {
    "input": set(),
    "attention": ATTENTION,
    "matmuls": ATTENTION | {"aten::mm", "aten::addmm", "aten::bmm"},
}


def checkpoint_activations(*, every: int = 1, keep: Kept = "input") -> Callable[..., Any]:
    """Return a function that runs block `index` of a model: `run(index, block, *arguments)`.

    For example `model.around_block = checkpoint_activations(every=2)`.

    Args:
        every: checkpoint each n-th block: 1 for all, 2 for every other one.
        keep: of a checkpointed block: its `input` alone; or also the output of `attention`, which
            takes longest to compute again where sequences are long; or also the outputs of all
            `matmuls`. Attention counts where it is one operation: `sdpa` and the Triton kernels.

    Raises:
        ValueError: `every` is below 1, or `keep` is unknown.
    """
    require(every >= 1, f"every must be at least 1, got {every}")
    known = ", ".join(get_args(Kept))
    require(keep in get_args(Kept), f"keep must be one of {known}, got {keep!r}")
    options: dict[str, Any] = {"use_reentrant": False}
    if OUTPUTS_KEPT[keep]:
        policy = functools.partial(_policy, OUTPUTS_KEPT[keep])
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def run(index: int, block: Callable[..., Any], *arguments: Any) -> Any:
        if index % every:
            return block(*arguments)
        return checkpoint(block, *arguments, **options)

    return run


def _policy(kept: set[str], context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    is_kept = operation.name().partition(".")[0] in kept
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
