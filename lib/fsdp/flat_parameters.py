"""Parameters of a block in one flat buffer, of which each rank holds a slice between uses.

Matrices of 6 and 10 elements on two ranks, each with a slice of 16, as `lib.ddp.flat.Bucket` lays
them out; `.` aligns starts to 16 bytes:

    whole        | a a a a a a . . b b b b b b b b | b b . . . . . . . . . . . . . . |
    rank 0       | a a a a a a . . b b b b b b b b |
    rank 1                                         | b b . . . . . . . . . . . . . . |

all-gather: slices → whole, in the dtype of computation; reduce-scatter: whole gradients → mean of a
slice. Parameters are views of the gathered buffer, so that nothing is copied after an all-gather.
The buffer is new each time. Autograd keeps none of it from forward to backward (`saved`), but a
weight that the caller has kept is whole and right as long as it is kept.

The module's own parameters become the **shards**, this rank's part of each. They alone hold state:
what is gathered is made from them anew in each pass, and freed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.ddp.flat import Bucket, Part, has_average, not_dense
from lib.ddp.process_group import (
    all_gather,
    mark_sharded,
    rank,
    reduce_scatter,
    world_size,
)
from lib.fsdp.stand_ins import WholeParameter, with_gradients_of

# A parameter's places in the model: tied ones have several.
Places = list[tuple[nn.Module, str]]


class Unsent(NamedTuple):
    """The gradient that a shard shows while whole gradients wait to be averaged."""

    grad: Tensor
    version: int

    is_own: bool
    """Whether it is this rank's part of what waits, not a mean of before."""


