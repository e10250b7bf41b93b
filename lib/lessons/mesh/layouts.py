"""The cost of a layout by formula: how a step is spread over data, tensor, pipeline and context.

A **layout** says how many ranks share what: `dp` ranks the batch, `tp` the matmuls of a block, `pp`
the blocks, `cp` a sequence. Ranks are numbered so that neighbors share most often: tensor, context,
data, pipeline. A step's time is that of the fullest pipeline stage,

    (micro-batches + pp - 1) · (compute + exposed messages of a micro-batch) + exposed gradients

- tensor: 4 all-reduces of the activations in a block, of which nothing hides (6 with checkpoints);
- context: keys and values go around a ring, and what exceeds the attention they hide behind counts,
  step by step; in backward the last hop of their gradients has nothing to hide behind;
- data, stages 0 and 1: gradients in float32, which hide behind the last backward pass;
- data, stage 3: blocks are gathered in bfloat16 for each pass and gradients scattered in float32
  for each micro-batch, which hide behind that pass;
- pipeline: 1F1B, which waits for messages: a micro-batch goes to the last stage and back while pp
  of them are under way, so each takes its 2 (pp - 1) messages / pp longer.

Activations are divided by `tp`, too (sequence parallelism), and the stages of ZeRO by dp · cp.
Scores that the causal mask hides take no time and hide no messages, as in notebook 11's section 2:
`computing` is less than the FLOPs of MFU, which count them. Backward of attention computes scores
once more, 2.5 times forward. Matmuls are as fast when they are cut, and computing beside messages
takes no longer: with many ranks a block, real steps are slower than this says. Memory counts as in
`lib.profiling.memory_formula`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from lib.lessons.ddp.costs import CLUSTERS, Cluster
from lib.model.config import ModelConfig, model_preset
from lib.model.costs import (
    activation_bytes_by_part,
    flops_by_part,
    flops_per_token,
    parameters_by_part,
)
from lib.profiling.collectives import Link, predicted_ms
from lib.profiling.memory_formula import RESERVED_BYTES


@dataclass(frozen=True)
class Machine:
    """GPUs in hosts."""

    gpus: int
    card_gb: float
    flops_per_s: float
    """Of one GPU, in whole steps."""

    cluster: Cluster

    def link(self, size: int, stride: int) -> Link:
        """The slowest link of groups of `size` ranks, `stride` apart; all groups send at once."""
        host = self.cluster.gpus_per_host
        if size * stride <= host or size == 1:
            return self.cluster.inside
        # the groups that leave a host share its network
        bandwidth = self.cluster.network.bandwidth_gbs / min(stride, host)
        inside = self.cluster.inside.bandwidth_gbs
        return Link(self.cluster.network.latency_us, min(bandwidth, inside))


# The stages of ZeRO that a layout may have.
STAGES = {0: "DDP", 1: "ZeRO-1", 3: "FSDP"}


@dataclass(frozen=True)
class Layout:
    """How many ranks share what, the stage of ZeRO, and the micro-batches of a rank's step."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    micro_batches: int = 1
    checkpoints: bool = False

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        words.append(STAGES[self.zero] if self.dp * self.cp > 1 else "")
        words.append(f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "")
        words.append("checkpoints" if self.checkpoints else "")
        return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Cost:
    """A layout by formula, for the fullest rank."""

    num_bytes: float
    step_s: float
    parts: dict[str, float]
    """Seconds of computing, and of what shows of each axis: messages, and a pipeline's bubble."""


def cost(config: ModelConfig, machine: Machine, layout: Layout, sequences: int) -> Cost:
    """The memory and time of a step of `sequences` sequences in all.

    Raises:
        ValueError: the ranks are not those of the machine, or the sequences can't be divided.
    """
    ranks = layout.dp * layout.tp * layout.pp * layout.cp
    if ranks != machine.gpus:
        raise ValueError(f"dp · tp · pp · cp must be {machine.gpus}, got {ranks}")
    rows, rest = divmod(sequences, layout.dp * layout.micro_batches)
    if rest or not rows:
        raise ValueError(
            f"dp · micro_batches must divide the {sequences} sequences, got "
            f"{layout.dp} · {layout.micro_batches}"
        )
    parts = _seconds(config, machine, layout, rows)
    return Cost(_bytes(config, layout, rows), sum(parts.values()), parts)


