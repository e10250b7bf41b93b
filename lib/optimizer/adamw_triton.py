"""AdamW for many tensors in one kernel: each weight and its state cross the memory bus once.

A table on the device holds the tensors' addresses, and a work list assigns each program a block of
one tensor, so that two launches serve a group of any size:

1. `prepare_kernel` advances the step counts and computes each tensor's coefficients;
2. `adamw_kernel` updates all elements.

Learning rate, gradient scale and the decision to skip are read on the device: the host never waits,
and a CUDA graph can replay the step.
"""

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# The table has a row for each tensor, int64: six addresses, the number of elements, and whether all
# addresses are multiples of 16 bytes, so that accesses may be that wide.
PARAM, GRAD, EXP_AVG, EXP_AVG_SQ = (tl.constexpr(column) for column in range(4))
MASTER, STEP, NUM_ELEMENTS, IS_ALIGNED = (tl.constexpr(column) for column in range(4, 8))
COLUMNS = tl.constexpr(8)
# The coefficients have a row for each tensor too, float32, padded to a power of two.
DECAY, STEP_SIZE, CORRECTION2_SQRT = (tl.constexpr(column) for column in range(3))
GRAD_SCALE, IS_ACTIVE = (tl.constexpr(column) for column in range(3, 5))
COEFFICIENTS = tl.constexpr(8)
# elements of a tensor that a program of `adamw_kernel` updates
BLOCK = 1024
NUM_WARPS = 4
# tensors that a program of `prepare_kernel` prepares
TENSOR_BLOCK = 64
# pinned tables in reserve: how many graphs can be captured between two eager steps
SPARES = 8
TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit(do_not_specialize=["num_tensors"])
def prepare_kernel(
    table,
    coefficients,
    lr,
    grad_scale,
    skip,
    log_beta1,
    log_beta2,
    weight_decay,
    num_tensors,
    TENSOR_BLOCK: tl.constexpr,
):
    """Advance the step counts, unless `skip` is nonzero, and compute each tensor's coefficients.

    `lr`, `grad_scale` and `skip` are pointers to scalars.
    """
    tensor = tl.program_id(0) * TENSOR_BLOCK + tl.arange(0, TENSOR_BLOCK)
    exists = tensor < num_tensors
    advance = tl.load(skip + tl.zeros_like(tensor)) == 0

    # the table holds addresses of step counts, which lie anywhere in memory
    step_address = tl.load(table + tensor * COLUMNS + STEP, mask=exists, other=0)
    step_pointer = step_address.to(tl.pointer_type(tl.float32))
    step = tl.load(step_pointer, mask=exists, other=0.0) + 1.0
    tl.store(step_pointer, step, mask=exists & advance)

    # in float64: 1 - beta^step loses five digits in float32 where beta is close to 1
    lr = tl.load(lr).to(tl.float64)
    step = step.to(tl.float64)
    bias_correction1 = 1.0 - tl.exp(step * log_beta1)
    bias_correction2 = 1.0 - tl.exp(step * log_beta2)
    row = coefficients + tensor * COEFFICIENTS
    decay = tl.zeros_like(step) + (1.0 - lr * weight_decay)
    scale = tl.zeros_like(step) + tl.load(grad_scale)
    tl.store(row + DECAY, decay.to(tl.float32), mask=exists)
    tl.store(row + STEP_SIZE, (lr / bias_correction1).to(tl.float32), mask=exists)
    tl.store(row + CORRECTION2_SQRT, tl.sqrt(bias_correction2).to(tl.float32), mask=exists)
    tl.store(row + GRAD_SCALE, scale.to(tl.float32), mask=exists)
    tl.store(row + IS_ACTIVE, tl.where(advance, step * 0.0 + 1.0, 0.0).to(tl.float32), mask=exists)


