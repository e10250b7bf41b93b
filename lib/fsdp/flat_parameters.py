"""Parameters of a block in one flat buffer, of which each rank holds a slice between uses.

Matrices of 6 and 10 elements on two ranks, each with a slice of 16, as `lib.ddp.flat.Bucket` lays
them out; `.` aligns starts to 16 bytes:

    whole        | a a a a a a . . b b b b b b b b | b b . . . . . . . . . . . . . . |
    rank 0       | a a a a a a . . b b b b b b b b |
    rank 1                                         | b b . . . . . . . . . . . . . . |

An all-gather turns slices into the whole, in the dtype of computation; a reduce-scatter turns whole
gradients into the mean of a slice. Gathered parameters are views of the buffer, so nothing is
copied after an all-gather. Each all-gather allocates a new buffer. Autograd keeps none of them from
forward to backward (`gathered_again`), but a weight that the caller keeps stays whole and right.

The module's own parameters become the **shards**, this rank's part of each. Only they hold state:
each pass gathers the whole from them, and frees it. In a pass the module has **placeholders** in
their place: reading one gathers its block.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.ddp.flat import Bucket, Part, averaging, not_dense
from lib.ddp.process_group import all_gather, mark_sharded, rank, reduce_scatter, world_size
from lib.optimizer.adamw import clip_with

# The number that grows when a tensor is changed in place.
VERSION = operator.attrgetter("_version")
# A parameter's places in the model: tied ones have several.
Places = list[tuple[nn.Module, str]]
# Properties and methods of a whole parameter that gather nothing.
PROPERTIES = ("dtype", "device", "shape", "ndim", "is_cuda", "requires_grad", "layout", "grad")
PROPERTIES += ("is_leaf", "retains_grad")
METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex")
METHODS += ("untyped_storage",)
DESCRIPTIONS = {getattr(torch.Tensor, name) for name in METHODS}
DESCRIPTIONS |= {getattr(torch.Tensor, name).__get__ for name in PROPERTIES}
DESCRIPTIONS |= {torch.Tensor.grad.__set__, torch.Tensor.__repr__}  # type: ignore[attr-defined]


class Unsent(NamedTuple):
    """A shard's `.grad` while whole gradients of `no_sync` wait to be averaged."""

    grad: Tensor
    version: int

    is_own: bool
    """Whether it is this rank's part of what waits, not a mean of before."""


