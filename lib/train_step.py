"""One step of training: forward, backward, clip, update, without waiting for the device.

What the step decides (is the loss finite, how far to clip, the loss scale) it decides on the
device, so that the host can run ahead, and a CUDA graph can replay the whole step.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.config_training import TrainConfig
from lib.distributed import mean_over_ranks, world_size
from lib.loss import linear_cross_entropy
from lib.model import TransformerLM
from lib.optimizer import clip_coefficient
from lib.profiling import annotate
from lib.train_optimizer import (
    OVERLAPPING,
    AveragedByOptimizer,
    check_wrapper,
    gather_under_forward,
    parallelise,
)

# float16 gradients underflow without a loss scale (Micikevicius et al. 2018, section 3.2).
FIRST_LOSS_SCALE = 2.0**16
LARGEST_LOSS_SCALE = 2.0**24
GROWTH_INTERVAL = 1000


class StepLog(NamedTuple):
    """What one step reports."""

    loss: float
    """Mean cross-entropy (and z-loss) in nats per token, of all ranks."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping."""

    is_skipped: bool
    """Whether loss or gradients were not finite, so that nothing was updated.

    Of several ranks none knows the others' losses in time. There the gradients alone decide, which
    are averaged and so the same on all.
    """


def compile_sublayers(model: TransformerLM) -> None:
    """Let `torch.compile` fuse what is between two gatherings of FSDP2."""
    for layer in model.layers:
        for part in (layer.attn, layer.ffn):
            part.forward = torch.compile(part.forward, dynamic=False)


def compile_blocks(model: TransformerLM) -> None:
    """Let `torch.compile` fuse each block of `model` by itself, once for all of them.

    A whole model of 48 blocks takes it minutes. And the gradients of one compiled graph arrive
    together at its end: those of blocks arrive during backward, so that they can be averaged
    meanwhile.
    """
    for layer in model.layers:
        layer.compile(dynamic=False)
    # how the model runs its blocks on a GPU
    model.fused_layer = torch.compile(model.fused_layer, dynamic=False)


