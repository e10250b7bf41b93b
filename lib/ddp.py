"""Data parallelism: every rank holds the model and a part of the batch; gradients are averaged.

Where the loss is a mean and the parts are of one size, the mean of the ranks' gradients is the
gradient of the whole batch, so that the ranks, which start alike, stay alike (Li et al. 2020,
arXiv:2006.15704, section 3). The wrappers differ in when and in what portions they average:

- `NaiveDDP` (`naive`): after backward, one all-reduce for each parameter;
- `FlatDDP` (`flat`): after backward, one all-reduce of everything;
- `OverlappedDDP` (`overlap`): one for each parameter, while backward still computes others;
- `BucketedDDP` (`flashddp`): the same in buckets of many parameters;
- `TorchDDP` (`torch_ddp`): PyTorch's own, the peer.

One step, with gradient accumulation:

    model = wrap("flashddp", module)
    with model.no_sync():
        loss(model(first), ...).backward()
    loss(model(second), ...).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()

**Unused parameters.** A parameter without a gradient on this rank counts as zero here, and gets the
mean like everybody; without a gradient on any rank it has none afterwards, as in one process. A
rank waits for its device to know that, but only where a gradient is missing.

**Compiled modules.** Wrap the compiled module; the hooks are on its parameters. All gradients of
one compiled graph arrive together at its end: for overlap, compile a model block by block.

**CUDA graphs.** NCCL's all-reduces can be recorded with forward, backward and optimizer, from the
second step on (the first agrees on an order) and where no rank misses a gradient. The replay runs
no hook and checks nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lib.ddp_base import DataParallel, Wrapper
from lib.ddp_buckets import Bucket, MeanReduction, fill_buckets, has_average
from lib.distributed import broadcast_module, check_same, world_size
from lib.profiling import annotate


class NaiveDDP(DataParallel):
    """After backward, one all-reduce for each parameter, each waited for before the next."""

    def _synchronize(self) -> None:
        absent = self._fill_in_absent()
        for param in self.params:
            self._reduce([param.grad]).finish()
        presence = self._presence(absent, self.params[0])
        self._reduce([presence]).finish()
        self._drop_unused(absent, presence)


class FlatDDP(DataParallel):
    """After backward, one all-reduce of all gradients, copied behind one another.

    There is one for each dtype. For the moment of the copy, gradients take their memory twice.
    """

    def _synchronize(self) -> None:
        absent = self._fill_in_absent()
        buckets = fill_buckets(self.params)
        presence = self._presence(absent, buckets[-1].params[0])
        reductions = [self._reduce(bucket.tensors()) for bucket in buckets[:-1]]
        reductions.append(self._reduce([*buckets[-1].tensors(), presence]))
        for reduction in reductions:
            reduction.finish()
        self._drop_unused(absent, presence)


class OverlappedDDP(DataParallel):
    """One all-reduce for each parameter, while backward goes on to others.

    All ranks start them in one order: that in which gradients arrived on rank 0 in the first step.
    That step overlaps nothing, so that each step of each run has the same order, and a resumed run
    the same bits. A gradient that is early waits for those before it, so that ranks whose passes
    differ do not mix up tensors.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.buckets: list[Bucket] = []
        # each parameter's bucket, and how many gradients each bucket waits for
        self.bucket_of: list[int] = []
        self.missing: list[int] = []
        self.started: list[MeanReduction] = []

    def _make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        return [Bucket([param]) for param in params]

    def _gradient_arrived(self, index: int) -> None:
        if not self.buckets:
            return
        self.missing[self.bucket_of[index]] -= 1
        while len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            with torch.no_grad():
                self._start_next()

    def _start_next(self, absent: Sequence[int] = ()) -> None:
        """Start the all-reduce of the next bucket; with the last one goes who has gradients."""
        bucket = self.buckets[len(self.started)]
        is_last = bucket is self.buckets[-1]
        presence = self._presence(absent, bucket.params[0]) if is_last else None
        with annotate("all-reduce"):
            self.started.append(self._reduce(bucket.tensors(presence)))

    def _synchronize(self) -> None:
        if not self.buckets:
            self._agree_on_buckets()
        absent = self._fill_in_absent() if len(self.started) < len(self.buckets) else []
        while len(self.started) < len(self.buckets):
            self._start_next(absent)
        for reduction in self.started:
            reduction.finish()
        presence = self.started[-1].tensors[-1][-len(self.params) :]
        self.started.clear()
        self.missing = [len(bucket.params) for bucket in self.buckets]
        self._drop_unused(absent, presence)

    def _agree_on_buckets(self) -> None:
        """Fill the buckets in the order in which rank 0's gradients arrived."""
        last = [index for index in reversed(range(len(self.params))) if index not in self.arrived]
        order = torch.tensor([*self.arrived, *last], device=self.params[0].device)
        first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast(order, first, group=self.group)
        params = [self.params[index] for index in order.tolist()]
        self.buckets = self._make_buckets(params)
        place = {id(param): n for n, bucket in enumerate(self.buckets) for param in bucket.params}
        self.bucket_of = [place[id(param)] for param in self.params]


