"""ZeRO stage 1: each rank keeps the optimizer's state of a part of the model, and updates that.

AdamW keeps 8 or 12 bytes for each weight, and in plain data parallelism every rank keeps all of
them, the same ones. Here each rank keeps 1/world_size (Rajbhandari et al. 2020, arXiv:1910.02054,
section 5.1). Two strategies give the same result:

- `parameters`: whole parameters are dealt to ranks, balanced by size; after the step each owner
  broadcasts its own. To read, and for any optimizer.
- `flat`: parameters stand behind one another in buffers, which are cut into equal slices. With
  `reduces_gradients` a reduce-scatter in place of the wrapper's all-reduce averages gradients, and
  an all-gather puts the parameters together again, so that both together send what one all-reduce
  does. For elementwise optimizers, such as SGD and the Adam family.

One step of `parameters`, behind a wrapper of `lib.ddp` that averages the gradients:

    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=1e-3)
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()

and one of `flat`, which needs no wrapper:

    broadcast_module(module)
    optimizer = ShardedOptimizer(
        module.parameters(), AdamW, strategy="flat", reduces_gradients=True, overlap=True, lr=1e-3
    )
    with optimizer.no_sync():
        loss(module(first)).backward()
    loss(module(second)).backward()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()

**Gradients that are absent.** A parameter without a gradient on any rank is left alone, as by an
unsharded optimizer. With `reduces_gradients` one that some rank used gets the mean, in which the
other ranks count as zero.

**With `reduces_gradients`** averaged gradients are in the shards, where only the optimizer's own
`zero_grad` clears them, and not that of the module. `torch.amp.GradScaler` looks at the wrong
gradients: each rank at its own, some of which have moved on. Ranks whose backward pass an exception
ended call `zero_grad` and go on, where each had a gradient by then. Two optimizers that overlap
need a group each, unless every rank uses the same parameters.

**Memory of `flat`.** Parameters become views of the buffers, at other addresses than before: make
CUDA graphs later, and convert and move the module before. They are contiguous from then on. With
`reduces_gradients` a gradient moves into the shards when it is averaged; the parameter's `.grad` is
None afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.config import require
from lib.distributed import check_same, rank, world_size
from lib.optimizer import AdamW, clip_coefficient, grad_norm
from lib.ranks import on_each_rank
from lib.sharded_optimizer_flat import FlatSlices
from lib.sharded_optimizer_parts import Shard, WholeParameters
from lib.sharded_optimizer_state import (
    load_unsharded,
    pack_shards,
    read_shards,
    settings_of,
    unpack_shards,
    write_shard,
)

__all__ = ["STRATEGIES", "ShardedOptimizer", "load_unsharded"]

STRATEGIES = ("parameters", "flat", "fsdp2")
# Their update of an element depends on other elements of the parameter, or of all parameters.
OF_ALL_ELEMENTS = ("LBFGS", "Adafactor", "Muon")
NOT_ELEMENTWISE = {"parameters": ("LBFGS",), "flat": OF_ALL_ELEMENTS, "fsdp2": OF_ALL_ELEMENTS}


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is divided among the ranks of a group.

    To its caller it is one optimizer over all parameters: groups, schedulers, closures and
    `add_param_group` work as always. `inner` is the `optimizer_cls` of this rank's shards, whose
    state `state` is. In a group of one rank it is the plain optimizer. All ranks make the same
    calls in the same order, from parameters that are alike.

    Args:
        params: as for any optimizer; tied parameters once.
        optimizer_cls: such as torch.optim.SGD or `lib.optimizer.AdamW`.
        group: the ranks that share the state; all by default.
        strategy: `parameters` or `flat`, see above; or `fsdp2`, for parameters that PyTorch's
            `fully_shard` has divided among the ranks already.
        reduces_gradients: whether gradients are each rank's own, which the optimizer then averages;
            `flat` only.
        overlap: whether it does that during backward, bucket by bucket.
        bucket_cap_mb: MiB (2²⁰ bytes) of parameters in a buffer of `flat`; a larger one has its
            own.
        master_weights: whether bfloat16 and float16 parameters are rounded copies of float32
            weights that the shards hold, from their first gradient on; what is written into such a
            parameter later is lost. `lib.optimizer.AdamW` does so in any case.
        kwargs: what `optimizer_cls` takes.

    Raises:
        ValueError: an argument is wrong, or parameters differ between ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        strategy: Literal["parameters", "flat", "fsdp2"] = "parameters",
        reduces_gradients: bool = False,
        overlap: bool = False,
        bucket_cap_mb: float = 25.0,
        master_weights: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_strategy(strategy, reduces_gradients, overlap, bucket_cap_mb)
        right = "a class, such as torch.optim.AdamW"
        require(callable(optimizer_cls), f"optimizer_cls is {optimizer_cls!r}; right is: {right}")
        self.group, self.optimizer_cls, self.kwargs = group, optimizer_cls, kwargs
        facts = {"strategy": strategy, "reduces_gradients": reduces_gradients, "overlap": overlap}
        facts |= {"bucket_cap_mb": bucket_cap_mb, "master_weights": master_weights}
        check_same({name: str(value) for name, value in facts.items()}, group)
        # made of no parameters, it tells the defaults
        empty = self._make_inner([{"params": []}])
        _check_elementwise(type(empty), strategy)
        masters = master_weights and not isinstance(empty, AdamW)
        if strategy == "fsdp2":
            from lib.sharded_optimizer_fsdp import ShardedParameters

            self.strategy = ShardedParameters(group, master_weights=masters)
        elif strategy == "parameters" or world_size(group) == 1:
            self.strategy = WholeParameters(group, master_weights=masters)
        else:
            self.strategy = FlatSlices(
                group,
                master_weights=masters,
                reduces_gradients=reduces_gradients,
                bucket_cap_mb=bucket_cap_mb,
                overlap=overlap,
            )
        self.inner: torch.optim.Optimizer | None = None
        self.inner_groups: list[dict[str, Any]] = []
        super().__init__(params, dict(empty.defaults))
        # all at once, since some make their state here and not at the first step
        self.inner = on_each_rank(lambda: self._make_inner(self.inner_groups), group)
        self.state = self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard further parameters, with settings of their own; on all ranks, also in training.

        Raises:
            ValueError: `optimizer_cls` refuses the settings, or parameters differ between ranks.
        """
        # wrong settings are refused before anything is moved
        self._make_inner([_inner_group(param_group, [])])
        first = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        params = param_group["params"]
        try:
            facts = {f"parameter {first + n}": _describe(param) for n, param in enumerate(params)}
            check_same(facts, self.group)
        except ValueError:
            self.param_groups.pop()
            raise
        inner_group = _inner_group(param_group, self.strategy.add(params, first))
        if self.inner is None:
            self.inner_groups.append(inner_group)
        else:
            self.inner.add_param_group(inner_group)

    @property
    def shards(self) -> list[Shard]:
        """What this rank updates, in the order of the inner optimizer."""
        return self.strategy.shards

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's shards and share them; return what `closure` returns, if given.

        `closure` is called once, on every rank; `options` go to the inner optimizer's step, such as
        `grad_scale` and `skip` of `lib.optimizer.AdamW`.

        Raises:
            RuntimeError: a parameter was moved, or gradients came after their norm was asked for.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait_for_parameters()
        self.strategy.collect()
        self._hand_over_gradients()
        for group, inner in zip(self.param_groups, self.inner.param_groups):
            inner.update(settings_of(group))
        self.inner.step(**options)
        for group, inner in zip(self.param_groups, self.inner.param_groups):
            group.update(settings_of(inner))
        # the others are as they were, whatever their masters are
        copied = [s for s in self.shards if s.has_master and s.leaf.grad is not None]
        if copied:
            torch._foreach_copy_([s.weight for s in copied], [s.leaf.detach() for s in copied])
        for shard in copied:
            shard.leaf.grad = None
        self.strategy.share()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero; on all ranks."""
        self.strategy.clear(set_to_none)
        super().zero_grad(set_to_none)
        for shard in self.shards:
            if shard.leaf is not shard.param:
                shard.leaf.grad = None

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The L2 norm of all averaged gradients: 0-dim, float32, the same on all ranks."""
        self.strategy.collect()
        if isinstance(self.inner, AdamW):
            self._hand_over_gradients()
            norm = self.inner.grad_norm()
        else:
            norm = grad_norm(shard for shard in self.shards if shard.grad is not None)
        if world_size(self.group) == 1:
            return norm
        # a rank without shards has it on its CPU
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        device = next((param.device for param in params), norm.device)
        square = norm.to(device, torch.float64).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt().float()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the shards' gradients so that their norm is at most `max_norm`.

        Returns the norm before, as `grad_norm`. The same as `lib.optimizer.clip_grad_norm` of the
        averaged gradients, of which each rank scales the part that it uses.
        """
        coefficient = clip_coefficient(norm := self.grad_norm(), max_norm)
        grads = [shard.grad for shard in self.shards if shard.grad is not None]
        if grads:
            torch._foreach_mul_(grads, coefficient)
        return norm

    def no_sync(self) -> contextlib.AbstractContextManager:
        """In the block, backward passes only add up gradients on this rank (for `overlap`)."""
        return self.strategy.no_sync()

    def wait_for_parameters(self, params: Iterable[Tensor] | None = None) -> None:
        """Wait until `params`, all by default, are what the last step made them.

        Needed after `wait_in_forward_of` alone, before parameters are read by other means.
        """
        self.strategy.wait_for_parameters(params)

    def wait_in_forward_of(
        self, modules: Iterable[nn.Module], *, starts_there: bool = False
    ) -> None:
        """Let `step` return while parameters of `modules` are still on their way (`flat` only).

        Each module's forward waits for its own, those of its children included, so that the
        all-gathers run under the forward passes of the modules before it. Only these forwards may
        read the parameters then, or who calls `wait_for_parameters`. Buffers with other parameters
        too are waited for in the step.

        Args:
            starts_there: whether the first of these forwards also starts the all-gathers, in place
                of the step. A CUDA graph of forward, backward and step, which must not leave
                anything under way, then holds all of them; call `replayed` after each replay. All
                ranks call `wait_for_parameters` together then.
        """
        self.strategy.wait_in_forward_of(modules, starts_there=starts_there)

    def replayed(self) -> None:
        """Know that a CUDA graph has updated this rank's shards."""
        if isinstance(self.strategy, FlatSlices):
            self.strategy.is_stale = self.strategy.starts_later

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's shards, and what tells which those are."""
        self.wait_for_parameters()
        packed = pack_shards(self.shards, self.inner, self.param_groups)
        return packed | {"rank": rank(self.group), "world_size": world_size(self.group)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what this rank's `state_dict` gave, or that of an unsharded optimizer.

        Raises:
            ValueError: it does not fit, or is of another rank or number of ranks (which
                `load_shards` can read).
        """
        self._load([state_dict], "state_dict")

    def save_shard(self, folder: str | os.PathLike, group: dist.ProcessGroup | None = None) -> Path:
        """Write this rank's state into `folder`, which should be empty; return the file's path.

        All ranks call it, and return when all files are there. A file is whole or absent.

        Args:
            group: the optimizer's ranks once more, to wait for one another in; by default the
                optimizer's group, whose timeout a slow disk may exceed.

        Raises:
            OSError: on all ranks, where one cannot write.
        """
        return write_shard(folder, self.state_dict(), group or self.group)

    def load_shards(self, folder: str | os.PathLike) -> None:
        """Take over what any number of ranks saved, of either strategy; reads only what is needed.

        At the same number of ranks and with the same strategy and `bucket_cap_mb`, training goes on
        bit for bit. `load_unsharded` reads the same files.

        Raises:
            FileNotFoundError: a file is missing; on all ranks, as the others.
            ValueError: the files do not fit the parameters, or are not of one save.
        """
        on_each_rank(lambda: self._load(read_shards(folder), folder), self.group)

    def _load(self, state_dicts: list[dict[str, Any]], what: str | os.PathLike) -> None:
        unpack_shards(state_dicts, what, self.shards, self.inner, self.param_groups)
        self.state = self.inner.state

    def _make_inner(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self.optimizer_cls(groups, **self.kwargs)

    def _hand_over_gradients(self) -> None:
        """Give the inner optimizer the gradients of its parameters, in their dtype."""
        for shard in self.shards:
            if shard.leaf is shard.param:
                continue
            if shard.grad is not None and shard.is_fresh:
                shard.leaf.copy_(shard.weight)
                shard.is_fresh = False
            shard.leaf.grad = None if shard.grad is None else shard.grad.to(shard.leaf.dtype)


def _inner_group(group: dict[str, Any], shards: list[Shard]) -> dict[str, Any]:
    return {**settings_of(group), "params": [shard.leaf for shard in shards]}


def _describe(param: Tensor) -> str:
    kind = str(param.dtype).removeprefix("torch.")
    return f"{kind} {tuple(param.shape)}, {'trained' if param.requires_grad else 'frozen'}"


def _check_strategy(
    strategy: str,
    reduces_gradients: bool,
    overlap: bool,
    bucket_cap_mb: float,
) -> None:
    known = ", ".join(STRATEGIES)
    require(strategy in STRATEGIES, f"strategy is {strategy!r}; right is: one of {known}")
    if reduces_gradients and strategy != "flat":
        raise ValueError(
            f"reduces_gradients is True with strategy {strategy!r}; right is: strategy 'flat', or "
            "a wrapper of lib.ddp that averages gradients"
        )
    if overlap and not reduces_gradients:
        raise ValueError("overlap is True, reduces_gradients False; right is: both True")
    require(bucket_cap_mb > 0, f"bucket_cap_mb is {bucket_cap_mb}; right is: above 0")


def _check_elementwise(optimizer_cls: type[torch.optim.Optimizer], strategy: str) -> None:
    names = {cls.__name__ for cls in optimizer_cls.__mro__}
    if names & set(NOT_ELEMENTWISE[strategy]):
        is_whole = names.isdisjoint(NOT_ELEMENTWISE["parameters"])
        others = "strategy 'parameters'" if is_whole else "another"
        raise ValueError(
            f"optimizer_cls is {optimizer_cls.__name__}, whose update of an element needs others "
            f"that may be on another rank; right is: {others}"
        )