def _weights(config: ModelConfig, layout: Layout) -> tuple[float, float]:
    """Weights of the fullest stage, on one of its tp ranks: all, and those of one block."""
    parts = parameters_by_part(config)
    block = (parts["attention"] + parts["feed_forward"]) / config.num_layers / layout.tp
    outer = parts["token_embeddings"] + parts["lm_head"]
    if layout.pp > 1:
        outer = max(parts["token_embeddings"], parts["lm_head"])
    return _blocks(config, layout) * block + outer / layout.tp, block


def _blocks(config: ModelConfig, layout: Layout) -> int:
    """Blocks of the fullest stage."""
    return math.ceil(config.num_layers / layout.pp)


def _seconds(config: ModelConfig, machine: Machine, layout: Layout, rows: int) -> dict[str, float]:
    """Seconds of each part of a step; `rows` sequences are a micro-batch of one rank."""
    dp, tp, pp, cp = layout.dp, layout.tp, layout.pp, layout.cp
    blocks, tokens = _blocks(config, layout), rows * config.context_length / cp
    uneven = blocks * pp / config.num_layers

    # computing a micro-batch on a stage: backward has two matmuls for each one of forward, and
    # attention's computes the scores once more; a causal mask hides half of them
    rate = machine.flops_per_s * tp * pp / uneven
    scores = flops_by_part(config)["attention"]
    attention = scores / 2 * tokens / rate
    matmuls = (flops_per_token(config, backward=False) - scores) * tokens / rate
    forward = matmuls + attention
    backward = 2 * matmuls + 2.5 * attention + (forward if layout.checkpoints else 0.0)

    # tensor: each all-reduce waits for what it sends, and the next matmul for the all-reduce
    activations = 2 * tokens * config.d_model
    count = (6 if layout.checkpoints else 4) * blocks
    tensor = count * _time(machine, "all_reduce", activations, tp, 1)

    # context: keys and values walk around a ring
    context = blocks * _ring(machine, layout, 2 * activations / tp, attention / blocks)

    # data: stage 3 gathers for each pass, the others send gradients once
    weights, _ = _weights(config, layout)
    shards, gathered, reduced = dp * cp, 0.0, 0.0
    if layout.zero == 3:
        gather = _time(machine, "all_gather", 2 * weights, shards, tp)
        scatter = _time(machine, "reduce_scatter", 4 * weights, shards, tp)
        # the first all-gather and the last reduce-scatter of a pass have nothing to hide behind
        gathered = max(gather / blocks, gather - forward)
        gathered += max(scatter / blocks, gather + scatter - backward)
    else:
        sent = _time(machine, "all_reduce", 4 * weights, shards, tp)
        reduced = max(sent / blocks, sent - backward)

    # pipeline: stages start and end one after another, and each round trip of 2 (pp - 1) messages
    # delays the pp micro-batches that are under way
    hop = _message(machine.link(pp, dp * tp * cp), activations / tp) if pp > 1 else 0.0
    one = forward + backward + tensor + context + gathered
    m = layout.micro_batches
    return {
        "computing": m * (forward + backward),
        "pipeline": (pp - 1) * one + (m + pp - 1) * 2 * (pp - 1) / pp * hop,
        "tensor": m * tensor,
        "context": m * context,
        "data": m * gathered + reduced,
    }


def _ring(machine: Machine, layout: Layout, kv_bytes: float, attention: float) -> float:
    """Seconds in which a block waits for messages of its ring; attention takes `attention` forward.

    In each of cp steps a rank computes with one share of keys and values, while the next arrives.
    In backward their gradients travel, too, and one hop further, home, behind nothing.
    """
    if layout.cp == 1:
        return 0.0
    hop, step = _message(machine.link(layout.cp, layout.tp), kv_bytes), attention / layout.cp
    forward = (layout.cp - 1) * max(0.0, hop - step)
    backward = (layout.cp - 1) * max(0.0, 2 * hop - 2.5 * step) + hop
    return (2 if layout.checkpoints else 1) * forward + backward


def _time(machine: Machine, collective: str, num_bytes: float, size: int, stride: int) -> float:
    """Seconds of a collective of groups of `size` ranks, `stride` apart."""
    link = machine.link(size, stride)
    return predicted_ms(collective, num_bytes, size, link.latency_us, link.bandwidth_gbs) / 1e3


def _message(link: Link, num_bytes: float) -> float:
    """Seconds of a message."""
    return link.latency_us / 1e6 + num_bytes / (link.bandwidth_gbs * 1e9)


