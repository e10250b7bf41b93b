"""Data parallelism: every rank holds the model and part of the batch, and gradients are averaged.

If the loss is a mean and the parts have one size, the mean of the ranks' gradients is the gradient
of the whole batch, so ranks that start with equal weights keep them equal (Li et al. 2020,
arXiv:2006.15704, section 3). The wrappers differ in when they average, and in what portions:

- `NaiveDDP` (`naive`): after backward, one all-reduce per parameter;
- `FlatDDP` (`flat`): after backward, one all-reduce of everything;
- `OverlappedDDP` (`overlap`): one per parameter, while backward still computes others;
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
mean like the others; without a gradient on any rank it has none afterwards, as in one process. To
find out, the host waits for its device, but only where a gradient is missing.

**Compiled modules.** Wrap the compiled module; hooks are on its parameters. All gradients of one
compiled graph arrive together at its end: for overlap, compile a model block by block.

**CUDA graphs.** NCCL's all-reduces can be captured with forward, backward and optimizer, from the
second step on (the first agrees on an order) and if no rank misses a gradient. The replay runs no
hook and checks nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.core.ranges import annotate
from lib.core.settings import require
from lib.ddp.buckets import (
    Bucket,
    GradientSync,
    MeanReduction,
    checked_cap,
    fill_buckets,
    has_average,
    require_finished,
)
from lib.ddp.process_group import (
    agree,
    before_leaving,
    broadcast_module,
    global_rank,
    world_size,
)


class Wrapper(nn.Module):
    """A module around another one, `module`, with that one's state dict.

    A copy, or one that was pickled, averages gradients in the group of all ranks, too.
    """

    module: nn.Module
    group: dist.ProcessGroup | None
    # whether another wrapper averages the gradients by now
    is_replaced = False

    def _on_gradient(self, index: int) -> None:
        """Called in backward when the gradient of parameter `index` is complete."""
        raise NotImplementedError

    def _hook(self, index: int, param: Tensor) -> None:
        # through a weak reference, so that a module can outlive its wrapper and be wrapped again
        hook = functools.partial(_gradient_hook, weakref.ref(self), index)
        param.register_post_accumulate_grad_hook(hook)

    def _replace_earlier(self) -> None:
        """Remove the hooks of earlier wrappers, which would average the same gradients too."""
        for *_, param in self.places:
            hooks = param._post_accumulate_grad_hooks or {}
            for number, hook in list(hooks.items()):
                if getattr(hook, "func", None) is _gradient_hook:
                    del hooks[number]
                    earlier = hook.args[0]()
                    if earlier is not None:
                        earlier.is_replaced = True

    def _check_is_newest(self) -> None:
        """Raise a `RuntimeError` if the module has been wrapped again."""
        if self.is_replaced:
            raise RuntimeError(
                "the module has been wrapped again since; call the newer wrapper, which averages "
                "its gradients"
            )

    def _note_parameters(self) -> None:
        """Note which parameters are averaged, and where in the module they are."""
        inner = inner_module(self.module)
        self.places = [
            (part, key, f"{name}.{key}".lstrip("."), param)
            for name, part in inner.named_modules()
            for key, param in part._parameters.items()
            if param is not None
        ]
        self.was_trained = [param.requires_grad for *_, param in self.places]

    def _check_parameters(self) -> None:
        """Raise a `RuntimeError` if there are other ones than when the module was wrapped."""
        for part, key, name, param in self.places:
            if part._parameters.get(key) is not param:
                raise RuntimeError(
                    f"parameter {name} was replaced after the module was wrapped, for example by "
                    "load_state_dict(assign=True); wrap the module again"
                )
        noted = {id(param): was for (*_, param), was in zip(self.places, self.was_trained)}
        for name, param in inner_module(self.module).named_parameters():
            if param.requires_grad and not noted.get(id(param)):
                what = "frozen when" if id(param) in noted else "added after"
                raise RuntimeError(
                    f"parameter {name} was {what} the module was wrapped and is trained now; wrap "
                    "the module again"
                )

    def __getstate__(self) -> dict[str, Any]:
        """The state for `copy.deepcopy` and pickle.

        Raises:
            TypeError: the wrapper has a group of its own.
        """
        if self.group is not None:
            raise TypeError(
                f"{type(self).__name__} with a group of its own cannot be copied or pickled; copy "
                "its module, and wrap that"
            )
        return super().__getstate__()  # type: ignore[misc]  # object's

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict, under its own names, compiled or not."""
        return inner_module(self.module).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module; every rank must load the same."""
        return inner_module(self.module).load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as a part of another module, whose state dict has the module's own names."""
        inner = inner_module(self.module)
        path = next(name for name, part in self.named_modules() if part is inner)
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}{path}.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)


