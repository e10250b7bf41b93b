"""The fast strategy: parameters are laid out in flat buffers, and each rank updates a slice.

A reduce-scatter gives each rank the mean gradient of its slice, the rank updates the slice, and an
all-gather puts the slices back together. These are the two halves of a ring all-reduce, so they
send as many bytes (Rajbhandari et al. 2020, arXiv:1910.02054, section 7.1).

One bucket on two ranks, a slice being 4 elements:

    buffer       | a a a . | b b b . |      the parameters; `.` pads (see `lib/ddp/flat.py`)
    gradients    | a a a . | b b b . |      on each rank, packed the same way
                      reduce-scatter
    mean         | rank 0  | rank 1  |      each rank holds its slice
                      update
                      all-gather
    buffer       | a a a . | b b b . |
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.core.settings import require
from lib.ddp.flat import Bucket, InOrder, fill_buckets, not_dense
from lib.ddp.process_group import all_gather, rank, reduce_scatter, world_size
from lib.ddp.wrapper_base import wrapper_of
from lib.optimizer.adamw import clip_with
from lib.sharded_optimizer.shards import Shard, make_shard, name_of, whole_shard


class FlatBucket(Bucket):
    """Parameters as views of one `buffer`; this rank updates its slice, `mine`."""

    def __init__(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        super().__init__(params, world_size(group))
        # all parameters in one buffer; each becomes a view of it
        self.buffer = self.pack([param.detach() for param in params])  # (ranks · slice_length,)
        for param, view in zip(params, self.views(self.buffer)):
            param.data = view
        self.addresses = [param.data_ptr() for param in params]

        # this rank's slice, and which parameters are in it
        begin = rank(group) * self.slice_length
        self.mine = self.buffer[begin : begin + self.slice_length]  # (slice_length,)
        self.own = list(self.parts(rank(group)))
        self.shards: list[Shard] = []
        # the mean gradient of the slice, once it has arrived
        self.mean: Tensor | None = None


class FlatSlices(InOrder):
    """Cuts every bucket of parameters into a slice per rank. Frozen parameters must stay frozen.

    Args:
        reduces_gradients: whether gradients are this rank's own, and are averaged here. They move
            into the shards then, and the parameters' `.grad` becomes None.
        bucket_cap_mb: MiB of parameters in a bucket.
        overlap: whether a bucket's reduce-scatter starts in backward, as soon as it is full.
    """

    collective = "reduce-scatter"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        reduces_gradients: bool,
        bucket_cap_mb: float,
        overlap: bool,
    ) -> None:
        self.set_up(group)
        self.reduces_gradients, self.overlaps = reduces_gradients, overlap
        self.cap_bytes = bucket_cap_mb * 2**20
        self.buckets: list[FlatBucket] = []
        self.shards: list[Shard] = []
        self.untrained: list[nn.Parameter] = []
        # buckets that a forward pass waits for instead of the step; whether forward passes, which a
        # CUDA graph captures, also start `gather_parameters`, and whether one must still
        self.awaited_in_forward: set[FlatBucket] = set()
        self.starts_in_forward = self.must_gather = False

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """Move `params`, numbered from `first`, into buckets; return this rank's shards."""
        self._check_not_wrapped(params)
        numbers: dict[Tensor, int] = {param: n for n, param in enumerate(params, start=first)}

        # frozen ones have no state, and stay where they are
        frozen = [param for param in params if not param.requires_grad]
        self.untrained += frozen
        added = [whole_shard(param, numbers[param]) for param in frozen if rank(self.group) == 0]

        # trained ones fill buckets in reverse order, about that in which gradients arrive
        trained = [param for param in reversed(params) if param.requires_grad]
        if self.reduces_gradients:
            clip_with(self, "ShardedOptimizer.clip_grad_norm", trained, has_part=False)
        for filled in fill_buckets(trained, cap_bytes=self.cap_bytes):
            bucket = FlatBucket(filled, self.group)
            # what of this rank's slice belongs to which parameter
            for param, start, stop, offset in bucket.own:
                weight = bucket.mine[offset : offset + stop - start]
                bucket.shards.append(make_shard(param, numbers[param], start, stop, weight))  # type: ignore[arg-type]  # those given
            added += bucket.shards
            # hooks on the parameters, with `overlap`
            self.buckets.append(bucket)
            self.bucket_of |= dict.fromkeys(map(id, filled), bucket)
            self.watch([(name_of(param), param) for param in filled], hooks=self.overlaps)

        # the inner optimizer has them in the order of the parameters
        added.sort(key=lambda shard: shard.number)
        self.shards += added
        return added

    # Gradients: reduce-scatter, started in backward with `overlap`

    def make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        """Sort the buckets by their last parameter in `params`."""
        place = {param: index for index, param in enumerate(params)}
        return sorted(self.buckets, key=lambda bucket: max(place[p] for p in bucket.params))

    def send(self, bucket: Any, presence: Tensor | None) -> None:
        """Start the reduce-scatter of a bucket's gradients, which parameters no longer hold."""
        # wait for the last but one: later gradients need the memory of earlier ones
        if self.num_sent >= 2:
            self.order[self.num_sent - 2].receive_mean()
        # pack the gradients, and free them
        flat = bucket.pack([param.grad for param in bucket.params])  # (ranks · slice_length,)
        for param in bucket.params:
            param.grad = None
        # this rank gets the mean of its slice; what is sent lives until then
        bucket.mean = flat.new_empty(bucket.slice_length)
        work = reduce_scatter(bucket.mean, flat, op=bucket.op, group=self.group, async_op=True)
        bucket.works, bucket.sent, bucket.means = [work], [flat], [bucket.mean]
        # which gradients any rank has
        if presence is not None:
            work = dist.all_reduce(presence, bucket.op, group=self.group, async_op=True)
            bucket.works.append(work)
            bucket.means.append(presence)
            self.presence = presence

    def finish_gradient_synchronization(self) -> None:
        """Give every shard the mean gradient of its elements, added to what it has.

        Once they are averaged, a further call only checks that no gradient came after.

        Raises:
            RuntimeError: a parameter was moved, or trained though it was frozen, or a gradient came
                after.
        """
        if self.is_closed:
            for param in self.params:
                if param.grad is not None:
                    raise RuntimeError(
                        "a backward pass ran after the gradients were averaged; run all backward "
                        "passes first"
                    )
            return
        # parameters of the step before, if no forward pass has waited for them since
        if self.awaited_in_forward:
            self.wait_for_parameters()
        if not self.reduces_gradients:
            # a wrapper has averaged them: take this rank's part
            self.check_parameters()
            for shard in self.shards:
                grad = shard.param.grad
                if grad is not None and grad.shape != shard.leaf.shape:
                    if grad.layout != torch.strided:
                        raise not_dense(name_of(shard.param), grad)
                    grad = grad.reshape(-1)[shard.start : shard.stop]  # (stop - start,)
                shard.leaf.grad = grad
            return
        if not self.order:
            self._check_not_wrapped(self.params)
        super().finish_gradient_synchronization()

        # cut each shard's gradient out of the mean of this rank's slice
        unused = {id(param) for param in self.unused}
        for bucket in self.buckets:
            mean, bucket.mean = bucket.mean, None  # (slice_length,)
            for shard, part in zip(bucket.shards, bucket.own):
                if id(shard.param) not in unused:
                    grad = mean[part.offset :][: part.stop - part.start].view_as(shard.leaf)  # type: ignore[index]  # sent
                    has_grad = shard.leaf.grad is not None
                    shard.leaf.grad = shard.leaf.grad.add_(grad) if has_grad else grad
        self.is_closed = True

    def check_parameters(self) -> None:
        """Raise a `RuntimeError` if a parameter has left its buffer, or was unfrozen."""
        for bucket in self.buckets:
            for param, address in zip(bucket.params, bucket.addresses):
                if param.data_ptr() != address:
                    raise RuntimeError(
                        f"{name_of(param)} was moved to other memory after the optimizer was "
                        "created, for example by module.to(); move and convert modules before"
                    )
        for param in self.untrained:
            if param.requires_grad:
                raise RuntimeError(
                    f"{name_of(param)} was frozen when the optimizer was created and is trained "
                    "now; make a new optimizer"
                )

    def _check_not_wrapped(self, params: Iterable[Tensor]) -> None:
        """Raise a `ValueError` if a wrapper averages the gradients, too."""
        for wrapper in map(wrapper_of, params):
            require(
                not (wrapper and self.reduces_gradients),
                "reduces_gradients must be False for the parameters of a wrapper, which averages "
                f"the same gradients, got True with {wrapper}; use the module without it",
            )

    # Parameters: all-gather, awaited in the step or just before a forward pass needs them

    def gather_parameters(self) -> None:
        """All-gather every slice; those that a forward pass waits for stay pending."""
        self.is_closed = self.must_gather = False
        order: list[Any] = self.order or self.buckets  # type: ignore[assignment]
        with annotate("all-gather"):
            # forward needs first what backward finished last
            for bucket in reversed(order):
                own = bucket.mine
                work = all_gather(bucket.buffer, own, group=self.group, async_op=True)
                bucket.gathering = work, own
            for bucket in order:
                if bucket not in self.awaited_in_forward:
                    bucket.wait()

    def wait_for_parameters(self, params: Iterable[Tensor] | None = None) -> None:
        """Wait until `params` (default: all) are complete."""
        if self.must_gather:
            self.gather_parameters()
        # their buckets, whose all-gathers are under way
        found: Any = [self.bucket_of.get(id(param)) for param in params or ()]
        for bucket in self.buckets if params is None else found:
            if bucket is not None and bucket.gathering is not None:
                bucket.wait()

    def overlap_gather_with_forward(
        self, parts: Sequence[nn.Module], *, in_graph: bool
    ) -> Callable[[nn.Module], None]:
        """See `ShardedOptimizer.overlap_gather_with_forward`."""
        self.starts_in_forward = in_graph
        covered = {param for part in parts for param in part.parameters()}
        self.awaited_in_forward |= {
            bucket for bucket in self.buckets if covered.issuperset(bucket.params)
        }
        # through a weak reference, so that the model can outlive the optimizer
        return functools.partial(_before_part, weakref.ref(self))


# compiled blocks must not trace into it
@torch.compiler.disable
def _before_part(slices: Callable[[], FlatSlices | None], part: nn.Module) -> None:
    this = slices()
    if this is not None:
        this.wait_for_parameters(part.parameters())
