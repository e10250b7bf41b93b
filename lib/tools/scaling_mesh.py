"""Pipelines and ring attention on real GPUs, beside their predictions, as notebook 11 shows them.

`scaling.py` measures them. The pipeline runs the `run_stage` of the notebook,
the ring its zigzag order, with the attention kernel of `lib`. Computing and messages are also timed
by themselves: they are what the formulas of the notebook predict the whole from.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from lib.core.allocator import synchronize
from lib.ddp.process_group import barrier, current_device, gather_objects, rank, world_size
from lib.flash_attention.triton_attention import flash_forward
from lib.lessons.mesh.context import attend, merge
from lib.lessons.mesh.exercises import gpipe, one_f_one_b, run_stage
from lib.lessons.mesh.toys import Stage, loss_of
from lib.lessons.ranks import Processes
from lib.model.config import model_preset
from lib.model.transformer import TransformerLM
from lib.profiling.measurement import interleave, wall_ms

ROUNDS = 5


def times_ms(calls: Mapping[str, Callable[[], Any]], repeats: int = 1) -> dict[str, list[float]]:
    """Name -> milliseconds of a call on the slowest rank, in each of `ROUNDS` rounds.

    Ranks begin each sample together, on idle devices; the calls are interleaved.
    """
    device = current_device()

    def sample(call: Callable[[], Any]) -> float:
        synchronize(device)
        barrier()
        return max(gather_objects(wall_ms(call, repeats, device)))

    samplers = [partial(sample, call) for call in calls.values()]
    interleave(samplers, 2)  # warm up
    return dict(zip(calls, interleave(samplers, ROUNDS)))


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {f"{name}_ms": statistics.median(found) for name, found in times.items()}


# Pipeline


class Pipeline:
    """A model cut into stages, one a rank, and the micro-batches that go through it."""

    def __init__(self, model: str, sequences: int, context_length: int) -> None:
        self.device, shape = current_device(), model_preset(model)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        generator = torch.Generator(self.device).manual_seed(0)
        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        self.model = TransformerLM(shape, generator=generator, **options)
        self.stage = Stage(rank(), world_size(), self.model)
        hidden = (sequences, context_length, shape.d_model)
        self.hidden = torch.zeros(hidden, **options)
        self.size = (shape.vocab_size, (sequences, context_length + 1))

    def micro_batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a micro-batch, the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(number)
        tokens = torch.randint(*self.size, generator=generator, device=self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def measure(self, count: int) -> dict[str, Any]:
        """Times, bytes and gradients of steps with `count` micro-batches."""
        me, ranks = rank(), world_size()
        data = [self.micro_batch(number) for number in range(count)]
        own = data if me == 0 else [(self.hidden, target) for _, target in data]
        orders = {"gpipe": gpipe(count), "1f1b": one_f_one_b.solve(me, ranks, count)}
        messages, alone = TwoWays(), Alone(self.hidden)

        def step(order: list, ranks: Any) -> None:
            run_stage.solve(order, self.stage, loss_of, own, ranks)
            ranks.wait_for_messages()

        calls = {name: partial(step, order, messages) for name, order in orders.items()}
        calls["alone"] = partial(step, orders["1f1b"], alone)
        figures: dict[str, Any] = {"times_ms": times_ms(calls)}
        figures |= _medians(figures["times_ms"])
        # a step of m micro-batches takes as long as m + p - 1 of them alone
        figures["predicted_ms"] = (count + ranks - 1) / count * figures["alone_ms"]
        figures["bubble"] = {n: 1 - figures["alone_ms"] / figures[f"{n}_ms"] for n in orders}
        figures["predicted_bubble"] = (ranks - 1) / (count + ranks - 1)
        figures["peak_bytes"] = {n: gather_objects(self._peak(calls[n])) for n in orders}
        figures["gradients_off_by"] = max(gather_objects(self._off_by(calls["1f1b"], data)))
        return figures

    def _peak(self, call: Callable[[], Any]) -> int:
        """Bytes that a step holds at most, beyond weights and gradients."""
        if self.device.type != "cuda":
            return 0
        synchronize(self.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        synchronize(self.device)
        return torch.cuda.max_memory_allocated() - before

    def _off_by(self, call: Callable[[], Any], data: Sequence[tuple[Tensor, Tensor]]) -> float:
        """The largest difference between this stage's gradients and those of the whole model."""
        self.model.zero_grad()
        call()
        on_stage = [param.grad for param in self.stage.parameters()]
        self.model.zero_grad()
        for inputs, targets in data:
            loss_of(self.model(inputs), targets).backward()
        pairs = zip(on_stage, self.stage.parameters(), strict=True)
        found = max((a - param.grad).abs().max().item() for a, param in pairs)
        # only this rank's share is needed from here on
        grads = [param.grad for param in self.stage.parameters()]
        self.model.zero_grad()
        for param, grad in zip(self.stage.parameters(), grads, strict=True):
            param.grad = grad
        return found


