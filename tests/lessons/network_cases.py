"""What ranks run on a simulated network, mostly by its virtual clock."""

import dataclasses
import functools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.ddp.process_group import all_gather, barrier, gather_objects, rank, reduce_scatter
from lib.ddp.wrappers import wrap
from lib.lessons.ddp.costs import predict_scaling
from lib.lessons.ddp.stack import Layers, miniatures, time_steps
from lib.lessons.simulated_network import (
    NETWORKS,
    LostRank,
    Network,
    SlowLink,
    Straggler,
    simulated_group,
)
from lib.profiling.collectives import Link
from tests.ddp.workers import message_of

LAYERS = Layers((96**2,) * 6, forward=1.0, backward=2.0)
# Each wrapper, and whether its messages of one layer each start in backward.
OVERLAPS = {"naive": False, "flat": False, "overlap": True, "flashddp": True}
PCIE = dataclasses.replace(NETWORKS["PCIe"], clock="virtual")


def virtual(network: Network, **changes: Any) -> Network:
    return dataclasses.replace(network, clock="virtual", **changes)


def predicted_ms(network: Network, name: str, ranks: int) -> float:
    """A step by formula: that of `predict_scaling`, and the message that says who has gradients."""
    link, count = network.link(ranks), len(LAYERS.sizes)
    prediction = predict_scaling(
        LAYERS.gradient_bytes,
        ranks,
        latency_us=link.latency_us,
        bandwidth_gbs=link.bandwidth_gbs,
        backward_ms=count * LAYERS.backward,
        other_ms=count * LAYERS.forward,
        buckets=1 if name == "flat" else count,
        overlap=OVERLAPS[name],
    )
    return prediction.step_ms + network.collective_ms("all_reduce", 4 * count, ranks)


def steps_of_wrappers() -> dict[tuple[str, str], tuple[float, float]]:
    """Milliseconds of a step, simulated and predicted, with each way to train on each network."""
    networks, ranks = miniatures(LAYERS), dist.get_world_size()
    # one layer a bucket
    options = {"bucket_cap_mb": LAYERS.gradient_bytes / len(LAYERS.sizes) / 2**20}
    makers = {name: functools.partial(wrap, name, **options) for name in OVERLAPS}
    return {
        (place, name): (step.step_ms, predicted_ms(networks[place], name, ranks))
        for (place, name), step in time_steps(makers, networks, LAYERS).items()
    }