class DataParallel(GradientSync, Wrapper):
    """The base of all wrappers; by itself, the wrapper `none` of a single rank.

    Parameters and buffers start as those of the group's rank 0. Buffers that change in training
    (batch norm's) stay each rank's own. On a single rank there are no hooks and no cost.

    On several ranks, backward raises if a gradient is sparse, or grows after its all-reduce has
    started, and names the parameter. If backward raises on one rank, all ranks must either handle
    it or fail; the next forward pass first finishes what was started.

    Args:
        module: on its device, in its dtype, with frozen parameters already frozen.
        group: the ranks that share the work (default: all).

    Raises:
        ValueError: module or settings differ between ranks.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module, self.group = module, group
        # tied parameters once
        named = list(inner_module(module).named_parameters())
        self.names = [name for name, param in named if param.requires_grad]
        self.params = [param for _, param in named if param.requires_grad]
        self._note_parameters()
        # indices of gradients that arrived since the last synchronization, in that order
        self.arrived: dict[int, None] = {}
        self.is_in_backward = False
        agree(self._facts, group)
        if world_size(group) > 1:
            broadcast_module(module, group)
            self._replace_earlier()
            self._register_hooks()

    def _facts(self) -> dict[str, str]:
        """Check the settings; return what must be the same on all ranks."""
        check_not_wrapped(self.module)
        return {"ddp_wrapper": type(self).__name__}

    def __getstate__(self) -> dict[str, Any]:
        """See `Wrapper`; raises a RuntimeError between backward and finish."""
        if self.arrived:
            raise RuntimeError(
                "a wrapper whose gradients were not averaged since backward cannot be copied or "
                "pickled; call finish_gradient_synchronization() before"
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on as a copy, whose parameters have no hooks yet."""
        super().__setstate__(state)
        if world_size(self.group) > 1:
            self._register_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            RuntimeError: the gradients of the last backward pass were not synchronized, or the
                module has been wrapped again.
        """
        self._check_is_newest()
        if self.arrived:
            require_finished(must_finish=not self.is_in_backward)
            # An exception ended that backward pass, perhaps at different points on different
            # ranks. Once all have sent everything, they are in step again.
            self.finish_gradient_synchronization()
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Turn every gradient into its mean over the ranks; between backward and optimizer step.

        Every rank must call it, even if its backward pass reached no parameter.

        Raises:
            RuntimeError: a parameter was added or replaced since the module was wrapped, or was
                frozen then and is trained now.
        """
        self._check_parameters()
        if world_size(self.group) > 1 and self.params:
            with torch.no_grad(), annotate("all-reduce"):
                self._synchronize()
        self.arrived.clear()
        self.is_in_backward = False

    def _synchronize(self) -> None:
        """Turn every gradient into its mean, in a group of several ranks."""
        raise NotImplementedError(f"{type(self).__name__} averages no gradients")

    def _gradient_arrived(self, index: int) -> None:
        """Called in backward when the gradient of parameter `index` is complete."""

    def _register_hooks(self) -> None:
        for index, param in enumerate(self.params):
            self._hook(index, param)

    def _on_gradient(self, index: int) -> None:
        if index in self.arrived:
            raise RuntimeError(
                f"the gradient of {self.names[index]} grew again after its all-reduce had started; "
                "run one backward pass before finish_gradient_synchronization(), and those before "
                "it in no_sync()"
            )
        layout = self.params[index].grad.layout
        if layout != torch.strided:
            raise ValueError(
                f"the gradient of {self.names[index]} must be dense (sparse=False), got {layout}"
            )
        if not self.is_syncing:
            return
        if not self.arrived and not self.is_in_backward:
            self.is_in_backward = True
            # not called if an exception ends the backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self.arrived[index] = None
        self._gradient_arrived(index)

    def _on_backward_end(self) -> None:
        self.is_in_backward = False

    def _fill_in_absent(self) -> list[int]:
        """Give parameters without a gradient one of zeros; return their indices."""
        absent = [index for index, param in enumerate(self.params) if param.grad is None]
        for index in absent:
            self.params[index].grad = torch.zeros_like(self.params[index])
        return absent

    def _presence(self, absent: Sequence[int], like: Tensor) -> Tensor:
        """Per parameter 1, or 0 if this rank has no gradient; the mean is 0 if no rank has."""
        presence = like.new_ones(len(self.params))  # (parameters,)
        for index in absent:
            presence[index] = 0
        return presence

    def _drop_unused(self, absent: list[int], presence: Tensor) -> None:
        """Remove the gradients in `absent` that no rank has; `presence` is averaged."""
        if absent:
            for index, share in zip(absent, presence[absent].tolist()):
                if share == 0:
                    self.params[index].grad = None