class TwoWays(Processes):
    """Ranks whose messages forward and backward have a group each: neither waits for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = {1: dist.new_group(), -1: dist.new_group()}

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to rank `to`, without waiting for it."""
        message = dist.isend(tensor.detach(), to, group=self.ways[to - self.number])
        self.sent.append((message, tensor))

    def receive(self, source: int, like: Tensor) -> Tensor:
        """The next tensor from rank `source`; on a GPU what follows waits for it, not the host."""
        tensor = torch.empty_like(like)
        message = dist.irecv(tensor, source, group=self.ways[self.number - source])
        message.wait()  # type: ignore[union-attr]
        return tensor


class Alone(Processes):
    """A rank that sends nothing and receives zeros."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def send(self, tensor: Tensor, to: int) -> None:
        """Drop the tensor."""

    def receive(self, source: int, like: Tensor) -> Tensor:
        """Zeros of the shape of `like`."""
        return torch.zeros_like(like)


# Ring


def measure_ring(tokens: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Causal attention, forward, with `tokens` of the sequence a rank in zigzag order: its times,
    and its error beside PyTorch's where the whole sequence is short.
    """
    device, me, ranks = current_device(), rank(), world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    size = (1, heads, tokens * ranks, head_dim)
    whole = [torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(3)]
    chunks = torch.arange(tokens * ranks, device=device).chunk(2 * ranks)
    share = torch.cat([chunks[me], chunks[-1 - me]])
    q, k, v = (x[:, :, share] for x in whole)
    figures: dict[str, Any] = {}
    if tokens <= 2048:
        figures["rms_error"] = _errors(ring(q, k, v), whole, share)
    del whole
    calls: dict[str, Callable[[], Any]] = {
        "ring": lambda: ring(q, k, v),
        "send_then_compute": lambda: ring(q, k, v, overlap=False),
        "computing": lambda: ring(q, k, v, sends=False),
        "messages": lambda: messages(torch.stack((k, v))),
    }
    if device.type == "cuda":
        shared = SharedMemory((2, *k.shape), dtype, device)
        calls["copied"] = lambda: ring(q, k, v, shared=shared)
        if tokens <= 2048:
            equal = all(map(torch.equal, ring(q, k, v, shared=shared), ring(q, k, v)))
            figures["copied_equals_ring"] = all(gather_objects(equal))
    figures["times_ms"] = times_ms(calls, repeats=10)
    figures |= _medians(figures["times_ms"])
    # of each step's computing and message the longer counts, and the first step sends the next
    compute, message = figures["computing_ms"] / ranks, figures["messages_ms"] / (ranks - 1)
    figures["predicted_ms"] = (ranks - 1) * max(compute, message) + compute
    figures["flops"] = 2 * ranks * tokens**2 * heads * head_dim  # of a rank, all steps
    figures["bytes_sent"] = 2 * (ranks - 1) * k.nbytes
    return figures


def ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    overlap: bool = True,
    sends: bool = True,
    shared: SharedMemory | None = None,
) -> tuple[Tensor, Tensor]:
    """Ring attention in zigzag order: output and log-sum-exps (..., 1) of this rank's queries.

    Args:
        q, k, v: (batch, heads, tokens, head_dim), of two chunks: one from each end of the sequence.
        overlap: whether keys and values travel while the rank computes.
        sends: False leaves messages out, for timing; the result is then wrong.
        shared: where copy engines find keys and values, instead of messages around the ring.
    """
    me, ranks, half = rank(), world_size(), q.shape[2] // 2
    keys_and_values = torch.stack((k, v)) if shared is None else shared.put(k, v)
    out, lse = torch.empty(0), torch.empty(0)
    for step in range(ranks):
        arriving, under_way = keys_and_values, ()
        if shared is not None and step < ranks - 1:
            arriving, under_way = shared.fetch((me - step - 1) % ranks)
        elif sends and step < ranks - 1:
            arriving, under_way = pass_on(keys_and_values)
        if not overlap:
            under_way = wait(under_way)
        k, v = keys_and_values
        owner = (me - step) % ranks
        if owner == me:  # consecutive or not, tokens are in order
            out, lse = attention(q, k, v, is_causal=True)
        elif owner < me:  # all queries see the owner's first chunk, and none its second
            out, lse = merge(out, lse, *attention(q, k[:, :, :half], v[:, :, :half]))
        else:  # the second chunk of queries sees all of them, and the first none
            late = merge(out[:, :, half:], lse[:, :, half:], *attention(q[:, :, half:], k, v))
            out[:, :, half:], lse[:, :, half:] = late
        wait(under_way)
        keys_and_values = arriving
    return out, lse


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output in float32 and log-sum-exps (..., queries, 1): the kernel of `lib`, or PyTorch."""
    if q.is_cuda:
        out, lse = flash_forward(q, k, v, is_causal, q.shape[-1] ** -0.5)
        return out.float(), lse[..., None]
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return attend(q, k, v, visible.tril() if is_causal else visible)


class SharedMemory:
    """Keys and values of each rank, which the others' copy engines read: no kernel takes part."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.own = symmetric_memory.empty(shape, dtype=dtype, device=device)
        self.handle = symmetric_memory.rendezvous(self.own, dist.group.WORLD)
        self.stream = torch.cuda.Stream(device)

    def put(self, k: Tensor, v: Tensor) -> Tensor:
        """This rank's keys and values (2, batch, heads, tokens, head_dim), for all to read."""
        self.handle.barrier(channel=0)  # nobody reads the last ones any more
        torch.stack((k, v), out=self.own)
        self.handle.barrier(channel=0)  # everybody's are complete
        return self.own

    def fetch(self, owner: int) -> tuple[Tensor, Sequence[Any]]:
        """Start to copy those of rank `owner`; return what arrives, and an event to wait for."""
        theirs = self.handle.get_buffer(owner, self.own.shape, self.own.dtype)
        arriving = torch.empty_like(self.own)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            arriving.copy_(theirs, non_blocking=True)
        arriving.record_stream(self.stream)
        return arriving, [self.stream.record_event()]


def pass_on(tensor: Tensor) -> tuple[Tensor, Sequence[Any]]:
    """Start to send to the next rank; return what arrives from the one before, and the messages."""
    arriving, me, ranks = torch.empty_like(tensor), rank(), world_size()
    send = dist.P2POp(dist.isend, tensor, (me + 1) % ranks)
    receive = dist.P2POp(dist.irecv, arriving, (me - 1) % ranks)
    return arriving, dist.batch_isend_irecv([send, receive])


def wait(under_way: Sequence[Any]) -> Sequence[Any]:
    """Let what follows wait for messages; none is left. (gloo's must not be waited for twice.)"""
    for message in under_way:
        message.wait()
    return ()


def messages(tensor: Tensor) -> None:
    """All messages of a ring, one after another."""
    for _ in range(world_size() - 1):
        tensor, under_way = pass_on(tensor)
        wait(under_way)


def _errors(ours: tuple[Tensor, Tensor], whole: Sequence[Tensor], share: Tensor) -> dict:
    """Root mean square errors of the ring and of PyTorch against float64, by head."""
    off: dict[str, list[Tensor]] = {"ring": [], "pytorch": []}
    for head in range(whole[0].shape[1]):
        q, k, v = (x[:, head : head + 1] for x in whole)
        exact = _sdpa(*(x.double() for x in (q, k, v)))[:, :, share]
        off["ring"].append((ours[0][:, head : head + 1] - exact).square().mean())
        off["pytorch"].append((_sdpa(q, k, v)[:, :, share] - exact).square().mean())
    return {name: torch.stack(found).mean().sqrt().item() for name, found in off.items()}


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
