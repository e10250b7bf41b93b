"""Parameters, gradients and states that the optimizer's tests share."""

import torch
from torch.nn import Parameter

from lib.optimizer.adamw import AdamW

SHAPES = [(33, 65), (64,), (1,), (), (0,), (3, 5, 7)]


def make_params(shapes=SHAPES, dtype=torch.float32, device="cpu", seed=0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    return [Parameter(weight.to(device, dtype)) for weight in weights]


def set_gradients(*models: list[Parameter], seed: int, scale: float = 1.0) -> None:
    """The same random gradients for each list of parameters, whatever its dtype and device."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for params in zip(*models):
        gradient = torch.randn(params[0].shape, generator=generator) * scale
        for param in params:
            # rounded to the coarsest dtype, so that a float32 run sees what the others see
            coarse = gradient.to(models[-1][0].dtype)
            param.grad = coarse.to(param.device, param.dtype, copy=True)


def groups(params: list[Parameter]) -> list[dict]:
    """Parameter groups with different settings, some of them left to the defaults."""
    return [
        {"params": params[:2], "weight_decay": 0.1},
        {"params": params[2:4], "lr": 0.03, "betas": (0.8, 0.95)},
        {"params": params[4:], "betas": (0.0, 0.9), "eps": 1e-4, "weight_decay": 0.0},
    ]


def bits(params: list[Parameter], optimizer: AdamW) -> list[torch.Tensor]:
    """Copies of everything that a step can change."""
    state = [value for param in params for _, value in sorted(optimizer.state[param].items())]
    return [tensor.detach().clone() for tensor in (*params, *state)]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def check_skip_changes_nothing(implementation: str, dtype: torch.dtype, device: str) -> None:
    """Steps that are skipped, the first of all among them, leave no trace among others."""
    params, others = (make_params(dtype=dtype, device=device) for _ in range(2))
    optimizer, peer = (AdamW(p, implementation=implementation) for p in (params, others))
    scale = torch.tensor(torch.nan, device=device)
    for step in range(2):
        set_gradients(params, seed=1, scale=torch.inf)
        for skip in (True, 1.0, torch.nan):
            optimizer.step(skip=torch.tensor(skip, device=device), grad_scale=scale)
        set_gradients(params, others, seed=2 + step)
        optimizer.step(skip=torch.tensor(False, device=device))
        peer.step()
        assert_equal(bits(params, optimizer), bits(others, peer))
