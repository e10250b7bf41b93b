"""Memory of a rank in training, by formula: with plain data parallelism and with ZeRO.

Mixed precision with Adam keeps 16 bytes per weight (Rajbhandari et al. 2020, arXiv:1910.02054,
section 3.1), and plain data parallelism keeps all of them on every rank. The stages of ZeRO divide
them among n ranks:

| stage | weights | gradients | optimizer state |
|-------|---------|-----------|-----------------|
| 0     | W       | G         | S               |
| 1     | W       | G         | S / n           |
| 2     | W       | G / n     | S / n           |
| 3     | W / n   | G / n     | S / n           |

A weight, its gradient and its state take 4 + 4 + 8 bytes in float32 and under autocast; with
`low_precision_weights` a matrix takes 2 + 2 + 12, norms as before. Beside them there are

- **activations**, which the forward pass keeps for the backward pass (`lib.model.costs`);
- **communication**: on CPUs `flashddp` copies one bucket of gradients at a time and `flat` all, G;
  on GPUs nothing. A sharded optimizer that averages gradients itself (stage 1, `none`) packs each
  bucket for its reduce-scatter, and frees it while the second one after it is being sent: a
  rank keeps the means of its slices, G / n, as in stage 2, and at most three buckets. Over gloo, on
  CPUs, a reduce-scatter makes one more copy. Stage 2 as in the paper takes one bucket, stage 3 the
  gradients of a block;
- **gathered** weights in stage 3: embedding or head, and, but for the loss, two blocks in `dtype`,
  one in use and one on its way;
- with activation **checkpoints** around every block: in place of its activations the block's input,
  and everything of one block at a time, which backward computes again;
- **working** memory: what is between the matmuls of a feed-forward layer;
- at the end of the **forward** pass that, or the loss, whichever is larger: logits (on a CPU 16 MiB
  at a time, three times that in 2-byte types, and the sum over chunks) and the head's copy in a
  2-byte type. Autocast keeps its copies of all blocks' weights until then, with checkpoints, too.

A GPU computes logits in chunks of 1/32 of its memory and sums their gradients in float32. That is
not in the formula, which takes all logits: on an H200 with 151,936 entries and 32,768 tokens both
are 9.9 GB, and on a smaller GPU chunks take less.

Stages 0 and 1 are what `lib.ddp.wrappers` and `lib.sharded_optimizer.optimizer` hold; 2 and 3 are
the paper's, with this library's precisions. Like `lib.model.costs` it needs no model and no torch.
Left out is what does not grow with the model's width: step counts, alignment, RoPE's fixed tables.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lib.core.settings import require
from lib.ddp.settings import DDP_WRAPPERS, default_bucket_cap_mb
from lib.model.config import ModelConfig
from lib.model.costs import (
    CHUNK_BYTES,
    activation_bytes_by_part,
    num_parameters,
    parameters_by_part,
)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Presets from small to large.
SIZES = ("small", "medium", "large", "xl", "2.7b")
# Memory of a GPU that tensors cannot use: CUDA's context, NCCL's buffers, gaps between blocks.
RESERVED_BYTES = 10**9


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, each kind at its own maximum; the maxima are at different times."""

    parameters: int
    """Weights that the model computes with."""

    gradients: int
    """Gradients at the end of the backward pass, when all are complete."""

    optimizer_state: int
    """AdamW's moments, and float32 masters of low-precision weights; from the first step on."""

    activations: int
    """Activations at the start of the backward pass."""

    communication: int = 0
    """Sent and received at the end of the backward pass, besides the gradients."""

    averaged_gradients: int = 0
    """Gradients that are left when the optimizer steps."""

    gathered: int = 0
    """Other ranks' weights while they are needed (stage 3)."""

    gathered_blocks: int = 0
    """The part of `gathered` that is released when the loss is computed."""

    working: int = 0
    """Temporaries of a layer when activations are at their maximum."""

    forward: int = 0
    """Temporaries at the end of the forward pass: of the loss or of a layer, and copies of weights
    that autocast keeps until then."""

    update: int = 0
    """Temporaries of the optimizer's step; 0 on a GPU, where it is one fused kernel."""

    recomputed: int = 0
    """The part of `activations` that backward computes again, block by block (checkpoints)."""

    late_gradients: int = 0
    """The part of `gradients` that is not there yet when the first block is computed again."""

    gradients_stay: bool = False
    """Whether the gradients' memory is kept between steps, as by PyTorch's DDP."""

    @property
    def between_steps(self) -> int:
        """Bytes that a rank holds all the time."""
        gradients = self.gradients if self.gradients_stay else 0
        return self.parameters + self.optimizer_state + gradients

    @property
    def before_step(self) -> int:
        """Between the backward pass and the optimizer's step, with averaged gradients."""
        gradients = self.gradients if self.gradients_stay else self.averaged_gradients
        return self.parameters + self.optimizer_state + gradients

    @property
    def peak(self) -> int:
        """The maximum over a step: when the loss is computed, in backward, or in the update.

        Backward frees activations while it creates gradients, layer by layer, so its maximum is at
        its start or at its end. With checkpoints a whole block is there in its last block and in
        its first one, but not in the loss.
        """
        kept = self.parameters + self.optimizer_state + self.gathered
        gradients = self.gradients if self.gradients_stay else 0
        end_of_forward = kept + gradients + self.activations - self.recomputed + self.forward
        end_of_forward -= self.gathered_blocks
        start_of_backward = kept + gradients + self.activations + self.working
        end_of_backward = kept + self.gradients + self.communication
        moments = [end_of_forward, start_of_backward, end_of_backward]
        if self.recomputed:
            late = 0 if self.gradients_stay else self.late_gradients
            moments.append(end_of_backward - late + self.recomputed + self.working)
        return max(*moments, self.before_step + self.update)


