"""AdamW in three implementations with one result: readable, in a few kernels, in two kernels.

`reference_update` is the algorithm, `foreach_update` the same for many parameters at once, and
`lib.optimizer.adamw_triton` runs it as a single pass over memory. `AdamW` picks one of them.
Below is what comes before an update: the norm of all gradients, and clipping.
"""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from lib.core.hardware import runs_triton
from lib.core.settings import require
from lib.core.terminal import warn_once

IMPLEMENTATIONS = ("auto", "reference", "foreach", "triton")
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Options of PyTorch's Adam and AdamW that change the result, and the value that is supported.
OPTIONS = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
log = logging.getLogger(__name__)


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
    """Take one AdamW step for one parameter, in place (Loshchilov and Hutter 2019, Algorithm 2).

    `gradient` is float32 and has the shape of `param`; `state` is described at `AdamW`.
    """
    beta1, beta2 = betas
    # bfloat16 is too coarse for small updates: such a parameter is a rounded copy of the weight
    weight = state.get("master", param)
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    state["step"] += 1
    step = state["step"].item()

    # decoupled decay: it shrinks the weight and never enters the moments
    weight.mul_(1 - lr * weight_decay)

    # running means of the gradient and of its square
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    # both start at zero, and are too small at first by a factor of 1 - beta^step
    denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    weight.addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))

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
    """`reference_update` for many parameters of one dtype and device, line by line for all."""
    beta1, beta2 = betas
    weights = [state.get("master", param) for param, state in zip(params, states)]
    means = [state["exp_avg"] for state in states]
    squares = [state["exp_avg_sq"] for state in states]
    steps = [state["step"] for state in states]

    # parameters may have joined at different steps
    torch._foreach_add_(steps, 1)
    steps = torch.stack(steps).tolist()

    # decay
    torch._foreach_mul_(weights, 1 - lr * weight_decay)

    # moments
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

    # bias correction and update
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, [(1 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(denominators, eps)
    step_sizes: list[Any] = [-lr / (1 - beta1**step) for step in steps]
    torch._foreach_addcdiv_(weights, means, denominators, step_sizes)

    if weights[0] is not params[0]:
        torch._foreach_copy_(params, weights)


class Optimizer(torch.optim.Optimizer):
    """`torch.optim.Optimizer` without the wrappers of its methods.

    They keep the methods from being compiled; for that, the first call loads PyTorch's compiler,
    which takes 1.6 s in each process.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    The state of a parameter is `step` (0-dim), `exp_avg` and `exp_avg_sq`, all float32. bfloat16
    and float16 parameters also have `master`, the float32 weight; the parameter is its
    rounded copy. It is made at the first step; from then on the parameter's own value is not read.

    Args:
        lr: a float, or a 0-dim tensor on the parameters' device, which may change between replays
            of a CUDA graph.
        implementation: one of

            - `reference`: `reference_update`, one parameter after another;
            - `foreach`: `foreach_update`, a few kernels for all parameters;
            - `triton`: two kernels for all parameters, on CUDA only. It never waits for the device,
              so that a CUDA graph can replay the step; take one step before capturing it;
            - `auto`: `triton` on CUDA where Triton is installed, else `foreach`.

            The first two read step counts, `lr` and `skip` on the host: free on a CPU, a wait on a
            GPU.

    Raises:
        ValueError: a hyperparameter is out of range, or the implementation is unknown.
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
        known = ", ".join(IMPLEMENTATIONS)
        is_known = implementation in IMPLEMENTATIONS
        require(is_known, f"implementation must be one of {known}, got {implementation!r}")
        self.implementation = implementation
        # updates in Triton, which keep tables on the device, by key of `_batches`
        self._fused: dict[Hashable, Any] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own, as in `torch.optim.Optimizer`."""
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """The state for `copy.deepcopy` and pickle; tables on the device are made again."""
        return super().__getstate__() | {"implementation": self.implementation, "_fused": {}}

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss, as in `torch.optim.Optimizer`.
            grad_scale: factor of all gradients, 0-dim on the parameters' device; `.grad` itself
                stays unscaled.
            skip: nonzero: change nothing; 0-dim on the parameters' device.

        Returns:
            What `closure` returned.

        Raises:
            ValueError: a dtype, layout, shape or device is not supported.
            RuntimeError: a parameter's first step is inside a CUDA graph capture.
        """
        # gradients, if the caller leaves them to a closure
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # a batch at a time: one group, device and dtype; all are checked before any is updated
        for key, params, group in list(self._batches(grad_scale=grad_scale, skip=skip)):
            self._update(key, params, group, grad_scale, skip)
        return loss

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The L2 norm of all its gradients, as `grad_norm`; with `triton` in fewer launches."""
        squares = []
        for key, params, _ in self._batches():
            if self._implementation_on(params[0].device) == "triton":
                # with the table of addresses that the update uses, too
                grads = [param.grad for param in params]
                states = self._states(params)
                squares.append(self._fused_for(key).square_sum(params, grads, states))
            else:
                squares.append(grad_norm(params).square())
        return torch.stack(squares).sum().sqrt() if squares else grad_norm([])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of `state_dict`, bit for bit, onto each parameter's device.

        A learning rate that is a tensor remains the same tensor and takes the loaded value. CUDA
        graphs captured before become invalid.

        Raises:
            ValueError: the saved groups, names, shapes or options, such as AMSGrad, do not fit;
                nothing has changed then.
        """
        for group in state_dict["param_groups"]:
            _check_group(group)
        own_lrs = [group["lr"] for group in self.param_groups]
        params = [param for group in self.param_groups for param in group["params"]]
        saved_ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        loaded = {
            param: _loaded_state(param, number, state_dict["state"][number])
            for number, param in zip(saved_ids, params)
            if number in state_dict["state"]
        }
        # groups only: the base class would round the state to the parameter's dtype
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(loaded)
        for group, lr in zip(self.param_groups, own_lrs):
            group["lr"] = lr.fill_(group["lr"]) if isinstance(lr, Tensor) else float(group["lr"])

    def _batches(self, **scalars: Any) -> Iterator[tuple[tuple, list[Tensor], dict[str, Any]]]:
        """Yield (key, parameters with gradients, group), where key is group, device and dtypes.

        Raises:
            ValueError: no implementation supports a parameter, a gradient or one of the scalars.
        """
        for index, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            for kind, batch in group_by(params, lambda p: (p.device, p.dtype, p.grad.dtype)):
                device, dtype, _ = kind
                if dtype not in PARAM_DTYPES:
                    raise ValueError(
                        f"parameters must be float32, bfloat16 or float16, got {dtype}"
                    )
                for layout in {param.grad.layout for param in batch} - {torch.strided}:
                    raise ValueError(f"gradients must be dense (sparse=False), got {layout}")
                for name, value in {"lr": group["lr"], **scalars}.items():
                    if isinstance(value, Tensor) and (value.dim() or value.device != device):
                        raise ValueError(
                            f"{name} must be a tensor of shape () on {device}, got shape "
                            f"{tuple(value.shape)} on {value.device}"
                        )
                yield (index, *kind), batch, group

    def _update(
        self,
        key: tuple,
        params: list[Tensor],
        group: dict[str, Any],
        grad_scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Update one batch of `_batches`."""
        # the Triton kernel reads `skip` on the GPU; the others wait for it here
        implementation = self._implementation_on(params[0].device)
        if implementation != "triton" and skip is not None and bool(skip):
            return

        # what an update needs; the first step makes the state
        states = self._states(params)
        grads = [param.grad for param in params]
        settings = {name: group[name] for name in HYPERPARAMETERS}

        # in one kernel, which casts and scales by itself
        if implementation == "triton":
            fused = self._fused_for(key)
            fused.step(params, grads, states, grad_scale=grad_scale, skip=skip, **settings)
            return

        # in float32, all parameters at once or one by one
        settings["lr"] = float(settings["lr"])
        if grads[0].dtype != torch.float32:
            # all gradients of a batch have one dtype
            copies = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
            torch._foreach_copy_(copies, grads)
            grads = copies
        if grad_scale is not None:
            grads = list(torch._foreach_mul(grads, grad_scale))
        if implementation == "foreach":
            foreach_update(params, grads, states, **settings)
            return

        # the algorithm itself, one parameter after another
        for param, grad, state in zip(params, grads, states):
            reference_update(param, grad, state, **settings)

    def _implementation_on(self, device: torch.device) -> str:
        """Resolve `implementation` for parameters on `device`."""
        if self.implementation in ("reference", "foreach"):
            return self.implementation
        if self.implementation == "auto" and device.type != "cuda":
            return "foreach"
        if runs_triton(device):
            return "triton"
        if self.implementation == "auto":
            warn_once(log, "Triton is not installed: AdamW takes foreach, which is slower")
            return "foreach"
        where = f"{device}, where Triton is not installed" if device.type == "cuda" else device
        raise ValueError(
            f"implementation must be 'auto' or 'foreach' for parameters on {where}, got 'triton'"
        )

    def _fused_for(self, key: tuple) -> Any:
        """The Triton update of one batch."""
        from lib.optimizer.adamw_triton import FusedAdamW

        if key not in self._fused:
            self._fused[key] = FusedAdamW()
        return self._fused[key]

    def _states(self, params: list[Tensor]) -> list[dict[str, Tensor]]:
        """The state of each of `params`, of one dtype, made at its first step."""
        has_master = params[0].dtype != torch.float32
        states = [self.state[param] for param in params]
        for param, state in zip(params, states):
            # also made anew: the master of a parameter whose dtype has changed
            if "step" not in state or ("master" in state) != has_master:
                _make_state(param, state)
        return states


def _make_state(param: Tensor, state: dict[str, Tensor]) -> None:
    """Add what `state` lacks before the first step of `param`, or the first in its dtype."""
    # made float32 after a step, as by `model.float()`, a parameter is its own master
    state.pop("master", None)
    if "step" in state and param.dtype == torch.float32:
        return
    if param.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the first step of a parameter of shape {tuple(param.shape)} is inside a CUDA "
            "graph capture, whose replays would reset its state; step once before capturing"
        )
    if "step" not in state:
        options: dict = {"dtype": torch.float32, "device": param.device}
        state["step"] = torch.zeros((), **options)
        state["exp_avg"] = torch.zeros(param.shape, **options)
        state["exp_avg_sq"] = torch.zeros(param.shape, **options)
    if param.dtype != torch.float32:
        state["master"] = param.to(torch.float32, memory_format=torch.contiguous_format)


def _check_group(group: dict[str, Any]) -> None:
    """Reject hyperparameters that are missing or out of range, and options of other algorithms."""
    missing = [name for name in HYPERPARAMETERS if name not in group]
    require(not missing, f"a group must have {', '.join(HYPERPARAMETERS)}, got {sorted(group)}")
    lr, betas, eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    lr_fits = lr.dim() == 0 if isinstance(lr, Tensor) else lr >= 0
    require(lr_fits, f"lr must be at least 0, or a 0-dim tensor, got {lr!r}")
    betas_fit = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    require(betas_fit, f"betas must be two numbers, each in [0, 1), got {betas!r}")
    require(eps >= 0, f"eps must be at least 0, got {eps!r}")
    require(decay >= 0, f"weight_decay must be at least 0, got {decay!r}")

    # options of PyTorch's optimizers that would be another algorithm
    for name, right in OPTIONS.items():
        found = group.get(name, right)
        # without decay it does not matter how it is applied
        is_idle = name == "decoupled_weight_decay" and not group["weight_decay"]
        require(found == right or is_idle, f"{name} must be {right} for AdamW here, got {found!r}")


def _loaded_state(param: Tensor, number: int, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """A float32 copy of one parameter's saved state."""
    shapes = {"step": (), "exp_avg": param.shape, "exp_avg_sq": param.shape}
    if "master" in saved and param.dtype != torch.float32:
        shapes["master"] = param.shape
    state = {}
    for name, shape in shapes.items():
        value = saved.get(name)
        if not isinstance(value, Tensor) or value.shape != shape:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"state {name} of parameter {number} must be a tensor of shape {tuple(shape)}, "
                f"got {found}"
            )
        state[name] = torch.empty(shape, dtype=torch.float32, device=param.device)
        state[name].copy_(value)
    return state


# Gradients: their norm, and clipping

# Id of a parameter -> what clips it, whether its gradient is a part, and whose it is. No attribute
# of it, which would be saved with a module.
CLIPPED_BY: dict[int, tuple[str, bool, int]] = {}


@torch.no_grad()
def clip_grad_norm(params: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their joint L2 norm is at most `max_norm`.

    The same as `torch.nn.utils.clip_grad_norm_` (Pascanu et al. 2013, arXiv:1211.5063, Algorithm
    1). Never waits for the device.

    Returns:
        The norm before clipping, as `grad_norm` does.

    Raises:
        ValueError: `max_norm` is negative; or ranks share the gradients, see `clip_with`.
    """
    # one norm of all gradients together, so that clipping keeps their direction
    params = [params] if isinstance(params, Tensor) else list(params)
    for param in params:
        method, has_part, _ = CLIPPED_BY.get(id(param), (getattr(param, "clipped_by", ""), True, 0))
        if method and (has_part or param.grad is None):
            raise ValueError(
                f"params must have whole gradients, but a parameter of shape {tuple(param.shape)} "
                f"has none or a part, as ranks share them; call {method}(), which adds up the "
                "norm over the ranks"
            )
    norm = grad_norm(params)
    scale_gradients(params, clip_coefficient(norm, max_norm))
    return norm


def clip_with(owner: Any, method: str, params: list[Any], *, has_part: bool) -> None:
    """Have `clip_grad_norm` refuse parameters whose gradients ranks share, while `owner` lives.

    Args:
        method: what clips them, for the message.
        has_part: whether a gradient is a part; otherwise it is whole until it is shared, and then
            None.
    """
    mark = method, has_part, id(owner)
    for param in params:
        CLIPPED_BY[id(param)] = mark
    # holds the parameters until then, so that no other has their ids
    weakref.finalize(owner, _clip_again, mark, params).atexit = False  # type: ignore[misc]  # settable


def _clip_again(mark: tuple[str, bool, int], params: list[Any]) -> None:
    for param in params:
        # another owner may have them by now
        if CLIPPED_BY.get(id(param)) == mark:
            del CLIPPED_BY[id(param)]


@torch.no_grad()
def grad_norm(params: Tensor | Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together: 0-dim, float32, on the gradients' device.

    Reads each gradient once, sums in float32, and never waits for the device. With a float64
    gradient among them, sums and result are float64.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    grads = [param.grad for param in params if param.grad is not None]
    device = grads[0].device if grads else params[0].device if params else None

    # the norm of each gradient
    norms = []
    for (_, dtype), batch in group_by(grads, lambda grad: (grad.device, grad.dtype)):
        # PyTorch refuses a norm in a narrower dtype than the gradient's
        norm_dtype = None if dtype.itemsize > 4 else torch.float32
        norms += torch._foreach_norm(batch, 2, dtype=norm_dtype)
    if not norms:
        return torch.zeros((), device=device)

    # the norm of the norms is that of all numbers
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    norms = [norm.to(device, dtype, non_blocking=True) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, 0-dim and at most 1, that brings gradients of norm `norm` to `max_norm`.

    As `grad_scale` of `AdamW.step` it clips without a pass of its own over the gradients.

    Raises:
        ValueError: `max_norm` is negative.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_gradients(params: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by `factor`, 0-dim, in place; never waits for the device."""
    # all of a device and dtype in a few kernels
    grads = [param.grad for param in params if param.grad is not None]
    for (device, _), batch in group_by(grads, lambda grad: (grad.device, grad.dtype)):
        torch._foreach_mul_(batch, factor.to(device, non_blocking=True))


def group_by(
    tensors: Iterable[Tensor], key: Callable[[Tensor], Hashable]
) -> list[tuple[Any, list[Tensor]]]:
    """Return (key, tensors) pairs; keys and tensors stay in the order in which they came."""
    groups: dict[Hashable, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.items())
