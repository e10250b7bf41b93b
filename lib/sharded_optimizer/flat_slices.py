"""The fast strategy: parameters are laid out in flat buffers, and each rank updates a slice.

A reduce-scatter gives each rank the mean gradient of its slice, the rank updates the slice, and an
all-gather puts the slices back together. They are the two halves of a ring all-reduce, and so
send as much (Rajbhandari et al. 2020, arXiv:1910.02054, section 7.1).

One bucket on two ranks, a slice being 4 elements:

    parameters   | a a a . | b b b . |      `.` pads each start to 16 bytes, and slices to one size
    gradients    | a a a . | b b b . |      on each rank, packed the same way
                      reduce-scatter
    mean         | rank 0  | rank 1  |      each rank holds its slice
                      update
                      all-gather
    parameters   | a a a . | b b b . |
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.core.settings import require
from lib.ddp.buckets import ALIGNMENT, GradientSync, fill_buckets, has_average
from lib.ddp.process_group import all_gather, global_rank, rank, reduce_scatter, world_size
from lib.ddp.wrappers import wrapper_of
from lib.sharded_optimizer.shards import Shard, ShardingStrategy, check_is_dense, make_shard


class FlatBucket:
    """Parameters of one dtype and device as views of one buffer, which is cut into equal slices.

    Each parameter starts at a multiple of 16 bytes and all slices have one length, so that gaps of
    zeros follow parameters; they belong to no shard.
    """

    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.params, self.group = params, group
        # layout, in elements: parameters, then equal slices
        step = max(1, ALIGNMENT // params[0].element_size())
        self.lengths = [-(-param.numel() // step) * step for param in params]
        self.starts = [0, *itertools.accumulate(self.lengths)]
        ranks = world_size(group)
        self.slice_length = -(-self.starts[-1] // (step * ranks)) * step
        self.begin = rank(group) * self.slice_length

        # zeros behind each parameter, and at the end; None if there are none anywhere
        gaps = [length - param.numel() for param, length in zip(params, self.lengths)]
        gaps[-1] += ranks * self.slice_length - self.starts[-1]
        zeros = params[0].detach().new_zeros(max(gaps))
        self.gaps = [zeros[:gap] for gap in gaps] if any(gaps) else None

        # parameters become views
        self.flat = self._pack([param.detach() for param in params])  # (ranks · slice_length,)
        for param, start in zip(params, self.starts):
            param.data = self.flat[start : start + param.numel()].view(param.shape)
        self.addresses = [param.data_ptr() for param in params]

        # this rank's shards, and where each starts in its slice
        self.shards: list[Shard] = []
        self.shard_starts: list[int] = []
        # ids of parameters whose gradients arrived in backward, and how many are expected
        self.arrived: set[int] = set()
        self.num_expected = 0
        # ids of parameters trained at the last reduction, which all ranks agree on
        self.were_trained = {id(param) for param in params if param.requires_grad}
        # parameters that had no gradient when this rank's were sent
        self.absent: list[nn.Parameter] = []
        # whether shards hold gradients, on any rank
        self.has_means = False
        self.sent: Tensor | None = None
        self.mean: Tensor | None = None
        self.reduction: Any = None
        self.gathering: Any = None

    def make_shards(self, numbers: dict[int, int]) -> list[Shard]:
        """Cut this rank's shards; `numbers` maps a parameter's id to its index."""
        for param, param_start in zip(self.params, self.starts):
            start = max(0, self.begin - param_start)
            stop = min(param.numel(), self.begin + self.slice_length - param_start)
            if start < stop:
                weight = self.flat[param_start + start : param_start + stop]  # (stop - start,)
                self.shards.append(make_shard(param, numbers[id(param)], start, stop, weight))
                self.shard_starts.append(param_start + start - self.begin)
        return self.shards

    @property
    def is_trained(self) -> bool:
        # frozen since the backward pass, a parameter is still updated once more
        used = (param.requires_grad or param.grad is not None for param in self.params)
        return self.has_means or bool(self.were_trained) or any(used)

    @property
    def is_full(self) -> bool:
        # never full if all parameters were frozen when the hooks were registered
        return 0 < self.num_expected == len(self.arrived)

    def check_addresses(self) -> None:
        """Raise a `RuntimeError` if a parameter has left the buffer."""
        for param, address in zip(self.params, self.addresses):
            if param.data_ptr() != address:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} was moved to other memory after "
                    "the optimizer was created, for example by module.to(); move and convert "
                    "modules before"
                )

    def start_reduction(self) -> None:
        """Start the reduce-scatter of the gradients; the parameters no longer hold them."""
        grads, absent = [], []
        for param in self.params:
            grad = param.grad
            if grad is None:
                absent.append(param)
                grad = torch.zeros_like(param)
            check_is_dense(grad)
            grads.append(grad.detach())
        self.absent, self.sent = absent, self._pack(grads)  # (ranks · slice_length,)
        # only the packed copy stays
        del grad, grads
        for param in self.params:
            param.grad = None
        self.mean = self.sent.new_empty(self.slice_length)
        op = dist.ReduceOp.AVG if has_average(self.sent, self.group) else dist.ReduceOp.SUM
        self.reduction = reduce_scatter(
            self.mean, self.sent, op=op, group=self.group, async_op=True
        )

    def free_sent(self) -> None:
        """Wait for the reduce-scatter (on a GPU only its stream waits) and free its input."""
        if self.sent is not None:
            self.reduction.wait()
            self.sent = None

    def finish_reduction(self, unused: set[int]) -> None:
        """Add the means to the shards' gradients, except for parameters that no rank used."""
        self.free_sent()
        if not has_average(self.mean, self.group):
            self.mean.div_(world_size(self.group))
        for shard, start in zip(self.shards, self.shard_starts):
            if id(shard.param) not in unused:
                grad = self.mean[start : start + shard.stop - shard.start].view_as(shard.weight)
                shard.grad = grad if shard.grad is None else shard.grad.add_(grad)
        self.has_means |= not unused or any(id(param) not in unused for param in self.params)
        self.mean = self.reduction = None
        self.arrived.clear()

    def start_gathering(self) -> None:
        """Start the all-gather of the updated slices, in place."""
        mine = self.flat[self.begin : self.begin + self.slice_length]  # (slice_length,)
        self.gathering = all_gather(self.flat, mine, group=self.group, async_op=True)

    def finish_gathering(self) -> None:
        """Wait for the all-gather, if one is pending (on a GPU only its stream waits)."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def _pack(self, tensors: list[Tensor]) -> Tensor:
        """Concatenate tensors and gaps; a single tensor without gaps is returned as it is."""
        if len(tensors) == 1 and not self.gaps and tensors[0].is_contiguous():
            return tensors[0].view(-1)
        pieces = [tensor.reshape(-1) for tensor in tensors]
        if self.gaps:
            pieces = [piece for pair in zip(pieces, self.gaps) for piece in pair]
        return torch.cat(pieces)


class FlatSlices(GradientSync, ShardingStrategy):
    """Cuts every bucket of parameters into a slice per rank.

    Args:
        reduces_gradients: whether gradients are this rank's own, to be averaged here. They move
            into the shards then, and the parameters' `.grad` becomes None.
        bucket_cap_mb: MiB of parameters in a bucket.
        overlap: whether a bucket's reduce-scatter starts in backward, as soon as the bucket is
            full. All ranks start them in one order: that in which they became full on rank 0 in
            the first step, which overlaps nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        reduces_gradients: bool,
        bucket_cap_mb: float,
        overlap: bool,
    ) -> None:
        super().__init__(group)
        self.reduces_gradients, self.overlap = reduces_gradients, overlap
        self.cap_bytes = bucket_cap_mb * 2**20
        self.buckets: list[FlatBucket] = []
        self.bucket_of: dict[int, FlatBucket] = {}
        # gradients: the order in which buckets are sent, None until the ranks have agreed on it;
        # indices of buckets in the order they became full; how many were started
        self.order: list[FlatBucket] | None = None
        self.filled: list[int] = []
        self.num_started = 0
        self.is_reduced = False
        # parameters: buckets that a forward pass waits for instead of the step, whether it also
        # starts the all-gathers, and whether they still have to be started
        self.awaited_in_forward: set[FlatBucket] = set()
        self.starts_in_forward = self.must_gather = False

    def __getstate__(self) -> NoReturn:
        """Refuse `copy.deepcopy` and pickle: copied parameters would not share buffers."""
        raise TypeError(
            "strategy 'flat' of several ranks cannot be copied or pickled; make a ShardedOptimizer "
            "for the copied parameters, and give it this one's state_dict()"
        )

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """Move `params`, numbered from `first`, into buckets; return this rank's shards."""
        self._finish_started()
        self._check_not_wrapped(params)
        numbers = {id(param): first + index for index, param in enumerate(params)}
        added = []
        for is_trained in (True, False):
            # gradients arrive in about the reverse order
            chosen = [param for param in reversed(params) if param.requires_grad is is_trained]
            for filled in fill_buckets(chosen, cap_bytes=self.cap_bytes):
                bucket = FlatBucket(filled.params, self.group)  # type: ignore[arg-type]  # those chosen
                added += bucket.make_shards(numbers)
                self._register_hooks(bucket, len(self.buckets))
                self.buckets.append(bucket)
        self.order = None
        added.sort(key=lambda shard: shard.number)
        self.shards += added
        return added

    # Gradients: reduce-scatter, started in backward with `overlap`

    def _register_hooks(self, bucket: FlatBucket, index: int) -> None:
        # through a weak reference, so that parameters can outlive the optimizer
        this = weakref.ref(self)
        for param in bucket.params:
            self.bucket_of[id(param)] = bucket
            if self.overlap and param.requires_grad:
                bucket.num_expected += 1
                hook = functools.partial(_gradient_hook, this, index)
                param.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, index: int, param: Tensor) -> None:
        """Called in backward when the gradient of `param`, in bucket `index`, is complete."""
        # in no_sync, gradients only add up
        if not self.is_syncing:
            return
        bucket = self.buckets[index]
        if id(param) in bucket.arrived or self.is_reduced:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} grew again after its "
                "reduce-scatter had started; run one backward pass per step, and those before it "
                "in no_sync()"
            )
        # once the bucket is full, start all that may start, in the order of all ranks
        bucket.arrived.add(id(param))
        if bucket.is_full:
            self.filled.append(index)
            if self.order is not None:
                with torch.no_grad():
                    while self.num_started < len(self.order) and self._next_is_ready():
                        self._start_next()

    def _next_is_ready(self) -> bool:
        bucket = self.order[self.num_started]
        return bucket.is_full or not bucket.is_trained

    def _start_next(self) -> None:
        # at most two are pending: later gradients need the memory of earlier ones
        if self.num_started >= 2:
            self.order[self.num_started - 2].free_sent()
        bucket = self.order[self.num_started]
        self.num_started += 1
        if bucket.is_trained:
            bucket.start_reduction()

    def finish_gradient_synchronization(self) -> None:
        """Give every shard the mean gradient of its elements.

        Once they are averaged, a further call only checks that no gradient came after.

        Raises:
            RuntimeError: a parameter was moved, or a gradient came after.
        """
        for bucket in self.buckets:
            bucket.check_addresses()
        if not self.reduces_gradients:
            # a wrapper has averaged them
            for shard in self.shards:
                shard.grad = shard.slice_of(shard.param.grad)
        elif not self.is_reduced:
            with annotate("reduce-scatter"):
                self._reduce()
        elif any(param.grad is not None for bucket in self.buckets for param in bucket.params):
            raise RuntimeError(
                "a backward pass ran after the gradients were averaged; run all backward passes "
                "first"
            )

    def _reduce(self) -> None:
        """Average the gradients since the last call, and add them to those of the shards."""
        # start what backward did not
        self._agree_on_order()
        while self.num_started < len(self.order):
            self._start_next()
        # finish all
        reduced = [bucket for bucket in self.order if bucket.reduction is not None]
        if reduced:
            unused = self._unused(reduced)
            for bucket in reduced:
                bucket.finish_reduction(unused)
        for bucket in self.buckets:
            bucket.were_trained = {id(param) for param in bucket.params if param.requires_grad}
        self.num_started, self.is_reduced = 0, True
        self.filled.clear()

    def _agree_on_order(self) -> None:
        """Send buckets in the order in which they became full on rank 0."""
        if self.order is not None:
            return
        self._check_not_wrapped(param for bucket in self.buckets for param in bucket.params)
        order = [*self.filled, *(n for n in range(len(self.buckets)) if n not in self.filled)]
        if self.overlap and self.buckets:
            indices = torch.tensor(order, device=self.buckets[0].flat.device)
            dist.broadcast(indices, global_rank(0, self.group), group=self.group)
            order = indices.tolist()
        self.order = [self.buckets[index] for index in order]

    def _check_not_wrapped(self, params: Iterable[Tensor]) -> None:
        """Raise a `ValueError` if something else averages the gradients, too."""
        for wrapper in map(wrapper_of, params) if self.reduces_gradients else ():
            name = type(wrapper).__name__
            require(
                wrapper is None,
                "reduces_gradients must be False for the parameters of a wrapper, which averages "
                f"the same gradients, got True with {name}; use the module without it",
            )

    def _unused(self, buckets: list[FlatBucket]) -> set[int]:
        """The ids of parameters without a gradient on any rank.

        The host waits for its device only where a gradient is missing.
        """
        params = [param for bucket in buckets for param in bucket.params]
        absent = {id(param) for bucket in buckets for param in bucket.absent}
        # frozen before the last reduction: absent on every rank. Frozen since: another rank may
        # have used it
        were_trained = {number for bucket in buckets for number in bucket.were_trained}
        frozen = {
            id(param)
            for param in params
            if id(param) in absent - were_trained and not param.requires_grad
        }
        uncertain = [n for n, param in enumerate(params) if id(param) in absent - frozen]
        presence = torch.ones(len(params), device=buckets[0].flat.device)  # (parameters,)
        if uncertain:
            presence[uncertain] = 0
        dist.all_reduce(presence, group=self.group)
        counts = presence[uncertain].tolist() if uncertain else []
        return frozen | {id(params[n]) for n, count in zip(uncertain, counts) if count == 0}

    def _finish_started(self) -> None:
        """Finish what a backward pass started, in the same order on all ranks."""
        if any(bucket.arrived for bucket in self.buckets):
            self._reduce()
            self.is_reduced = False

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drop the shards' gradients, or set them to zero."""
        self._finish_started()
        self.is_reduced = False
        if set_to_none:
            for bucket in self.buckets:
                bucket.has_means = False
        for shard in self.shards:
            if set_to_none or not self.reduces_gradients:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()

    # Parameters: all-gather, awaited in the step or just before a forward pass needs them

    def gather_parameters(self) -> None:
        """All-gather every slice; those that a forward pass waits for stay pending."""
        self.is_reduced = False
        self.must_gather = True
        if not self.starts_in_forward:
            self._gather()

    def _gather(self) -> None:
        order = self.order or self.buckets
        self.must_gather = False
        # forward needs first what backward finished last
        with annotate("all-gather"):
            for bucket in reversed(order):
                if bucket.is_trained:
                    bucket.start_gathering()
            for bucket in order:
                if bucket not in self.awaited_in_forward:
                    bucket.finish_gathering()

    def wait_for_parameters(self, params: Iterable[Tensor] | None = None) -> None:
        """Wait until `params` (default: all) are complete."""
        self._wait_for(self.buckets if params is None else self._buckets_of(params))

    def _wait_for(self, buckets: list[FlatBucket]) -> None:
        if self.must_gather:
            self._gather()
        for bucket in buckets:
            bucket.finish_gathering()

    def overlap_gather_with_forward(
        self, parts: Sequence[nn.Module], *, in_graph: bool
    ) -> Callable[[nn.Module], None]:
        """See `ShardedOptimizer.overlap_gather_with_forward`."""
        self.starts_in_forward = in_graph
        covered = {id(param) for part in parts for param in part.parameters()}
        self.awaited_in_forward |= {
            bucket for bucket in self.buckets if all(id(p) in covered for p in bucket.params)
        }
        # through a weak reference, so that the model can outlive the optimizer
        return functools.partial(_before_part, weakref.ref(self))

    def mark_replayed(self) -> None:
        """See `ShardedOptimizer.mark_replayed`."""
        self.must_gather = self.starts_in_forward

    def _buckets_of(self, params: Iterable[Tensor]) -> list[FlatBucket]:
        found = (self.bucket_of.get(id(param)) for param in params)
        return list(dict.fromkeys(bucket for bucket in found if bucket is not None))


def _gradient_hook(slices: Callable[[], FlatSlices | None], index: int, param: Tensor) -> None:
    this = slices()
    if this is not None:
        this._on_gradient(index, param)


# compiled blocks must not trace into it
@torch.compiler.disable
def _before_part(slices: Callable[[], FlatSlices | None], part: nn.Module) -> None:
    this = slices()
    if this is not None:
        this.wait_for_parameters(part.parameters())
