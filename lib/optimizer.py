"""AdamW, the cosine schedule with warm-up, and gradient clipping.

AdamW exists three times with one result: to read, in few kernels, and in one (see `AdamW`).
"""

import importlib.util
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lib.config import check
from lib.hardware import runs_triton

IMPLEMENTATIONS = ("auto", "reference", "foreach", "triton")


def reference_update(
    param: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW for one parameter, in place (Loshchilov and Hutter 2019, Algorithm 2).

    `gradient` is float32 and has the shape of `param`; `state` is that of `AdamW`.
    """
    beta1, beta2 = betas
    # A bfloat16 weight is too coarse to take small updates: it is a rounded copy of the true one.
    weight = state.get("master", param)
    mean, square = state["exp_avg"], state["exp_avg_sq"]

    state["step"] += 1
    step = state["step"].item()

    # The decay is decoupled: it shrinks the weight and never enters the moments.
    weight.mul_(1 - lr * weight_decay)

    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    # Both moments start at zero, so they are too small at first by these factors.
    mean_correction = 1 - beta1**step
    square_correction = 1 - beta2**step
    denominator = square.sqrt().div_(square_correction**0.5).add_(eps)
    weight.addcdiv_(mean, denominator, value=-lr / mean_correction)

    if weight is not param:
        param.copy_(weight)


def foreach_update(
    params: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """`reference_update` of many parameters of one dtype and device, each line for all of them."""
    beta1, beta2 = betas
    weights = [state.get("master", param) for param, state in zip(params, states)]
    means = [state["exp_avg"] for state in states]
    squares = [state["exp_avg_sq"] for state in states]

    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    steps = torch.stack(steps).tolist()

    torch._foreach_mul_(weights, 1 - lr * weight_decay)

    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, [(1 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(weights, means, denominators, [-lr / (1 - beta1**s) for s in steps])

    if weights[0] is not params[0]:
        torch._foreach_copy_(params, weights)


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    `implementation` is one of

    - `reference`: `reference_update`, one parameter after the other;
    - `foreach`: `foreach_update`, a few kernels for all parameters;
    - `triton`: two kernels for all parameters, on CUDA only. Nothing waits for the device, so a
      CUDA graph can replay the step; take one step before capturing it;
    - `auto`: `triton` on CUDA where Triton is installed, else `foreach`.

    The first two read step counts, `lr` and `skip` on the host: free on a CPU, a wait on a GPU.

    `lr` is a float, or a 0-dim tensor on the parameters' device that may change between replays.
    State of a parameter: `step` (0-dim), `exp_avg` and `exp_avg_sq`, all float32; for bfloat16 and
    float16 parameters also `master`, the float32 weight of which the parameter is the rounded copy.
    It is made at the first step; from then on the parameter's own value is not read.

    Raises `ValueError` for hyperparameters out of range and an unknown implementation.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        implementation: str = "auto",
    ) -> None:
        self.implementation = implementation
        known = implementation in IMPLEMENTATIONS
        check(self, "implementation", known, "one of " + ", ".join(IMPLEMENTATIONS))
        self._has_triton = importlib.util.find_spec("triton") is not None
        self._fused: dict[Hashable, Any] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own, as in `torch.optim.Optimizer`."""
        group = SimpleNamespace(**{**self.defaults, **param_group})
        lr_is_right = group.lr.dim() == 0 if isinstance(group.lr, Tensor) else group.lr >= 0
        check(group, "lr", lr_is_right, "0 or more, or a 0-dim tensor")
        betas_are_right = len(group.betas) == 2 and all(0 <= beta < 1 for beta in group.betas)
        check(group, "betas", betas_are_right, "two numbers, each at least 0 and below 1")
        check(group, "eps", group.eps >= 0, "0 or more")
        check(group, "weight_decay", group.weight_decay >= 0, "0 or more")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Any:
        """Update every parameter that has a gradient; return what `closure` returns, if given.

        Gradients count `grad_scale` times (`.grad` stays as it is), and if `skip` is not zero
        nothing changes; both are 0-dim tensors on the parameters' device.

        Raises `ValueError` for gradients, parameters and scalars that it has no update for, and
        `RuntimeError` where a parameter's first step is inside a CUDA graph capture.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for key, batch, group in self._batches():
            _check_batch(batch, lr=group["lr"], grad_scale=grad_scale, skip=skip)
            self._update(key, batch, group, grad_scale, skip)
        return loss

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of all its gradients, as by `grad_norm`; with `triton` in fewer launches."""
        squares = []
        for key, batch, _ in self._batches():
            grads = [param.grad for param in batch]
            if self._implementation_on(batch[0].device) == "triton":
                states = [self._state(param) for param in batch]
                squares.append(self._fused_for(key).square_sum(batch, grads, states))
            else:
                squares.append(grad_norm(batch).square())
        return torch.stack(squares).sum().sqrt() if squares else grad_norm([])

    def _batches(self) -> Iterator[tuple[tuple, list[Tensor], dict[str, Any]]]:
        """(key, parameters, group): those with gradients that share group, device and dtypes."""
        for index, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            for kind, batch in _grouped(params, lambda p: (p.device, p.dtype, p.grad.dtype)):
                yield (index, *kind), batch, group

    def _fused_for(self, key: tuple) -> Any:
        """The Triton update of one batch, which keeps tables on the device."""
        from lib.optimizer_triton import FusedAdamW

        if key not in self._fused:
            self._fused[key] = FusedAdamW()
        return self._fused[key]

    def _update(
        self,
        key: tuple[int, torch.device, torch.dtype, torch.dtype],
        params: list[Tensor],
        group: dict[str, Any],
        grad_scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Update parameters of one group that share device, dtype and gradient's dtype."""
        implementation = self._implementation_on(params[0].device)
        if implementation != "triton" and skip is not None and bool(skip):
            return
        states = [self._state(param) for param in params]
        grads = [param.grad for param in params]
        settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        if implementation == "triton":
            fused = self._fused_for(key)
            fused.step(params, grads, states, grad_scale=grad_scale, skip=skip, **settings)
            return
        settings["lr"] = float(settings["lr"])
        grads = _float32(grads)
        if grad_scale is not None:
            grads = torch._foreach_mul(grads, grad_scale)
        if implementation == "foreach":
            foreach_update(params, grads, states, **settings)
            return
        for param, grad, state in zip(params, grads, states):
            reference_update(param, grad, state, **settings)

    def _implementation_on(self, device: torch.device) -> str:
        """What `implementation` means for parameters on `device`."""
        if self.implementation == "auto":
            return "triton" if device.type == "cuda" and self._has_triton else "foreach"
        runs = self.implementation != "triton" or runs_triton(device)
        check(self, "implementation", runs, f"'auto' or 'foreach' for parameters on {device}")
        return self.implementation

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        """The state of `param`, made at its first step."""
        state = self.state[param]
        names = ["step", "exp_avg", "exp_avg_sq"] + ["master"] * (param.dtype != torch.float32)
        missing = [name for name in names if name not in state]
        if missing and param.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first step of a parameter of shape {tuple(param.shape)} is inside a CUDA "
                "graph capture, whose replays would reset its state; step once before capturing"
            )
        for name in missing:
            shape = () if name == "step" else param.shape
            state[name] = torch.zeros(shape, dtype=torch.float32, device=param.device)
            if name == "master":
                state[name].copy_(param)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a copy of `state_dict`, bit for bit, on each parameter's device.

        A learning rate that is a tensor stays the same tensor and takes the loaded value; CUDA
        graphs of earlier steps are void. Raises `ValueError`, and changes nothing, where the saved
        groups, names or shapes do not fit the parameters.
        """
        own_lrs = [group["lr"] for group in self.param_groups]
        params = [param for group in self.param_groups for param in group["params"]]
        saved_ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        loaded = {
            param: _loaded_state(param, number, state_dict["state"][number])
            for number, param in zip(saved_ids, params)
            if number in state_dict["state"]
        }
        # Given the state, `super` would round it to the parameter's dtype.
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(loaded)
        for group, lr in zip(self.param_groups, own_lrs):
            group["lr"] = lr.fill_(group["lr"]) if isinstance(lr, Tensor) else float(group["lr"])


def _loaded_state(param: Tensor, number: int, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """A float32 copy of one parameter's saved state."""
    shapes = {"step": (), "exp_avg": param.shape, "exp_avg_sq": param.shape}
    if "master" in saved and param.dtype != torch.float32:
        shapes["master"] = param.shape
    state = {}
    for name, shape in shapes.items():
        given = SimpleNamespace(**{f"state {name} of parameter {number}": saved.get(name)})
        fits = isinstance(saved.get(name), Tensor) and saved[name].shape == shape
        check(given, *vars(given), fits, f"a tensor of shape {tuple(shape)}")
        state[name] = torch.empty(shape, dtype=torch.float32, device=param.device)
        state[name].copy_(saved[name])
    return state


def _check_batch(params: list[Tensor], **scalars: Any) -> None:
    """Raise a `ValueError` for parameters, gradients and scalars that AdamW has no update for."""
    device, dtype = params[0].device, params[0].dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"a parameter is {dtype}; right is: float32, bfloat16 or float16")
    for layout in {param.grad.layout for param in params} - {torch.strided}:
        raise ValueError(f"a gradient is {layout}; right is: dense, as with sparse=False")
    for name, value in scalars.items():
        if isinstance(value, Tensor) and (value.dim() or value.device != device):
            found = f"{name} is a tensor of shape {tuple(value.shape)} on {value.device}"
            raise ValueError(f"{found}; right is: shape () on {device}")


