"""One training step: forward, backward, synchronize, clip, update, without waiting for the device.

The step makes its decisions (is the loss finite, how far to clip, the loss scale) on the device, so
that the host can run ahead and a CUDA graph can replay the whole step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lib.core.allocator import synchronize
from lib.core.hardware import check_compiler
from lib.core.ranges import annotate
from lib.ddp.process_group import before_leaving, mean_over_ranks, world_size
from lib.fsdp.activation_checkpointing import checkpoint_activations
from lib.model.transformer import MeanLoss, TransformerLM
from lib.optimizer.adamw import clip_coefficient
from lib.training.config import TrainConfig
from lib.training.parallelism import parallelize

# float16 gradients underflow without a loss scale (Micikevicius et al. 2018, section 3.2).
FIRST_LOSS_SCALE = 2.0**16
LARGEST_LOSS_SCALE = 2.0**24
GROWTH_INTERVAL = 1000


class StepLog(NamedTuple):
    """The report of one step."""

    loss: float
    """Mean cross-entropy (plus z-loss) in nats per token, over all ranks."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping."""

    is_skipped: bool
    """Whether the update was skipped because the loss or a gradient was not finite.

    On several ranks the gradients alone decide: they are averaged and so the same everywhere, while
    a rank does not see the others' losses in time.
    """


def new_step(
    config: TrainConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    kernels: bool = True,
    group: dist.ProcessGroup | None = None,
) -> TrainStep:
    """The step of a new model on `device`, with matmuls in `dtype`, as benchmarks measure it.

    Args:
        kernels: run the model's elementwise steps as Triton kernels, where there are some.
        group: the ranks that train together; all by default.
    """
    generator = torch.Generator(device).manual_seed(seed)
    model = TransformerLM(config.model, device=device, generator=generator)
    model.use_kernels(kernels)
    if config.low_precision_weights:
        model.use_low_precision_weights(dtype)
    return TrainStep(model, config, device, dtype, group=group)