class BucketedDDP(OverlappedDDP):
    """All-reduces of whole buckets, each started in backward as soon as its gradients are there.

    A few large messages cost less than many small ones, and start before backward ends. Parameters
    fill buckets of at most `bucket_cap_mb` in the order in which their gradients arrive, which is
    about the reverse of their use; the first bucket is small, so that the network has work early.

    NCCL takes all gradients of a bucket in one launch, and they stay where backward put them. Other
    backends take one tensor at a time. For them, or with `packed`, the gradients of a full bucket
    are copied behind one another into one buffer and are views of it from then on. The buffer
    replaces them: beyond the gradients themselves there is one bucket's memory during the copy, and
    a few bytes a parameter, for alignment and for who has a gradient. `zero_grad(set_to_none=True)`
    frees it with them, and the next backward pass makes another, so that the forward pass has the
    memory; with `set_to_none=False` backward adds into the views, and nothing is copied. (The first
    is the cheaper: adding reads and writes more than the copy.)

    Args:
        bucket_cap_mb: MiB (2²⁰ bytes) of gradients in a bucket; a larger parameter has its own.
        packed: None: not with NCCL.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float = 25.0,
        packed: bool | None = None,
        **options: Any,
    ) -> None:
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; right is: above 0")
        super().__init__(module, **options)
        if packed is None:
            packed = not all(has_average(param, self.group) for param in self.params)
        self.bucket_cap_mb, self.packed = bucket_cap_mb, packed
        check_same({"bucket_cap_mb": str(bucket_cap_mb), "packed": str(packed)}, self.group)

    def _make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        return fill_buckets(params, cap_bytes=self.bucket_cap_mb * 2**20, packed=self.packed)


class TorchDDP(Wrapper):
    """PyTorch's `DistributedDataParallel` behind the interface of the others.

    It averages during backward and needs no `finish_gradient_synchronization()`, which does
    nothing. Gradients are views of its buckets.

    Args:
        find_unused_parameters: needed where a backward pass leaves parameters out; costs a walk
            through the graph in each forward pass.

    Raises:
        TypeError: `reduce_dtype` is bfloat16 and the group has no NCCL.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        reduce_dtype: torch.dtype | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        hooks = {
            None: None,
            torch.bfloat16: default_hooks.bf16_compress_hook,
            torch.float16: default_hooks.fp16_compress_hook,
        }
        if reduce_dtype not in hooks:
            raise ValueError(f"reduce_dtype is {reduce_dtype}; right is: None, bfloat16 or float16")
        self.inner = module
        if world_size(group) > 1:
            broadcast_module(module, group)
            # what newer releases call it, of which the older name warns
            names = inspect.signature(DistributedDataParallel).parameters
            sync = {"forward_sync_buffers", "broadcast_buffers"} & names.keys()
            self.inner = DistributedDataParallel(
                module,
                process_group=group,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
                **{max(sync): False},
            )
            if hooks[reduce_dtype]:
                self.inner.register_comm_hook(group, hooks[reduce_dtype])

    @property
    def module(self) -> nn.Module:
        is_wrapped = isinstance(self.inner, DistributedDataParallel)
        return self.inner.module if is_wrapped else self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do after backward."""

    def no_sync(self) -> contextlib.AbstractContextManager:
        """In the block, forward and backward passes only add up gradients on this rank."""
        is_wrapped = isinstance(self.inner, DistributedDataParallel)
        return self.inner.no_sync() if is_wrapped else contextlib.nullcontext()


WRAPPERS = {
    "none": DataParallel,
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlappedDDP,
    "flashddp": BucketedDDP,
    "torch_ddp": TorchDDP,
}


def wrap(
    name: str,
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float = 25.0,
    reduce_dtype: torch.dtype | None = None,
) -> DataParallel | TorchDDP:
    """The module in the data-parallel wrapper called `name`, one of `WRAPPERS`.

    Args:
        group: the ranks that share the work; all by default.
        bucket_cap_mb: MiB of gradients in a bucket of `flashddp` and `torch_ddp`.
        reduce_dtype: what gradients are sent in; their own dtype by default.

    Raises:
        ValueError: an unknown name; `none` in a group of several ranks; modules or settings that
            differ between ranks.
    """
    if name not in WRAPPERS:
        raise ValueError(f"ddp_wrapper is {name!r}; right is: one of {', '.join(WRAPPERS)}")
    if name == "none" and world_size(group) > 1:
        raise ValueError(
            f"ddp_wrapper is 'none', but the group has {world_size(group)} ranks, which would each "
            "train a model of their own; right is: another one"
        )
    has_buckets = name in ("flashddp", "torch_ddp")
    options = {"bucket_cap_mb": bucket_cap_mb} if has_buckets else {}
    return WRAPPERS[name](module, group=group, reduce_dtype=reduce_dtype, **options)
