"""Which kind of work a kernel or operator does, told by its name."""

import functools
import re

CATEGORIES = ("matmul", "attention", "elementwise", "communication", "copy", "other")

# The first pattern found in a name decides; names of CUDA kernels, of operators, of Triton kernels
# of this library and of `torch.compile`. "elementwise" is everything that is bound by memory:
# reductions, norms, softmax, loss and optimizer too.
RULES = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        # on the host only the request for it
        ("other", r"^c10d::"),
        ("communication", r"nccl|^gloo:|all_?reduce|all_?gather|reduce_?scatter"),
        # what `torch.compile` writes is called after all that it fuses, attention's inputs too
        ("elementwise", r"^triton_(poi|red|per|for)_"),
        (
            "attention",
            r"flash|fmha|attention|sdpa|dot_do_o|convert_dq"
            r"|^_forward_kernel|^_backward_(queries|keys)_kernel",
        ),
        (
            "matmul",
            r"gemm|gemv|xmma|cutlass|nvjet|cublas|splitk|matmul_kernel|triton_tem"
            r"|^(aten|mkldnn|mkl|inductor|prims)::_*(\w*linear\w*|addmm|mm|bmm|baddbmm|addmv_?|mv|dot)"
            r"(_out)?$",
        ),
        ("copy", r"^memcpy|^memset|^aten::(copy_|fill_|cat)$"),
        # what looks at a tensor in another way, makes room for one, or calls other operators
        (
            "other",
            r"^aten::(_?\w*view\w*|as_strided\w*|reshape|_reshape_alias|t|transpose|permute"
            r"|expand\w*|select|slice|split\w*|chunk|unbind|un?flatten|(un)?squeeze|narrow|detach_?"
            r"|alias|lift_fresh|to|empty\w*|new_empty\w*|resize_?|set_|item|_local_scalar_dense"
            r"|is_\w+|result_type|clone|zero_|zeros\w*|ones\w*|stack|_to_copy|contiguous"
            r"|matmul|einsum|linear)$",
        ),
        ("elementwise", r"^aten::|at::native|cub::|kernel|triton_|CompiledFxGraph|cpp_fused"),
    )
)


@functools.cache
def category_of(name: str) -> str:
    """One of `CATEGORIES`.

    Example:
        >>> category_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL")
        'communication'
    """
    return next((category for category, pattern in RULES if pattern.search(name)), "other")