@triton.jit
def update_block(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    master,
    row,
    offsets,
    mask,
    beta1_complement,
    beta2,
    beta2_complement,
    eps,
    HAS_MASTER: tl.constexpr,
):
    """Read, update and write the elements at `offsets` where `mask` is true (None: all).

    The same arithmetic as `reference_update`; `row` points at the tensor's coefficients.
    """
    decay = tl.load(row + DECAY)
    step_size = tl.load(row + STEP_SIZE)
    correction2_sqrt = tl.load(row + CORRECTION2_SQRT)
    scale = tl.load(row + GRAD_SCALE)
    weight = master if HAS_MASTER else param

    g = tl.load(grad + offsets, mask=mask).to(tl.float32) * scale
    w = tl.load(weight + offsets, mask=mask)
    m = tl.load(exp_avg + offsets, mask=mask)
    v = tl.load(exp_avg_sq + offsets, mask=mask)

    w *= decay
    m += (g - m) * beta1_complement
    v = v * beta2 + g * g * beta2_complement
    denominator = tl.div_rn(tl.sqrt_rn(v), correction2_sqrt) + eps
    w -= step_size * tl.div_rn(m, denominator)

    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    tl.store(weight + offsets, w, mask=mask)
    if HAS_MASTER:
        tl.store(param + offsets, w.to(param.dtype.element_ty), mask=mask)


