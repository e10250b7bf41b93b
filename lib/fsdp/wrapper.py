"""Fully sharded data parallelism: ranks share parameters, gradients and optimizer state.

A rank holds 1/ranks of every matrix, and a whole block of them only while it computes with it
(ZeRO stage 3: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3; Zhao et al. 2023,
arXiv:2304.11277). With blocks 0, 1, 2 a step is

    forward    gather 0, 1 | run 0 | release 0, gather 2 | run 1 | release 1 | run 2
    backward   gather 1 | run 2 | release 2, send gradients 2, gather 0 | run 1 | … | run 0 | …

where gathering and sending go on while a block runs: the next one is **prefetched**. Sending is a
reduce-scatter, after which each rank has the mean gradient of its slice, and its optimizer updates
that slice:

    model = FSDP(module, compute_dtype=torch.bfloat16, blocks=module.layers)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with model.no_sync():
        loss(model(first)).backward()
    loss(model(second)).backward()
    model.finish_gradient_synchronization()
    model.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()

**Parameters.** Outside of forward and backward, the module's matrices are flat shards: 1-dim, a few
of them empty on some ranks. Optimizers must be elementwise (SGD, the Adam family). Vectors, such as
norms' weights and biases, are few; they stay whole on every rank, and their gradients are averaged
by `finish_gradient_synchronization`. `full_parameters` and `state_dict` gather everything.

**All ranks run the same blocks in the same order**, forward and backward; parameters inside a block
may be unused on some. A parameter without a gradient on any rank has none afterwards.

**After an exception in backward** that is raised on all ranks, the next forward pass starts anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.settings import require
from lib.ddp.buckets import GradientSync, MeanReduction, require_finished
from lib.ddp.process_group import agree, broadcast_module, describe_tensor, rank, world_size
from lib.fsdp.flat_parameters import FlatParameters, Places
from lib.optimizer.schedule import clip_coefficient, grad_norm, group_by

# Modules that are gathered together: one, or several that run one after another.
BlockOf = nn.Module | Sequence[nn.Module]


class Block:
    """Modules whose matrices are gathered together."""

    def __init__(self, modules: list[nn.Module], flats: list[FlatParameters]) -> None:
        self.modules, self.flats = modules, flats
        self.is_sent = False

    def each(self, method: Callable[[FlatParameters], None]) -> None:
        """Call a method of all its flat parameters."""
        for flat in self.flats:
            method(flat)


class FSDP(GradientSync, nn.Module):
    """A module whose matrices are divided among the ranks of a group.

    Args:
        module: starts on all ranks as on the group's rank 0; its frozen parameters are already
            frozen.
        compute_dtype: of gathered matrices (default: their own). Shards and gradients keep theirs.
        blocks: disjoint modules, or lists of modules, in the order in which forward first uses
            them (default: elements of each ModuleList and Sequential, and all other modules with
            matrices). What is outside stays gathered from forward to the end of backward, and so
            do matrices that several blocks share.
        full_precision: modules whose matrices are gathered in their own dtype.
        group: the ranks that share the work (default: all).
        prefetch: gather the next block while one runs.

    Raises:
        ValueError: modules or settings differ between ranks; blocks overlap.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        blocks: Iterable[BlockOf] | None = None,
        full_precision: Iterable[nn.Module] = (),
        group: dist.ProcessGroup | None = None,
        prefetch: bool = True,
    ) -> None:
        super().__init__()
        self.module, self.group, self.ranks = module, group, world_size(group)
        self.prefetches = prefetch
        chosen = [
            _as_list(block) for block in (default_blocks(module) if blocks is None else blocks)
        ]
        options = {"compute_dtype": compute_dtype, "prefetch": prefetch}
        agree(lambda: _facts(module, chosen, options), group)
        broadcast_module(module, group)
        named = dict(module.named_parameters())

        # Divide the matrices; the last block holds what is outside of all others.
        keeps_dtype = {id(p) for part in full_precision for p in part.parameters()}
        self.vectors = {name: param for name, param in named.items() if param.ndim < 2}
        places = places_of(module)
        self.blocks: list[Block] = []
        for modules, names in zip([*chosen, []], divide(module, chosen)):
            flats = []
            for members in group_alike({name: named[name] for name in names}, keeps_dtype):
                first = next(iter(members.values()))
                keeps = compute_dtype is None or id(first) in keeps_dtype
                dtype = first.dtype if keeps else compute_dtype
                at = [places[id(param)] for param in members.values()]
                flats.append(FlatParameters(members, at, group, dtype))  # type: ignore[arg-type]
            self.blocks.append(Block(modules, flats))
        self.outside = self.blocks.pop()
        for flat in self.flats:
            flat.use(flat.shards)

        # Where the model is: the block that runs, and whether this is the backward pass.
        self.running: Block | None = None
        self.is_in_backward = self.must_finish = False
        # the block whose gradients were sent last
        self.sending: Block | None = None
        self.block_of = {id(part): block for block in self.blocks for part in block.modules}
        for block in self.blocks:
            for part in block.modules:
                part.register_forward_pre_hook(functools.partial(_before_forward, self))
                part.register_forward_hook(functools.partial(_after_forward, self, block))

    @property
    def all_blocks(self) -> list[Block]:
        """Return the parts outside blocks, and the blocks, in the order of the forward pass."""
        return [self.outside, *self.blocks]

    @property
    def flats(self) -> list[FlatParameters]:
        """All flat parameters, in the order of forward."""
        return [flat for block in self.all_blocks for flat in block.flats]

    # Forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, whose blocks are gathered just before they run.

        Raises:
            RuntimeError: the gradients of the last backward pass were not synchronized.
        """
        if self.is_in_backward:
            self._start_anew()
        require_finished(self.must_finish)
        self.outside.each(FlatParameters.finish_gathering)
        output = self.module(*args, **kwargs)
        # autograd holds what stays gathered for backward
        for flat in self.flats:
            flat.use(flat.shards)
        for tensor in _tensors_in(output):
            # the first hook of backward, before any block's
            tensor.register_hook(lambda grad: self._start_backward())
        if not torch.is_grad_enabled():
            self._release_all()
        return output

    def before_part(self, part: nn.Module) -> None:
        """Gather the block of `part`, before its forward pass or before its weights are read."""
        block = self.block_of.get(id(part))
        if block is not None:
            self._enter(block, step=0 if self.is_in_backward else 1)

    def _enter(self, block: Block, step: int) -> None:
        """Gather `block`, prefetch the one that is `step` further, and release the one before."""
        before, self.running = self.running, block
        if before is not None and before is not block:
            before.each(FlatParameters.release)
        block.each(FlatParameters.start_gathering)
        index = self.blocks.index(block) + step
        if self.prefetches and step and 0 <= index < len(self.blocks):
            self.blocks[index].each(FlatParameters.start_gathering)
        block.each(FlatParameters.finish_gathering)

    # Backward

    def _start_backward(self) -> None:
        if not self.is_in_backward:
            self.is_in_backward = True
            # for blocks that are computed again
            self.outside.each(FlatParameters.finish_gathering)
            for block in self.all_blocks:
                block.is_sent = False
            # not called if an exception ends the backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, block: Block) -> None:
        """Send the gradients of the blocks that backward has passed, and gather `block`."""
        self._start_backward()
        index = self.blocks.index(block)
        for later in reversed(self.blocks[index + 1 :]):
            self._send(later)
        self._enter(block, step=-1)

    def _send(self, block: Block) -> None:
        """Reduce-scatter a block's gradients, or keep them in `no_sync`.

        Whatever was sent before is waited for, so that the gradients of at most one block are held.
        """
        if block.is_sent:
            return
        block.is_sent = True
        for flat in block.flats:
            if flat.is_trained:
                flat.take_gradients(send=self.is_syncing)
        if self.is_syncing:
            self._finish_sending()
            self.sending = block

    def _finish_sending(self) -> None:
        """Wait for the gradients that were sent last."""
        if self.sending is not None:
            self.sending.each(FlatParameters.finish_reducing)
            self.sending = None

    def _end_backward(self) -> None:
        for block in reversed(self.all_blocks):
            self._check_complete(block)
            self._send(block)
        self._release_all()
        self.must_finish |= self.is_syncing
        self.is_in_backward = False

    def _check_complete(self, block: Block) -> None:
        for flat in block.flats:
            for name, whole in zip(flat.names, flat.whole):
                if block.is_sent and whole.grad is not None:
                    raise RuntimeError(
                        f"the gradient of {name} grew after it was sent; blocks must be given in "
                        "the order in which forward uses them first"
                    )

    def _release_all(self) -> None:
        self.running = None
        for block in self.all_blocks:
            block.each(FlatParameters.release)

    def _start_anew(self) -> None:
        """Forget a backward pass that an exception ended, on all ranks alike."""
        self._finish_sending()
        for block in self.all_blocks:
            block.each(FlatParameters.drop_gradients)
        self._release_all()
        self.is_in_backward = False

    # Gradients

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Give every shard and vector its mean gradient; between backward and optimizer step."""
        self._finish_sending()
        flats = [flat for flat in self.flats if flat.is_trained]
        vectors = [param for param in self.vectors.values() if param.requires_grad]
        has_grad = [param.grad is not None for param in vectors]
        has_grad += [i in flat.seen for flat in flats for i in range(len(flat.shards))]
        for param in vectors:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        if self.ranks > 1 and has_grad:
            device = [*vectors, *(flat.slice for flat in flats)][0].device
            presence = torch.ones(len(has_grad), device=device)
            for index, has in enumerate(has_grad):
                if not has:
                    presence[index] = 0
            # all of a dtype in one message
            for _, tensors in group_by([*[p.grad for p in vectors], presence], lambda t: t.dtype):
                joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
                MeanReduction([joined], self.group).finish()
                means = joined.split([tensor.numel() for tensor in tensors])
                views = [mean.view(tensor.shape) for mean, tensor in zip(means, tensors)]
                torch._foreach_copy_(tensors, views)
            # the host waits only where a gradient is missing
            has_grad = has_grad if all(has_grad) else (presence > 0).tolist()
        shards = [shard for flat in flats for shard in flat.shards]
        for param, has in zip([*vectors, *shards], has_grad):
            if not has:
                param.grad = None
        for flat in flats:
            flat.seen.clear()
        self.must_finish = False

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The L2 norm of all averaged gradients: 0-dim, float32, the same on all ranks."""
        square = grad_norm(shard for flat in self.flats for shard in flat.shards).double().square()
        if self.ranks > 1:
            dist.all_reduce(square, group=self.group)
        vectors = grad_norm(self.vectors.values())
        return (square + vectors.to(square.device).double().square()).sqrt().float()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before."""
        norm = self.grad_norm()
        coefficient = clip_coefficient(norm, max_norm)
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(coefficient)
        return norm

    # State

    def full_parameters(self, *, on_first_only: bool = False) -> dict[str, Tensor]:
        """Whole parameters by the module's names, in their own dtype; all ranks call it.

        Args:
            on_first_only: gather block by block onto rank 0's CPU; other ranks get none.
        """
        whole: dict[str, Tensor] = {}
        for flat in self.flats:
            tensors = flat.gathered()
            if on_first_only:
                tensors = [t.cpu() for t in tensors] if rank(self.group) == 0 else []
            whole |= zip(flat.names, tensors)
        if not on_first_only or rank(self.group) == 0:
            whole |= {name: param.detach() for name, param in self.vectors.items()}
        return {name: whole[name] for name in self._named() if name in whole}

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict with whole parameters, on all ranks; all call it."""
        full = self.full_parameters()
        by_shard = {id(param): full[name] for name, param in self._named().items()}
        state = self.module.state_dict(*args, **(kwargs | {"keep_vars": True}))
        return {name: by_shard.get(id(value), value.detach()) for name, value in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:  # type: ignore[override]
        """Load a state dict with whole parameters, of which each rank keeps its part.

        Raises:
            ValueError: names or shapes do not fit.
        """
        own = self.module.state_dict(keep_vars=True)
        require(
            own.keys() == state_dict.keys(),
            f"state_dict must have the module's names, but differs in "
            f"{', '.join(sorted(own.keys() ^ state_dict.keys()))}",
        )
        index_of = {id(s): (flat, i) for flat in self.flats for i, s in enumerate(flat.shards)}
        for name, value in own.items():
            flat, index = index_of.get(id(value), (None, 0))
            shape = value.shape if flat is None else flat.whole[index].shape
            found = tuple(state_dict[name].shape)
            require(found == tuple(shape), f"{name} must have shape {tuple(shape)}, got {found}")
        for name, value in own.items():
            flat, index = index_of.get(id(value), (None, 0))
            if flat is None:
                value.copy_(state_dict[name])
            else:
                flat.set_whole(index, state_dict[name].to(flat.slice.device))


# Hooks; torch.compile must not trace into them


@torch.compiler.disable
def _before_forward(fsdp: FSDP, part: nn.Module, args: Any) -> None:
    fsdp.before_part(part)


@torch.compiler.disable
def _after_forward(fsdp: FSDP, block: Block, part: nn.Module, args: Any, output: Any) -> None:
    for tensor in _tensors_in(output):
        tensor.register_hook(lambda grad: fsdp._before_backward(block))


def _tensors_in(output: Any) -> list[Tensor]:
    """Tensors of a module's output that a gradient comes back to."""
    leaves, _ = torch.utils._pytree.tree_flatten(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


# Dividing a module


def default_blocks(module: nn.Module) -> list[nn.Module]:
    """Elements of each ModuleList and Sequential, and all other modules with matrices."""
    blocks: list[nn.Module] = []
    for child in module.children():
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential))
        has_own = any(param.ndim >= 2 for param in child.parameters(recurse=False))
        found = [child] if has_own else list(child.children()) if is_list else default_blocks(child)
        blocks += [part for part in found if any(p.ndim >= 2 for p in part.parameters())]
    return blocks


