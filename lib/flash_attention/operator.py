"""A kernel's two passes as one operator: for autograd, for eager calls, and for torch.compile."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lib.flash_attention.inputs import is_called_eagerly


class Operator(NamedTuple):
    """A differentiable operator, made by `make_operator`."""

    forward: Callable[..., tuple[Tensor, ...]]
    """The operator `workbook::NAME`, which PyTorch's compiler does not look into."""

    backward: Callable[..., Any]
    """The operator `workbook::NAME_backward`."""

    call: Callable[..., Tensor]
    """The output alone, differentiable: the passes themselves where nothing traces the call."""


def make_operator(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Any],
    fake: Callable[..., tuple[Tensor, ...]],
    empty_grad: Callable[[Tensor], Tensor] = torch.empty_like,
    *,
    num_grads: int = 3,
) -> Operator:
    """Define a differentiable operator of PyTorch from its two passes.

    Args:
        forward: takes tensors, then settings; returns the output, and what backward needs beside
            it, which has no gradient. Types are annotated: they make the operator's schema.
        backward: takes the output's gradient, all tensors that forward took and returned, and the
            settings; returns the gradients of the first `num_grads` tensors.
        fake: what forward returns for its arguments, in shape and layout, without contents.
        empty_grad: the same for the gradient of a tensor.
    """
    annotations = [x.annotation for x in inspect.signature(forward).parameters.values()]
    num_tensors = annotations.count(Tensor)
    unused = (None,) * (len(annotations) - num_grads)
    forward_op = torch.library.custom_op(f"workbook::{name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"workbook::{name}_backward", backward, mutates_args=())
    forward_op.register_fake(fake)

    @backward_op.register_fake
    def _(grad_out: Tensor, *arguments: Any) -> Any:
        grads = tuple(empty_grad(x) for x in arguments[:num_grads])
        return grads if num_grads > 1 else grads[0]

    def with_unused(grads: Any) -> tuple[Tensor | None, ...]:
        return (*grads, *unused) if num_grads > 1 else (grads, *unused)

    def save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.settings = inputs[num_tensors:]
        ctx.save_for_backward(*inputs[:num_tensors], *output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])

    def traced_backward(ctx: Any, grad_out: Tensor, *none: None) -> tuple[Tensor | None, ...]:
        return with_unused(backward_op(grad_out, *ctx.saved_tensors, *ctx.settings))

    forward_op.register_autograd(traced_backward, setup_context=save)

    class Eager(torch.autograd.Function):
        """The passes without the operator, which takes tens of µs more of the host."""

        @staticmethod
        def forward(ctx, *inputs):
            output = forward(*inputs)
            ctx.settings = inputs[num_tensors:]
            ctx.save_for_backward(*inputs[:num_tensors], *output)
            return output[0]

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad_out):
            return with_unused(backward(grad_out, *ctx.saved_tensors, *ctx.settings))

    def call(*inputs: Any) -> Tensor:
        if is_called_eagerly(*inputs[:num_tensors]):
            return Eager.apply(*inputs)
        return forward_op(*inputs)[0]

    return Operator(forward_op, backward_op, call)