@triton.jit
def adamw_kernel(
    table,
    work,
    coefficients,
    beta1_complement,
    beta2,
    beta2_complement,
    eps,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    PARAM_ALIGNMENT: tl.constexpr,
    GRAD_ALIGNMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of one tensor, which `work` assigns to this program."""
    tensor = tl.load(work + tl.program_id(0) * 2)
    start = tl.load(work + tl.program_id(0) * 2 + 1).to(tl.int64) * BLOCK
    row = coefficients + tensor * COEFFICIENTS
    entry = table + tensor * COLUMNS
    param = tl.load(entry + PARAM).to(tl.pointer_type(PARAM_DTYPE))
    grad = tl.load(entry + GRAD).to(tl.pointer_type(GRAD_DTYPE))
    exp_avg = tl.load(entry + EXP_AVG).to(tl.pointer_type(tl.float32))
    exp_avg_sq = tl.load(entry + EXP_AVG_SQ).to(tl.pointer_type(tl.float32))
    master = tl.load(entry + MASTER).to(tl.pointer_type(tl.float32))
    num_elements = tl.load(entry + NUM_ELEMENTS)
    is_aligned = tl.load(entry + IS_ALIGNED)

    param += start
    grad += start
    exp_avg += start
    exp_avg_sq += start
    master += start
    offsets = tl.arange(0, BLOCK)
    if tl.load(row + IS_ACTIVE) != 0:
        if (is_aligned != 0) & (start + BLOCK <= num_elements):
            # The compiler cannot see the alignment of an address from a table. With these hints
            # each access is of four elements, whatever the dtype, so that every thread has its own.
            update_block(
                tl.multiple_of(param, PARAM_ALIGNMENT),
                tl.multiple_of(grad, GRAD_ALIGNMENT),
                tl.multiple_of(exp_avg, 16),
                tl.multiple_of(exp_avg_sq, 16),
                tl.multiple_of(master, 16),
                row,
                offsets,
                None,
                beta1_complement,
                beta2,
                beta2_complement,
                eps,
                HAS_MASTER,
            )
        else:
            update_block(
                param,
                grad,
                exp_avg,
                exp_avg_sq,
                master,
                row,
                offsets,
                offsets < num_elements - start,
                beta1_complement,
                beta2,
                beta2_complement,
                eps,
                HAS_MASTER,
            )


@triton.jit
def square_sum_kernel(
    table,
    work,
    sums,
    GRAD_DTYPE: tl.constexpr,
    GRAD_ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of squares of one block of one gradient."""
    tensor = tl.load(work + tl.program_id(0) * 2)
    start = tl.load(work + tl.program_id(0) * 2 + 1).to(tl.int64) * BLOCK
    entry = table + tensor * COLUMNS
    grad = tl.load(entry + GRAD).to(tl.pointer_type(GRAD_DTYPE)) + start
    num_elements = tl.load(entry + NUM_ELEMENTS)
    offsets = tl.arange(0, BLOCK)
    if (tl.load(entry + IS_ALIGNED) != 0) & (start + BLOCK <= num_elements):
        g = tl.load(tl.multiple_of(grad, GRAD_ALIGNMENT) + offsets).to(tl.float32)
        tl.store(sums + tl.program_id(0), tl.sum(g * g, 0))
    else:
        g = tl.load(grad + offsets, mask=offsets < num_elements - start, other=0.0).to(tl.float32)
        tl.store(sums + tl.program_id(0), tl.sum(g * g, 0))


@dataclasses.dataclass(frozen=True)
class DeviceList:
    """Integers on the device, the pinned memory they come from, and the key they were made for."""

    key: tuple
    pinned: Tensor
    values: Tensor


class FusedAdamW:
    """The update of a changing list of tensors, and the tables on the device that it needs.

    Tables are rebuilt only when an address changes. Those that a CUDA graph uses live as long as
    this object, since each replay reads them again.
    """

    def __init__(self) -> None:
        self._table: DeviceList | None = None
        self._work: DeviceList | None = None
        self._coefficients: Tensor | None = None
        self._spares: list[Tensor] = []
        self._neutral: tuple[Tensor, Tensor] | None = None
        self._kept_for_graphs: list[object] = []

    @torch.no_grad()
    def step(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Tensor]],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Update all of `params` in two launches, without waiting for the device.

        Parameters share a device and a dtype, gradients share one; states and scalars, which are
        0-dim tensors on the device, are as in `lib.optimizer.adamw.AdamW`.

        Raises:
            ValueError: a tensor is not contiguous.
            RuntimeError: the first step is inside a CUDA graph capture.
        """
        device = params[0].device
        has_master = "master" in states[0]
        columns = _columns(params, grads, states)
        with torch.cuda.device_of(params[0]):
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            one, zero = self._neutral_scalars(device, capturing)
            table, work, coefficients = self._tables(columns, device, capturing)
            if not isinstance(lr, Tensor):
                lr = torch.full((), lr, dtype=torch.float32, device=device)
            if skip is not None and skip.dtype == torch.bool:
                skip = skip.view(torch.uint8)
            beta1, beta2 = betas
            prepare_kernel[(triton.cdiv(len(params), TENSOR_BLOCK),)](
                table,
                coefficients,
                lr,
                one if grad_scale is None else grad_scale,
                zero if skip is None else skip,
                math.log(beta1) if beta1 else -math.inf,
                math.log(beta2) if beta2 else -math.inf,
                float(weight_decay),
                len(params),
                TENSOR_BLOCK=TENSOR_BLOCK,
                num_warps=2,
            )
            adamw_kernel[(len(work),)](
                table,
                work,
                coefficients,
                1.0 - beta1,
                float(beta2),
                1.0 - beta2,
                float(eps),
                PARAM_DTYPE=TRITON_DTYPE[params[0].dtype],
                GRAD_DTYPE=TRITON_DTYPE[grads[0].dtype],
                PARAM_ALIGNMENT=4 * params[0].element_size(),
                GRAD_ALIGNMENT=4 * grads[0].element_size(),
                HAS_MASTER=has_master,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )

    @torch.no_grad()
    def square_sum(
        self, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]]
    ) -> Tensor:
        """The sum of squares of all `grads`, 0-dim float32, in two launches that read each once."""
        device = params[0].device
        columns = _columns(params, grads, states)
        with torch.cuda.device_of(params[0]):
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            table, work, _ = self._tables(columns, device, capturing)
            sums = torch.empty(len(work), dtype=torch.float32, device=device)
            square_sum_kernel[(len(work),)](
                table,
                work,
                sums,
                GRAD_DTYPE=TRITON_DTYPE[grads[0].dtype],
                GRAD_ALIGNMENT=4 * grads[0].element_size(),
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
            return sums.sum()

    def _tables(
        self, columns: list[list[Tensor]], device: torch.device, capturing: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The table, the work list and room for the coefficients, on `device`."""
        sizes = tuple(param.numel() for param in columns[0])
        addresses = tuple(tuple(tensor.data_ptr() for tensor in column) for column in columns)
        table, work, coefficients = self._table, self._work, self._coefficients
        if work is None or work.key != (device, sizes):
            work = self._to_device((device, sizes), work_list(sizes), capturing)
            shape = (len(sizes), COEFFICIENTS.value)
            coefficients = torch.empty(shape, dtype=torch.float32, device=device)
        if table is None or table.key != (device, sizes, addresses):
            _check_layout(columns[:5])
            rows = table_rows(addresses, sizes)
            table = self._to_device((device, sizes, addresses), rows, capturing)
        if capturing:
            # Copies that are captured happen at each replay and not now: the graph keeps these
            # tables, and steps outside of it must not use them.
            self._kept_for_graphs.append((table, work, coefficients, self._neutral))
        else:
            self._table, self._work, self._coefficients = table, work, coefficients
        return table.values, work.values, coefficients

    def _to_device(self, key: tuple, values: Tensor, capturing: bool) -> DeviceList:
        """Copy `values` to the device in `key` without waiting, from pinned memory."""
        device = key[0]
        if device.type != "cuda":
            return DeviceList(key, values, values.to(device))
        if capturing and self._spares and self._spares[0].shape == values.shape:
            pinned = self._spares.pop().copy_(values)
        else:
            pinned = values.pin_memory()
        used_up = len(self._spares) < SPARES or self._spares[0].shape != values.shape
        if values.dtype == torch.int64 and not capturing and used_up:
            # pinned ahead for tables made during capture, when memory cannot always be pinned
            spares = torch.empty((SPARES, *values.shape), dtype=values.dtype, pin_memory=True)
            self._spares = list(spares)
        return DeviceList(key, pinned, pinned.to(device, non_blocking=True))

    def _neutral_scalars(self, device: torch.device, capturing: bool) -> tuple[Tensor, Tensor]:
        """A gradient scale of one and a `skip` of zero, for steps without them."""
        if self._neutral is None or self._neutral[0].device != device:
            if capturing:
                raise RuntimeError(
                    "the first step is inside a CUDA graph capture; take one outside it first, "
                    "which compiles the kernels (skip=torch.tensor(True) leaves the weights alone)"
                )
            one = torch.ones((), dtype=torch.float32, device=device)
            self._neutral = (one, torch.zeros((), dtype=torch.uint8, device=device))
        return self._neutral