def _as_list(block: BlockOf) -> list[nn.Module]:
    return [block] if isinstance(block, nn.Module) else list(block)


def divide(module: nn.Module, blocks: list[list[nn.Module]]) -> list[list[str]]:
    """Names of the matrices of each block, and last of those outside of blocks or in several."""
    homes: dict[int, set[int]] = {}
    for number, modules in enumerate(blocks):
        for part in modules:
            for param in part.parameters():
                homes.setdefault(id(param), set()).add(number)
    names: list[list[str]] = [[] for _ in range(len(blocks) + 1)]
    for name, param in module.named_parameters():
        if param.ndim >= 2:
            found = homes.get(id(param), set())
            names[found.copy().pop() if len(found) == 1 else -1].append(name)
    return names


def places_of(module: nn.Module) -> dict[int, Places]:
    """Where each parameter is found, by its id."""
    places: dict[int, Places] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((part, name))
    return places


def group_alike(
    named: dict[str, nn.Parameter], keeps_dtype: set[int]
) -> list[dict[str, nn.Parameter]]:
    """Parameters that share a buffer: of one dtype, trained or frozen, gathered in one dtype."""
    groups: dict[Any, dict[str, nn.Parameter]] = {}
    for name, param in named.items():
        kind = (param.dtype, param.requires_grad, id(param) in keeps_dtype)
        groups.setdefault(kind, {})[name] = param
    return list(groups.values())


def _facts(
    module: nn.Module, blocks: list[list[nn.Module]], options: dict[str, Any]
) -> dict[str, str]:
    """Check the blocks; return what must be the same on all ranks."""
    seen: set[int] = set()
    for part in (part for modules in blocks for part in modules):
        inside = {id(child) for child in part.modules()}
        require(
            not seen & inside,
            f"blocks must not overlap, got a {type(part).__name__} that is in two of them",
        )
        seen |= inside
    facts = {name: str(value) for name, value in options.items()}
    facts |= {name: describe_tensor(param) for name, param in module.named_parameters()}
    names = divide(module, blocks)
    return facts | {f"block {i}": ", ".join(block) for i, block in enumerate(names)}
