"""Fully sharded data parallelism: ranks share parameters, gradients and optimizer state.

A rank holds 1/ranks of every matrix, and a whole block of them only while it computes with it
(ZeRO stage 3: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3; Zhao et al. 2023,
arXiv:2304.11277). With blocks 0, 1, 2 a step is

    forward    gather 0, 1 | run 0 | drop 0, gather 2 | run 1 | drop 1 | run 2
    backward   gather 1 | run 2 | drop 2, send gradients 2, gather 0 | run 1 | … | run 0 | …

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

**Parameters.** The module's own matrices become flat shards: 1-dim, a few of them empty on some
ranks, and so do the vectors beside a matrix, such as a layer's bias. Optimizers must be elementwise
(SGD, the Adam family). Modules of vectors alone, such as norms, are few; they stay whole on every
rank, and their gradients are averaged by `finish_gradient_synchronization`. `full_parameters` and
`state_dict` gather everything.

**Clip with the FSDP's own `clip_grad_norm`**: another function takes the norm of one rank's shards
alone, so that ranks clip vectors differently and no longer agree. That of `lib.optimizer` refuses
them; `torch.nn.utils.clip_grad_norm_` does it without a word.

**To save the optimizer, shard it.** The state of a plain one, as above, is that of this rank's
shards, and no other rank's; loaded on another rank, it may fit and be wrong. This one trains the
same, and `lib.checkpoint` saves the state of all ranks and loads it on any number of them:

    optimizer = ShardedOptimizer(
        model.whole_parameters(), AdamW, strategy=model.shards_of, lr=1e-3
    )

**Shards are all the state there is.** Every forward pass gathers them anew; in it a weight that is
read while its block is not gathered gathers it. Changed shards, also by `.to(dtype)`, are followed
in the next pass.

**All ranks run the same blocks in the same order**, forward and backward; parameters inside a block
may be unused on some if its outputs are tensors, in lists, dicts or dataclasses. A parameter
without a gradient on any rank has none afterwards. Other orders hang, or mix up blocks of equal
sizes. `finish_gradient_synchronization` compares them in the first step alone.

**After an exception in backward** that all ranks raise at the same point, clear the gradients,
through the optimizer or the model: the next forward pass starts anew. What was not averaged by
then, also in `no_sync` before, is forgotten.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.settings import require
from lib.ddp.flat import GradientSync, not_finished
from lib.ddp.process_group import (
    broadcast_module,
    gather_objects,
    mean_over_ranks,
    rank,
    world_size,
)
from lib.ddp.wrapper_base import Wrapper, inner_module
from lib.fsdp.blocks import (
    Block,
    BlockOf,
    checked_facts,
    default_blocks,
    make_blocks,
    tensors_in,
)
from lib.fsdp.flat_parameters import VERSION, FlatParameters, Placeholder
from lib.optimizer.adamw import clip_coefficient, grad_norm, group_by, scale_gradients
from lib.sharded_optimizer.shards import Shard, whole_shard


class FSDP(GradientSync, Wrapper):
    """A module whose matrices are divided among the ranks of a group.

    Args:
        module: starts on all ranks as on the group's rank 0. Its parameters become the shards.
        compute_dtype: of gathered parameters in floating point (default: their own). Shards keep
            theirs, and so do gradients, which are averaged in float32 at least.
        blocks: disjoint modules, or lists of modules, in the order in which forward first uses
            them, so that the next one is prefetched (default: elements of each ModuleList,
            ModuleDict and Sequential, and all other modules with matrices). What is outside stays
            gathered from forward to the end of backward, and so do parameters that several blocks
            share.
        full_precision: modules whose parameters are gathered in their own dtype.
        group: the ranks that share the work (default: all).
        prefetch: gather the next block while one runs.

    Raises:
        ValueError: modules or settings differ between ranks; blocks overlap or are not inside; a
            parameter is divided already, or has a gradient or a gradient hook.
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
        given = default_blocks(module) if blocks is None else blocks
        chosen = [[part] if isinstance(part, nn.Module) else list(part) for part in given]
        kept = list(full_precision)
        options = {"compute_dtype": compute_dtype, "prefetch": prefetch}
        broadcast_module(module, group, lambda: checked_facts(module, chosen, kept, options))

        # divide the parameters; the last block holds what is outside of all others
        self.blocks, self.vectors = make_blocks(module, chosen, group, compute_dtype, kept)
        self.unblocked = self.blocks.pop()
        # all, in the order of the forward pass
        self.all_blocks = [self.unblocked, *self.blocks]
        self.flats = [flat for block in self.all_blocks for flat in block.flats]
        self.note_parameters(module)
        # shards may be frozen and trained at any time
        self.frozen = {}
        # the block of each module; `self` stands for what is outside of all others
        self.block_of: dict[nn.Module, Block] = {self: self.unblocked}
        self.block_of |= {part: block for block in self.blocks for part in block.modules}
        self.flat_at: dict[int, FlatParameters] = {}
        for part, block in self.block_of.items():
            for flat in block.flats:
                flat.flat_at = self.flat_at
                flat.before_forward = functools.partial(self.before_forward, part)
                flat.before_backward = functools.partial(self.before_backward, block)

        # the block that runs, and whether this is a forward or a backward pass
        self.current: Block | None = None
        self.is_in_forward = self.is_in_backward = False
        # in backward: the block that it has reached, those that it has passed, and the flat
        # parameters whose gradients are on their way
        self.reached: Block | None = None
        self.passed: set[Block] = set()
        self.reducing: list[FlatParameters] = []
        # whether gradients of no_sync wait to be sent, and whether some were sent since the last
        # finish_gradient_synchronization
        self.has_unsent = self.must_finish = False
        # what was sent since the last forward pass began, until ranks have compared it once
        self.messages: list[str] | None = [] if self.ranks > 1 else None
        for flat in self.flats:
            flat.messages = self.messages
        # how tensors were saved for backward before this pass
        self.saving: Any = None
        self._add_hooks(module)

    def _add_hooks(self, module: nn.Module) -> None:
        # parts gather their block before they run
        module.register_forward_pre_hook(functools.partial(self.before_forward, self))
        for block in self.blocks:
            for part in block.modules:
                part.register_forward_pre_hook(self.before_forward)
                part.register_forward_hook(functools.partial(self.after_forward, block))
        # state dicts hold whole parameters; PyTorch sets an attribute of the second hook
        inner = inner_module(module)
        inner.register_state_dict_pre_hook(lambda *args: self.follow_shards())
        inner.register_state_dict_post_hook(functools.partial(self._put_whole))
        inner.register_load_state_dict_pre_hook(self._take_parts)

    # Forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, whose blocks are gathered just before they run.

        Raises:
            RuntimeError: the gradients of the last backward pass were not synchronized; a parameter
                was added or replaced; or see `FlatParameters.follow_shards`.
        """
        self.saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with torch.autograd.graph.saved_tensors_hooks(self._save, _read_saved):
            # a checkpoint around the whole module runs it again in backward
            if self.is_in_backward and torch._C._current_graph_task_id() >= 0:
                return self.module(*args, **kwargs)

            # after an optimizer step; what is outside of blocks is gathered for the whole step
            self.follow_shards()
            if self.must_finish:
                raise not_finished("forward")
            if self.messages is not None:
                self.messages.clear()
            self.is_in_forward = True
            for flat in self.flats:
                flat.put(flat.placeholders)
            self.before_forward(self)

            # run; what is gathered at the end waits for backward
            waits = False
            try:
                output = self.module(*args, **kwargs)
                waits = torch.is_grad_enabled()
            finally:
                self._end_pass(drops=not waits)
            return output

    def gather(self, block: Block, step: int = 0) -> None:
        """Gather `block`, drop the one before, and prefetch the one that is `step` further."""
        # drop the block before, so that at most this one and the next are gathered
        wanted = [block]
        if block is not self.unblocked:
            before, self.current = self.current, block
            if before is not None and before is not block:
                for flat in before.flats:
                    if flat.gathered:
                        flat.put(flat.placeholders)
                self.drop(before.flats)
            # prefetch
            after = block.index + step
            if step and self.prefetches and 0 <= after < len(self.blocks):
                wanted.append(self.blocks[after])

        # start the all-gathers, this block's first
        for one in wanted:
            for flat in one.flats:
                flat.start_gathering()

        # wait for this block
        for flat in block.flats:
            flat.wait()

    def drop(self, flats: list[FlatParameters]) -> None:
        """Free gathered parameters.

        Raises:
            RuntimeError: one was changed in place, which would be lost.
        """
        changed = [flat for flat in flats if flat.drop()]
        if changed:
            raise RuntimeError(
                f"a forward pass changed one of {', '.join(changed[0].names)} in place, in memory "
                "that is gathered for the pass alone; change parameters between steps"
            )

    # Hooks; torch.compile must not trace into them

    @torch.compiler.disable
    def before_forward(self, part: nn.Module, *args: Any) -> None:
        """Gather a module's block, before its forward pass or before its weights are read.

        Raises:
            RuntimeError: the module was called by itself, around the FSDP.
        """
        if not (self.is_in_forward or self.is_in_backward):
            raise RuntimeError(
                "the module must be called through its FSDP, which gathers the weights; for "
                "another function than forward, wrap a module that has it as its forward"
            )
        # a module without one has no matrices; a block of several is gathered for the first
        block = self.block_of.get(part)
        if block is not None and not any(flat.gathered for flat in block.flats):
            self.gather(block, step=0 if self.is_in_backward else 1)
            for flat in block.flats:
                flat.show()

    @torch.compiler.disable
    def after_forward(self, block: Block, module: Any, args: Any, output: Any) -> None:
        """Have autograd call `before_backward` when the gradient of an output is there."""
        # the block itself is dropped when the next one is gathered
        if torch.is_grad_enabled() and not self.is_in_backward:
            for tensor in [output] if isinstance(output, Tensor) else tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(functools.partial(self.before_backward, block))

    def before_backward(self, block: Block, *grads: Tensor) -> None:
        """Gather a block when backward comes to it, and send the gradients of the one before."""
        # backward begins: what is gathered still is that of the last block
        if not self.is_in_backward:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "backward must run without create_graph=True: the weights are gone when "
                    "gradients are differentiated again"
                )
            self.is_in_backward = True
            self.passed.clear()
            for flat in self.flats:
                flat.put(flat.gathered or flat.placeholders)
            self.gather(self.unblocked)
            # not called if an exception ends the backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

        # called for each output and each saved weight of a block
        before = self.reached
        if block is self.unblocked or (block is before and block is self.current):
            return
        # the block before is done; the next one is that of the layer below
        self.reached = block
        if before is not None and before is not block:
            self.after_backward(before)
        self.gather(block, step=-1)

    def after_backward(self, block: Block) -> None:
        """Start the reduce-scatter of a block's gradients; in `no_sync` keep them."""
        self.passed.add(block)
        # wait for what was sent before, so that at most one block's gradients are on their way
        self.receive()
        trained = [flat for flat in block.flats if flat.is_trained]
        for flat in trained:
            flat.send(now=self.is_syncing)
        if self.is_syncing:
            self.reducing = trained

    def receive(self) -> None:
        """Wait for the gradients that were sent last, and add their means to the shards'."""
        for flat in self.reducing:
            flat.receive_mean()
        self.reducing = []

    # Passes

    def follow_shards(self) -> None:
        """Follow changes of the shards between passes; see `FlatParameters.follow_shards`."""
        self.settle()
        self.check_parameters()
        # what a pass without backward left
        self.drop(self.flats)
        for flat in self.flats:
            flat.follow_shards()

    def _end_pass(self, drops: bool = True) -> None:
        """Put the shards back into the model; drop what is gathered, unless backward needs it."""
        self.is_in_forward = self.is_in_backward = False
        self.reached = None
        for flat in self.flats:
            flat.put(flat.shards)
        if drops:
            self.drop(self.flats)

    def _save(self, tensor: Tensor) -> Any:
        """Let autograd save, for `_read_saved`, where gathered memory was in place of it."""
        if torch._C._has_storage(tensor):
            flat = self.flat_at.get(tensor.untyped_storage()._cdata)
            if flat is not None and not (tensor.is_conj() or tensor.is_neg()):
                layout = tensor.storage_offset(), tensor.shape, tensor.stride()
                return flat, flat.version, tensor.dtype, layout
        if self.saving is not None:
            pack, unpack = self.saving
            return functools.partial(unpack, pack(tensor))
        return tensor.detach(), tensor._version

    def _end_backward(self) -> None:
        # send what was not sent yet
        for block in reversed(self.all_blocks):
            # gradients may also come after backward has left a block
            with torch._C.DisableTorchFunctionSubclass():
                is_late = any(w.grad is not None for flat in block.flats for w in flat.placeholders)
            if is_late or block not in self.passed:
                self.after_backward(block)
        # then all gradients of matrices are where `zero_grad` finds them
        self.receive()
        self._end_pass()
        if not self.is_syncing:
            self.has_unsent = True
        elif not self.must_finish:
            # a frozen module, through which backward went to another one, has nothing to average
            is_trained = [flat.is_trained for flat in self.flats]
            is_trained += [param.requires_grad for param in self.vectors.values()]
            self.must_finish = any(is_trained)

    def settle(self) -> None:
        """Forget a backward pass that an exception has ended; on all ranks."""
        if self.is_in_backward and torch._C._current_graph_task_id() < 0:
            # also what is on its way: the optimizer may have cleared the shards' gradients by now
            self.reducing = []
            for flat in self.flats:
                flat.drop_gradients()
            self.has_unsent = self.must_finish = False
            self._end_pass()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, and the parameters that every rank has."""
        self.settle()
        return super().named_parameters(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        # with cuDNN, recurrent modules would move their shards into memory of their own
        is_enabled, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
        try:
            return super()._apply(*args, **kwargs)
        finally:
            torch.backends.cudnn.enabled = is_enabled

    # Gradients

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Give every shard and vector its mean gradient; between backward and optimizer step.

        Gradients of passes in `no_sync` are averaged too. Called again, it changes nothing.

        Raises:
            ValueError: in the first step, if ranks ran other blocks or in another order.
        """
        self.settle()
        if self.messages:
            self._check_order(self.messages)
        # matrices: backward has sent their gradients, unless it ran in no_sync on all ranks
        if self.has_unsent:
            is_syncing, self.is_syncing = self.is_syncing, True
            for block in reversed(self.all_blocks):
                self.after_backward(block)
            self.receive()
            self.is_syncing, self.has_unsent = is_syncing, False

        # vectors, and who has gradients: a parameter that no rank has used has none
        flats = [flat for flat in self.flats if flat.is_trained]
        vectors = [param for param in self.vectors.values() if param.requires_grad]
        has_grad = [param.grad is not None for param in vectors]
        for flat in flats:
            # this rank's own, or a mean of before; but not that of an empty part, which may be an
            # old one, as an optimizer of the other shards does not clear it
            has_grad += [
                index in flat.seen
                or (
                    (shard.grad is not None and index not in flat.from_others)
                    and (shard.numel() > 0 or flat.sizes[index] == 0)
                )
                for index, shard in enumerate(flat.shards)
            ]
        has_grad = self._average_vectors(vectors, flats, has_grad)
        shards = [shard for flat in flats for shard in flat.shards]
        for param, has in zip([*vectors, *shards], has_grad):
            if not has:
                param.grad = None

        # ready for the next step
        for flat in flats:
            flat.seen.clear()
            flat.from_others.clear()
        self.must_finish = False

    def _check_order(self, messages: list[str]) -> None:
        """Refuse passes in which ranks ran different blocks; once."""
        # one number tells whether they are alike
        number = zlib.crc32(" ".join(messages).encode())
        is_alike = mean_over_ranks(number, self.group) == number
        first, *others = [messages] if is_alike else gather_objects(messages, self.group)
        for other, theirs in enumerate(others, start=1):
            for one, another in itertools.zip_longest(first, theirs, fillvalue="end of the pass"):
                require(
                    one == another,
                    "all ranks must run the same blocks in the same order, but rank 0 came to the "
                    f"{one} when rank {other} came to the {another}; where a block has no inputs, "
                    "run it on an empty batch",
                )
        self.messages = None
        for flat in self.flats:
            flat.messages = None

    def _average_vectors(
        self, vectors: list[nn.Parameter], flats: list[FlatParameters], has_grad: list[bool]
    ) -> list[bool]:
        """Average the gradients of vectors; return which parameters have one on any rank.

        Args:
            has_grad: for each vector, then each shard of `flats`, whether this rank has a gradient.
        """
        if self.ranks == 1 or not has_grad:
            return has_grad
        # zeros where this rank has no gradient
        for param in vectors:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        device = [*vectors, *(flat.mine for flat in flats)][0].device
        presence = torch.ones(len(has_grad), device=device)
        for index, has in enumerate(has_grad):
            if not has:
                presence[index] = 0
        # one all-reduce for each dtype
        for _, tensors in group_by([*[p.grad for p in vectors], presence], lambda t: t.dtype):
            joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(joined, group=self.group)
            means = joined.div_(self.ranks).split([tensor.numel() for tensor in tensors])
            views = [mean.view(tensor.shape) for mean, tensor in zip(means, tensors)]
            torch._foreach_copy_(tensors, views)
        # the host waits only where a gradient is missing
        return has_grad if all(has_grad) else (presence > 0).tolist()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The L2 norm of all averaged gradients: 0-dim, the same on all ranks.

        float32, or float64 where a parameter is, as `lib.optimizer.adamw.grad_norm`.

        Raises:
            RuntimeError: the gradients of the last backward pass were not synchronized.
        """
        if self.must_finish:
            raise RuntimeError(
                "the norm of gradients that were not averaged; call "
                "finish_gradient_synchronization() after backward() and before this"
            )
        # norm² of all matrices = sum of the ranks' norm²; vectors are the same on all ranks
        square = grad_norm(shard for flat in self.flats for shard in flat.shards).double().square()
        if self.ranks > 1:
            dist.all_reduce(square, group=self.group)
        vectors = grad_norm(self.vectors.values())
        norm = (square + vectors.to(square.device).double().square()).sqrt()
        wide = (torch.float64, torch.complex128)
        return norm if any(param.dtype in wide for param in self.parameters()) else norm.float()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before.

        Raises:
            RuntimeError: the gradients of the last backward pass were not synchronized.
            ValueError: `max_norm` is negative.
        """
        norm = self.grad_norm()
        scale_gradients(self.parameters(), clip_coefficient(norm, max_norm))
        return norm

    # State, with whole parameters; all ranks call these methods and `state_dict`

    def full_parameters(self, *, on_first_only: bool = False) -> dict[str, Tensor]:
        """Copies of the whole parameters by the module's names, in their own dtype.

        Args:
            on_first_only: gather block by block onto rank 0's CPU; other ranks get none.

        Raises:
            RuntimeError: the gradients of the last backward pass were not synchronized.
        """
        self.follow_shards()
        if self.must_finish:
            raise not_finished("state_dict() or full_parameters()")
        whole: dict[str, Tensor] = {}
        for flat in self.flats:
            tensors = flat.copies()
            if on_first_only:
                tensors = [t.cpu() for t in tensors] if rank(self.group) == 0 else []
            whole |= zip(flat.names, tensors)
        if not on_first_only:
            whole |= {name: param.detach().clone() for name, param in self.vectors.items()}
        elif rank(self.group) == 0:
            whole |= {name: p.detach().to("cpu", copy=True) for name, p in self.vectors.items()}
        return {name: whole[name] for name, _ in self.module.named_parameters() if name in whole}

    def whole_parameters(self) -> list[nn.Parameter]:
        """Parameters in their whole shapes, in the module's order; divided ones have no memory.

        They are what `ShardedOptimizer` is given, with `shards_of` as its strategy.
        """
        whole = {n: w for flat in self.flats for n, w in zip(flat.names, flat.placeholders)}
        return [whole.get(name, param) for name, param in self.module.named_parameters()]

    def shards_of(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """This rank's shards of `whole_parameters`, numbered from `first`; vectors are whole."""
        shards = []
        for number, param in enumerate(params, first):
            if not isinstance(param, Placeholder):
                shards.append(whole_shard(param, number))
                continue
            part, leaf = param.flat.own[param.number], param.flat.shards[param.number]
            if part.stop > part.start:
                shards.append(Shard(param, number, part.start, part.stop, leaf))
        return shards

    def _put_whole(self, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace the shards in the module's state dict by whole parameters, on all ranks."""
        full = self.full_parameters()
        by_id = {id(param): full[name] for name, param in self.module.named_parameters()}
        for name, param in module.named_parameters(remove_duplicate=False):
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = by_id[id(param)]

    def _take_parts(self, module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Replace whole parameters in a state dict that is loaded by this rank's parts.

        Raises:
            ValueError: one has another shape.
        """
        self.follow_shards()
        place_of = {id(s): (flat, i) for flat in self.flats for i, s in enumerate(flat.shards)}
        for name, param in module.named_parameters(remove_duplicate=False):
            value = state.get(f"{prefix}{name}")
            if id(param) in place_of and isinstance(value, Tensor):
                flat, index = place_of[id(param)]
                shape, part = tuple(flat.shapes[index]), flat.own[index]
                found = tuple(value.shape)
                require(found == shape, f"{name} must have shape {shape}, got {found}")
                state[f"{prefix}{name}"] = value.reshape(-1)[part.start : part.stop]

    def __getstate__(self) -> dict[str, Any]:
        """Refuse `copy.deepcopy` and pickle with a TypeError."""
        raise TypeError(
            "an FSDP cannot be copied or pickled: each rank has a part of it, and a process group; "
            "copy or save its state_dict(), which all ranks call, and load it into another one"
        )


# Tensors that autograd saves


def _read_saved(saved: Any) -> Tensor:
    """The tensor of which `FSDP._save` returned `saved`."""
    if isinstance(saved, functools.partial):
        return saved()
    owner, version, *view = saved
    changed = ""
    if view:
        owner.before_backward()
        if sum(map(VERSION, owner.shards)) != version:
            changed = f"one of {', '.join(owner.names)} is not as in the forward pass"
    elif owner._version != version:
        changed = f"a tensor of shape {tuple(owner.shape)}"
    if changed:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {changed}"
        )
    if not view:
        return owner
    # the same view of the memory into which it was gathered again
    dtype, layout = view
    return owner.buffer.new_empty(0, dtype=dtype).set_(owner.buffer.untyped_storage(), *layout)