def inner_module(module: Any) -> Any:
    """The module itself, or the one inside if `torch.compile` wrapped it."""
    return getattr(module, "_orig_mod", module)


def check_not_wrapped(module: nn.Module) -> None:
    """Refuse a module, or one with a part, whose gradients are averaged already."""
    for name, part in module.named_modules():
        is_wrapped = isinstance(part, (Wrapper, DistributedDataParallel))
        require(
            not is_wrapped,
            f"module must not be wrapped already, but {name or 'it'} is {type(part).__name__}; "
            "wrap the module inside it, .module, alone",
        )


def _gradient_hook(wrapper: Callable[[], Wrapper | None], index: int, param: Tensor) -> None:
    this = wrapper()
    if this is not None:
        this._on_gradient(index)


def wrapper_of(param: Tensor) -> Wrapper | None:
    """The wrapper that averages a parameter's gradient; None if there is none, or it has ended.

    PyTorch's watches one parameter of its module alone.
    """
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    found = (hook.args[0]() for hook in hooks if getattr(hook, "func", None) is _gradient_hook)
    return next((wrapper for wrapper in found if wrapper is not None), None)


class NaiveDDP(DataParallel):
    """After backward, one all-reduce per parameter, each finished before the next starts."""

    def _synchronize(self) -> None:
        absent = self._fill_in_absent()
        for param in self.params:
            MeanReduction([param.grad], self.group).finish()
        # which gradients exist anywhere
        presence = self._presence(absent, self.params[0])
        MeanReduction([presence], self.group).finish()
        self._drop_unused(absent, presence)


class FlatDDP(DataParallel):
    """After backward, one all-reduce of all gradients, copied into one buffer (per dtype).

    While they are copied, gradients take twice their memory.
    """

    def _synchronize(self) -> None:
        absent = self._fill_in_absent()
        # without a cap: one bucket per dtype
        buckets = fill_buckets(self.params)
        *others, last = buckets
        presence = self._presence(absent, last.params[0])
        reductions = [MeanReduction(bucket.pack_gradients(), self.group) for bucket in others]
        reductions.append(MeanReduction([*last.pack_gradients(), presence], self.group))
        for reduction in reductions:
            reduction.finish()
        self._drop_unused(absent, presence)


