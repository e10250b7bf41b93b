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

**Parameters.** The module's own matrices become flat shards: 1-dim, a few of them empty on some
ranks, and so do the vectors beside a matrix, such as a layer's bias. Optimizers must be elementwise
(SGD, the Adam family). Modules of vectors alone, such as norms, are few; they stay whole on every
rank, and their gradients are averaged by `finish_gradient_synchronization`. `full_parameters` and
`state_dict` gather everything.

**Shards are all the state there is.** Every forward pass gathers them anew; in it a weight that is
not gathered is a stand-in, which gathers its block when it is read, and keeps it until the end of
backward. Changed shards, also by `.to(dtype)`, are followed in the next pass.

**All ranks run the same blocks in the same order**, forward and backward; parameters inside a block
may be unused on some. A parameter without a gradient on any rank has none afterwards.

**After an exception in backward** that is raised on all ranks, the next forward pass starts anew.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.flat import GradientSync, average, require_finished
from lib.ddp.process_group import agree, broadcast_module, world_size
from lib.fsdp.blocks import (
    Block,
    BlockOf,
    Use,
    as_list,
    checked_facts,
    default_blocks,
    is_gathered_weight,
    listed,
    make_blocks,
    tensors_in,
)
from lib.fsdp.flat_parameters import FlatParameters
from lib.fsdp.whole_state import WholeState
from lib.optimizer.schedule import clip_coefficient, grad_norm, group_by

log = logging.getLogger(__name__)