class MeanLoss(nn.Module):
    """A model's loss as a module, for the wrappers of `lib.ddp`.

    Args:
        autocast: the dtype of matrix products; None: that of the weights.
    """

    def __init__(
        self,
        model: TransformerLM,
        device: torch.device,
        autocast: torch.dtype | None,
        z_loss: float,
    ) -> None:
        super().__init__()
        self.model, self.device, self.dtype, self.z_loss = model, device, autocast, z_loss
        self.hidden = model.hidden

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the tokens of inputs and targets, both (batch, length) int64."""
        with self.autocast():
            hidden = self.hidden(inputs).flatten(0, 1)
            weight = self.model.output_weight
            with annotate("loss"):
                return linear_cross_entropy(hidden, weight, targets.flatten(), z_loss=self.z_loss)

    def autocast(self) -> contextlib.AbstractContextManager:
        is_short = self.dtype is not None
        return torch.autocast(self.device.type, self.dtype, enabled=is_short)


class TrainStep:
    """Runs optimizer steps of `model`, and remembers what each reported until it is read.

    Call it with the windows of a step. The first call compiles or records what the config asks for.
    Several ranks call it together, each with windows of its own. `parallel` is the model's loss in
    the wrapper that averages gradients, `config.ddp_wrapper`.

    Args:
        model: on `device`; its matrices in `dtype` where config.low_precision_weights says so. All
            ranks get the weights of rank 0.
        dtype: of activations and matrix products.
        group: the ranks that train `model` together; all by default.

    Raises:
        ValueError: as `check_wrapper`; models or settings differ between ranks.
    """

    def __init__(
        self,
        model: TransformerLM,
        config: TrainConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.config, self.device, self.dtype = model, config, device, dtype
        self.group, self.num_ranks = group, world_size(group)
        check_wrapper(config, self.num_ranks)
        is_short = dtype != torch.float32 and not config.low_precision_weights
        self.loss = MeanLoss(model, device, dtype if is_short else None, config.optimizer.z_loss)
        if config.compile:
            self._compile()
        self.lr = torch.zeros((), device=device)
        self.parallel, self.optimizer = parallelise(self.loss, config, self.lr, group)
        self.is_sharded = hasattr(self.optimizer, "save_shard")
        if isinstance(self.parallel, AveragedByOptimizer):
            gather_under_forward(self.optimizer, self.loss, starts_there=config.cuda_graph)
        shape = (config.gradient_accumulation_steps, config.batch_size)
        self.windows = torch.zeros(
            *shape, model.config.context_length + 1, dtype=torch.int64, device=device
        )
        self.uses_scale = dtype == torch.float16
        self.loss_scale = torch.tensor(FIRST_LOSS_SCALE if self.uses_scale else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)
        # a hold makes a step change nothing, for the warm-up before a graph is recorded
        self.hold = torch.zeros((), dtype=torch.bool, device=device)
        self.rows = torch.zeros(min(config.log_interval, config.steps), 2, device=device)
        self.next_row = torch.zeros(1, dtype=torch.int64, device=device)
        self.unread = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    @annotate("training step")
    def __call__(self, windows: Tensor, lr: float) -> None:
        """Take one step at learning rate `lr` (read the log at least every log_interval steps).

        Args:
            windows: this rank's, (gradient_accumulation_steps · batch_size, context_length + 1)
                int64.
        """
        self.windows.copy_(windows.view_as(self.windows), non_blocking=True)
        self.lr.fill_(lr)
        if self.config.cuda_graph:
            if self.graph is None:
                self._record()
            self.graph.replay()
            if self.is_sharded:
                self.optimizer.replayed()
        else:
            self._step()
        self.unread += 1

    def read_log(self) -> list[StepLog]:
        """What the steps since the last call reported; waits for the device and the other ranks."""
        if self.is_sharded:
            self.optimizer.wait_for_parameters()
        size = len(self.rows)
        last = int(self.next_row)
        rows = mean_over_ranks(self.rows, self.group).tolist()
        places = [(last - self.unread + i) % size for i in range(self.unread)]
        self.unread = 0
        # as on the device
        decisive = slice(None) if self.num_ranks == 1 else slice(1, None)
        return [
            StepLog(*row, not all(map(math.isfinite, row[decisive])))
            for row in map(rows.__getitem__, places)
        ]

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside model and optimizer."""
        return {"loss_scale": self.loss_scale, "good_steps": self.good_steps}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state_tensors` gave."""
        for name, tensor in self.state_tensors().items():
            tensor.copy_(tensors[name])

    def autocast(self) -> contextlib.AbstractContextManager:
        """Matrix products in the short type, where the weights are not held in it."""
        return self.loss.autocast()

    def weights(self) -> dict[str, Tensor]:
        """The model's state dict after the last step; all ranks call it, and rank 0 gets it."""
        if self.is_sharded:
            self.optimizer.wait_for_parameters()
        gather = getattr(self.parallel, "whole_state_dict", self.model.state_dict)
        return gather()

    def whole_model(self) -> TransformerLM:
        """`model`, or a copy of it, with all weights as the last step made them on every rank.

        All ranks call it.
        """
        if self.is_sharded:
            self.optimizer.wait_for_parameters()
        copy = getattr(self.parallel, "whole_model", None)
        return copy() if copy else self.model

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, times the loss scale of float16, to those of the weights."""
        (loss * self.loss_scale if self.uses_scale else loss).backward()

    def _compile(self) -> None:
        if self.num_ranks == 1 or self.config.ddp_wrapper not in OVERLAPPING:
            self.loss.hidden = torch.compile(self.model.hidden, dynamic=False)
            return
        if self.config.ddp_wrapper == "fsdp2":
            compile_sublayers(self.model)
            return
        compile_blocks(self.model)
        if self.config.ddp_wrapper == "torch_ddp":
            # it would split graphs at its buckets, which blocks are small enough for
            torch._dynamo.config.optimize_ddp = False

    def _step(self) -> None:
        # few operations beside model and optimizer: a small model feels each kernel
        losses, last = [], len(self.windows) - 1
        for index, windows in enumerate(self.windows):
            with contextlib.nullcontext() if index == last else self.parallel.no_sync():
                with annotate("forward"):
                    loss = self.parallel(windows[:, :-1], windows[:, 1:]) / len(self.windows)
                with annotate("backward"):
                    self.backward(loss)
            losses.append(loss.detach())
        self.parallel.finish_gradient_synchronization()
        with annotate("gradient norm"):
            norm = self.optimizer.grad_norm()
        if self.uses_scale:
            norm = norm / self.loss_scale
        row = torch.stack((sum(losses), norm))
        is_finite = row.isfinite().all() if self.num_ranks == 1 else norm.isfinite()
        max_norm = self.config.optimizer.max_grad_norm
        scale = clip_coefficient(norm, max_norm) if max_norm else None
        if self.uses_scale:
            scale = (1 if scale is None else scale) / self.loss_scale
            self._adapt_loss_scale(is_finite)
        skip = is_finite.logical_not_().logical_or_(self.hold)
        with annotate("optimizer"):
            self.optimizer.step(grad_scale=scale, skip=skip)
        self.optimizer.zero_grad(set_to_none=True)
        self.rows.index_copy_(0, self.next_row, row.unsqueeze(0))
        self.next_row.add_(1).remainder_(len(self.rows))

    def _adapt_loss_scale(self, is_finite: Tensor) -> None:
        """Halve the scale after an overflow, double it after a while without one."""
        good_steps = torch.where(is_finite, self.good_steps + 1, 0)
        grows = good_steps >= GROWTH_INTERVAL
        factor = torch.where(is_finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.loss_scale.mul_(factor).clamp_(1.0, LARGEST_LOSS_SCALE)
        self.good_steps.copy_(torch.where(grows, 0.0, good_steps))

    def _record(self) -> None:
        """Record the step as a CUDA graph; nothing that it warms up with is kept."""
        before = [tensor.clone() for tensor in (self.loss_scale, self.good_steps, self.next_row)]
        self.hold.fill_(True)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        for tensor, value in zip((self.loss_scale, self.good_steps, self.next_row), before):
            tensor.copy_(value)
        self.hold.fill_(False)
        self.graph = torch.cuda.CUDAGraph()
        # NCCL watches over its collectives from a thread of its own, which may ask CUDA meanwhile
        mode = "global" if self.num_ranks == 1 else "thread_local"
        with torch.cuda.graph(self.graph, capture_error_mode=mode):
            self._step()


@contextlib.contextmanager
def numerics(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    """PyTorch's global switches for speed against repeatability, and back to what they were."""
    precision = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        # older releases of PyTorch refuse matrix products on a GPU without it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # its backward pass adds in whatever order the blocks arrive
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(was_deterministic)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
