"""Data parallelism: every rank holds the model and part of the batch, and gradients are averaged.

If the loss is a mean and the parts have one size, the mean of the ranks' gradients is the gradient
of the whole batch, so ranks that start with equal weights keep them equal (Li et al. 2020,
arXiv:2006.15704, section 3). The wrappers differ in when they average, and in what portions:

- `NaiveDDP` (`naive`): after backward, one all-reduce per parameter;
- `FlatDDP` (`flat`): after backward, one all-reduce of everything;
- `OverlappedDDP` (`overlap`): one per parameter, while backward still computes others;
- `BucketedDDP` (`flashddp`): the same in buckets of many parameters.

`lib/tools/peers/torch_ddp.py` has PyTorch's own, `torch_ddp`, behind the same interface.

One step, with gradient accumulation:

    model = wrap("flashddp", module)
    with model.no_sync():
        loss(model(first), ...).backward()
    loss(model(second), ...).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()

**Unused parameters.** A parameter without a gradient on this rank counts as zero here, and gets the
mean like the others; without a gradient on any rank it has none afterwards, as in one process. To
find out, the host waits for its device, but only where a gradient is missing.

**Compiled modules.** Wrap the compiled module; hooks are on its parameters. All gradients of one
compiled graph arrive together at its end: for overlap, compile a model block by block.

**CUDA graphs.** NCCL's all-reduces can be captured with forward, backward and optimizer, from the
second step on (the first agrees on an order) and if no rank misses a gradient. The replay runs no
hook and checks nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.settings import require
from lib.ddp.flat import (
    Bucket,
    InOrder,
    averaging,
    checked_cap,
    fill_buckets,
    not_finished,
    start_all_reduce,
)
from lib.ddp.process_group import agree, broadcast_module, world_size
from lib.ddp.wrapper_base import Wrapper, check_not_wrapped, inner_module


class DataParallel(InOrder, Wrapper):
    """The base of our wrappers; by itself, the wrapper `none` of a single rank.

    Parameters and buffers start as those of the group's rank 0. Buffers that change in training
    (batch norm's) stay each rank's own. On a single rank there are no hooks and no cost.

    On several ranks, backward raises if a gradient is sparse, or grows after its all-reduce has
    started, and names the parameter. If backward raises on one rank, all ranks must either handle
    it or fail; the next forward pass first finishes what was started, and clears all gradients. A
    rank on which no gradient had arrived cannot know of it, and must fail.

    Args:
        module: on its device, in its dtype, with frozen parameters already frozen.
        group: the ranks that share the work (default: all).

    Raises:
        ValueError: module or settings differ between ranks.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self.set_up(group)
        self.note_parameters(inner_module(module))
        # all start with rank 0's weights
        broadcast_module(module, group, self._facts)
        if self.ranks > 1:
            # tied parameters once
            named = inner_module(module).named_parameters()
            self.watch((name, param) for name, param in named if param.requires_grad)
        # whether the gradients of a bucket become views of one buffer, for a backend that sums
        self.packed = any(averaging(param, group)[1] > 1 for param in self.params)

    def _facts(self) -> dict[str, str]:
        """Check the settings; return what must be the same on all ranks."""
        check_not_wrapped(self.module)
        return {"ddp_wrapper": type(self).__name__}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            RuntimeError: the gradients of the last backward pass were not synchronized.
        """
        # but not where a checkpoint runs the module again in backward
        if self.arrived and torch._C._current_graph_task_id() < 0:
            if not self.is_in_backward:
                raise not_finished("forward")
            # an exception ended that backward pass, perhaps at different points on different
            # ranks; once all have sent everything, they are in step again
            self.finish_gradient_synchronization()
            # means of that pass: some came after the caller had set gradients to zero
            for param in self.params:
                param.grad = None
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict, under its own names, compiled or not.

        Raises:
            RuntimeError: the gradients of the last backward pass were not synchronized.
        """
        # where an error ended either, no step has been taken, and the weights are right
        if self.arrived and not (self.is_in_backward or self.is_finishing):
            raise not_finished("state_dict()")
        return super().state_dict(*args, **kwargs)

    def make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        """One bucket per parameter."""
        return [Bucket([param]) for param in params]

    def send(self, bucket: Bucket, presence: Tensor | None) -> None:
        """Start the all-reduce of a bucket's gradients, packed into one buffer or as they are."""
        # the gradients that arrived
        grads = [param.grad for param in bucket.params]
        if any(grad.dtype != grads[0].dtype for grad in grads):
            raise RuntimeError(
                "a part of the module was cast after it was wrapped; wrap the module again, since "
                "the gradients of a bucket must have one dtype"
            )
        # pack them, with `presence` behind them (`flat` sends it apart); they become views
        if self.packed and len(grads) > 1:
            last = presence if self.overlaps else None
            tensors = [bucket.pack(grads, last)]  # (length + len(last),)
            for param, view in zip(bucket.params, bucket.views(tensors[0])):
                param.grad = view
        # or send them as they are, but contiguous
        else:
            last, tensors = None, [grad.contiguous() for grad in grads]
            for param, grad, sent in zip(bucket.params, grads, tensors):
                if sent is not grad:
                    param.grad = sent
        # the ranks' mean of who has gradients is read in finish_gradient_synchronization
        if presence is not None:
            if last is None:
                tensors.append(presence)
            self.presence = tensors[-1][-len(presence) :]  # (parameters,)
        # don't wait: backward goes on
        bucket.means = tensors
        bucket.works = start_all_reduce(tensors, bucket.op, self.group)


class NaiveDDP(DataParallel):
    """After backward, one all-reduce per parameter, each finished before the next starts."""

    overlaps = False

    def send(self, bucket: Bucket, presence: Tensor | None) -> None:
        """Average a parameter's gradient, and wait for it."""
        super().send(bucket, presence)
        bucket.receive_mean()


class FlatDDP(DataParallel):
    """After backward, one all-reduce of all gradients (per dtype).

    Its hooks send nothing, so the model can be compiled as a whole, and no kernel of NCCL takes
    multiprocessors from backward: between two GPUs over NVLink that may win more than overlap does.

    NCCL takes gradients where backward put them. For other backends they are copied into one
    buffer, and meanwhile take twice their memory.
    """

    overlaps = False

    def make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        """Without a cap: one bucket per dtype."""
        return [Bucket(filled) for filled in fill_buckets(params)]


class OverlappedDDP(DataParallel):
    """One all-reduce per parameter, while backward goes on to others."""


class BucketedDDP(OverlappedDDP):
    """All-reduces of whole buckets, each started in backward as soon as it is complete.

    A few large messages cost less than many small ones, and start before backward ends. Parameters
    fill buckets of at most `bucket_cap_mb` in the order in which their gradients arrive, about the
    reverse of their use; the first bucket is small, so that communication starts early.

    NCCL takes all gradients of a bucket in one launch, and they stay where backward put them. Other
    backends take one tensor at a time. For them the gradients of a complete bucket are copied into
    one buffer and become views of it. Beyond the gradients, that takes one bucket's memory during
    the copy, and a few bytes per parameter for alignment and `presence`. `zero_grad()` frees the
    buffer, and the next backward pass allocates another, so that the forward pass has the memory.

    Args:
        bucket_cap_mb: MiB (2²⁰ bytes) of gradients in a bucket; a larger parameter gets its own.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        # before the ranks compare it
        self.bucket_cap_mb = bucket_cap_mb
        super().__init__(module, group=group)

    def _facts(self) -> dict[str, str]:
        return super()._facts() | {"bucket_cap_mb": checked_cap(self.bucket_cap_mb)}

    def make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        """Fill buckets up to the cap."""
        filled = fill_buckets(params, cap_bytes=self.bucket_cap_mb * 2**20)
        return [Bucket(params) for params in filled]


WRAPPERS = {
    "none": DataParallel,
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlappedDDP,
    "flashddp": BucketedDDP,
}


def wrap(
    wrapper: str | type[Wrapper],
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float = 25.0,
) -> Any:
    """Wrap the module in a data-parallel wrapper: the name of one of `WRAPPERS`, or a class.

    Args:
        group: the ranks that share the work (default: all).
        bucket_cap_mb: MiB of gradients in a bucket, where the wrapper has buckets.

    Raises:
        ValueError: an unknown name; `none` in a group of several ranks; modules or settings that
            differ between ranks.
    """
    agree(lambda: {"ddp_wrapper": _checked_wrapper(wrapper, group).__name__}, group)
    chosen = WRAPPERS[wrapper] if isinstance(wrapper, str) else wrapper
    has_buckets = "bucket_cap_mb" in inspect.signature(chosen).parameters
    options = {"bucket_cap_mb": bucket_cap_mb} if has_buckets else {}
    return chosen(module, group=group, **options)


def _checked_wrapper(
    wrapper: str | type[Wrapper], group: dist.ProcessGroup | None
) -> type[Wrapper]:
    """The class of a wrapper that can average gradients in this group."""
    if isinstance(wrapper, type) and issubclass(wrapper, Wrapper):
        return wrapper
    known = ", ".join(WRAPPERS)
    require(
        isinstance(wrapper, str) and wrapper in WRAPPERS,
        f"ddp_wrapper must be one of {known}, or a class such as TorchDDP of "
        f"lib.tools.peers.torch_ddp, got {wrapper!r}",
    )
    require(
        wrapper != "none" or world_size(group) == 1,
        f"ddp_wrapper must average gradients in a group of {world_size(group)} ranks, got 'none', "
        "with which each rank would train a model of its own",
    )
    return WRAPPERS[wrapper]