def _columns(
    params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]]
) -> list[list[Tensor]]:
    """The tensors whose addresses are columns PARAM to STEP of the table."""
    # without a master the kernel never reads that column, so any address will do
    third_state = "master" if "master" in states[0] else "exp_avg"
    names = ("exp_avg", "exp_avg_sq", third_state, "step")
    contiguous = [grad.contiguous() for grad in grads]
    return [params, contiguous, *([state[name] for state in states] for name in names)]


def table_rows(addresses: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> Tensor:
    """The table, (tensors, COLUMNS) int64, from its first six columns and the tensors' sizes."""
    aligned = [all(address % 16 == 0 for address in row[:5]) for row in zip(*addresses)]
    return torch.tensor([*addresses, sizes, aligned], dtype=torch.int64).T.contiguous()


def work_list(sizes: tuple[int, ...]) -> Tensor:
    """The tensor, and the block within it, of each program: (programs, 2) int32."""
    counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = torch.cumsum(counts, 0) - counts
    block = torch.arange(len(tensor)) - first[tensor]
    return torch.stack([tensor, block], dim=1).to(torch.int32)


def _check_layout(columns: list[list[Tensor]]) -> None:
    """Reject tensors that the kernel would read or write wrongly."""
    for param, *others in zip(*columns):
        for tensor in (param, *others):
            fits = tensor.numel() == param.numel() and tensor.device == param.device
            if not fits or not tensor.is_contiguous():
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} on {param.device} must have "
                    f"contiguous tensors of its size and device, got shape {tuple(tensor.shape)}, "
                    f"strides {tensor.stride()}, on {tensor.device} (implementation='foreach' "
                    "takes any strides)"
                )
