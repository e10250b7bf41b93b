"""Where a rank's memory goes in training, by formula: with plain data parallelism and with ZeRO.

Mixed precision with Adam keeps 16 bytes for each weight (Rajbhandari et al. 2020, arXiv:1910.02054,
section 3.1), and plain data parallelism keeps all of them on every rank. The stages of ZeRO divide
them among n ranks:

| stage | weights | gradients | optimizer's state |
|-------|---------|-----------|-------------------|
| 0     | W       | G         | S                 |
| 1     | W       | G         | S / n             |
| 2     | W       | G / n     | S / n             |
| 3     | W / n   | G / n     | S / n             |

Stages 0 and 1 are what `lib.ddp` and `lib.sharded_optimizer` hold; 2 and 3 are the paper's, with
the precisions of this library. Like `lib.model_costs` it needs no model and no torch. Left out is
what does not grow with the model's width: step counts, alignment, the fixed tables of RoPE.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lib.communication_costs import default_bucket_cap_mb
from lib.config import require
from lib.config_training import ModelConfig
from lib.model_costs import activation_bytes, num_parameters, parameters_by_part
from lib.model_presets import model_preset

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# From small to large.
SIZES = ("small", "medium", "large", "xl", "2.7b")
# What a GPU holds beside tensors: CUDA's context, NCCL's buffers, gaps between blocks.
RESERVED_BYTES = 10**9
# Of logits at a time; a GPU's chunks are larger than all logits here.
CPU_LOGITS_BYTES = 16 << 20
# How gradients are averaged: `none` is a sharded optimizer that does it alone.
AVERAGED_BY = ("none", "naive", "flat", "overlap", "flashddp", "torch_ddp")


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, of each kind when it has most; they do not all have most at one time."""

    parameters: int
    """The weights that the model computes with."""

    gradients: int
    """At the end of the backward pass, when all are there."""

    optimizer_state: int
    """AdamW's moments, and the float32 masters of shorter weights; from the first step on."""

    activations: int
    """At the start of the backward pass, for which the forward pass kept them."""

    communication: int = 0
    """What is sent and received at the end of the backward pass, where it is not the gradients."""

    averaged_gradients: int = 0
    """Those that are left when the optimizer steps."""

    gathered: int = 0
    """Weights of other ranks, while they are needed (stage 3)."""

    working: int = 0
    """What a layer or the loss works on when most activations are there."""

    update: int = 0
    """What the optimizer's step works on; 0 on a GPU, where a fused kernel does it."""

    gradients_stay: bool = False
    """Whether the gradients' memory is kept between steps, as by PyTorch's DDP."""

    @property
    def total(self) -> int:
        """The first five added up, as if none made room for another."""
        kept = self.parameters + self.gradients + self.optimizer_state
        return kept + self.activations + self.communication

    @property
    def initialised(self) -> int:
        """What is there before the first step, which makes the optimizer's state."""
        return self.between_steps - self.optimizer_state

    @property
    def between_steps(self) -> int:
        """What is there all the time."""
        gradients = self.gradients if self.gradients_stay else 0
        return self.parameters + self.optimizer_state + gradients

    @property
    def before_step(self) -> int:
        """Between the backward pass and the optimizer's step, when gradients are averaged."""
        gradients = self.gradients if self.gradients_stay else self.averaged_gradients
        return self.parameters + self.optimizer_state + gradients

    @property
    def peak(self) -> int:
        """The most that a step holds: at the start of backward, at its end, or in the update.

        Backward frees activations while it makes gradients, layer by layer, so that it holds most
        at one of its ends.
        """
        kept = self.parameters + self.optimizer_state + self.gathered
        gradients = self.gradients if self.gradients_stay else 0
        start_of_backward = kept + gradients + self.activations + self.working
        end_of_backward = kept + self.gradients + self.communication
        return max(start_of_backward, end_of_backward, self.before_step + self.update)


def state_bytes_per_weight(element_bytes: int) -> int:
    """Bytes of AdamW's state for a weight: two float32 moments, and a master where it is short."""
    return 8 if element_bytes == 4 else 12