def _grouped(
    tensors: Iterable[Tensor], key: Callable[[Tensor], Hashable]
) -> list[tuple[Any, list[Tensor]]]:
    """The tensors of equal `key` together, in their order."""
    groups: dict[Hashable, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.items())


def _float32(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, copied to float32 unless they are; all have one dtype."""
    if tensors[0].dtype == torch.float32:
        return tensors
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def cosine_lr(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> float:
    """The learning rate at `step`: a linear warm-up, half a cosine, then constant.

    Rises from 0 to `max_lr` at `warmup_steps` and falls to `min_lr` at `cosine_steps` (Loshchilov
    and Hutter 2017, arXiv:1608.03983, without restarts). Raises `ValueError` for arguments out of
    order.
    """
    given = SimpleNamespace(**locals())
    check(given, "step", step >= 0, "0 or more")
    check(given, "warmup_steps", warmup_steps >= 0, "0 or more")
    right = f"at least warmup_steps, {warmup_steps}"
    check(given, "cosine_steps", cosine_steps >= warmup_steps, right)
    check(given, "min_lr", 0 <= min_lr <= max_lr, f"between 0 and max_lr, {max_lr}")
    if step < warmup_steps:
        return step / warmup_steps * max_lr
    if step >= cosine_steps:
        return min_lr
    progress = (step - warmup_steps) / (cosine_steps - warmup_steps)
    return min_lr + (1 + math.cos(math.pi * progress)) / 2 * (max_lr - min_lr)


@torch.no_grad()
def grad_norm(params: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all gradients together: 0-dim, float32, on the gradients' device.

    Sums in float32, of wider gradients in theirs; reads each once and never waits for the device.
    """
    params = list(params)
    grads = [param.grad for param in params if param.grad is not None]
    device = grads[0].device if grads else params[0].device if params else None
    norms = [
        norm.to(device, torch.float32, non_blocking=True)
        for (_, dtype), batch in _grouped(grads, lambda grad: (grad.device, grad.dtype))
        # a norm cannot be of a narrower dtype than what it is of
        for norm in torch._foreach_norm(
            batch, 2, dtype=None if dtype.itemsize > 4 else torch.float32
        )
    ]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of `norm` are multiplied by to have at most `max_norm`: 0-dim, at most 1.

    Given to `AdamW.step(grad_scale=...)` it clips without a pass of its own over the gradients.
    Raises `ValueError` for a negative `max_norm`.
    """
    check(SimpleNamespace(max_norm=max_norm), "max_norm", max_norm >= 0, "0 or more")
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their joint L2 norm is at most `max_norm`.

    Returns the norm before, as `grad_norm` does; never waits for the device. The same as
    `torch.nn.utils.clip_grad_norm_` (Pascanu et al. 2013, arXiv:1211.5063, Algorithm 1).
    """
    params = list(params)
    norm = grad_norm(params)
    coefficient = clip_coefficient(norm, max_norm)
    grads = [param.grad for param in params if param.grad is not None]
    for (device, _), batch in _grouped(grads, lambda grad: (grad.device, grad.dtype)):
        torch._foreach_mul_(batch, coefficient.to(device, non_blocking=True))
    return norm
