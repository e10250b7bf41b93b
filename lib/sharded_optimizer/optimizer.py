"""ZeRO stage 1: each rank keeps the optimizer state of a part of the model, and updates that part.

AdamW keeps 8 or 12 bytes per weight, and in plain data parallelism every rank keeps the same
ones. Here each rank keeps 1/world_size (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1).
A step has four phases:

1. **average gradients** (`finish_gradient_synchronization`): each rank gets the mean gradient of
   its shards. A wrapper of `lib.ddp.wrappers` averages all gradients, or with `reduces_gradients`
   a reduce-scatter here gives each rank its part alone, started in backward with `overlap`;
2. **norm** (`grad_norm`, `clip_grad_norm`): each rank sums the squares of its part, and one number
   is all-reduced;
3. **update** (`step`): the inner optimizer updates this rank's shards;
4. **gather** (`step`): the ranks exchange updated parameters, under the next forward pass with
   `overlap_gather_with_forward`.

Two strategies give the same result:

- `parameters`: whole parameters are assigned to ranks, balanced by size, and each owner broadcasts
  its own after the update. Easy to read.
- `flat`: parameters are laid out in flat buffers, which are cut into equal slices. Reduce-scatter
  and all-gather together send what one all-reduce does.

One step of `parameters`, behind a wrapper that averages gradients:

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
    optimizer.finish_gradient_synchronization()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()

**Missing gradients.** A parameter without a gradient on any rank is left alone, as by an unsharded
optimizer. With `reduces_gradients`, one that some rank used gets the mean, in which the other
ranks count as zero.

**With `reduces_gradients`** averaged gradients are in the shards. Only the optimizer's own
`zero_grad` clears them: with the module's alone, those of all steps add up. Its own
`clip_grad_norm` alone finds them: `torch.nn.utils.clip_grad_norm_` returns 0 and clips nothing, and
that of `lib.optimizer` refuses. `torch.amp.GradScaler` would look at the wrong gradients: each rank
at its own, some of which are in the shards already. After an exception in backward, ranks on which
every gradient had already arrived call `zero_grad` and go on. Two optimizers overlap only if all
ranks use the same parameters in the same order: each waits in backward for its own reduce-scatters,
which a rank with another order would start too late, and all would hang.

**Memory of `flat`.** Parameters become views of the buffers, at new addresses: capture CUDA graphs
later, and convert and move the module before. They are contiguous from then on. With
`reduces_gradients` a gradient moves into the shards when it is averaged; the parameter's `.grad`
is None afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.settings import require
from lib.ddp.flat import checked_cap
from lib.ddp.process_group import (
    agree,
    checksums,
    describe_tensor,
    gather_objects,
    is_sharded,
    on_each_rank,
    rank,
    world_size,
)
from lib.optimizer.adamw import (
    AdamW,
    Optimizer,
    clip_coefficient,
    grad_norm,
    scale_gradients,
)
from lib.sharded_optimizer.flat_slices import FlatSlices
from lib.sharded_optimizer.saved_state import pack_shards, unpack_shards
from lib.sharded_optimizer.shards import Shard, settings_of, whole_shards
from lib.sharded_optimizer.whole_parameters import WholeParameters

STRATEGIES = ("parameters", "flat")
# Returns this rank's shards of parameters, whose numbers begin with the second argument.
Divide = Callable[[list[nn.Parameter], int], list[Shard]]
# Their update of an element reads no other one, so that a slice can be updated by itself.
OPTIMIZERS = (AdamW, torch.optim.AdamW, torch.optim.SGD)


class ShardedOptimizer(Optimizer):
    """AdamW or SGD whose state is divided among the ranks of a group.

    To its caller it is one optimizer over all parameters, with parameter groups and schedulers.
    `inner` is the `optimizer_cls` over this rank's shards; `state` is the inner optimizer's. In a
    group of one rank it is the plain optimizer. All ranks make the same calls in the same order,
    starting from equal parameters. Clip and clear gradients with its own methods.

    Args:
        params: as for any optimizer; tied parameters once. With `module.named_parameters()` ranks
            compare names. Without names, an order that differs between ranks is found by values
            alone: equal ones in another order, such as two new norms, are not, and ranks end with
            different weights.
        optimizer_cls: `lib.optimizer.adamw.AdamW`, torch.optim.AdamW, torch.optim.SGD, or a
            subclass whose update of an element reads no other one.
        group: the ranks that share the state (default: all).
        strategy: `parameters` or `flat`, see above; or, for parameters that FSDP has divided among
            the ranks, what returns this rank's shards. Ranks then exchange nothing here.
        reduces_gradients: whether each rank's gradients are its own, to be averaged here; `flat`
            only. Without it, the caller or a wrapper averages them before `step` and `grad_norm`.
            With it, the module's `zero_grad` does not clear them, but this optimizer's.
        overlap: whether that happens during backward, bucket by bucket.
        bucket_cap_mb: MiB (2²⁰ bytes) of parameters in a buffer of `flat`; a larger parameter gets
            its own.
        kwargs: arguments of `optimizer_cls`.

    Raises:
        ValueError: an argument is wrong, or parameters differ between ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        strategy: Literal["parameters", "flat"] | Divide = "parameters",
        reduces_gradients: bool = False,
        overlap: bool = False,
        bucket_cap_mb: float = 25.0,
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {
            "reduces_gradients": reduces_gradients,
            "overlap": overlap,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self.group, self.ranks, self.is_checked = group, world_size(group), False
        self.shards_whole = isinstance(strategy, str)
        self.inner: torch.optim.Optimizer | None = None

        def checked() -> dict[str, str]:
            _check_arguments(optimizer_cls, strategy, **options)
            # without parameters, to learn its defaults
            defaults = dict(optimizer_cls([{"params": []}], **kwargs).defaults)
            Optimizer.__init__(self, params, defaults)
            # a partial function has no name of its own
            name = getattr(strategy, "__qualname__", type(strategy).__name__)
            name = strategy if isinstance(strategy, str) else name
            facts = {"strategy": name, "optimizer_cls": optimizer_cls.__qualname__} | options
            return {name: str(value) for name, value in facts.items()} | self._facts()

        agree(checked, group)
        # who averages gradients and sends parameters: `flat` both, `parameters` only the latter
        self.flat: FlatSlices | None = None
        self.strategy: FlatSlices | WholeParameters | None = None
        if self.ranks > 1 and strategy == "flat":
            self.strategy = self.flat = FlatSlices(group, **options)
        elif self.ranks > 1 and strategy == "parameters":
            self.strategy = WholeParameters(group)

        # the inner optimizer has this rank's shards of each parameter group
        divide = whole_shards if isinstance(strategy, str) else strategy
        if self.strategy:
            divide = self.strategy.add
        self.shards: list[Shard] = []
        inner_groups, params = [], []
        for param_group in self.param_groups:
            shards = divide(param_group["params"], len(params))
            leaves = [shard.leaf for shard in shards]
            inner_groups.append({**settings_of(param_group), "params": leaves})
            self.shards += shards
            params += param_group["params"]
        self.inner = on_each_rank(lambda: optimizer_cls(inner_groups, **kwargs), group)
        self.state = self.inner.state
        # shards that all ranks have, and update in the same way: of a divided module the vectors
        self.replicated: list[Shard] = []
        if not self.shards_whole:
            self.replicated = [shard for shard in self.shards if shard.leaf is shard.param]

    def __getstate__(self) -> dict[str, Any]:
        """Refuse `copy.deepcopy` and pickle with a TypeError."""
        raise TypeError(
            "a ShardedOptimizer cannot be copied or pickled; make one for the copied parameters, "
            "and give it this one's state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by the constructor for each parameter group.

        Raises:
            ValueError: a parameter is given twice.
            RuntimeError: called later.
        """
        if self.inner is not None:
            raise RuntimeError(
                "a ShardedOptimizer takes all parameters when it is created; make a new one with "
                "these, too"
            )
        super().add_param_group(param_group)
        different = len(set(param_group["params"]))
        is_once = different == len(param_group["params"])
        require(is_once, "params must hold each parameter once, got one of them twice")

    def _facts(self) -> dict[str, str]:
        """The properties of parameter groups that all ranks must share."""
        facts, number = {}, 0
        for index, group in enumerate(self.param_groups):
            # names if the caller gave them
            names = group.get("param_names") or [""] * len(group["params"])
            for name, param in zip(names, group["params"]):
                facts[f"parameter {number}"] = f"{name} {describe_tensor(param)}".strip()
                require(
                    not self.shards_whole or not is_sharded(param),
                    f"parameter {number} must be whole, but is divided among the ranks already; "
                    "give the plain optimizer this rank's shards",
                )
                number += 1
            facts[f"length of parameter group {index}"] = str(len(group["params"]))
            for name, value in settings_of(group).items():
                shown = value.tolist() if isinstance(value, Tensor) else value
                facts[f"{name} of parameter group {index}"] = str(shown)
        return facts

    def no_sync(self) -> contextlib.AbstractContextManager:
        """In the block, backward passes only add up gradients on this rank (for `overlap`)."""
        return self.flat.no_sync() if self.flat else contextlib.nullcontext()

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Give each shard its averaged gradient; after the last backward pass, on all ranks.

        With `reduces_gradients` this finishes the reduce-scatters, and starts those that backward
        did not; without, it takes gradients that a wrapper has averaged. `grad_norm`,
        `clip_grad_norm` and `step` call it if the caller has not.

        Raises:
            RuntimeError: a parameter was moved, or gradients came after they were averaged.
        """
        if self.flat:
            self.flat.finish_gradient_synchronization()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The L2 norm of all averaged gradients: 0-dim, the same on all ranks.

        float32, or float64 where a parameter is, as `lib.optimizer.adamw.grad_norm`.

        Raises:
            RuntimeError: as `finish_gradient_synchronization`.
            ValueError: as `step`.
        """
        self._check_values()
        if self.flat:
            self.flat.finish_gradient_synchronization()
        if isinstance(self.inner, AdamW):
            norm = self.inner.grad_norm()
        else:
            norm = grad_norm(shard.leaf for shard in self.shards)
        if self.ranks == 1:
            return norm
        # a rank without shards has its norm, 0, on the CPU
        params = [param for group in self.param_groups for param in group["params"]]
        device = (self.shards[0].leaf if self.shards else params[0] if params else norm).device
        # norm² of the whole = sum of the ranks' norm²
        square = norm.to(device, torch.float64).square()
        dist.all_reduce(square, group=self.group)
        replicated = [s.leaf for s in self.replicated if s.leaf.grad is not None]
        if replicated:
            # counted once on each rank; infinity less infinity would be no number
            once = grad_norm(replicated).to(device, torch.float64).square()
            others = (self.ranks - 1) * once
            square = torch.where(once.isfinite(), square - others, once)
        is_double = any(param.dtype in (torch.float64, torch.complex128) for param in params)
        return square.sqrt().to(torch.float64 if is_double else torch.float32)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before.

        The same as `lib.optimizer.adamw.clip_grad_norm` of the averaged gradients, of which
        each rank scales its own part.

        Raises:
            RuntimeError: as `finish_gradient_synchronization`.
            ValueError: `max_norm` is negative; or as `step`.
        """
        norm = self.grad_norm()
        leaves = (shard.leaf for shard in self.shards)
        scale_gradients(leaves, clip_coefficient(norm, max_norm))
        return norm

    @torch.no_grad()
    def step(self, closure: None = None, **options: Any) -> None:  # type: ignore[override]
        """Update this rank's shards and gather all parameters.

        The phases: finish averaging gradients, update this rank's shards with the inner optimizer,
        and gather the parameters, for which the next forward pass may wait.

        Args:
            closure: must be None.
            options: for the inner optimizer's step, such as `grad_scale` and `skip` of
                `lib.optimizer.adamw.AdamW`.

        Raises:
            RuntimeError: as `finish_gradient_synchronization`.
            TypeError: the inner optimizer does not know an option.
            ValueError: there is a closure; in the first step also if the values of parameters
                differ between ranks, or gradients that are not averaged here.
        """
        if closure is not None:
            raise ValueError(f"closure must be None, got {closure}; call backward before step")
        self._check_values()

        # average gradients: reduce-scatter, unless that is done
        if self.flat:
            self.flat.finish_gradient_synchronization()

        # update this rank's shards; schedulers set `lr` here
        for group, inner_group in zip(self.param_groups, self.inner.param_groups):
            inner_group |= {**group, "params": inner_group["params"]}
        self.inner.step(**options)

        # gather the parameters; in a CUDA graph the next forward pass does
        if self.flat and self.flat.starts_in_forward:
            self.flat.must_gather = True
        elif self.strategy:
            self.strategy.gather_parameters()

    def _check_values(self) -> None:
        """Refuse, once, parameters or averaged gradients that differ between ranks.

        Parameters do in another order, and gradients if nobody has averaged them. Clipping, which
        comes after this, changes a rank's own part of them.
        """
        if self.is_checked or self.ranks == 1 or not self.shards_whole:
            return
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [] if self.flat and self.flat.reduces_gradients else [p.grad for p in params]
        dense = [i for i, g in enumerate(grads) if g is not None and g.layout == torch.strided]
        sums = dict(zip(dense, checksums(grads[i] for i in dense)))  # type: ignore[misc]  # not None
        found = [(value, sums.get(number)) for number, value in enumerate(checksums(params))]
        first, *others = gather_objects(found, self.group)
        for other, theirs in enumerate(others, start=1):
            for number, (one, another) in enumerate(zip(first, theirs)):
                where = (
                    f"parameter {number}, of shape {tuple(params[number].shape)}, has other "
                    f"{'values' if one[0] != another[0] else 'gradients'} on rank {other} than on "
                    "rank 0"
                )
                require(
                    one[0] == another[0],
                    "parameters must be given in the same order and start with the same values on "
                    f"all ranks, but {where}; broadcast_module(module) or a wrapper of lib.ddp "
                    "gives all ranks those of rank 0",
                )
                require(
                    one[1] == another[1],
                    f"gradients must be averaged before step() and grad_norm(), but {where}; call "
                    "finish_gradient_synchronization() of a wrapper of lib.ddp, or make the "
                    "optimizer with strategy='flat' and reduces_gradients=True",
                )
        self.is_checked = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero; on all ranks."""
        # first finish what a backward pass has started, in the same order on all ranks
        if self.flat:
            if self.flat.arrived:
                self.flat.finish_gradient_synchronization()
            self.flat.is_closed = False
        self.inner.zero_grad(set_to_none)
        # and those of whole parameters, which a wrapper has averaged
        if self.shards_whole:
            super().zero_grad(set_to_none)

    def overlap_gather_with_forward(
        self, parts: Sequence[nn.Module], *, in_graph: bool
    ) -> Callable[[nn.Module], None]:
        """Let `step` return while parameters are still being gathered (`flat` only).

        The all-gathers then run under the forward passes of earlier parts. Buckets with parameters
        outside of `parts` are still waited for in the step. To read parameters in other ways, call
        `wait_for_parameters` first, on all ranks together if `in_graph`.

        Args:
            parts: modules that forward passes run one after another.
            in_graph: whether a CUDA graph captures forward, backward and step. It cannot leave
                anything pending at its end, so forward then also starts the all-gathers; call
                `mark_replayed` after each replay.

        Returns:
            What the model must call with a module of `parts`, or one inside, just before it reads
            that module's parameters: it waits for them.
        """
        if not self.flat:
            return lambda part: None
        return self.flat.overlap_gather_with_forward(parts, in_graph=in_graph)

    def mark_replayed(self) -> None:
        """Note that a CUDA graph's replay has updated the shards, which must be gathered."""
        if self.flat:
            self.flat.must_gather = self.flat.starts_in_forward

    def wait_for_parameters(self, params: Iterable[Tensor] | None = None) -> None:
        """Wait until `params` (default: all) have the values of the last step.

        Needed after `overlap_gather_with_forward` only, to read parameters outside of forward.
        """
        if self.flat:
            self.flat.wait_for_parameters(params)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, and which elements it is for; see `saved_state`."""
        self.wait_for_parameters()
        saved_by_rank_0 = self.replicated if rank(self.group) else []
        own = [shard for shard in self.shards if shard not in saved_by_rank_0]
        packed = pack_shards(own, self.inner, self.param_groups)
        return packed | {"rank": rank(self.group), "world_size": world_size(self.group)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's `state_dict`, or that of an unsharded optimizer.

        Raises:
            ValueError: it does not fit, or comes from another rank or number of ranks.
        """
        self.load_state_dicts([state_dict], "state_dict")

    def load_state_dicts(
        self, state_dicts: list[dict[str, Any]], source: str | os.PathLike
    ) -> None:
        """Load this rank's part of the `state_dict` of all ranks, of any number and strategy.

        With the same number of ranks, strategy and `bucket_cap_mb`, training continues bit for bit.

        Args:
            source: where they come from, for error messages.

        Raises:
            ValueError: they do not fit; on this rank only.
        """
        unpack_shards(state_dicts, source, self.shards, self.inner, self.param_groups)
        self.state = self.inner.state


def _check_arguments(
    optimizer_cls: Any,
    strategy: str | Divide,
    *,
    reduces_gradients: bool,
    overlap: bool,
    bucket_cap_mb: float,
) -> None:
    is_class = isinstance(optimizer_cls, type) and issubclass(optimizer_cls, OPTIMIZERS)
    name = getattr(optimizer_cls, "__qualname__", repr(optimizer_cls))
    require(
        is_class,
        "optimizer_cls must be AdamW, of lib.optimizer or torch.optim, or torch.optim.SGD, or a "
        f"subclass, got {name}",
    )
    known = ", ".join(STRATEGIES)
    is_known = callable(strategy) or strategy in STRATEGIES
    require(is_known, f"strategy must be one of {known}, got {strategy!r}")
    require(
        strategy == "flat" or not reduces_gradients,
        f"strategy must be 'flat' with reduces_gradients, got {strategy!r}; others need a wrapper "
        "of lib.ddp.wrappers that averages gradients",
    )
    message = "overlap must be False without reduces_gradients, got True"
    require(reduces_gradients or not overlap, message)
    checked_cap(bucket_cap_mb)