def rank_memory(
    config: ModelConfig,
    *,
    ranks: int,
    stage: int = 0,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    low_precision_weights: bool = False,
    checkpoints: bool = False,
    ddp_wrapper: str = "flashddp",
    bucket_cap_mb: float | None = None,
    cuda: bool = True,
    outer_stays: bool = False,
) -> RankMemory:
    """Bytes on the fullest of `ranks` ranks that train `TransformerLM(config)` together.

    Args:
        stage: of ZeRO, 0 to 3; one rank is stage 0 in any case.
        batch_size: sequences of `config.context_length` tokens in a rank's forward pass.
        dtype: of matmuls: `float32`, `bfloat16` or `float16`.
        low_precision_weights: whether matrices are held in `dtype`.
        checkpoints: whether each block keeps its input alone (`lib.fsdp.checkpoint_activations`).
        ddp_wrapper: who averages gradients in stages 0 and 1; `none` is for stage 1.
        bucket_cap_mb: MiB (2²⁰ bytes) of gradients in a bucket (default:
            `lib.ddp.settings.default_bucket_cap_mb`).
        cuda: whether the rank has a GPU. A CPU's AdamW works on a float32 copy of the gradients
            and on the updates' denominators, 8 bytes for each weight that it updates.
        outer_stays: in stage 3, whether embedding and head stay gathered from forward to the end of
            backward, as by PyTorch's `fully_shard`, and not only while they are needed.

    Raises:
        ValueError: an unknown stage, dtype or wrapper, or fewer than one rank or sequence.
    """
    _check(ranks, batch_size, stage, dtype, ddp_wrapper, bucket_cap_mb)
    element_bytes = ELEMENT_BYTES[dtype]
    weight_bytes = element_bytes if low_precision_weights else 4

    # what the stage divides among the ranks
    divides_state = ranks > 1 and stage >= 1
    divides_gradients = ranks > 1 and (stage >= 2 or (stage == 1 and ddp_wrapper == "none"))
    divides_weights = ranks > 1 and stage == 3

    def share(number: int, is_divided: bool) -> int:
        return -(-number // ranks) if is_divided else number

    # weights, gradients and state
    weights, state = _weight_and_state_bytes(config, weight_bytes)
    parts = parameters_by_part(config)
    block = (parts["attention"] + parts["feed_forward"]) // config.num_layers
    # the head has given a tied embedding its gradient
    late = block + (0 if config.tied_embeddings else parts["token_embeddings"])

    # gradients on their way, and weights of other ranks
    cap_mb = bucket_cap_mb or default_bucket_cap_mb(weights)
    bucket = min(int(cap_mb * 2**20), weights)
    communication = 0
    if ranks > 1 and not divides_gradients:
        # a wrapper averages whole gradients
        copies = {"flat": weights, "flashddp": bucket}
        communication = 0 if cuda else copies.get(ddp_wrapper, 0)
    elif ranks > 1:
        packed = min((3 if cuda else 4) * bucket, 2 * weights)
        communication = {1: packed, 2: bucket, 3: block * element_bytes}[stage]
    outer = [parts["token_embeddings"], parts["lm_head"]]
    outer_bytes = (sum(outer) if outer_stays else max(outer)) * weight_bytes
    gathered_blocks = divides_weights * min(2, config.num_layers) * block * element_bytes

    # activations and temporaries
    autocast = not (low_precision_weights or divides_weights)
    kept, recomputed, copies = _activation_bytes(
        config, batch_size, element_bytes, autocast=autocast, cuda=cuda, checkpoints=checkpoints
    )
    # a GPU's checkpointed blocks hold less beside the insides of a layer, forward and backward
    widths = (2, 0) if checkpoints and cuda and config.norm == "pre" else (4, 4)
    in_forward, working = (
        _working_bytes(config, batch_size, element_bytes, widths=n) for n in widths
    )
    is_cast = element_bytes < weight_bytes
    loss = _loss_bytes(config, batch_size, element_bytes, is_cast=is_cast, cuda=cuda)
    return RankMemory(
        parameters=share(weights, divides_weights),
        gradients=share(weights, divides_gradients),
        optimizer_state=share(state, divides_state),
        activations=kept,
        communication=communication,
        averaged_gradients=share(weights, divides_gradients),
        gathered=divides_weights * outer_bytes + gathered_blocks,
        gathered_blocks=gathered_blocks,
        working=working,
        forward=copies + max(in_forward, loss),
        update=0 if cuda else 8 * share(num_parameters(config), divides_state),
        recomputed=recomputed,
        late_gradients=share(late * weight_bytes, divides_gradients),
        gradients_stay=ranks > 1 and not divides_gradients and ddp_wrapper == "torch_ddp",
    )


def default_cap_mb(config: ModelConfig, *, dtype: str, low_precision_weights: bool) -> float:
    """The default MiB in a bucket of this model's gradients."""
    element_bytes = ELEMENT_BYTES[dtype] if low_precision_weights else 4
    return default_bucket_cap_mb(_weight_and_state_bytes(config, element_bytes)[0])


def _weight_and_state_bytes(config: ModelConfig, element_bytes: int) -> tuple[int, int]:
    """Bytes of the weights, and of AdamW's state; matrices in `element_bytes`, norms in 4.

    The state is two float32 moments, and a float32 master of a weight in two bytes.
    """
    norms = parameters_by_part(config)["norms"]
    matrices = num_parameters(config) - norms
    weights = matrices * element_bytes + norms * 4
    state = matrices * (8 if element_bytes == 4 else 12) + norms * 8
    return weights, state


def _activation_bytes(
    config: ModelConfig,
    batch_size: int,
    element_bytes: int,
    *,
    autocast: bool,
    cuda: bool,
    checkpoints: bool,
) -> tuple[int, int, int]:
    """Bytes of activations, the part of them that is recomputed, and other copies of weights.

    Without checkpoints the copies are kept for backward, and are activations. With checkpoints all
    are there until the forward pass ends, and those of one block when it is computed again.
    """

    def kept(shape: ModelConfig) -> dict[str, int]:
        return activation_bytes_by_part(
            shape,
            batch_size,
            element_bytes=element_bytes,
            autocast=autocast,
            cuda=cuda,
            around_block=checkpoints,
        )

    all_parts = kept(config)
    if not checkpoints:
        return sum(all_parts.values()), 0, 0
    width = batch_size * config.context_length * config.d_model * element_bytes
    inputs = config.num_layers * width
    # what one more block would keep
    deeper = kept(dataclasses.replace(config, num_layers=config.num_layers + 1))
    recomputed = sum(deeper.values()) - sum(all_parts.values())
    outside = sum(all_parts.values()) - config.num_layers * recomputed
    if cuda and config.norm == "pre":
        # a Triton norm keeps its input, which the block's checkpoint has already
        recomputed -= width
    return outside + inputs + recomputed, recomputed, all_parts["weight_copies"]


def _working_bytes(config: ModelConfig, batch_size: int, element_bytes: int, *, widths: int) -> int:
    """Bytes of temporaries in a feed-forward layer: inside, and `widths` as wide as the model."""
    tokens = batch_size * config.context_length
    return tokens * element_bytes * (widths * config.d_model + 3 * config.ff_width)


def _loss_bytes(
    config: ModelConfig, batch_size: int, element_bytes: int, *, is_cast: bool, cuda: bool
) -> int:
    """Bytes of temporaries in the loss: logits, and the head in the dtype of the matmuls."""
    vocabulary = config.vocab_size or 0
    logits = batch_size * config.context_length * element_bytes * vocabulary
    head = vocabulary * config.d_model
    copy = head * element_bytes if is_cast else 0
    # a GPU's chunks are so large that the formula takes all logits
    if cuda or logits <= CHUNK_BYTES:
        # on a CPU the loss also copies logits in 2-byte types to float32
        return logits * (1 if cuda or element_bytes == 4 else 3) + copy
    # the head's gradient of one chunk, and in 2-byte types that and the sum in float32
    sums = head * (4 if element_bytes == 4 else 8)
    return CHUNK_BYTES * (1 if element_bytes == 4 else 3) + sums + copy


def _check(
    ranks: int,
    batch_size: int,
    stage: int,
    dtype: str,
    ddp_wrapper: str,
    bucket_cap_mb: float | None,
) -> None:
    require(ranks >= 1, f"ranks must be at least 1, got {ranks}")
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    require(stage in range(4), f"stage must be 0, 1, 2 or 3, got {stage}")
    for name, value, known in (
        ("dtype", dtype, ELEMENT_BYTES),
        ("ddp_wrapper", ddp_wrapper, DDP_WRAPPERS),
    ):
        require(value in known, f"{name} must be one of {', '.join(known)}, got {value!r}")
    averages = stage > 0 or ddp_wrapper != "none" or ranks == 1
    require(averages, f"ddp_wrapper must not be 'none' in stage 0 on {ranks} ranks; use flashddp")
    is_positive = bucket_cap_mb is None or bucket_cap_mb > 0
    require(is_positive, f"bucket_cap_mb must be more than 0, got {bucket_cap_mb}")