class OverlappedDDP(DataParallel):
    """One all-reduce per parameter, while backward goes on to others.

    All ranks start them in one order: that in which gradients arrived on rank 0 in the first step.
    That step overlaps nothing, so that every step of every run has the same order, and a resumed
    run the same bits. A gradient that arrives early waits for those before it, so that ranks whose
    backward passes differ do not mix up tensors.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.buckets: list[Bucket] = []
        # each parameter's bucket, and how many gradients each bucket still lacks
        self.bucket_of: list[int] = []
        self.missing: list[int] = []
        self.started: list[MeanReduction] = []

    def _make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        return [Bucket([param]) for param in params]

    def _gradient_arrived(self, index: int) -> None:
        # the first step only records the order
        if not self.buckets:
            return
        self.missing[self.bucket_of[index]] -= 1
        # start what is complete, in order
        while len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            with torch.no_grad():
                self._start_next()

    def _start_next(self, absent: Sequence[int] = ()) -> None:
        """Start the all-reduce of the next bucket; the last also carries who has gradients."""
        bucket = self.buckets[len(self.started)]
        is_last = bucket is self.buckets[-1]
        presence = self._presence(absent, bucket.params[0]) if is_last else None
        with annotate("all-reduce"):
            self.started.append(MeanReduction(bucket.pack_gradients(presence), self.group))

    def _synchronize(self) -> None:
        if not self.buckets:
            self._agree_on_buckets()
        # start what backward did not, in the first step all
        absent = self._fill_in_absent() if len(self.started) < len(self.buckets) else []
        while len(self.started) < len(self.buckets):
            self._start_next(absent)
        # wait
        for reduction in self.started:
            reduction.finish()
        presence = self.started[-1].tensors[-1][-len(self.params) :]  # (parameters,)
        # ready for the next step
        self.started.clear()
        self.missing = [len(bucket.params) for bucket in self.buckets]
        self._drop_unused(absent, presence)

    def _agree_on_buckets(self) -> None:
        """Fill the buckets in the order in which rank 0's gradients arrived."""
        last = [index for index in reversed(range(len(self.params))) if index not in self.arrived]
        order = torch.tensor([*self.arrived, *last], device=self.params[0].device)  # (parameters,)
        dist.broadcast(order, global_rank(0, self.group), group=self.group)
        self.buckets = self._make_buckets([self.params[index] for index in order.tolist()])
        bucket_of = {
            id(param): n for n, bucket in enumerate(self.buckets) for param in bucket.params
        }
        self.bucket_of = [bucket_of[id(param)] for param in self.params]


