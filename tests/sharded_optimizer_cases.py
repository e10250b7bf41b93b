"""Single properties of `ShardedOptimizer`, each a function that every rank of two runs."""

import copy
import itertools
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_cases import Raise, stack
from torch import Tensor, nn

from lib import distributed, optimizer
from lib.sharded_optimizer import ShardedOptimizer, load_unsharded

SGD = {"optimizer_cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
ADAMW = {"optimizer_cls": optimizer.AdamW, "lr": 0.1}
LOCAL = {"strategy": "flat", "reduces_gradients": True}
# a bucket for each layer of `stack`
OVERLAP = LOCAL | {"overlap": True, "bucket_cap_mb": 1e-6}
REDUCE_SCATTER = "reduce_scatter_single", "reduce_scatter_tensor"
ALL_GATHER = "all_gather_single", "all_gather_into_tensor"


@contextmanager
def counted() -> Iterator[Counter]:
    """Elements of the whole tensors in the collectives that start in the block, by kind."""
    elements: Counter = Counter()
    originals = {
        name: getattr(dist, name)
        for name in (*REDUCE_SCATTER, *ALL_GATHER, "all_reduce", "broadcast")
        if hasattr(dist, name)
    }

    def counting(name: str) -> Callable[..., Any]:
        kind = "_".join(name.split("_")[:2])

        def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
            whole = args[0] if kind == "reduce_scatter" else tensor
            elements[kind] += whole.numel()
            return originals[name](tensor, *args, **options)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield elements
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def made_of(module: nn.Module, how: dict[str, Any], **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(module.parameters(), **{**how, **options})


def backward(module: nn.Module, rank: int | None = None) -> None:
    rank = distributed.rank() if rank is None else rank
    module(torch.full((2, 4), 1.0 + rank)).square().mean().backward()


def backward_of_both(module: nn.Module) -> None:
    """The mean gradient of both ranks, in one process."""
    for rank in range(2):
        (module(torch.full((2, 4), 1.0 + rank)).square().mean() / 2).backward()


def error_of(module: nn.Module, expected: nn.Module) -> float:
    pairs = zip(module.parameters(), expected.parameters())
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


def traffic() -> dict[str, dict[str, int]]:
    """Elements sent in the second step of each strategy; the module has 24 + 48 + 24."""
    results = {}
    for name, how in {"parameters": {}, "flat": LOCAL, "averaged": {"strategy": "flat"}}.items():
        module = stack()
        made = made_of(module, SGD, **how)
        for _ in range(2):
            with counted() as elements:
                backward(module, rank=0)
                made.step()
                made.zero_grad()
        results[name] = dict(elements)
    return results


def elements_of_state() -> dict[str, int]:
    """Elements of momentum on this rank, of sizes that can be divided by 8, and of odd sizes."""
    results = {}
    for name, how in {"parameters": {}, "flat": LOCAL}.items():
        for sizes in ((4, 6, 8, 3), (3, 5, 7, 1)):
            module = stack(sizes)
            made = made_of(module, SGD, **how)
            for param in module.parameters():
                param.grad = torch.ones_like(param)
            made.step()
            buffers = [state["momentum_buffer"] for state in made.state.values()]
            results[name, sizes] = sum(buffer.numel() for buffer in buffers)
    return results


def frozen_do_not_count() -> int:
    """Elements that this rank owns of parameters of 8 and 8, where frozen ones came before."""
    made = made_of(nn.Linear(4, 6, bias=False).requires_grad_(False), SGD)
    for _ in range(2):
        made.add_param_group({"params": [nn.Parameter(torch.zeros(8))]})
    return sum(shard.stop for shard in made.shards if shard.param.requires_grad)


def places() -> dict[str, Any]:
    """Where parameters are, and what they hold, after they became views of one buffer."""
    module = nn.Sequential(stack((3, 5, 7, 1)), nn.Linear(1, 7))
    module[1].weight.data = module[1].weight.data.T.clone().T
    before = [param.detach().clone() for param in module.parameters()]
    identities = [id(param) for param in module.parameters()]
    made_of(module, SGD, **LOCAL)
    params = list(module.parameters())
    return {
        "values": all(torch.equal(param, old) for param, old in zip(params, before)),
        "identities": identities == [id(param) for param in params],
        "storages": len({param.untyped_storage().data_ptr() for param in params}),
        "aligned": all(param.storage_offset() % 4 == 0 for param in params),
        "contiguous": all(param.is_contiguous() for param in params),
    }


def closure() -> dict[str, Any]:
    """Whether gradients are on in each call, what step returns, and the error of parameters."""
    results = {}
    for name, how in {"parameters": {}, "flat": LOCAL}.items():
        module, alone = stack(), stack()
        alone.load_state_dict(module.state_dict())
        made, calls = made_of(module, SGD, **how), []

        def loss(module=module, made=made, calls=calls) -> Tensor:
            made.zero_grad()
            calls.append(torch.is_grad_enabled())
            found = module(torch.ones(2, 4)).square().mean()
            found.backward()
            return found

        value = made.step(loss).item()
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        alone(torch.ones(2, 4)).square().mean().backward()
        plain.step()
        results[name] = [calls, value > 0, error_of(module, alone)]
    return results


def gradients_move() -> dict[str, Any]:
    """Errors where gradients grow over steps, are applied twice, or are set to zero in place."""
    results = {}
    for name, how in {"flat": LOCAL, "overlap": OVERLAP}.items():
        module = stack()
        alone = copy.deepcopy(module)
        made = made_of(module, ADAMW, **how)
        plain = optimizer.AdamW(alone.parameters(), lr=0.1)
        errors = []
        for zeros in (None, None, False, None, True, None):
            if zeros is not None:
                made.zero_grad(set_to_none=zeros)
                plain.zero_grad(set_to_none=zeros)
            if zeros is not False:
                backward(module)
                backward_of_both(alone)
            made.step()
            plain.step()
            errors.append(error_of(module, alone))
            # the same gradients once more
            made.step()
            plain.step()
            errors.append(error_of(module, alone))
        left = [param.grad for param in module.parameters()]
        results[name] = [max(errors), left == [None] * 3]
    return results


def late_gradients() -> list[str]:
    messages = []
    for how in (LOCAL, OVERLAP):
        module = stack()
        made = made_of(module, SGD, **how)
        backward(module)
        made.grad_norm()

        def again(module=module, made=made) -> None:
            backward(module)
            made.step()

        messages.append(message_of(again))
        made.zero_grad()
        messages.append(message_of(again))
    return messages


def twice() -> list[Any]:
    """A second backward pass of `overlap`, and one in `no_sync` before."""
    module = stack()
    made = made_of(module, SGD, **OVERLAP)
    backward(module)
    made.step()
    made.zero_grad()
    alone = copy.deepcopy(module)
    with counted() as elements, made.no_sync():
        backward(module)
    nothing = dict(elements)
    backward(module)
    message = message_of(lambda: backward(module))
    made.zero_grad()
    alone.load_state_dict(module.state_dict())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for group in made.param_groups:
        group["momentum"] = 0.0
    with made.no_sync():
        backward(module)
    backward(module)
    made.step()
    backward_of_both(alone)
    backward_of_both(alone)
    plain.step()
    return [nothing, message, error_of(module, alone)]


def overlap_begins_in_backward() -> list[int]:
    """Elements on their way when the first layer's gradient came, in each of two steps."""
    module = stack()
    made = made_of(module, SGD, **OVERLAP)
    seen = []
    with counted() as elements:
        module[0].weight.register_hook(lambda grad: seen.append(elements["reduce_scatter"]))
        for _ in range(2):
            backward(module)
            made.step()
            made.zero_grad()
    return seen


def buckets_under_way() -> list[int]:
    """Buckets whose gradients are still held when each layer's gradient comes, in a second step."""
    module = stack((4, 4, 4, 4, 4, 4))
    made = made_of(module, SGD, **OVERLAP)
    seen: list[int] = []
    backward(module)
    made.step()
    made.zero_grad()
    for param in module.parameters():
        param.register_hook(
            lambda grad: seen.append(sum(b.sent is not None for b in made.strategy.buckets))
        )
    backward(module)
    made.step()
    return seen


def exception_in_backward() -> list[Any]:
    """The error of the step after a backward pass that failed at another layer on each rank."""
    module = stack()
    made = made_of(module, SGD, **OVERLAP)
    alone = copy.deepcopy(module)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        if step:
            layer = module[distributed.rank()]
            hook = layer.register_forward_hook(lambda *args: Raise.apply(args[2]))
            message = message_of(lambda: backward(module))
            hook.remove()
            made.zero_grad()
        backward(module)
        made.step()
        made.zero_grad()
        backward_of_both(alone)
        plain.step()
        plain.zero_grad()
    return [message, error_of(module, alone)]


def gathers_under_forward() -> dict[str, Any]:
    """Errors where forward passes, plain and compiled, wait for their parameters themselves."""
    results = {}
    for name in ("plain", "compiled"):
        module = nn.Sequential(*[nn.Sequential(layer, nn.Tanh()) for layer in stack()])
        alone = copy.deepcopy(module)
        made = made_of(module, ADAMW, **OVERLAP)
        made.wait_in_forward_of(module[:2])
        plain = optimizer.AdamW(alone.parameters(), lr=0.1)
        if name == "compiled":
            for block in module:
                block.compile(backend="aot_eager")
        under_way = []
        for _ in range(3):
            backward(module)
            made.step()
            under_way.append([b.gathering is not None for b in made.strategy.buckets])
            made.zero_grad()
            backward_of_both(alone)
            plain.step()
            plain.zero_grad()
        made.wait_for_parameters()
        results[name] = [under_way[-1], error_of(module, alone)]
    return results


def options_of_step() -> dict[str, list[float]]:
    """Errors with a gradient scale, and changes in a step that is skipped."""
    results = {}
    for name, how in {"parameters": {}, "flat": LOCAL}.items():
        module = stack()
        alone, before = copy.deepcopy(module), copy.deepcopy(module)
        made, plain = made_of(module, ADAMW, **how), optimizer.AdamW(alone.parameters(), lr=0.1)
        backward(module, rank=0)
        backward(alone, rank=0)
        made.step(skip=torch.tensor(True))
        change = error_of(module, before)
        for step in (made.step, plain.step):
            step(grad_scale=torch.tensor(1e-9))
        results[name] = [change, error_of(module, alone)]
    return results


def learning_rate_tensor() -> float:
    module = stack()
    alone = copy.deepcopy(module)
    lr = torch.tensor(0.0)
    made = made_of(module, ADAMW, lr=lr, **LOCAL)
    plain = optimizer.AdamW(alone.parameters(), lr=0.3)
    made.load_state_dict(copy.deepcopy(made.state_dict()))
    lr.fill_(0.3)
    backward(module, rank=0)
    backward(alone, rank=0)
    made.step()
    plain.step()
    return error_of(module, alone)


def other_optimizers() -> dict[str, float]:
    """Errors of optimizers with state of other kinds."""
    kinds = {
        ("parameters", "Adafactor"): {"lr": 0.1},
        ("parameters", "Adagrad"): {"lr": 0.1},
        ("flat", "Adagrad"): {"lr": 0.1},
        ("flat", "Adam"): {"lr": 0.1, "amsgrad": True},
        ("flat", "RMSprop"): {"lr": 0.1, "centered": True},
        ("flat", "SGD"): {"lr": 0.1},
    }
    results = {}
    for (strategy, name), settings in kinds.items():
        cls = getattr(torch.optim, name)
        module = stack()
        alone = copy.deepcopy(module)
        made = ShardedOptimizer(module.parameters(), cls, strategy=strategy, **settings)
        plain = cls(alone.parameters(), **settings)
        for _ in range(3):
            for model, used in ((module, made), (alone, plain)):
                used.zero_grad()
                backward(model, rank=0)
                used.step()
            made.load_state_dict(copy.deepcopy(made.state_dict()))
        results[strategy, name] = error_of(module, alone)
    return results


def mixed_dtypes() -> dict[str, float]:
    results = {}
    for name, how in {"parameters": {}, "flat": LOCAL}.items():
        module = nn.ParameterList(
            [
                torch.ones(3),
                torch.ones(5, dtype=torch.bfloat16),
                torch.ones((), dtype=torch.float32),
            ]
        )
        alone = copy.deepcopy(module)
        made, plain = made_of(module, SGD, **how), torch.optim.SGD(alone.parameters(), lr=0.1)
        for _, model in itertools.product(range(2), (module, alone)):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.3)
        made.clip_grad_norm(0.5)
        optimizer.clip_grad_norm(alone.parameters(), 0.5)
        made.step()
        plain.step()
        results[name] = error_of(module, alone)
    return results


def frozen() -> dict[str, list[Any]]:
    """Errors where a parameter is trained later, and where one is frozen later."""
    results = {}
    for name, how in {"parameters": {}, "flat": LOCAL, "overlap": OVERLAP}.items():
        module = stack()
        module[1].requires_grad_(False)
        alone = copy.deepcopy(module)
        made, plain = made_of(module, ADAMW, **how), optimizer.AdamW(alone.parameters(), lr=0.1)
        for trained in ((0, 2), (0, 1, 2), (1, 2), (1, 2), (0, 1)):
            for index, (layer, other) in enumerate(zip(module, alone)):
                layer.requires_grad_(index in trained)
                other.requires_grad_(index in trained)
            for model, used in ((module, made), (alone, plain)):
                used.zero_grad()
                backward(model, rank=0)
                used.step()
        results[name] = error_of(module, alone)
    return results


def group_between_backward_and_step() -> dict[str, float]:
    """Errors where parameters are added that have gradients already."""
    results = {}
    for name, how in {"parameters": {}, "flat": LOCAL, "overlap": OVERLAP}.items():
        module = stack()
        alone = copy.deepcopy(module)
        made = ShardedOptimizer(module[1:].parameters(), **ADAMW, **how)
        plain = optimizer.AdamW(alone[1:].parameters(), lr=0.1)
        for step in range(4):
            for model, used in ((module, made), (alone, plain)):
                backward(model, rank=0)
                if step == 2:
                    used.add_param_group({"params": model[0].parameters(), "lr": 0.2})
                used.step()
                model.zero_grad()
                used.zero_grad()
        results[name] = error_of(module, alone)
    return results


def refused() -> list[str]:
    rank = distributed.rank()
    moved = stack()
    made = made_of(moved, SGD, **LOCAL)
    moved.double()
    sparse = nn.Embedding(5, 4, sparse=True)
    made_sparse = made_of(sparse, SGD, **LOCAL)
    sparse(torch.tensor([1])).sum().backward()
    later = made_of(stack(), ADAMW)
    groups = len(later.param_groups)
    messages = [
        message_of(made.step),
        message_of(made_sparse.step),
        message_of(lambda: made_of(stack(), SGD, strategy=("flat", "parameters")[rank])),
        message_of(lambda: made_of(stack((4, 5 + rank)), SGD)),
        message_of(lambda: later.add_param_group({"params": stack((3, 2 + rank)).parameters()})),
        message_of(lambda: later.add_param_group({"params": stack().parameters(), "lr": -1.0})),
    ]
    assert len(later.param_groups) == groups
    return messages


def state_dicts() -> dict[str, Any]:
    """Whether training goes on bit for bit from a state dict, and from that of one process."""
    results = {}
    for name, how in {"parameters": {}, "flat": LOCAL}.items():
        module = stack()
        made = made_of(module, ADAMW, **how)
        alone = copy.deepcopy(module)
        plain = optimizer.AdamW(alone.parameters(), lr=0.1)
        for model, used in ((module, made), (alone, plain)):
            backward(model, rank=0)
            used.step()
            used.zero_grad()
        again, from_plain = copy.deepcopy(module), copy.deepcopy(alone)
        others = [made_of(again, ADAMW, **how), made_of(from_plain, ADAMW, **how)]
        state = made.state_dict()
        others[0].load_state_dict(state)
        others[1].load_state_dict(plain.state_dict())
        given = [state, made.state_dict()]
        dist.broadcast_object_list(given, 0)
        for model, used in zip((module, again, from_plain, alone), (made, *others, plain)):
            backward(model, rank=0)
            used.step()
        results[name] = [
            error_of(again, module),
            error_of(from_plain, alone),
            message_of(lambda: made.load_state_dict(given[0])),  # noqa: B023
            sum(v.numel() for s in state["state"].values() for v in s.values() if v.dim()),
        ]
    return results


def wrong_files() -> list[str]:
    """The errors of folders that hold too few files, of other ranks, or of two saves."""
    made = made_of(stack(), SGD)
    folders = [tempfile.mkdtemp()] if distributed.rank() == 0 else [None]
    dist.broadcast_object_list(folders, 0)
    folder = Path(folders[0])
    messages = [message_of(lambda: made.load_shards(folder))]
    distributed.barrier()
    if distributed.rank() == 0:
        (folder / "shard-00000-of-00003.pt").write_bytes(b"of three ranks before")
    distributed.barrier()
    path = made.save_shard(folder)
    names = sorted(file.name for file in folder.iterdir())
    copies = {file.name: file.read_bytes() for file in folder.iterdir()}
    made.save_shard(folder)
    messages.append(message_of(lambda: made.load_shards(folder)))
    if distributed.rank() == 0:
        path.write_bytes(copies[path.name])
    distributed.barrier()
    messages.append(message_of(lambda: made.load_shards(folder)))
    distributed.barrier()
    if distributed.rank() == 0:
        path.unlink()
    distributed.barrier()
    messages.append(message_of(lambda: made.load_shards(folder)))
    other = made_of(stack((4, 6, 8, 2)), SGD)
    distributed.barrier()
    made.save_shard(folder)
    messages.append(message_of(lambda: other.load_shards(folder)))
    distributed.barrier()
    messages.append(message_of(lambda: made.save_shard(path if distributed.rank() else folder)))
    return [names, *[message.replace(str(folder), "FOLDER") for message in messages]]


def masters_are_saved() -> dict[str, bool]:
    """Whether masters and moments come back bit for bit in one process, sharded and not."""
    folders = [tempfile.mkdtemp()] if distributed.rank() == 0 else [None]
    dist.broadcast_object_list(folders, 0)
    alone_group = [dist.new_group([rank]) for rank in range(2)][distributed.rank()]
    results = {}
    for (name, how), settings in itertools.product(
        {"parameters": {}, "flat": LOCAL}.items(), (SGD, ADAMW)
    ):
        module = stack().bfloat16()
        alone = copy.deepcopy(module)
        options = {"master_weights": True}
        made = made_of(module, settings, **how, **options)
        plain = made_of(alone, settings, group=alone_group, **options)
        for step in range(3):
            for model, used in ((module, made), (alone, plain)):
                for param in model.parameters():
                    param.grad = torch.full_like(param, 0.01 * (step + 1))
                used.step()
                used.zero_grad()
        folder = Path(folders[0]) / name / settings["optimizer_cls"].__name__
        made.save_shard(folder)
        fresh = made_of(copy.deepcopy(alone), settings, group=alone_group, **options)
        fresh.load_shards(folder)
        same = [all_equal(fresh.state_dict()["state"], plain.state_dict()["state"])]
        if settings is ADAMW:
            unsharded = optimizer.AdamW(alone.parameters(), lr=0.1)
            load_unsharded(folder, unsharded)
            same.append(all_equal(unsharded.state_dict()["state"], plain.state_dict()["state"]))
        rounded = [
            param != param.to(torch.bfloat16) for param in fresh.inner.param_groups[0]["params"]
        ]
        has_masters = settings is ADAMW or any(found.any() for found in rounded)
        results[name, settings["optimizer_cls"].__name__] = all(same) and has_masters
        distributed.barrier()
    return results


def all_equal(state: dict[int, dict[str, Tensor]], other: dict[int, dict[str, Tensor]]) -> bool:
    pairs = [(state[key][name], other[key][name]) for key in other for name in other[key]]
    return len(pairs) > 5 and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


class DiesInStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def dies_in_step() -> None:
    module = stack()
    made = ShardedOptimizer(module.parameters(), DiesInStep, lr=0.1, **LOCAL)
    backward(module)
    made.step()


def on_gpus() -> dict[str, Any]:
    """Errors of each way to shard on this rank's GPU, over three steps."""
    device = distributed.current_device()
    results = {}
    hows = {"parameters": {}, "flat": LOCAL, "overlap": OVERLAP, "lazy": OVERLAP}
    for name, how in hows.items():
        torch.manual_seed(0)
        module = stack((64, 300, 300, 5)).to(device)
        alone = copy.deepcopy(module)
        made, plain = made_of(module, ADAMW, **how), optimizer.AdamW(alone.parameters(), lr=0.1)
        if name == "lazy":
            made.wait_in_forward_of(module)
        norms = []
        for _ in range(3):
            x = [torch.full((2, 64), 1.0 + rank, device=device) for rank in range(2)]
            mine = x[distributed.rank()] if how else None
            loss = module(mine).square().mean() if how else sum(map_loss(module, x))
            loss.backward()
            sum(map_loss(alone, x)).backward()
            norms.append(abs((made.clip_grad_norm(1.0) / plain.grad_norm()).item() - 1))
            optimizer.clip_grad_norm(alone.parameters(), 1.0)
            for used in (made, plain):
                used.step()
                used.zero_grad()
        made.wait_for_parameters()
        results[name] = [error_of(module, alone), max(norms)]
    return results


def map_loss(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    return [module(x).square().mean() / len(inputs) for x in inputs]
