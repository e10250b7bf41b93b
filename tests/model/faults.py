"""Deliberate faults in this room; `tests/test_faults.py` shows that tests catch each of them."""

from tests.fault import Fault

FAULTS = [
    # attention looks one key ahead
    Fault(
        "lib/model/attention.py",
        "dtype=torch.bool, device=device).tril()",
        "dtype=torch.bool, device=device).tril(1)",
        "tests/model/test_attention.py",
    ),
    # a cached query sees one key too few
    Fault(
        "lib/model/attention.py",
        "positions[None, :] <= positions[self.length :, None]",
        "positions[None, :] < positions[self.length :, None]",
        "tests/model/test_attention.py",
    ),
    # the positions of new tokens start at 0 again
    Fault(
        "lib/model/transformer.py",
        "torch.arange(first, first + length, device=token_ids.device)",
        "torch.arange(length, device=token_ids.device)",
        "tests/model/test_attention.py",
    ),
    # a row without keys is no longer special
    Fault(
        "lib/model/loss.py",
        "exponentials / total.masked_fill(total == 0, 1)",
        "exponentials / total",
        "tests/model/test_loss.py",
    ),
    # swapped gate and value
    Fault(
        "lib/model/elementwise_cpu.py",
        "return F.silu(gate).mul_(value)",
        "return F.silu(value).mul_(gate)",
        "tests/model/test_elementwise_cpu.py",
    ),
    # wrong sign in the backward pass
    Fault(
        "lib/model/elementwise_cpu.py",
        "torch.addcmul(grad * weight, x_hat, mean, value=-1)",
        "torch.addcmul(grad * weight, x_hat, mean, value=1)",
        "tests/model/test_elementwise_cpu.py",
    ),
    # stacked matrices initialized as one
    Fault(
        "lib/model/transformer.py",
        "math.sqrt(2 / (d_in + d_out // self.stacked))",
        "math.sqrt(2 / (d_in + d_out))",
        "tests/model/test_transformer.py",
    ),
    # frequencies of the wrong width
    Fault(
        "lib/model/transformer.py",
        "theta ** (-pairs / self.head_dim)",
        "theta ** (-pairs / (2 * self.head_dim))",
        "tests/model/test_transformer.py",
    ),
    # a fused block no longer announces the norm that it ends with
    Fault(
        "lib/model/transformer.py",
        "            self._announce(next_norm)\n",
        "",
        "tests/model/test_transformer.py",
    ),
    # z-loss left out of the gradient
    Fault(
        "lib/model/loss.py",
        "weight = (1 + 2 * z_loss * lse) * grad_factor / total",
        "weight = grad_factor / total",
        "tests/model/test_loss.py",
    ),
    # a sum in place of the mean
    Fault(
        "lib/model/loss.py",
        "return losses.mean()",
        "return losses.sum()",
        "tests/model/test_loss.py",
    ),
    # backward counted once
    Fault(
        "lib/model/costs.py",
        "return 3 * forward if backward else forward",
        "return 2 * forward if backward else forward",
        "tests/model/test_costs.py",
    ),
    # the last program's rows beyond the end are stored
    Fault(
        "lib/model/elementwise_triton.py",
        "mask = (rows < num_rows)[:, None] & inside[None, :]",
        "mask = (rows <= num_rows)[:, None] & inside[None, :]",
        "tests/model/test_elementwise_triton.py",
    ),
    # gradients rotated forward once more
    Fault(
        "lib/model/elementwise_triton.py",
        "cos_ptr + angles, sin_ptr + angles, -1.0, HEAD_DIM",
        "cos_ptr + angles, sin_ptr + angles, 1.0, HEAD_DIM",
        "tests/model/test_elementwise_triton.py",
    ),
    # the kernel that rotates q and k skips their norms
    Fault(
        "lib/model/attention.py",
        "positions is None and norms is None and cache is None",
        "positions is None and cache is None",
        "tests/model/test_elementwise_triton.py",
    ),
    # a target just outside the vocabulary is read
    Fault(
        "lib/model/loss_triton.py",
        "is_valid = (target >= 0) & (target < vocab_size)",
        "is_valid = (target >= 0) & (target <= vocab_size)",
        "tests/model/test_elementwise_triton.py",
    ),
    # types are not checked in Python
    Fault(
        "lib/model/config.py",
        "        check_fields(self)\n",
        "",
        "tests/core/test_settings.py",
    ),
    # blocks keep their kernels where PyTorch's operators are asked for
    Fault(
        "lib/model/transformer.py",
        '        for module in self.modules():\n            if hasattr(module, "uses_kernels"):',
        '        for module in [self]:\n            if hasattr(module, "uses_kernels"):',
        "tests/model/test_elementwise_triton.py",
    ),
    # evaluation and generation get the compiled model too
    Fault(
        "lib/model/transformer.py",
        "        self.hidden = torch.compile(self.model.hidden, dynamic=False)",
        "        self.hidden = self.model.hidden = torch.compile(self.model.hidden, dynamic=False)",
        "tests/model/test_transformer.py",
    ),
    # positions of sequences taken for positions of heads
    Fault(
        "lib/model/attention.py",
        "positions = positions.unsqueeze(-2)  # (1, length) or (batch, 1, length)",
        "positions = positions + 0",
        "tests/model/test_transformer.py::test_each_sequence_can_have_positions_of_its_own",
    ),
    # keys shared by heads that are not neighbors
    Fault(
        "lib/model/attention.py",
        "k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)",
        "k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)",
        "tests/model/test_attention.py::test_every_kernel_shares_keys_among_neighboring_heads",
    ),
    # fewer values than keys
    Fault(
        "lib/model/attention.py",
        "or k.shape[:-1] != v.shape[:-1]:",
        "or False:",
        "tests/model/test_attention.py::test_shapes_that_do_not_belong_together_are_refused",
    ),
    # one row of cosines for any length
    Fault(
        "lib/model/transformer.py",
        "            if length > longest:",
        "            if False:",
        "tests/model/test_transformer.py::test_other_shapes_than_those_of_the_formula_are_refused",
    ),
    # a message that is always written out compiles anew for every length
    Fault(
        "lib/model/transformer.py",
        "            if length > longest:\n",
        '            len(f"{length}")\n            if length > longest:\n',
        "tests/model/test_transformer.py::test_a_compiled_model_takes_any_length_once_it_has_seen_two",
    ),
    # auto stays with PyTorch's on Hopper, or takes ours where it lacks its compiler
    Fault(
        "lib/model/fastest_attention.py",
        "if capability[0] == 9 and dtype in SHORT",
        "if capability[0] == 8 and dtype in SHORT",
        "tests/model/test_fastest_attention.py",
    ),
    Fault(
        "lib/model/fastest_attention.py",
        "        if not _has_hopper_kernels(device):",
        "        if False:",
        "tests/model/test_fastest_attention.py",
    ),
    # float64 rounded to float32 in norms
    Fault(
        "lib/model/elementwise.py",
        "wide = x.to(torch.promote_types(x.dtype, torch.float32))",
        "wide = x.float()",
        "tests/model/test_transformer.py::test_a_model_in_float64_never_computes_in_less",
    ),
    # angles rounded with the model
    Fault(
        "lib/model/transformer.py",
        "        if self.cos is not before:",
        "        if False:",
        "tests/model/test_transformer.py::test_rope_keeps_its_angles_whatever_becomes_of_the_model",
    ),
    # a kernel reads rows with gaps as if there were none
    Fault(
        "lib/model/elementwise_triton.py",
        "return _RMSNorm.apply(x.contiguous(), weight.contiguous(), eps)",
        "return _RMSNorm.apply(x, weight, eps)",
        "tests/model/test_elementwise_triton.py",
    ),
]