class TrainStep:
    """Takes optimizer steps of `model`, and keeps the report of each until it is read.

    Call it with the sequences of a step. The first call compiles or records what the config asks
    for. All ranks call it together, each with its own sequences. `parallel` is how they train the
    model together.

    Args:
        model: on `device`; its matrices in `dtype` with config.low_precision_weights. All ranks get
            the weights of rank 0.
        dtype: of activations and matmuls.
        group: the ranks that train `model` together; all by default.

    Raises:
        ValueError: settings that can't be combined (see `check_wrapper`); models or settings differ
            between ranks.
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

        # Loss, gradient averaging and optimizer.
        uses_autocast = dtype != torch.float32 and not config.low_precision_weights
        autocast = dtype if uses_autocast else None
        self.loss = MeanLoss(model, device, autocast, config.optimizer.z_loss)
        if config.activation_checkpointing != "none":
            model.around_block = checkpoint_activations(
                every=config.checkpointed_blocks, keep=config.activation_checkpointing
            )
        if config.compile:
            check_compiler("compile True", device)
        self.lr = torch.zeros((), device=device)
        self.parallel = parallelize(self.loss, config, self.lr, group)
        self.optimizer = self.parallel.optimizer

        # The step's input, at a fixed address for CUDA graphs.
        shape = (config.gradient_accumulation_steps, config.batch_size)
        self.sequences = torch.zeros(
            *shape, model.config.context_length + 1, dtype=torch.int64, device=device
        )  # (passes, batch, context_length + 1)

        # The loss scale of float16, and the steps since it changed.
        self.uses_scale = dtype == torch.float16
        self.loss_scale = torch.tensor(FIRST_LOSS_SCALE if self.uses_scale else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)

        # A ring buffer of what steps reported: loss and gradient norm.
        self.rows = torch.zeros(min(config.log_interval, config.steps), 2, device=device)
        self.next_row = torch.zeros(1, dtype=torch.int64, device=device)
        self.unread = 0

        # While true, a step updates nothing: for the warmup before a graph is recorded.
        self.hold = torch.zeros((), dtype=torch.bool, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, sequences: Tensor, lr: float) -> None:
        """Take one step at learning rate `lr`; read the log at least every log_interval steps.

        Args:
            sequences: this rank's sequences, (gradient_accumulation_steps · batch_size,
                context_length + 1) int64: inputs, and targets one position later.
        """
        with annotate("training step"):
            # Input: into the tensors that a CUDA graph reads.
            self.sequences.copy_(sequences.view_as(self.sequences), non_blocking=True)
            self.lr.fill_(lr)

            # Step: as a CUDA graph, or operation by operation.
            if self.config.cuda_graph:
                self._replay()
            else:
                self._step()
            self.unread += 1

    def _step(self) -> None:
        # As few operations as possible besides model and optimizer: small models feel each kernel.
        parallel, num_passes = self.parallel, len(self.sequences)
        losses: list[Tensor] = []
        for number, sequences in enumerate(self.sequences, start=1):
            # Ranks exchange gradients in the last pass only; those before just add them up.
            is_last = number == num_passes
            with contextlib.nullcontext() if is_last else parallel.no_sync():
                # Forward: the mean loss of each pass counts equally.
                with annotate("forward"):
                    inputs, targets = sequences[:, :-1], sequences[:, 1:]  # (batch, context_length)
                    loss = parallel.loss(inputs, targets) / num_passes

                # Backward: adds to the gradients, and starts to average them over ranks.
                with annotate("backward"):
                    (loss * self.loss_scale if self.uses_scale else loss).backward()
            losses.append(loss.detach())

        # Reduce: finish what backward began; every gradient is its mean over the ranks.
        parallel.reduce()

        # Norm of the gradients, over all parameters and shards; without the loss scale.
        with annotate("gradient norm"):
            norm = parallel.grad_norm()
        if self.uses_scale:
            norm = norm / self.loss_scale
        row = torch.stack((sum(losses[1:], losses[0]), norm))  # (2,)

        # Clip: the factor that the optimizer multiplies gradients by, on the fly.
        max_norm = self.config.optimizer.max_grad_norm
        scale = clip_coefficient(norm, max_norm) if max_norm else None

        # Skip the update if the loss or a gradient is not finite; the loss scale adapts to that.
        is_finite = row.isfinite().all() if self.num_ranks == 1 else norm.isfinite()
        if self.uses_scale:
            scale = (1 if scale is None else scale) / self.loss_scale
            self._adapt_loss_scale(is_finite)
        skip = is_finite.logical_not().logical_or_(self.hold)

        # Update the weights, and gather them: they may arrive during the next forward pass.
        with annotate("optimizer"):
            parallel.update(scale, skip)

        # Log loss and norm, on the device.
        self.rows.index_copy_(0, self.next_row, row.unsqueeze(0))
        self.next_row.add_(1).remainder_(len(self.rows))

    def _adapt_loss_scale(self, is_finite: Tensor) -> None:
        """Halve the scale after an overflow, double it after GROWTH_INTERVAL steps without one."""
        good_steps = torch.where(is_finite, self.good_steps + 1, 0)
        grows = good_steps >= GROWTH_INTERVAL
        factor = torch.where(is_finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.loss_scale.mul_(factor).clamp_(1.0, LARGEST_LOSS_SCALE)
        self.good_steps.copy_(torch.where(grows, 0.0, good_steps))

    def wait(self) -> None:
        """Wait until the device has finished the last step, and on a CPU its all-gathers too.

        A profiler must not stop before: gloo's threads write the end of each collective into its
        log, which is freed by then.
        """
        synchronize(self.device)
        if self.device.type == "cpu":
            self.parallel.gather()

    def read_log(self) -> list[StepLog]:
        """The reports of the steps since the last call, at most the last `log_interval` of them.

        Waits for the device and the other ranks.
        """
        self.parallel.gather()

        # one row a step, the oldest first; losses and norms are means over the ranks
        rows = mean_over_ranks(self.rows, self.group).roll(-int(self.next_row), dims=0)
        rows = rows[max(len(rows) - self.unread, 0) :].tolist()
        self.unread = 0

        # the same rule as in `_step`
        decisive = slice(None) if self.num_ranks == 1 else slice(1, None)
        is_skipped = [not all(map(math.isfinite, row[decisive])) for row in rows]
        return [StepLog(loss, norm, skipped) for (loss, norm), skipped in zip(rows, is_skipped)]

    def state_tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint needs besides model and optimizer."""
        return {"loss_scale": self.loss_scale, "good_steps": self.good_steps}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` returned."""
        for name, tensor in self.state_tensors().items():
            tensor.copy_(tensors[name])

    # CUDA graph

    def use_cuda_graph(self, is_on: bool) -> None:
        """Let the steps from here on replay a CUDA graph, or run eagerly."""
        self.config = dataclasses.replace(self.config, cuda_graph=is_on)

    def _replay(self) -> None:
        """Take the step by replaying its CUDA graph, which the first call records."""
        if self.graph is None:
            self._warm_up()
            self.graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog thread may call CUDA while ranks record
            mode = "global" if self.num_ranks == 1 else "thread_local"
            with torch.cuda.graph(self.graph, capture_error_mode=mode):
                self._step()
            before_leaving(self.drop_graph)
        self.graph.replay()
        self.parallel.replayed()

    def drop_graph(self) -> None:
        """Forget the recorded step: NCCL leaves a group only when no graph has its calls."""
        self.graph = None

    def _warm_up(self) -> None:
        """Run the step a few times on a side stream, as recording needs; nothing changes."""
        # what a step changes besides weights, which `hold` keeps as they are
        changed = (self.loss_scale, self.good_steps, self.next_row)
        before = [tensor.clone() for tensor in changed]
        self.hold.fill_(True)

        # libraries allocate their workspaces in the first steps, kernels are compiled
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(stream)

        # as if nothing had happened
        for tensor, value in zip(changed, before):
            tensor.copy_(value)
        self.hold.fill_(False)


@contextlib.contextmanager
def numerics(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    """Set PyTorch's global switches for speed or repeatability, and restore them afterwards."""
    precision = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        # older releases of PyTorch refuse matmuls on a GPU without it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # its backward pass adds up in the order in which thread blocks arrive
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        # setting it loads PyTorch's compiler, for seconds
        if torch.are_deterministic_algorithms_enabled() != was_deterministic:
            torch.use_deterministic_algorithms(was_deterministic)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
