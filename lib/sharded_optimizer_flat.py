"""Flat shards: parameters behind one another in buffers that are cut into a slice for each rank.

A reduce-scatter gives each rank the mean gradient of its slice, the rank updates the slice, and an
all-gather puts the slices together again: the two halves of a ring all-reduce, and so its traffic
(Rajbhandari et al. 2020, arXiv:1910.02054, section 7.1).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp_buckets import GradientSync, fill_buckets
from lib.profiling import annotate
from lib.sharded_optimizer_bucket import FlatBucket
from lib.sharded_optimizer_parts import Shard


class FlatSlices(GradientSync):
    """The strategy of flat shards: a slice of every bucket for each rank.

    Args:
        reduces_gradients: whether gradients are this rank's own, to be averaged here. They move
            into the shards then, and the parameters' `.grad` becomes None.
        overlap: whether a bucket's reduce-scatter starts in backward, as soon as it is full. All
            ranks start them in one order: that in which they became full on rank 0 in the first
            step, which overlaps nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        master_weights: bool,
        reduces_gradients: bool,
        bucket_cap_mb: float,
        overlap: bool,
    ) -> None:
        self.group, self.master_weights = group, master_weights
        self.reduces_gradients, self.overlap = reduces_gradients, overlap
        self.cap_bytes = bucket_cap_mb * 2**20
        self.buckets: list[FlatBucket] = []
        self.shards: list[Shard] = []
        self.bucket_of: dict[int, FlatBucket] = {}
        # in which buckets are sent; None until all ranks know
        self.order: list[FlatBucket] | None = None
        # numbers of buckets that became full, in that order
        self.filled: list[int] = []
        self.num_started = 0
        self.is_reduced = False
        self.waits_later: set[int] = set()
        # whether forward passes start the gathering too, and whether it is theirs to start
        self.starts_later, self.is_stale = False, False

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """Move `params`, numbered from `first`, into buckets; return this rank's shards."""
        self._finish_begun()
        numbers = {id(param): first + index for index, param in enumerate(params)}
        added = []
        for kind in (True, False):
            # gradients arrive in about the reverse order
            chosen = [param for param in reversed(params) if param.requires_grad is kind]
            for filled in fill_buckets(chosen, cap_bytes=self.cap_bytes):
                bucket = FlatBucket(filled.params, self.group)
                added += bucket.make_shards(numbers, master_weights=self.master_weights)
                self._hook(bucket, len(self.buckets))
                self.buckets.append(bucket)
        self.order = None
        added.sort(key=lambda shard: shard.number)
        self.shards += added
        return added

    def collect(self) -> None:
        """Let every shard have its gradient: of the mean where gradients are this rank's own."""
        for bucket in self.buckets:
            bucket.check_places()
        if not self.reduces_gradients:
            for shard in self.shards:
                shard.grad = shard.grad_in(shard.param.grad)
        elif not self.is_reduced:
            with annotate("reduce-scatter"):
                self.reduce()
        elif any(param.grad is not None for bucket in self.buckets for param in bucket.params):
            raise RuntimeError(
                "a backward pass between the gradients' norm and the step; right is: all backward "
                "passes first"
            )

    def reduce(self) -> None:
        """Average what came since the last call, and add it to the gradients of the shards."""
        self._agree_on_order()
        while self.num_started < len(self.order):
            self._start_next()
        trained = [bucket for bucket in self.order if bucket.reduction is not None]
        if trained:
            unused = self._unused(trained)
            for bucket in trained:
                bucket.finish_reduction(unused)
        for bucket in self.buckets:
            trained = (param for param in bucket.params if param.requires_grad)
            bucket.were_trained = {id(param) for param in trained}
        self.num_started, self.is_reduced = 0, True
        self.filled.clear()

    def clear(self, set_to_none: bool) -> None:
        """Forget the gradients; first ends what a backward pass began that no step followed."""
        self._finish_begun()
        self.is_reduced = False
        if set_to_none:
            for bucket in self.buckets:
                bucket.has_means = False
        for shard in self.shards:
            if set_to_none or not self.reduces_gradients:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()

    def share(self) -> None:
        """Give all ranks every slice; those that a forward pass will ask for are left under way."""
        self.is_reduced = False
        self.is_stale = True
        if not self.starts_later:
            self._gather()

    def wait_for_parameters(self, params: Iterable[Tensor] | None = None) -> None:
        """Wait until `params`, all by default, are what the last step made them."""
        self._wait_for(self.buckets if params is None else self._buckets_of(params))

    def wait_in_forward_of(self, modules: Iterable[nn.Module], *, starts_there: bool) -> None:
        """Wait for the modules' parameters no longer in the step but before their forward."""
        self.starts_later = starts_there
        covered: set[int] = set()
        # through a weak reference, so that modules can outlive the optimizer
        this = weakref.ref(self)
        for module in modules:
            covered |= {id(param) for param in module.parameters()}
            buckets = self._buckets_of(module.parameters())
            module.register_forward_pre_hook(functools.partial(_before_forward, this, buckets))
        for bucket in self.buckets:
            if all(id(param) in covered for param in bucket.params):
                self.waits_later.add(id(bucket))

    def _gather(self) -> None:
        order = self.order or self.buckets
        self.is_stale = False
        # the first to be needed are the last whose gradients came
        with annotate("all-gather"):
            for bucket in reversed(order):
                if bucket.is_trained:
                    bucket.start_gathering()
            for bucket in order:
                if id(bucket) not in self.waits_later:
                    bucket.finish_gathering()

    def _wait_for(self, buckets: list[FlatBucket]) -> None:
        if self.is_stale:
            self._gather()
        for bucket in buckets:
            bucket.finish_gathering()

    def _finish_begun(self) -> None:
        """End what a backward pass began, in the order in which it did."""
        if any(bucket.arrived for bucket in self.buckets):
            self.reduce()
            self.is_reduced = False

    def _buckets_of(self, params: Iterable[Tensor]) -> list[FlatBucket]:
        found = (self.bucket_of.get(id(param)) for param in params)
        return list(dict.fromkeys(bucket for bucket in found if bucket is not None))

    def _hook(self, bucket: FlatBucket, number: int) -> None:
        # through a weak reference, so that parameters can outlive the optimizer
        this = weakref.ref(self)
        for param in bucket.params:
            self.bucket_of[id(param)] = bucket
            if self.overlap and param.requires_grad:
                bucket.num_expected += 1
                hook = functools.partial(_on_gradient, this, number)
                param.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, number: int, param: Tensor) -> None:
        if not self.is_syncing:
            return
        bucket = self.buckets[number]
        if id(param) in bucket.arrived or self.is_reduced:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} grew again after it "
                "was given to be averaged; right is: one backward pass before the step, and those "
                "before it in no_sync()"
            )
        bucket.arrived.add(id(param))
        if bucket.is_full:
            self.filled.append(number)
            if self.order is not None:
                with torch.no_grad():
                    while self.num_started < len(self.order) and self._next_is_ready():
                        self._start_next()

    def _next_is_ready(self) -> bool:
        bucket = self.order[self.num_started]
        return bucket.is_full or not bucket.is_trained

    def _start_next(self) -> None:
        # two at a time are under way; the memory of those before is for the gradients to come
        if self.num_started >= 2:
            self.order[self.num_started - 2].free_sent()
        bucket = self.order[self.num_started]
        self.num_started += 1
        if bucket.is_trained:
            bucket.start_reduction()

    def _agree_on_order(self) -> None:
        """Send buckets in the order in which they became full on rank 0."""
        if self.order is not None:
            return
        order = [*self.filled, *(n for n in range(len(self.buckets)) if n not in self.filled)]
        if self.overlap and self.buckets:
            first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            device = self.buckets[0].flat.device
            numbers = torch.tensor(order, device=device)
            dist.broadcast(numbers, first, group=self.group)
            order = numbers.tolist()
        self.order = [self.buckets[number] for number in order]

    def _unused(self, buckets: list[FlatBucket]) -> set[int]:
        """Ids of the parameters without a gradient on any rank.

        A rank waits for its device to know, but only where a gradient is missing.
        """
        params = [param for bucket in buckets for param in bucket.params]
        absent = {id(param) for bucket in buckets for param in bucket.absent}
        # one that was frozen before the last reduction has none anywhere; another rank may have
        # used one that was frozen since
        known = {number for bucket in buckets for number in bucket.were_trained}
        frozen = {
            id(param) for param in params if id(param) in absent - known and not param.requires_grad
        }
        asked = [n for n, param in enumerate(params) if id(param) in absent - frozen]
        presence = torch.ones(len(params), device=buckets[0].flat.device)
        if asked:
            presence[asked] = 0
        dist.all_reduce(presence, group=self.group)
        counts = presence[asked].tolist() if asked else []
        return frozen | {id(params[n]) for n, count in zip(asked, counts) if count == 0}


def _on_gradient(slices: Callable[[], FlatSlices | None], number: int, param: Tensor) -> None:
    this = slices()
    if this is not None:
        this._on_gradient(number, param)


# compiled blocks must not make it a part of themselves
@torch.compiler.disable
def _before_forward(
    slices: Callable[[], FlatSlices | None], buckets: list[FlatBucket], module: nn.Module, args: Any
) -> None:
    this = slices()
    if this is not None:
        this._wait_for(buckets)