def _bytes(config: ModelConfig, layout: Layout, rows: int) -> float:
    """Bytes of the fullest rank at the start or at the end of backward."""
    shards, m = layout.dp * layout.cp, layout.micro_batches
    weights, block = _weights(config, layout)
    blocks = _blocks(config, layout)
    kept = 4 * weights / (shards if layout.zero == 3 else 1)
    kept += 8 * weights / (shards if layout.zero else 1)
    # stage 1 scatters gradients as they come, unless they first add up over micro-batches
    scattered = layout.zero == 3 or (layout.zero == 1 and m == 1)
    gradients = 4 * weights / (shards if scattered else 1)
    # in bfloat16: two gathered blocks beside embedding or head, or autocast's copies of all
    if layout.zero == 3:
        copies = 2 * 2 * block + 4 * (weights - blocks * block) / (2 if layout.pp == 1 else 1)
    else:
        copies = 2 * blocks * block

    # of a micro-batch on a stage, on one of its ranks; only the last stage computes a loss, and it
    # has a single micro-batch in flight
    share, flight = rows / layout.tp / layout.cp, min(m, layout.pp)
    one = _activations(config) * share
    logits = 2 * config.context_length * (config.vocab_size or 0) * share
    inputs = 2 * config.context_length * config.d_model * share
    each, again = (inputs, one) if layout.checkpoints else (one, 0.0)
    first = flight * blocks * each + again
    last = blocks * each + max(again, logits)
    # gradients come as activations go, but for those that add up
    added = gradients if m > 1 else 0.0
    start = copies + added + (max(first, last) if layout.pp > 1 else last)
    return kept + max(start, gradients) + RESERVED_BYTES


def _activations(config: ModelConfig) -> float:
    """Bytes that one block keeps of one sequence, in bfloat16 on a GPU."""

    def kept(blocks: int) -> int:
        shape = dataclasses.replace(config, num_layers=blocks)
        return sum(
            activation_bytes_by_part(shape, 1, element_bytes=2, autocast=False, cuda=True).values()
        )

    return kept(2) - kept(1)


def fits(config: ModelConfig, machine: Machine, layout: Layout, sequences: int) -> bool:
    """Return whether every rank of a layout has enough memory."""
    return cost(config, machine, layout, sequences).num_bytes <= machine.card_gb * 1e9


def layouts(config: ModelConfig, machine: Machine, sequences: int) -> Iterator[Layout]:
    """All layouts of a power of two of ranks and sequences, whether they fit or not."""
    powers = [2**k for k in range(machine.gpus.bit_length())]
    for tp, pp, cp in itertools.product(powers, repeat=3):
        dp = machine.gpus // (tp * pp * cp)
        if config.num_heads % tp or config.ff_width % tp or pp > config.num_layers:
            continue
        if 1 <= dp <= sequences:
            for m, zero, checkpoints in itertools.product(
                micro_batch_counts(sequences, dp), STAGES, (False, True)
            ):
                yield Layout(dp, tp, pp, cp, zero, m, checkpoints)


def micro_batch_counts(sequences: int, dp: int) -> list[int]:
    """The numbers of equal micro-batches, powers of two, that a rank's sequences make."""
    return [2**k for k in range((sequences // dp).bit_length())] if dp else []


def fastest(config: ModelConfig, machine: Machine, sequences: int) -> Layout | None:
    """The layout that takes the shortest step of all that fit; None if none does."""
    found = []
    for layout in layouts(config, machine, sequences):
        one = cost(config, machine, layout, sequences)
        if one.num_bytes <= machine.card_gb * 1e9:
            # of equally fast ones always the same
            found.append((one.step_s, str(layout), layout))
    return min(found)[-1] if found else None


def machine(hosts: int, cluster: Cluster) -> Machine:
    """Hosts of eight H100s of 80 GB, at 400 TFLOP/s in whole steps."""
    return Machine(hosts * cluster.gpus_per_host, 80.0, 4e14, cluster)


# Model, and sequences of a step: about half a million tokens, and two million.
MODELS = {
    "xl": (dataclasses.replace(model_preset("xl"), context_length=1024), 512),
    "8b": (model_preset("8b"), 64),
    # as wide and deep as Qwen2.5-32B, but with a head of keys for each one of queries
    "32b": (
        ModelConfig(
            vocab_size=152_064,
            context_length=8192,
            d_model=5120,
            num_layers=64,
            num_heads=40,
            d_ff=27_648,
        ),
        256,
    ),
}
MACHINES = {
    "1 host": machine(1, CLUSTERS["8 × 400 Gbit/s"]),
    "8 hosts, 8 × 400 Gbit/s": machine(8, CLUSTERS["8 × 400 Gbit/s"]),
    "8 hosts, 100 Gbit/s": machine(8, CLUSTERS["100 Gbit/s"]),
}