class FlatParameters:
    """Parameters of one dtype that are gathered together.

    Args:
        named: parameters by name, of one device; they become this rank's shards.
        places: where each is found in the model.
        compute_dtype: of the gathered parameters, and so of what is sent; None: their own.

    Attributes:
        before_forward: called when a parameter is read that is not gathered.
        before_backward: called when backward needs a parameter, or has a gradient of one.
        flat_at: which flat parameters are gathered where, by their storage; shared by all.
    """

    before_forward: Callable[[], None]
    before_backward: Callable[[], None]

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        places: list[Places],
        group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.flat_at: dict[int, FlatParameters] = {}
        self.names, self.shards = list(named), list(named.values())
        self.places, self.group, self.compute_dtype = places, group, compute_dtype
        self.ranks = world_size(group)

        # layout, for buffers of two bytes an element too; `own` are this rank's parts
        self.bucket = Bucket(self.shards, self.ranks, torch.bfloat16)
        found = {id(part.param): part for part in self.bucket.parts(rank(group))}
        self.own = [found.get(id(param), Part(param, 0, 0, 0)) for param in self.shards]

        # this rank's slice; each parameter becomes its part of it, which the optimizer updates
        whole = [param.detach().reshape(-1) for param in self.shards]
        self._fill_slice([flat[part.start : part.stop] for flat, part in zip(whole, self.own)])
        for param in self.shards:
            mark_sharded(param)
        self._make_whole()

        # whole gradients that were added up without being sent, and those that are being sent
        self.added: Tensor | None = None
        self.unsent: dict[int, Unsent] = {}
        self.reducing: Any = None
        # parameters with a gradient here since the last synchronization, and those whose shard got
        # one from other ranks alone
        self.seen: set[int] = set()
        self.from_others: set[int] = set()

    def own_parts(self, mine: Tensor) -> list[Tensor]:
        """The elements of each parameter in a tensor of this rank's slice."""
        return [mine[part.offset : part.offset + part.stop - part.start] for part in self.own]

    def _fill_slice(self, parts: list[Tensor]) -> None:
        """Put the shards' elements into a new slice, and make the shards views of it."""
        self.mine = parts[0].new_zeros(self.bucket.slice_length)
        for shard, part, own in zip(self.shards, parts, self.own_parts(self.mine)):
            own.copy_(part)
            shard.data = own
        self.addresses = [shard.data_ptr() for shard in self.shards]

    def _make_whole(self) -> None:
        """Make the whole parameters, which have no memory."""
        own = self.mine.dtype
        self.dtype = self.compute_dtype if own.is_floating_point and self.compute_dtype else own
        # gradients are sums: in float32, or in the parameter's dtype if that has more digits
        is_narrow = own.is_floating_point and own.itemsize < 4
        self.grad_dtype = torch.float32 if is_narrow else own
        self.whole = [WholeParameter(self, i) for i in range(len(self.shards))]
        self.trains = [shard.requires_grad for shard in self.shards]
        self.is_trained = any(self.trains)
        self.averages = has_average(self.mine, self.group)
        self._forget()

    def _forget(self) -> None:
        """Let go of gathered memory, which lives on if the caller has kept a weight."""
        self.buffer = self.mine.new_empty(0)
        self.gathered: list[Tensor] = []
        self.gathering: Any = None

    # Shards: what a caller may have done to them between passes

    def follow_shards(self) -> None:
        """Take over changes of the shards: new values, `.to(dtype)`, `param.data = …`, freezing.

        Raises:
            RuntimeError: one does not fit the others anymore.
        """
        is_moved, trains = False, []
        for shard, address in zip(self.shards, self.addresses):
            is_moved |= shard.data_ptr() != address or shard.dtype != self.mine.dtype
            trains.append(shard.requires_grad)
        if is_moved:
            self._follow_data()
        if trains != self.trains:
            self.is_trained, self.trains = any(trains), trains
            with torch._C.DisableTorchFunctionSubclass():
                for whole, is_trained in zip(self.whole, trains):
                    whole.requires_grad_(is_trained)

    def check_places(self) -> None:
        """Raise a `RuntimeError` if a shard was replaced in the module."""
        for shard, places in zip(self.shards, self.places):
            for module, name in places:
                if module._parameters.get(name) is not shard:
                    raise RuntimeError(
                        f"{name} of a {type(module).__name__} was replaced after FSDP had divided "
                        "it; change it by load_state_dict(), or make a new FSDP of a whole module"
                    )

    def _follow_data(self) -> None:
        kinds = {(shard.dtype, shard.device) for shard in self.shards}
        if len(kinds) > 1:
            found = ", ".join(f"{n}: {s.dtype}" for n, s in zip(self.names, self.shards))
            raise RuntimeError(f"parameters of one block must keep one dtype, got {found}")
        for name, shard, part in zip(self.names, self.shards, self.own):
            if shard.shape != (part.stop - part.start,):
                raise RuntimeError(
                    f"{name} must keep the shape of this rank's shard, "
                    f"({part.stop - part.start},), got {tuple(shard.shape)}; whole values are set "
                    "by load_state_dict()"
                )
        before = self.mine
        self._fill_slice([shard.detach() for shard in self.shards])
        if (before.dtype, before.device) != (self.mine.dtype, self.mine.device):
            self._make_whole()

    def copies(self) -> list[Tensor]:
        """Copies of the whole parameters, in their own dtype; on all ranks."""
        flat = self.mine
        if self.ranks > 1:
            flat = self.mine.new_empty(self.bucket.length)
            all_gather(flat, self.mine, group=self.group)
        return [view.clone() for view in self.bucket.views(flat)]

    # Parameters: gathered before forward and backward, dropped after

    def start_gathering(self) -> None:
        """Start the all-gather."""
        self.version = self.shards_version()
        with torch.inference_mode(False):
            # memory of its own each time: what else refers to the last one may go on
            self.buffer = self.mine.new_empty(self.bucket.length, dtype=self.dtype)
        sent = self.mine.to(self.dtype)
        if self.ranks == 1:
            self.buffer.copy_(sent)
            return
        with annotate("all-gather"):
            work = all_gather(self.buffer, sent, group=self.group, async_op=True)
        # what is sent lives until it has arrived
        self.gathering = work, sent

    def shards_version(self) -> int:
        """A number that grows when a shard is changed in place."""
        total = 0
        for shard in self.shards:
            total += shard._version
        return total

    def wait(self) -> None:
        """Wait for the all-gather; on a GPU only its stream waits."""
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def show(self) -> None:
        """Let the model have the gathered parameters, in a pass forward."""
        if not self.gathered:
            views = self.bucket.views(self.buffer.detach())
            self.gathered = with_gradients_of(self.whole, views)
            self.gathered_version = self.buffer._version
            self.flat_at[self.buffer.untyped_storage()._cdata] = self
            self.put(self.gathered)

    def put(self, params: list[Any]) -> None:
        """Put shards, whole or gathered parameters where modules find their own."""
        for param, found in zip(params, self.places):
            for module, name in found:
                module._parameters[name] = param
                if isinstance(module, nn.RNNBase):
                    _hold_anew(module)

    def drop(self) -> bool:
        """Free the gathered parameters; return whether a forward pass had changed them in place."""
        self.wait()
        is_changed = False
        if self.gathered:
            is_changed = self.buffer._version != self.gathered_version
            del self.flat_at[self.buffer.untyped_storage()._cdata]
        self._forget()
        return is_changed

    def saved(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A function that autograd saves instead of a gathered parameter: it gathers that again."""
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return functools.partial(self._gathered_again, self.version, tensor.dtype, *layout)

    def _gathered_again(self, version: int, dtype: torch.dtype, *layout: Any) -> Tensor:
        self.before_backward()
        if self.shards_version() != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: one of {', '.join(self.names)} is not as in the forward pass"
            )
        return self.buffer.new_empty(0, dtype=dtype).set_(self.buffer.untyped_storage(), *layout)

    # Gradients: reduce-scattered when backward has passed the block

    def take_gradients(self, *, send: bool) -> None:
        """Move the whole gradients into one flat tensor, and send it or keep it for later."""
        grads: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for index, whole in enumerate(self.whole):
                if whole.grad is not None:
                    grads[index], whole.grad = whole.grad, None
        if self.unsent:
            self._forget_cleared()
        for index, grad in grads.items():
            if grad.layout != torch.strided:
                raise not_dense(self.names[index], grad)
        self.seen |= grads.keys()
        add = self.added is not None
        if self.added is None and (grads or send):
            # zeros for parameters without a gradient
            make = torch.empty if len(grads) == len(self.whole) else torch.zeros
            self.added = make(self.bucket.length, dtype=self.grad_dtype, device=self.mine.device)
        if grads:
            views = self.bucket.views(self.added)  # type: ignore[arg-type]  # made above
            views = [views[index] for index in grads]
            (torch._foreach_add_ if add else torch._foreach_copy_)(views, list(grads.values()))
        if send:
            self._start_reducing(self.added)
            self.added = None
        elif self.added is not None:
            self._show_unsent(self.added)

    def _show_unsent(self, added: Tensor) -> None:
        """Give shards this rank's own gradient, so that clearing it clears what waits."""
        mine = added.view(self.ranks, -1)[rank(self.group)]  # (slice_length,)
        for index, part in enumerate(self.own_parts(mine)):
            if index not in self.seen:
                continue
            shard, before = self.shards[index], self.unsent.get(index)
            is_own = shard.grad is None or (before is not None and before.is_own)
            if is_own:
                part = part.to(shard.dtype)
                shard.grad = part if part.numel() else part.clone()
            self.unsent[index] = Unsent(shard.grad, shard.grad._version, is_own)

    def _forget_cleared(self) -> None:
        """Drop what waits for parameters whose gradient was cleared or replaced since.

        Raises:
            RuntimeError: one was changed in place.
        """
        changed = [
            index
            for index, (grad, version, _) in self.unsent.items()
            if self.shards[index].grad is not grad or grad._version != version
        ]
        for index in changed:
            grad = self.shards[index].grad
            if grad is not self.unsent[index].grad:
                del self.unsent[index]
                self.seen.discard(index)
            elif grad.any():
                raise RuntimeError(
                    f"the gradient of {self.names[index]} was changed before it was averaged; call "
                    "finish_gradient_synchronization() first"
                )
        views = self.bucket.views(self.added) if changed else []  # type: ignore[arg-type]
        for index in changed:
            views[index].zero_()

    def _start_reducing(self, flat: Any) -> None:
        mean = flat.new_empty(self.bucket.slice_length)
        op = dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM
        work = None
        if self.ranks == 1:
            mean.copy_(flat)
        else:
            with annotate("reduce-scatter"):
                work = reduce_scatter(mean, flat, op=op, group=self.group, async_op=True)
        # what is sent lives until it has arrived
        self.reducing = work, mean, flat

    def finish_reducing(self) -> None:
        """Wait for the reduce-scatter, and add the mean to the gradients of the shards."""
        if self.reducing is None:
            return
        work, mean, _ = self.reducing
        if work is not None:
            work.wait()
            if not self.averages:
                mean.div_(self.ranks)
        self.reducing = None
        for index, (shard, part) in enumerate(zip(self.shards, self.own_parts(mean))):
            part = part.to(shard.dtype)
            if not part.numel():
                # one that nobody clears must not keep the mean's memory
                part = part.clone()
            unsent = self.unsent.pop(index, None)
            is_first = shard.grad is None or (unsent is not None and unsent.is_own)
            if is_first and index not in self.seen:
                self.from_others.add(index)
            shard.grad = part if is_first else shard.grad + part

    def has_gradients(self) -> list[bool]:
        """Which parameters have a gradient of this rank's, or a mean of before."""
        return [
            i in self.seen or (shard.grad is not None and i not in self.from_others)
            for i, shard in enumerate(self.shards)
        ]

    def drop_gradients(self) -> None:
        """Forget whole gradients that were not sent."""
        for index, (grad, _, is_own) in self.unsent.items():
            if is_own and self.shards[index].grad is grad:
                self.shards[index].grad = None
        self.added = None
        self.unsent.clear()
        self.seen.clear()
        self.from_others.clear()
        for whole in self.whole:
            whole.grad = None


def _hold_anew(module: nn.RNNBase) -> None:
    """Let a recurrent module, which holds its weights twice, have those that were put there."""
    module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]
    module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights]