class FSDP(GradientSync, WholeState, nn.Module):  # type: ignore[misc]
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
        options = {"compute_dtype": compute_dtype, "prefetch": prefetch}
        chosen: list[list[nn.Module]] = []
        kept: list[nn.Module] = []

        def checked() -> dict[str, str]:
            given = default_blocks(module) if blocks is None else listed("blocks", blocks)
            chosen.extend(map(as_list, given))
            kept.extend(listed("full_precision", full_precision))
            return checked_facts(module, chosen, kept, options)

        agree(checked, group)
        broadcast_module(module, group)

        # Divide the parameters; the last block holds what is outside of all others.
        self.blocks, self.vectors = make_blocks(module, chosen, group, compute_dtype, kept)
        self.outside = self.blocks.pop()
        self._let_stand_ins_gather()

        # Where the model is: the block that runs, and whether this is a pass forward or backward.
        self.running: Block | None = None
        self.is_in_forward = self.is_in_backward = False
        # calls of blocks in the last forward pass, which are gone if nothing leads back to them
        self.uses: list[tuple[Block, weakref.ref[Use]]] = []
        # blocks that backward has reached, and the one whose gradients were sent last
        self.reached: list[Block] = []
        self.sending: Block | None = None
        # whether gradients may wait to be sent, and whether some were sent since the last finish
        self.has_unsent = self.must_finish = False
        self.block_of = {id(part): block for block in self.blocks for part in block.modules}
        module.register_forward_pre_hook(functools.partial(_check_pass, self))
        module.register_state_dict_pre_hook(functools.partial(_check_saving, self))
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
            RuntimeError: the gradients of the last backward pass were not synchronized; a parameter
                was added; or see `FlatParameters.follow_shards`.
            TypeError: the output holds no tensor by which backward could be noticed.
        """
        return self.run(self.module, *args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward pass that is another function of the module, such as one of its methods."""
        if self.is_in_backward and torch._C._current_graph_task_id() >= 0:
            # a checkpoint around the whole module computes it again
            return function(*args, **kwargs)
        self._begin_forward()
        try:
            output = function(*args, **kwargs)
            self._watch(output)
            if not torch.is_grad_enabled():
                self._release_all()
        except BaseException:
            self._release_all()
            raise
        finally:
            self.is_in_forward = False
            # autograd holds what stays gathered for backward
            self._show(in_pass=False)
        return output

    def _begin_forward(self) -> None:
        self.settle()
        require_finished(self.must_finish)
        # what a pass without backward left
        self._release_all()
        for flat in self.flats:
            flat.follow_shards()
        self._check_parameters()
        self._let_stand_ins_gather()
        self.uses.clear()
        self.is_in_forward = True
        self._show(in_pass=True)
        self.outside.each(FlatParameters.finish_gathering)

    def _check_parameters(self) -> None:
        """Raise a `RuntimeError` if there are other trained ones than when they were divided."""
        known = {id(shard) for flat in self.flats for shard in flat.shards}
        known |= {id(param) for param in self.vectors.values()}
        for name, param in self.module.named_parameters():
            if param.requires_grad and id(param) not in known:
                raise RuntimeError(
                    f"{name} was added or replaced after FSDP had divided the module, and its "
                    "gradient would not be averaged; make a new FSDP of a whole module"
                )

    def _watch(self, output: Any) -> None:
        """Notice the backward pass of a module's output."""
        tensors = list(tensors_in(output))
        if any(map(is_gathered_weight, tensors)):
            raise RuntimeError(
                "the output must not be a weight or a view of one, whose memory is freed after "
                "the pass; return a clone"
            )
        if not torch.is_grad_enabled():
            return
        if not tensors and any(flat.is_trained for flat in self.flats):
            raise TypeError(
                "the output must be or hold tensors, in lists, dicts or dataclasses, by which FSDP "
                f"notices the backward pass, got {type(output).__name__}"
            )
        self.has_unsent = True
        for block, use in self.uses:
            if use() is None:
                # what the block left behind elsewhere, such as a loss, may still be used
                self._keep(block, "returns what is not used")
        for tensor in tensors:
            if tensor.grad_fn is not None:
                # the first hook of the pass's backward, before any block's
                tensor.register_hook(functools.partial(_before_output, self, self.running))

    def before_part(self, part: nn.Module) -> None:
        """Gather the block of `part`, before its forward pass or before its weights are read."""
        block = self.block_of.get(id(part))
        if block is not None:
            _check_pass(self)
            self._enter(block, step=0 if self.is_in_backward else 1)

    def after_part(self, block: Block, output: Any) -> None:
        """Notice the backward pass of a block by its output; if it can't be, keep it gathered."""
        tensors = list(tensors_in(output))
        if any(map(is_gathered_weight, tensors)):
            self._keep(block, "returns a weight or a view of one")
        if self.is_in_backward or not torch.is_grad_enabled():
            return
        watched = [tensor for tensor in tensors if tensor.grad_fn is not None]
        if not watched and (not tensors or any(flat.is_trained for flat in block.flats)):
            self._keep(block, "returns no tensor that a gradient comes back to")
        if watched:
            use = Use()
            block.open.add(use)
            self.uses.append((block, weakref.ref(use)))
        for tensor in watched:
            tensor.register_hook(functools.partial(_before_backward, self, block, use))

    def _enter(self, block: Block, step: int) -> None:
        """Gather `block`, prefetch the one that is `step` further, and release the one before."""
        before, self.running = self.running, block
        block.is_reached |= self.is_in_backward
        if before is not None and before is not block and not before.stays:
            before.each(FlatParameters.release)
        block.each(FlatParameters.start_gathering)
        index = block.index + step
        if self.prefetches and step and 0 <= index < len(self.blocks):
            self.blocks[index].each(FlatParameters.start_gathering)
        block.each(FlatParameters.finish_gathering)

    def _keep(self, block: Block, why: str) -> None:
        """From now on, let a block stay gathered until the end of backward."""
        if not block.stays:
            block.stays = True
            names = ", ".join(name for flat in block.flats for name in flat.names)
            log.warning("the block of %s %s: it stays gathered until backward ends", names, why)
        block.each(FlatParameters.finish_gathering)

    def _let_stand_ins_gather(self) -> None:
        for block in self.all_blocks:
            for flat in block.flats:
                for index, stand_in in enumerate(flat.stand_ins):
                    stand_in.read_whole = functools.partial(self._read, block, flat, index)

    def _read(self, block: Block, flat: FlatParameters, index: int) -> Tensor:
        """The whole parameter whose stand-in is read."""
        self._keep(block, "is read outside of its forward pass")
        return flat.whole[index]

    # Backward

    def _start_backward(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward must run without create_graph=True: the weights are gone when gradients "
                "are differentiated again"
            )
        if not self.is_in_backward:
            self.is_in_backward = True
            self._show(in_pass=True)
            for block in self.all_blocks:
                block.each(FlatParameters.notice_updates)
                block.is_sent, block.is_reached = False, block.stays
                if block.stays:
                    block.each(FlatParameters.finish_gathering)
            # not called if an exception ends the backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def before_output(self, last: Block | None) -> None:
        """Begin the backward pass of a forward pass, which ended with block `last`."""
        self._start_backward()
        if last is not None:
            # its weights may have been read without a call that could be noticed
            self._enter(last, step=0)

    def before_backward(self, block: Block, use: Use) -> None:
        """Send the gradients of the blocks that backward has passed, and gather `block`."""
        self._start_backward()
        block.open.discard(use)
        for other in list(self.reached):
            # a block that was called twice is passed when backward has passed both calls
            if other is not block and not other.open and not other.stays:
                self.reached.remove(other)
                self._send(other)
        if block not in self.reached:
            self.reached.append(block)
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
        # then all gradients of matrices are where `zero_grad` finds them
        self._finish_sending()
        self._end_pass()
        self.has_unsent = not self.is_syncing
        # a frozen module, through which backward went to another one, has nothing to average
        is_trained = any(param.requires_grad for param in self.parameters())
        self.must_finish |= self.is_syncing and is_trained

    def _check_complete(self, block: Block) -> None:
        for flat in block.flats:
            for name, whole in zip(flat.names, flat.whole):
                if whole.grad is not None and (block.is_sent or not block.is_reached):
                    why = "grew after it was sent" if block.is_sent else "came unannounced"
                    raise RuntimeError(
                        f"the gradient of {name} {why}: backward must enter a block by what that "
                        "returned, and once for each call; leave its module out of blocks="
                    )

    def _end_pass(self) -> None:
        self.is_in_backward = False
        self.reached.clear()
        self._release_all()
        self._show(in_pass=False)

    def _release_all(self) -> None:
        self.running = None
        for block in self.all_blocks:
            block.each(FlatParameters.release)

    def _show(self, *, in_pass: bool) -> None:
        for flat in self.flats:
            flat.show(in_pass=in_pass)

    def settle(self) -> None:
        """Forget a backward pass that an exception ended, on all ranks alike."""
        if self.is_in_backward and torch._C._current_graph_task_id() < 0:
            self._finish_sending()
            for block in self.all_blocks:
                block.each(FlatParameters.drop_gradients)
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
        """
        self.settle()
        if self.has_unsent:
            # on all ranks alike: there was a forward pass whose gradients were not sent
            is_syncing, self.is_syncing = self.is_syncing, True
            for block in reversed(self.all_blocks):
                block.is_sent = False
                self._send(block)
            self._finish_sending()
            self.is_syncing, self.has_unsent = is_syncing, False
        flats = [flat for flat in self.flats if flat.is_trained]
        vectors = [param for param in self.vectors.values() if param.requires_grad]
        has_grad = [param.grad is not None for param in vectors]
        has_grad += [has for flat in flats for has in flat.has_gradients()]
        has_grad = self._average_vectors(vectors, flats, has_grad)
        shards = [shard for flat in flats for shard in flat.shards]
        for param, has in zip([*vectors, *shards], has_grad):
            if not has:
                param.grad = None
        for flat in flats:
            flat.forget_who_had_gradients()
        self.must_finish = False

    def _average_vectors(
        self, vectors: list[nn.Parameter], flats: list[FlatParameters], has_grad: list[bool]
    ) -> list[bool]:
        """Average the gradients of whole parameters; return who has gradients on any rank."""
        if self.ranks == 1 or not has_grad:
            return has_grad
        for param in vectors:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        device = [*vectors, *(flat.slice for flat in flats)][0].device
        presence = torch.ones(len(has_grad), device=device)
        for index, has in enumerate(has_grad):
            if not has:
                presence[index] = 0
        # all of a dtype in one message
        for _, tensors in group_by([*[p.grad for p in vectors], presence], lambda t: t.dtype):
            joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
            average(joined, self.group)
            means = joined.split([tensor.numel() for tensor in tensors])
            views = [mean.view(tensor.shape) for mean, tensor in zip(means, tensors)]
            torch._foreach_copy_(tensors, views)
        # the host waits only where a gradient is missing
        return has_grad if all(has_grad) else (presence > 0).tolist()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The L2 norm of all averaged gradients: 0-dim, the same on all ranks.

        float32, or float64 where a parameter is, as `lib.optimizer.schedule.grad_norm`.
        """
        require_finished(self.must_finish)
        square = grad_norm(shard for flat in self.flats for shard in flat.shards).double().square()
        if self.ranks > 1:
            dist.all_reduce(square, group=self.group)
        vectors = grad_norm(self.vectors.values())
        norm = (square + vectors.to(square.device).double().square()).sqrt()
        wide = (torch.float64, torch.complex128)
        return norm if any(param.dtype in wide for param in self.parameters()) else norm.float()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before."""
        norm = self.grad_norm()
        coefficient = clip_coefficient(norm, max_norm)
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(coefficient)
        return norm


# Hooks; torch.compile must not trace into them


@torch.compiler.disable
def _check_pass(fsdp: FSDP, *args: Any) -> None:
    if not (fsdp.is_in_forward or fsdp.is_in_backward):
        raise RuntimeError(
            "the module must be called through its FSDP, which gathers the weights: call the FSDP, "
            "or FSDP.run(function, …) for another function than forward"
        )


@torch.compiler.disable
def _check_saving(fsdp: FSDP, *args: Any) -> None:
    if not fsdp.is_saving:
        raise RuntimeError(
            "state_dict must be that of the FSDP, not of the module inside, which holds this "
            "rank's shards alone; all ranks call it"
        )


@torch.compiler.disable
def _before_forward(fsdp: FSDP, part: nn.Module, args: Any) -> None:
    fsdp.before_part(part)


@torch.compiler.disable
def _after_forward(fsdp: FSDP, block: Block, part: nn.Module, args: Any, output: Any) -> None:
    fsdp.after_part(block, output)


def _before_output(fsdp: FSDP, last: Block | None, grad: Tensor) -> None:
    fsdp.before_output(last)


def _before_backward(fsdp: FSDP, block: Block, use: Use, grad: Tensor) -> None:
    fsdp.before_backward(block, use)