def default_cap_mb(config: ModelConfig, *, dtype: str, low_precision_weights: bool) -> float:
    """MiB in a bucket of this model's gradients, where nobody says how many."""
    element_bytes = ELEMENT_BYTES[dtype] if low_precision_weights else 4
    return default_bucket_cap_mb(_weight_and_state_bytes(config, element_bytes)[0])


def rank_memory(
    config: ModelConfig,
    *,
    ranks: int,
    stage: int = 0,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    low_precision_weights: bool = False,
    ddp_wrapper: str = "flashddp",
    bucket_cap_mb: float | None = None,
    cuda: bool = True,
) -> RankMemory:
    """Bytes on the fullest of `ranks` ranks that train `TransformerLM(config)` together.

    A weight, its gradient and its state take

    - float32, or autocast to `dtype`: 4 + 4 + 8 bytes;
    - `low_precision_weights`, for matrices (norms stay as above): 2 + 2 + 12.

    That is W, G and S, which the stage divides. Beside them:

    - `flashddp` copies one bucket of gradients at a time on CPUs and none on GPUs, `flat` all of
      them, G; `torch_ddp` has buffers of G between steps too, and the gradients are views of them;
    - a sharded optimizer that averages gradients itself (stage 1, `none`) packs each bucket into
      the input of its reduce-scatter, and frees it while the second one after it is on its way: of
      its gradients a rank keeps the means of its slices, G / n, as in stage 2, and at most three
      buckets beside. Over gloo, on CPUs, a reduce-scatter copies its bucket once more;
    - stage 2 as in the paper has G / n and one bucket;
    - stage 3 gathers embedding and head, and the weights of two blocks in `dtype`, one in use and
      one on its way; at the end of backward there are also the gradients of a block. Autocast has
      nothing left to copy.

    `working` is the larger of the logits (on a CPU 16 MiB of them at a time, in 2-byte types three
    times) and of what lies between the products of a feed-forward layer. On one rank nothing is
    sent.

    Args:
        stage: of ZeRO, 0 to 3.
        batch_size: windows of `config.context_length` tokens in a forward pass of a rank.
        dtype: of matrix products: `float32`, `bfloat16` or `float16`.
        low_precision_weights: whether matrices are held in `dtype`.
        ddp_wrapper: who averages gradients in stages 0 and 1; `none` is stage 1 alone.
        bucket_cap_mb: MiB (2²⁰ bytes) of gradients in a bucket; when None as many as
            `lib.communication_costs.default_bucket_cap_mb` says.
        cuda: whether the rank has a GPU. A CPU's AdamW works on a float32 copy of the gradients
            and on the updates' denominators, 8 bytes for each weight that it updates.

    Raises:
        ValueError: an unknown stage, dtype or wrapper, or fewer than one rank or window.
    """
    _check(ranks, batch_size, stage, dtype, ddp_wrapper, bucket_cap_mb)
    short = ELEMENT_BYTES[dtype]
    stage = stage if ranks > 1 else 0

    def share(num_bytes: int) -> int:
        return -(-num_bytes // ranks)

    updated = num_parameters(config)
    weights, state = _weight_and_state_bytes(config, short if low_precision_weights else 4)
    gradients = weights
    memory = RankMemory(
        parameters=weights,
        gradients=gradients,
        optimizer_state=share(state) if stage else state,
        activations=activation_bytes(
            config,
            batch_size,
            element_bytes=short,
            autocast=not low_precision_weights and stage < 3,
            cuda=cuda,
        ),
        averaged_gradients=gradients,
        working=_working_bytes(config, batch_size, short, cuda=cuda),
        update=0 if cuda else 8 * (share(updated) if stage else updated),
    )
    if ranks == 1:
        return memory
    change = dataclasses.replace
    cap = bucket_cap_mb or default_bucket_cap_mb(gradients)
    bucket = min(int(cap * 2**20), gradients)
    if stage == 0 or (stage == 1 and ddp_wrapper != "none"):
        copied = {"flat": gradients, "flashddp": 0 if cuda else bucket}
        sent = copied.get(ddp_wrapper, 0)
        return change(memory, communication=sent, gradients_stay=ddp_wrapper == "torch_ddp")
    memory = change(memory, averaged_gradients=share(gradients), gradients=share(gradients))
    if stage == 1:
        return change(memory, communication=min((3 if cuda else 4) * bucket, 2 * gradients))
    memory = change(memory, communication=bucket)
    if stage == 2:
        return memory
    parts = parameters_by_part(config)
    block = short * (parts["attention"] + parts["feed_forward"]) // config.num_layers
    outer = (short if low_precision_weights else 4) * (parts["token_embeddings"] + parts["lm_head"])
    gathered = outer + min(2, config.num_layers) * block
    return change(memory, parameters=share(weights), gathered=gathered, communication=block)


def largest_preset(
    memory_bytes: int,
    ranks: int = 1,
    *,
    stage: int = 0,
    batch_size: int = 1,
    reserved_bytes: int = RESERVED_BYTES,
    **settings,
) -> str | None:
    """The largest of the presets `small` to `2.7b` whose training fits; None where none does.

    Args:
        memory_bytes: that a GPU has.
        reserved_bytes: of them what is not for tensors.
        settings: for `rank_memory`.

    Example:
        A T4 with its 16 GB, with weights in two bytes:

        >>> largest_preset(16 * 10**9, low_precision_weights=True)
        'medium'
        >>> largest_preset(16 * 10**9, 2, stage=1, low_precision_weights=True)
        'large'
    """
    fits = None
    for name in SIZES:
        config = model_preset(name)
        needed = rank_memory(config, ranks=ranks, stage=stage, batch_size=batch_size, **settings)
        if needed.peak + reserved_bytes <= memory_bytes:
            fits = name
    return fits


def _weight_and_state_bytes(config: ModelConfig, element_bytes: int) -> tuple[int, int]:
    """Of the weights, and of AdamW's state for them; matrices in `element_bytes`, norms in 4."""
    vectors = parameters_by_part(config)["norms"]
    matrices = num_parameters(config) - vectors
    weights = matrices * element_bytes + vectors * 4
    state = matrices * state_bytes_per_weight(element_bytes) + vectors * state_bytes_per_weight(4)
    return weights, state


def _working_bytes(config: ModelConfig, batch_size: int, element_bytes: int, *, cuda: bool) -> int:
    """What a feed-forward layer or the loss works on."""
    elements = batch_size * config.context_length * element_bytes
    logits = elements * (config.vocab_size or 0)
    if not cuda:
        # in 2-byte types the loss also copies them to float32
        logits = min(logits, CPU_LOGITS_BYTES) * (1 if element_bytes == 4 else 3)
    return max(logits, elements * (4 * config.d_model + 3 * config.ff_width))


def _check(
    ranks: int,
    batch_size: int,
    stage: int,
    dtype: str,
    ddp_wrapper: str,
    bucket_cap_mb: float | None,
) -> None:
    for name, value in {"ranks": ranks, "batch_size": batch_size}.items():
        require(value >= 1, f"{name} is {value}; right is: at least 1")
    require(stage in range(4), f"stage is {stage}; right is: 0, 1, 2 or 3")
    known = ", ".join(ELEMENT_BYTES)
    require(dtype in ELEMENT_BYTES, f"dtype is {dtype!r}; right is: one of {known}")
    known = ", ".join(AVERAGED_BY)
    message = f"ddp_wrapper is {ddp_wrapper!r}; right is: one of {known}"
    require(ddp_wrapper in AVERAGED_BY, message)
    alone = stage == 0 and ddp_wrapper == "none" and ranks > 1
    require(not alone, f"ddp_wrapper is 'none' in stage 0 on {ranks} ranks; right is: flashddp")
    is_right = bucket_cap_mb is None or bucket_cap_mb > 0
    require(is_right, f"bucket_cap_mb is {bucket_cap_mb}; right is: above 0")
