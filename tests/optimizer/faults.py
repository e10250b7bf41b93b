"""Deliberate faults in this room; `tests/test_faults.py` shows that tests catch each of them."""

from tests.fault import Fault

FAULTS = [
    # decay enters the moments' step, not the weight
    Fault(
        "lib/optimizer/adamw.py",
        "weight.mul_(1 - lr * weight_decay)",
        "weight.mul_(1 - weight_decay)",
        "tests/optimizer/test_adamw.py",
    ),
    # bias correction without the root
    Fault(
        "lib/optimizer/adamw.py",
        "denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)",
        "denominator = square.sqrt().div_(1 - beta2**step).add_(eps)",
        "tests/optimizer/test_adamw.py",
    ),
    # eps before the bias correction
    Fault(
        "lib/optimizer/adamw.py",
        "    torch._foreach_add_(denominators, eps)\n",
        "    torch._foreach_add_(denominators, eps * eps)\n",
        "tests/optimizer/test_adamw.py",
    ),
    # the parameter is not written back from its master
    Fault(
        "lib/optimizer/adamw.py",
        "    if weights[0] is not params[0]:\n        torch._foreach_copy_(params, weights)\n",
        "",
        "tests/optimizer/test_adamw.py",
    ),
    # a loaded state shares memory with the saved one
    Fault(
        "lib/optimizer/adamw.py",
        "        state[name] = torch.empty(shape, dtype=torch.float32, device=param.device)\n"
        "        state[name].copy_(value)\n",
        "        state[name] = value\n",
        "tests/optimizer/test_adamw.py",
    ),
    # a skipped step is taken
    Fault(
        "lib/optimizer/adamw.py",
        'if implementation != "triton" and skip is not None and bool(skip):',
        'if implementation != "triton" and skip is not None and bool(skip == 1):',
        "tests/optimizer/test_adamw.py",
    ),
    # gradients are scaled in place
    Fault(
        "lib/optimizer/adamw.py",
        "grads = list(torch._foreach_mul(grads, grad_scale))",
        "torch._foreach_mul_(grads, grad_scale)",
        "tests/optimizer/test_adamw.py",
    ),
    # the schedule is off by the warm-up
    Fault(
        "lib/optimizer/schedule.py",
        "progress = (step - warmup_steps) / (cosine_steps - warmup_steps)",
        "progress = (step - warmup_steps) / cosine_steps",
        "tests/optimizer/test_schedule.py",
    ),
    # small gradients are scaled up
    Fault(
        "lib/optimizer/schedule.py",
        "return torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
        "return max_norm / (norm + 1e-6)",
        "tests/optimizer/test_schedule.py",
    ),
    # norms in the gradients' own dtype
    Fault(
        "lib/optimizer/schedule.py",
        "norm_dtype = None if dtype.itemsize > 4 else torch.float32",
        "norm_dtype = None",
        "tests/optimizer/test_schedule.py",
    ),
    # the last block reads and writes beyond the tensor
    Fault(
        "lib/optimizer/adamw_triton.py",
        "                offsets < num_elements - start,\n",
        "                offsets <= num_elements - start,\n",
        "tests/optimizer/test_adamw_triton.py",
    ),
    # a table that is not rebuilt when a tensor moves
    Fault(
        "lib/optimizer/adamw_triton.py",
        "if table is None or table.key != (device, sizes, addresses):",
        "if table is None or table.key[:2] != (device, sizes):",
        "tests/optimizer/test_adamw_triton.py",
    ),
    # a copy lacks what torch does not know
    Fault(
        "lib/optimizer/adamw.py",
        'return super().__getstate__() | {"implementation": self.implementation, "_fused": {}}',
        "return super().__getstate__()",
        "tests/optimizer/test_adamw.py::test_a_copy_goes_on_as_the_original_and_apart_from_it",
    ),
    # float64 gradients clipped by a rounded norm
    Fault(
        "lib/optimizer/schedule.py",
        "dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else",
        "dtype = torch.float32 if any(norm.dtype == torch.float64 for norm in norms) else",
        "tests/optimizer/test_schedule.py",
    ),
]