class BucketedDDP(OverlappedDDP):
    """All-reduces of whole buckets, each started in backward as soon as it is complete.

    A few large messages cost less than many small ones, and start before backward ends. Parameters
    fill buckets of at most `bucket_cap_mb` in the order in which their gradients arrive, about the
    reverse of their use; the first bucket is small, so that communication starts early.

    NCCL takes all gradients of a bucket in one launch, and they stay where backward put them. Other
    backends take one tensor at a time. For them, or with `packed`, the gradients of a complete
    bucket are copied into one buffer and become views of it. The buffer replaces them: beyond the
    gradients themselves it takes one bucket's memory during the copy, and a few bytes per parameter
    for alignment and for who has a gradient. `zero_grad(set_to_none=True)` frees it with them, and
    the next backward pass makes another, so that the forward pass has the memory; with
    `set_to_none=False` backward adds into the views, and nothing is copied. (The first is cheaper:
    adding reads and writes more than the copy.)

    Args:
        bucket_cap_mb: MiB (2²⁰ bytes) of gradients in a bucket; a larger parameter gets its own.
        packed: whether gradients become views of a buffer per bucket (default: not with NCCL).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float = 25.0,
        packed: bool | None = None,
        **options: Any,
    ) -> None:
        # before the ranks compare them
        self.bucket_cap_mb, self.packed = bucket_cap_mb, packed
        super().__init__(module, **options)
        if packed is None:
            self.packed = not all(has_average(param, self.group) for param in self.params)

    def _facts(self) -> dict[str, str]:
        cap = checked_cap(self.bucket_cap_mb)
        return super()._facts() | {"bucket_cap_mb": cap, "packed": str(self.packed)}

    def _make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        return fill_buckets(params, cap_bytes=self.bucket_cap_mb * 2**20, packed=self.packed)


class TorchDDP(Wrapper):
    """PyTorch's `DistributedDataParallel` behind the interface of the others.

    It averages during backward, which must reach every trained parameter, and needs no
    `finish_gradient_synchronization()`. Gradients are views of its buckets. PyTorch's may hang when
    it is freed after `destroy_process_group`, so `init_from_environment` and `launch` free it
    before. Then, or after `free()`, the module is left as on a single rank.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        super().__init__()
        self.inner: Any = module
        self.group = group
        self.params = list(module.parameters())
        self.dtypes = [param.dtype for param in self.params]
        # whether the last forward pass was in no_sync, and whether a backward pass followed it
        self.is_held_back = self.was_averaged = False
        agree(lambda: self._facts(bucket_cap_mb), group)
        self._note_parameters()
        if world_size(group) > 1:
            broadcast_module(module, group)
            self._replace_earlier()
            # renamed in newer PyTorch; the old name warns
            names = inspect.signature(DistributedDataParallel).parameters
            sync_buffers = max({"forward_sync_buffers", "broadcast_buffers"} & names.keys())
            options: dict[str, Any] = {sync_buffers: False}
            self.inner = DistributedDataParallel(
                module,
                process_group=group,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=True,
                **options,
            )
            self._watch()

    def _facts(self, bucket_cap_mb: float) -> dict[str, str]:
        check_not_wrapped(self.inner)
        return {"ddp_wrapper": "TorchDDP", "bucket_cap_mb": checked_cap(bucket_cap_mb)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._is_wrapped:
            self._watch()

    def _watch(self) -> None:
        """Look at each backward pass, and free PyTorch's wrapper before its group."""
        before_leaving(self.free)
        # one is enough, since each pass must reach all
        self._hook(0, next(param for *_, param in self.places if param.requires_grad))

    def _on_gradient(self, index: int) -> None:
        if not self._is_wrapped or not self.inner.require_backward_grad_sync:
            return
        if self.was_averaged:
            raise RuntimeError(
                "torch_ddp would not average a second backward pass after the last forward pass; "
                "add up the losses and run one, or run those before the last in no_sync()"
            )
        self.was_averaged = True

    def free(self) -> None:
        """Take PyTorch's wrapper off the module."""
        self.inner = self.module

    @property
    def module(self) -> nn.Module:  # type: ignore[override]  # an attribute in `Wrapper`
        """The wrapped module."""
        return self.inner.module if self._is_wrapped else self.inner

    @property
    def _is_wrapped(self) -> bool:
        return isinstance(self.inner, DistributedDataParallel)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            RuntimeError: the module has been cast since; PyTorch would average nothing then.
        """
        self._check_is_newest()
        if self._is_wrapped and [param.dtype for param in self.params] != self.dtypes:
            raise RuntimeError("the module was cast after it was wrapped; wrap it again")
        if torch.is_grad_enabled():
            self.is_held_back = self._is_wrapped and not self.inner.require_backward_grad_sync
            self.was_averaged = False
        return self.inner(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Check that gradients were averaged, as they are when backward ends.

        Raises:
            RuntimeError: they were not, or some of them.
        """
        if not self._is_wrapped:
            return
        self._check_parameters()
        if self.is_held_back:
            raise RuntimeError(
                "the last backward pass ran in no_sync(), and torch_ddp averages gradients in "
                "backward only; run the last one outside of it"
            )
        trained = [(name, param) for _, _, name, param in self.places if param.requires_grad]
        missed = [name for name, param in trained if param.grad is None]
        if missed and len(missed) < len(trained):
            raise RuntimeError(
                f"backward did not reach parameter {missed[0]}, and torch_ddp averages nothing "
                "unless it reaches all; another wrapper, such as flashddp, can do without"
            )

    def no_sync(self) -> contextlib.AbstractContextManager:
        """In the block, forward and backward passes only add up gradients on this rank."""
        return self.inner.no_sync() if self._is_wrapped else contextlib.nullcontext()


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
) -> DataParallel | TorchDDP:
    """Wrap the module in the data-parallel wrapper called `name`, one of `WRAPPERS`.

    Args:
        group: the ranks that share the work (default: all).
        bucket_cap_mb: MiB of gradients in a bucket of `flashddp` and `torch_ddp`.

    Raises:
        ValueError: an unknown name; `none` in a group of several ranks; modules or settings that
            differ between ranks.
    """
    agree(lambda: _checked_wrapper(name, group), group)
    options = {"bucket_cap_mb": bucket_cap_mb} if name in ("flashddp", "torch_ddp") else {}
    return WRAPPERS[name](module, group=group, **options)


def _checked_wrapper(name: str, group: dist.ProcessGroup | None) -> dict[str, str]:
    known = ", ".join(WRAPPERS)
    require(name in WRAPPERS, f"ddp_wrapper must be one of {known}, got {name!r}")
    require(
        name != "none" or world_size(group) == 1,
        f"ddp_wrapper must average gradients in a group of {world_size(group)} ranks, got 'none', "
        "with which each rank would train a model of its own",
    )
    return {"ddp_wrapper": WRAPPERS[name].__name__}