class FlatParameters(Bucket):
    """A bucket of parameters, of which this rank keeps its slice, `mine`, and gathers the rest.

    Args:
        named: parameters by name, of one dtype and device; they become this rank's shards.
        places: where each is found in the model.
        compute_dtype: of the gathered parameters, and so of what is sent; None: their own.

    Attributes:
        shards: this rank's part of each parameter, 1-dim, a view of `mine`; has the mean gradient.
        placeholders: stand for the parameters while nothing is gathered; get the whole gradients.
        gathered: each parameter as a view of `buffer`, while the model may read it.
        before_forward: called when a parameter is read that is not gathered.
        before_backward: called when backward needs a parameter, or has a gradient of one.
        flat_at: which flat parameters are gathered where, by their storage; shared by all.
        messages: what was sent, in words, until ranks have compared it; shared by all.
    """

    before_forward: Callable[[], None]
    before_backward: Callable[[], None]
    messages: list[str] | None = None

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        places: list[Places],
        group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
    ) -> None:
        # laid out so that a buffer of two bytes an element is aligned too
        super().__init__(list(named.values()), world_size(group), torch.bfloat16)
        self.names, self.shards, self.places = list(named), list(named.values()), places
        self.group, self.compute_dtype = group, compute_dtype
        self.recurrent = {m for at in places for m, _ in at if isinstance(m, nn.RNNBase)}

        # which elements of each parameter this rank has, and where they are in its slice
        found = {id(part.param): part for part in self.parts(rank(group))}
        self.own = [found.get(id(param), Part(param, 0, 0, 0)) for param in self.shards]
        self.at = [slice(own.offset, own.offset + own.stop - own.start) for own in self.own]

        # parameters while they are gathered
        self.flat_at: dict[int, FlatParameters] = {}
        self.gathered: list[Tensor] = []

        # each parameter becomes its part of this rank's slice, which the optimizer updates
        flattened = [param.detach().reshape(-1) for param in self.shards]
        self._fill_slice([flat[own.start : own.stop] for flat, own in zip(flattened, self.own)])
        for param in self.shards:
            mark_sharded(param)
        if self.ranks > 1:
            clip_with(self, Placeholder.clipped_by, self.shards, has_part=True)
        self._make_placeholders()

        # whole gradients that were added up without being sent
        self.added: Tensor | None = None
        self.unsent: dict[int, Unsent] = {}
        # the mean gradient of this rank's slice, once it has arrived
        self.mean: Any = None
        # parameters with a gradient here since the last synchronization, and those whose shard got
        # one from other ranks alone
        self.seen: set[int] = set()
        self.from_others: set[int] = set()

    def _fill_slice(self, parts: list[Tensor]) -> None:
        """Copy the shards' elements into a new slice, and make the shards views of it."""
        self.mine = parts[0].new_zeros(self.slice_length)
        for shard, part, at in zip(self.shards, parts, self.at):
            self.mine[at].copy_(part)
            shard.data = self.mine[at]
        self.addresses = [shard.data_ptr() for shard in self.shards]

    def _make_placeholders(self) -> None:
        """Make the placeholders of the parameters, which have a shape and no memory."""
        own = self.mine.dtype
        self.gathered_dtype = self.compute_dtype or own if own.is_floating_point else own
        # gradients are sums: in float32, or in the parameter's dtype if that has more digits
        is_narrow = own.is_floating_point and own.itemsize < 4
        self.grad_dtype = torch.float32 if is_narrow else own
        self.placeholders = [Placeholder(self, i) for i in range(len(self.shards))]
        self.trains = [shard.requires_grad for shard in self.shards]
        self.is_trained = any(self.trains)
        self.op, self.divisor = averaging(self.mine, self.group)
        # what `buffer` is while nothing is gathered
        self.nothing = self.buffer = self.mine.new_empty(0)

    # Shards, which the caller may change between passes

    def follow_shards(self) -> None:
        """Follow changes of the shards: new values, `.to(dtype)`, `param.data = …`, freezing.

        Raises:
            RuntimeError: shards of one buffer have different dtypes, or one has another shape.
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
                for placeholder, is_trained in zip(self.placeholders, trains):
                    placeholder.requires_grad_(is_trained)

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
            self._make_placeholders()

    def copies(self) -> list[Tensor]:
        """Gather copies of the whole parameters, in their own dtype; all ranks call it."""
        flat = self.mine
        if self.ranks > 1:
            flat = self.mine.new_empty(self.length)
            all_gather(flat, self.mine, group=self.group)
        return [view.clone() for view in self.views(flat)]

    # Parameters: gathered before forward and backward, dropped after

    def start_gathering(self) -> None:
        """Start the all-gather of the ranks' slices into a new buffer, unless that was done."""
        if self.buffer is not self.nothing:
            return
        self.version = sum(map(VERSION, self.shards))
        with torch.inference_mode(False):
            # memory of its own each time: what else refers to the last one may go on
            self.buffer = self.mine.new_empty(self.length, dtype=self.gathered_dtype)
        sent = self.mine.to(self.gathered_dtype)
        if self.ranks == 1:
            self.buffer.copy_(sent)
            return
        if self.messages is not None:
            self.messages.append(f"all-gather of {self.names[0]}")
        with annotate("all-gather"):
            work = all_gather(self.buffer, sent, group=self.group, async_op=True)
        self.gathering = work, sent

    def show(self) -> None:
        """Let the model read the gathered parameters, whose gradients the placeholders get."""
        self.gathered = self.views(self.buffer.detach())
        # to autograd the gathered tensors come from the placeholders, so that these get the
        # gradients, and outlive what is gathered
        trained = [index for index, is_trained in enumerate(self.trains) if is_trained]
        if trained:
            gathered = [self.gathered[index] for index in trained]
            placeholders = [self.placeholders[index] for index in trained]
            with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                connected = WithGradients.apply(gathered, *placeholders)
            for index, param in zip(trained, connected):
                self.gathered[index] = param
        # a forward pass must not change them, and a saved weight is found by its memory
        self.gathered_version = self.buffer._version
        self.flat_at[self.buffer.untyped_storage()._cdata] = self
        self.put(self.gathered)

    def put(self, params: list[Any]) -> None:
        """Make `params` (shards, placeholders or gathered parameters) the modules' parameters."""
        for param, found in zip(params, self.places):
            for module, name in found:
                module._parameters[name] = param
        for module in self.recurrent:
            _hold_anew(module)

    def drop(self) -> bool:
        """Free the gathered parameters; return whether a forward pass had changed them in place.

        Their memory lives on if the caller has kept a weight.
        """
        # prefetched, but not used
        self.wait()
        is_changed = False
        if self.gathered:
            is_changed = self.buffer._version != self.gathered_version
            del self.flat_at[self.buffer.untyped_storage()._cdata]
        self.buffer, self.gathered = self.nothing, []
        return is_changed

    # Gradients: reduce-scattered when backward has passed the block

    def send(self, *, now: bool) -> None:
        """Move the whole gradients into one flat tensor, and start its reduce-scatter.

        Without `now` it is kept, to be sent with later gradients.
        """
        # take them off the placeholders
        grads: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for index, placeholder in enumerate(self.placeholders):
                if placeholder.grad is not None:
                    grads[index], placeholder.grad = placeholder.grad, None
        if self.unsent:
            self._forget_cleared()
        for index, grad in grads.items():
            if grad.layout != torch.strided:
                raise not_dense(self.names[index], grad)
        self.seen |= grads.keys()

        # pack them, or add them to those that wait; zeros for parameters without a gradient
        add = self.added is not None
        if self.added is None and (grads or now):
            make = torch.empty if len(grads) == len(self.placeholders) else torch.zeros
            self.added = make(self.length, dtype=self.grad_dtype, device=self.mine.device)
        if grads:
            views = self.views(self.added)  # type: ignore[arg-type]  # made above
            views = [views[index] for index in grads]
            (torch._foreach_add_ if add else torch._foreach_copy_)(views, list(grads.values()))

        # in no_sync they wait
        if not now:
            if self.added is not None:
                self._show_unsent(self.added)
            return
        # this rank gets the mean of its slice
        flat: Any
        flat, self.added = self.added, None  # (ranks · slice_length,)
        self.mean = flat
        if self.ranks > 1:
            self.mean = flat.new_empty(self.slice_length)
            if self.messages is not None:
                self.messages.append(f"reduce-scatter of {self.names[0]}")
            with annotate("reduce-scatter"):
                work = reduce_scatter(self.mean, flat, op=self.op, group=self.group, async_op=True)
            self.works, self.sent, self.means = [work], [flat], [self.mean]

    def _show_unsent(self, added: Tensor) -> None:
        """Set the shards' `.grad` to this rank's own gradient, so that clearing it is noticed."""
        mine = added.view(self.ranks, -1)[rank(self.group)]  # (slice_length,)
        for index, part in enumerate(mine[at] for at in self.at):
            if index not in self.seen:
                continue
            shard, before = self.shards[index], self.unsent.get(index)
            is_own = shard.grad is None or (before is not None and before.is_own)
            if is_own:
                part = part.to(shard.dtype)
                shard.grad = part if part.numel() else part.clone()
            self.unsent[index] = Unsent(shard.grad, shard.grad._version, is_own)

    def _forget_cleared(self) -> None:
        """Zero the waiting gradients of shards whose `.grad` was cleared or replaced.

        Raises:
            RuntimeError: a `.grad` was changed in place.
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
        views = self.views(self.added) if changed else []  # type: ignore[arg-type]
        for index in changed:
            views[index].zero_()

    def receive_mean(self) -> None:
        """Wait for the reduce-scatter, and add the mean to the gradients of the shards."""
        # the sum over the ranks becomes their mean
        super().receive_mean()
        mean, self.mean = self.mean, None  # (slice_length,)
        # each shard gets its part of the slice
        for index, (shard, at) in enumerate(zip(self.shards, self.at)):
            part = mean[at].to(shard.dtype)
            if not part.numel():
                # one that nobody clears must not keep the mean's memory
                part = part.clone()
            unsent = self.unsent.pop(index, None)
            is_first = shard.grad is None or (unsent is not None and unsent.is_own)
            if is_first and index not in self.seen:
                self.from_others.add(index)
            shard.grad = part if is_first else shard.grad + part

    def drop_gradients(self) -> None:
        """Forget whole gradients that were not sent, and a mean that has not been received."""
        super().receive_mean()
        self.mean = None
        for index, (grad, _, is_own) in self.unsent.items():
            if is_own and self.shards[index].grad is grad:
                self.shards[index].grad = None
        self.added = None
        self.unsent.clear()
        self.seen.clear()
        self.from_others.clear()
        for placeholder in self.placeholders:
            placeholder.grad = None


def _hold_anew(module: nn.RNNBase) -> None:
    """Let a recurrent module, which holds its weights twice, have those that were put there."""
    module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]
    module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights]


# What the model has, and what autograd sees, in place of the shards


class Placeholder(nn.Parameter):
    """A parameter with a shape and a gradient, but no memory; reading it gathers its block."""

    flat: Any
    number: int
    # see `lib.optimizer.adamw.clip_grad_norm`
    clipped_by = "FSDP.clip_grad_norm"

    def __new__(cls, flat: Any, index: int) -> Placeholder:
        """Make it for parameter `index` of `flat`."""
        shard, shape = flat.shards[index], flat.shapes[index]
        empty = shard.detach().new_empty((), dtype=flat.gathered_dtype).expand(shape)
        placeholder = super().__new__(cls, empty, requires_grad=shard.requires_grad)
        placeholder.flat, placeholder.number = flat, index
        return placeholder

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(Placeholder, _gathered, (args, kwargs))
        return function(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)}, which is not gathered"


def _gathered(placeholder: Placeholder) -> Tensor:
    if not placeholder.flat.gathered:
        placeholder.flat.before_forward()
    return placeholder.flat.gathered[placeholder.number]


class WithGradients(torch.autograd.Function):
    """Gathered parameters, whose gradients are those of the placeholders."""

    @staticmethod
    def forward(ctx: Any, gathered: list[Tensor], *placeholders: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.before_backward = placeholders[0].flat.before_backward
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.before_backward()
        return None, *grads