def results_beside_gloo() -> list[tuple[str, bool]]:
    """Each collective on a simulated network, and whether gloo gives the same bits."""
    group, found, size = simulated_group(PCIE), [], dist.get_world_size()

    def compare(name: str, act: Any) -> None:
        results = [act(group), act(None)]
        found.append((name, all(map(torch.equal, *results))))

    def tensor(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(rank())
        return torch.randint(-9, 9, (length,), generator=generator).to(dtype)

    def reduced(group: Any, op: Any, dtype: torch.dtype) -> list[Tensor]:
        whole, part = tensor(6, dtype), torch.empty(2, dtype=dtype)
        dist.all_reduce(whole, op, group=group)
        if op == dist.ReduceOp.SUM:
            reduce_scatter(part, tensor(2 * size, dtype), group=group)
        return [whole, part] if op == dist.ReduceOp.SUM else [whole]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            compare(f"{op} {dtype}", lambda group: reduced(group, op, dtype))  # noqa: B023

    def gathered(group: Any) -> list[Tensor]:
        output = torch.empty(3 * size)
        all_gather(output, tensor(3), group=group)
        parts = [torch.empty(3, 1) for _ in range(size)]
        dist.all_gather(parts, tensor(3).view(3, 1), group=group)
        sent = tensor(4).view(2, 2).T.contiguous()
        dist.broadcast(sent, size - 1, group=group)
        return [output, *parts, sent]

    def message(group: Any) -> list[Tensor]:
        received = torch.empty(5)
        if rank() == 0:
            dist.send(tensor(5), size - 1, group=group)
        elif rank() == size - 1:
            dist.recv(received, 0, group=group)
            return [received]
        return []

    compare("gather and broadcast", gathered)
    compare("message", message)
    objects = gather_objects({"rank": rank()}, group)
    return [*found, ("objects", objects == [{"rank": n} for n in range(size)])]


def timings_of_faulty_networks() -> dict[str, Any]:
    """Milliseconds of an all-reduce where a rank is late, a link is slow, or all is well."""
    sick = {
        "well": {},
        "straggler": {"straggler": Straggler(rank=1, delay_ms=7.0)},
        "slow link": {"slow_link": SlowLink(rank=1, factor=0.25)},
    }
    found: dict[str, Any] = {}
    for name, fault in sick.items():
        network = virtual(Network(Link(100.0, 0.001)), **fault)
        group = simulated_group(network)
        dist.all_reduce(torch.ones(1500), group=group)
        found[name] = 1e3 * group.clock.now()
        (transfer,) = group.transfers
        found[f"{name}, predicted"] = network.collective_ms("all_reduce", 6000, group.size())
        assert (transfer.kind, transfer.num_bytes) == ("all_reduce", 6000)
    return found


def ring_by_messages() -> tuple[float, float, list[float]]:
    """An all-reduce from messages to the next rank: its time, that by formula, and the sum."""
    size, own = dist.get_world_size(), rank()
    network = virtual(Network(Link(100.0, 0.001)))
    group = simulated_group(network)
    chunks = list(torch.full((size * 50,), 1.0 + own).chunk(size))
    for number in range(2 * (size - 1)):
        sent, received = torch.empty(0), torch.empty(50)
        sent = chunks[(own - number) % size]
        works = [
            dist.isend(sent.clone(), (own + 1) % size, group=group),
            dist.irecv(received, (own - 1) % size, group=group),
        ]
        for work in works:
            work.wait()
        index = (own - number - 1) % size
        chunks[index] = received + chunks[index] if number < size - 1 else received
    formula = network.collective_ms("all_reduce", size * 200, size)
    return 1e3 * group.clock.now(), formula, torch.cat(chunks).tolist()


def wall_clock() -> tuple[float, float, bool, bool]:
    """Seconds of two all-reduces, by the network and by the wall; whether they came too early."""
    group = simulated_group(Network(Link(10_000.0, 1.0)))
    tensors = [torch.ones(3), torch.ones(3)]
    barrier(group)
    start = time.monotonic()
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    changed = []
    while not works[1].is_completed():
        now = time.monotonic()
        changed += [now] if tensors[1].sum().item() != 3 else []
        time.sleep(0.001)
    took = time.monotonic() - start
    transfers = group.transfers[-2:]
    is_early = any(now < transfers[1].end for now in changed)
    is_right = all((tensor == dist.get_world_size()).all() for tensor in tensors)
    return sum(t.end - t.start for t in transfers), took, is_early, is_right


def named_errors() -> list[str]:
    """What ranks are told when their calls differ, or one of them is lost."""
    messages, last = [], dist.get_world_size() - 1
    group = simulated_group(PCIE)
    tensor = torch.ones(4 + (rank() == last))
    messages.append(message_of(lambda: dist.all_reduce(tensor, group=group)))
    # and so is every later call
    messages.append(message_of(lambda: dist.barrier(group)))
    group = simulated_group(virtual(PCIE, lost_rank=LostRank(last, after=1)), timeout=0.5)
    dist.barrier(group)
    tensor = torch.ones(4)
    messages.append(message_of(lambda: dist.all_reduce(tensor, group=group)))
    return messages


def on_a_simulated_job() -> tuple[str, float]:
    """The backend of all ranks, and a mean that they took there; a subgroup has the network too."""
    x = torch.ones(1)
    dist.all_reduce(x)
    group = dist.new_group([0, 1])
    return dist.get_backend(), x.item(), dist.group.WORLD.network == group.network


CASES = (
    "steps_of_wrappers",
    "results_beside_gloo",
    "timings_of_faulty_networks",
    "ring_by_messages",
    "wall_clock",
    "named_errors",
)
