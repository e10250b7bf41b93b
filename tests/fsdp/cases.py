"""Properties of FSDP, each a function that all ranks of a group run."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lib.ddp.process_group import (
    current_device,
    gather_objects,
    rank,
    world_size,
)
from lib.ddp.wrappers import wrap
from lib.fsdp import FSDP, checkpoint_activations
from lib.lessons.simulated_network import simulated_group
from lib.model.config import ModelConfig
from lib.model.transformer import MeanLoss, TransformerLM
from lib.optimizer.adamw import AdamW, clip_grad_norm
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.training.parallelism import divide_loss
from tests.ddp.cases import Raise
from tests.ddp.training_cases import Net, Trained, loss_of, part, train
from tests.ddp.workers import message_of, recorded_collectives
from tests.lessons.network_cases import PCIE
from tests.sharded_optimizer.cases import update

MODES: dict[str, tuple[dict[str, Any], str, int]] = {
    "default": ({}, "sgd", 1),
    "accumulation": ({}, "adamw", 3),
    "no prefetch": ({"prefetch": False}, "sgd", 2),
    "all in one": ({"blocks": []}, "adamw", 2),
    "other order": ({"blocks": lambda net: [net.layers[i] for i in (1, 0, 2)]}, "sgd", 1),
    "pairs": ({"blocks": lambda net: [[net.layers[0], net.layers[1]], net.layers[2]]}, "sgd", 1),
    "checkpointing": ({"around": checkpoint_activations()}, "sgd", 2),
    "every other": ({"around": checkpoint_activations(every=2)}, "sgd", 1),
    "matmuls kept": ({"around": checkpoint_activations(keep="matmuls")}, "sgd", 1),
}


def divided(net: Net, mode: str, group: Any = None) -> FSDP:
    options = dict(MODES[mode][0])
    net.around = options.pop("around", None)
    if callable(options.get("blocks")):
        options["blocks"] = options["blocks"](net)
    return FSDP(net, group=group, **options)


def trained() -> dict[str, Trained]:
    """Each mode of training, and one over a simulated network."""
    found = {}
    for mode, (_, *how) in MODES.items():
        # without clipping, whose norm is summed in another order, all bits are equal
        max_norm = 1e9 if mode == "default" else 0.1
        found[mode] = train(functools.partial(divided, mode=mode), *how, max_norm)
    if current_device().type == "cpu":
        group = simulated_group(PCIE)
        make = functools.partial(divided, mode="default", group=group)
        found["simulated network"] = train(make, *MODES["default"][1:])
    return found


def backward(model: nn.Module, step: int = 0) -> None:
    loss_of(model, *part(step, 0, rank())).backward()
    model.finish_gradient_synchronization()


def mean_loss(module: nn.Module, step: int = 0) -> Tensor:
    """The loss of all ranks, in one process."""
    ranks = range(world_size())
    return sum(loss_of(module, *part(step, 0, number)) for number in ranks) / len(ranks)


# Memory and messages


def gathered_blocks(model: FSDP) -> list[int]:
    return [
        number
        for number, block in enumerate(model.blocks)
        if any(flat.buffer is not flat.nothing for flat in block.flats)
    ]


def check_two_blocks_are_gathered_at_most_and_none_between_steps() -> None:
    net = Net()
    model = FSDP(net, blocks=net.layers)
    seen: list[list[int]] = []
    for layer in net.layers:
        layer.a.register_forward_hook(lambda *args: seen.append(gathered_blocks(model)))
        layer.a.register_full_backward_hook(lambda *args: seen.append(gathered_blocks(model)))
    for _ in range(2):
        seen.clear()
        backward(model)
        # the next one is on its way; the last stays for backward
        assert seen == [[0, 1], [1, 2], [2], [1, 2], [0, 1], [0]], seen
        assert [flat.buffer.untyped_storage().nbytes() for flat in model.flats] == [0] * 7
        assert all(whole.grad is None for flat in model.flats for whole in flat.placeholders)
    with torch.no_grad():
        model(*part(0, 0, 0)[:1], True)
    assert gathered_blocks(model) == []


def check_matrices_are_divided_evenly_and_shards_are_what_the_optimizer_sees() -> None:
    model = FSDP(Net())
    # biases belong to their matrices, norms are whole
    total = sum(p.numel() for name, p in Net().named_parameters() if "norm" not in name)
    own = sum(shard.numel() for flat in model.flats for shard in flat.shards)
    assert sum(gather_objects(own)) == total
    backward(model)
    for name, param in model.module.named_parameters():
        is_used = param.requires_grad and not name.startswith("never")
        assert (param.grad is not None) == is_used, name
        if is_used:
            assert param.grad.shape == param.shape
            assert param.grad.dtype == torch.float32
        if is_used and not param.numel():
            # an optimizer that skips empty shards does not free this
            assert param.grad.untyped_storage().nbytes() == 0, name


def check_a_step_sends_each_block_three_times() -> None:
    net = Net()
    model = FSDP(net, blocks=net.layers)
    # the first step also compares the order of blocks
    backward(model)
    sent: list[str] = []
    with recorded_collectives(lambda kind, _: sent.append(kind)):
        backward(model)
    # one buffer outside, and a trained and a frozen one in each of three blocks; the last block's
    # stay for backward
    assert sent.count("all_gather") == 1 + 6 + 4, sent
    assert sent.count("reduce_scatter") == 4
    # vectors, and who has gradients
    assert sent.count("all_reduce") == 1, sent
    # no_sync sends no gradients
    sent.clear()
    with recorded_collectives(lambda kind, _: sent.append(kind)), model.no_sync():
        loss_of(model, *part(0, 0, rank())).backward()
    assert "reduce_scatter" not in sent


class Keeping(nn.Linear):
    """A layer whose caller keeps what it read in the pass: its weight, a view, an array."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.weight, self.weight.T[1:], self.weight.detach().cpu().numpy()]
        return super().forward(x)


def check_a_weight_that_is_kept_from_a_pass_stays_whole() -> None:
    module = nn.Sequential(*(Keeping(6, 6) for _ in range(3))).to(current_device())
    model = FSDP(module)
    whole = model.full_parameters()
    seen = []
    module[1].register_forward_hook(lambda *args: seen.append(module[0].weight))
    module[0].register_forward_pre_hook(lambda *args: seen.append(module[2].weight))
    model(torch.ones(2, 6, device=current_device())).sum().backward()
    model.finish_gradient_synchronization()
    for param in model.parameters():
        param.data.zero_()
    for index, layer in enumerate(module):
        expected = whole[f"{index}.weight"]
        weight, view, array = layer.kept
        assert torch.equal(weight, expected)
        assert torch.equal(view, expected.T[1:])
        assert torch.equal(torch.from_numpy(array), expected.cpu())
    # one that was not gathered when it was kept is not gathered after the pass
    for weight in seen:
        assert "must be called through its FSDP" in message_of(weight.sum)
    # autograd keeps none of it from forward to backward, but the last block's
    model(torch.ones(2, 6, device=current_device()))
    storages = [layer.kept[0].untyped_storage() for layer in module]
    for layer in module:
        del layer.kept
    if current_device().type == "cpu":
        # gloo's threads let go of what they gathered a little later
        for _ in range(500):
            counts = [torch._C._storage_Use_Count(storage._cdata) for storage in storages]
            if counts[:2] == [1, 1]:
                break
            time.sleep(0.01)
        assert counts[:2] == [1, 1], counts


# Mixed precision


def check_blocks_compute_in_low_precision_and_shards_stay_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        net, alone = Net(), Net()
        seen = set()
        net.layers[1].b.register_forward_pre_hook(
            lambda m, args: seen.add((m.weight.dtype, net.embedding.weight.dtype))  # noqa: B023
        )
        for layer in (*net.layers, *alone.layers):
            layer.a.bias.data.zero_()
            layer.a.bias.requires_grad_(False)
        model = FSDP(net, dtype, full_precision=[net.embedding])
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, alone)]
        for step in range(2):
            with torch.autocast(current_device().type, dtype):
                losses = loss_of(model, *part(step, 0, rank())), mean_loss(alone, step)
            for loss in losses:
                loss.backward()
            model.finish_gradient_synchronization()
            update(*optimizers)
        assert seen == {(dtype, torch.float32)}
        full = model.full_parameters()
        for name, param in alone.named_parameters():
            assert full[name].dtype == torch.float32
            # gradients are rounded to the short type on each rank
            torch.testing.assert_close(full[name], param, rtol=0, atol=4e-3)


# State


def check_state_is_whole_also_inside_another_module() -> None:
    model = FSDP(Net(seed=3))
    whole = model.state_dict()
    expected = Net(seed=3).state_dict()
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    # as a part of another module
    around = nn.ModuleDict({"inside": model, "beside": nn.Linear(2, 2)})
    saved = around.state_dict()
    assert all(torch.equal(saved[f"inside.{name}"], whole[name]) for name in whole)
    saved = {name: value + 1 for name, value in saved.items()}
    around.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in around.state_dict().items())
    saved["inside.head.weight"] = torch.zeros(11, 5)
    message = message_of(lambda: around.load_state_dict(saved))
    assert "head.weight must have shape (11, 6), got (11, 5)" in message, message

    del whole["head.weight"]
    message = message_of(lambda: model.load_state_dict(whole))
    assert 'Missing key(s) in state_dict: "head.weight"' in message, message


def check_sharded_optimizers_train_shards_and_save_them_as_others_do() -> None:
    net, alone = Net(), Net()
    model = FSDP(net)
    made = ShardedOptimizer(model.whole_parameters(), AdamW, strategy=model.shards_of, lr=0.1)
    plain = AdamW(alone.parameters(), lr=0.1)
    for step in range(2):
        backward(model, step)
        mean_loss(alone, step).backward()
        norm = made.clip_grad_norm(0.5)
        torch.testing.assert_close(norm, clip_grad_norm(alone.parameters(), 0.5))
        update(made, plain)
    full = model.full_parameters()
    for name, param in alone.named_parameters():
        torch.testing.assert_close(full[name], param, rtol=0, atol=1e-5)
    assert sum(gather_objects(len(made.state_dict()["ranges"]))) >= len(full)


class Sometimes(nn.Module):
    """A matrix that every pass uses, and one, with a bias that one rank holds, for some passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.some = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        return self.some(self.always(x)).sum() if uses_all else self.always(x).sum()


def check_an_empty_shards_old_gradient_is_none() -> None:
    """A parameter that no rank uses in a step stays as it is, whatever the step before had."""
    alone, module = Sometimes(), FSDP(Sometimes())
    plain = AdamW(alone.parameters(), lr=1e-2)
    optimizer = ShardedOptimizer(
        module.whole_parameters(), AdamW, strategy=module.shards_of, lr=1e-2
    )
    for uses_all in (True, False, True):
        x = torch.ones(2, 6)
        for one, steps in ((alone, plain), (module, optimizer)):
            one(x, uses_all).backward()
            if one is module:
                module.finish_gradient_synchronization()
            steps.step()
            steps.zero_grad()
    torch.testing.assert_close(module.full_parameters(), dict(alone.named_parameters()))


def check_an_infinite_gradient_of_a_vector_has_an_infinite_norm() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(current_device())
    model = FSDP(module)
    made = ShardedOptimizer(model.whole_parameters(), AdamW, strategy=model.shards_of, lr=0.1)
    model(torch.ones(2, 4, device=current_device())).sum().backward()
    model.finish_gradient_synchronization()
    module[1].bias.grad[0] = torch.inf
    assert made.grad_norm() == model.grad_norm() == torch.inf


def check_backward_through_a_frozen_module_leaves_nothing_to_finish() -> None:
    x = torch.ones(2, 4, device=current_device())
    parts = [nn.Sequential(nn.Linear(4, 4)).to(current_device()) for _ in range(2)]
    loss = parts[1](parts[0](x)).square().mean()
    grads = torch.autograd.grad(loss, list(parts[0].parameters()))
    expected = torch.cat([grad.flatten() for grad in grads]).norm()
    maker, judge = map(FSDP, parts)
    judge.requires_grad_(False)
    judge(maker(x)).square().mean().backward()
    maker.finish_gradient_synchronization()
    torch.testing.assert_close(maker.grad_norm(), expected)
    judge.requires_grad_(True)
    judge(x).square().mean().backward()
    message = message_of(lambda: judge(x))
    assert "gradients were not averaged" in message, message


# Errors


def check_a_forgotten_finish_is_an_error_at_the_next_forward() -> None:
    model = FSDP(Net())
    loss_of(model, *part(0, 0, rank())).backward()
    message = message_of(lambda: loss_of(model, *part(0, 0, rank())))
    assert message.startswith("RuntimeError: forward after a backward pass"), message
    for call in (model.state_dict, model.full_parameters):
        message = message_of(call)
        words = "RuntimeError: state_dict() or full_parameters() after a backward pass whose"
        assert message.startswith(words), message
    model.finish_gradient_synchronization()
    model.state_dict()
    backward(model)


def check_training_goes_on_after_an_exception_that_all_ranks_have() -> None:
    alone = Net()
    mean_loss(alone).backward()
    norm = clip_grad_norm(alone.parameters(), 1e9)
    for clears, is_syncing in itertools.product(("model", "optimizer", "zeros"), (True, False)):
        net = Net()
        model = FSDP(net)
        optimizer = torch.optim.SGD(model.parameters())
        zeros = functools.partial(optimizer.zero_grad, set_to_none=False)
        clear = {"model": model.zero_grad, "optimizer": optimizer.zero_grad, "zeros": zeros}[clears]
        # a pass before, and one that fails while the last block's gradients are on their way
        right = loss_of(model, *part(1, 0, rank()))
        hook = net.layers[0].register_forward_hook(lambda *args: Raise.apply(args[2]))
        wrong = loss_of(model, *part(1, 1, rank()))
        hook.remove()
        with contextlib.nullcontext() if is_syncing else model.no_sync():
            right.backward()
        assert message_of(wrong.backward) == "RuntimeError: in backward"
        clear()
        backward(model)
        torch.testing.assert_close(model.grad_norm(), norm, msg=lambda m: f"{clears}: {m}")  # noqa: B023


# Refusals


class Indexed(nn.Module):
    """A matrix outside of blocks, a block, and an embedding."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=sparse)
        self.last = nn.Linear(4, 4)
        self.to(current_device())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.embedding(tokens))


def check_what_cannot_be_divided_is_refused_by_name() -> None:
    graded, hooked, lazy = Indexed(), Indexed(), nn.Sequential(nn.LazyLinear(3))
    graded.last.weight.grad = torch.zeros_like(graded.last.weight)
    hooked.last.weight.register_post_accumulate_grad_hook(lambda param: None)
    stranger, net = nn.Linear(2, 2), Indexed()
    divided, odd = FSDP(Indexed()), rank() == world_size() - 1
    cases: dict[str, Callable[[], Any]] = {
        "weight must be the same on all ranks": lambda: FSDP(nn.Linear(4, 5 + odd)),
        "prefetch must be the same on all ranks": lambda: FSDP(net, prefetch=odd),
        "block 0 must be the same on all ranks": lambda: FSDP(
            net, blocks=[net.last if odd else net.embedding]
        ),
        "blocks must not overlap": lambda: FSDP(net, blocks=[net, net.last]),
        "last.weight must have no gradient before it is divided": lambda: FSDP(graded),
        "last.weight must have no gradient hook": lambda: FSDP(hooked),
        "0.weight must have a shape, but is lazy": lambda: FSDP(lazy),
        "blocks must be modules inside the wrapped one, got a Linear": lambda: FSDP(
            net, blocks=[stranger]
        ),
        "full_precision must be modules inside": lambda: FSDP(net, full_precision=[stranger]),
        "compute_dtype must be a floating-point dtype of torch, got torch.int8": lambda: FSDP(
            net, torch.int8
        ),
        "compute_dtype must be a floating-point dtype of torch, got 'bfloat16'": lambda: FSDP(
            net, "bfloat16"
        ),
        "embedding.weight must be whole, but is divided among": lambda: FSDP(divided),
        "embedding.weight must be whole, but is divided": lambda: wrap("flashddp", divided),
        "parameter 0 must be whole, but is divided": lambda: ShardedOptimizer(
            divided.parameters(), AdamW, strategy="flat"
        ),
    }
    for words, make in cases.items():
        message = message_of(make)
        assert message.startswith("ValueError: "), message
        assert words in message, message
    # nothing was divided by what was refused
    assert net.last.weight.shape == (4, 4)


class Experts(nn.Module):
    """Two blocks of equal size, of which a pass runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 4)
        self.to(current_device())

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.last(self.experts[number](x)).sum()


def check_ranks_that_run_different_blocks_are_refused_in_the_first_step() -> None:
    x = torch.ones(1, 4, device=current_device())
    model = FSDP(Experts(), prefetch=False)
    # a pass before that is alike does not count
    model(x, 0)
    model(x, rank() % 2).backward()
    assert message_of(model.finish_gradient_synchronization).startswith(
        "ValueError: all ranks must run the same blocks in the same order, but rank 0 came to the "
        "all-gather of experts.0.weight when rank 1 came to the all-gather of experts.1.weight"
    )
    model = FSDP(Experts())
    for number in range(2):
        model(x, number).backward()
        model.finish_gradient_synchronization()


def check_misuse_is_refused_by_name() -> None:
    tokens = torch.tensor([0, 3], device=current_device())
    net = Indexed()
    model = FSDP(net)
    # the module and its parts
    for act in (lambda: net(tokens), lambda: net.last(torch.ones(1, 4))):
        assert "must be called through its FSDP" in message_of(act)
    # clipping by the norm of this rank's part
    for params in (model.parameters(), model.whole_parameters()):
        message = message_of(lambda: clip_grad_norm(params, 1.0))  # noqa: B023
        if world_size() > 1:
            assert message.startswith("ValueError: params must have whole gradients"), message
            assert "call FSDP.clip_grad_norm(), which" in message, message
    # which may be read where the forward pass doesn't call them
    net.forward = lambda: net.last.weight.sum() + net.embedding.weight[tokens].sum()
    whole = model.full_parameters()
    expected = whole["last.weight"].sum() + whole["embedding.weight"][tokens].sum()
    torch.testing.assert_close(model(), expected)

    grown = nn.Sequential(nn.Linear(4, 4)).to(current_device())
    model = FSDP(grown)
    grown.append(nn.Linear(4, 4))
    message = message_of(lambda: model(torch.ones(1, 4, device=current_device())))
    assert "parameter 1.weight was added after the module was wrapped" in message, message
    sparse = FSDP(Indexed(sparse=True))
    message = message_of(lambda: sparse(tokens).sum().backward())
    assert "the gradient of embedding.weight must be dense (sparse=False)" in message, message
    model = FSDP(Indexed())
    with model.no_sync():
        model(tokens).sum().backward()
    for param in model.parameters():
        param.grad.mul_(2)
    message = message_of(lambda: model(tokens).sum().backward())
    assert "was changed before it was averaged" in message, message
    model = FSDP(Indexed())
    model(tokens).sum().backward()
    message = message_of(lambda: model.clip_grad_norm(1.0))
    assert "not averaged; call finish_gradient_synchronization() after backward" in message, message
    model.finish_gradient_synchronization()
    net = model.module
    net.last.weight = nn.Parameter(torch.zeros(4, 4, device=current_device()))
    for act in (lambda: model(tokens), model.full_parameters):
        message = message_of(act)
        assert "parameter last.weight was replaced after the module was wrapped" in message, message


def check_biases_and_integers_have_the_dtype_that_their_matrix_is_computed_in() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.steps = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            assert self.steps.dtype == torch.int8
            return self.linear(self.norm(x.float()).to(x.dtype)) * self.steps[0]

    module = Scaled().to(current_device())
    whole = nn.Linear(4, 4).to(current_device())
    whole.load_state_dict(module.linear.state_dict())
    model = FSDP(module, torch.bfloat16)
    x = torch.randn(3, 4, device=current_device()).bfloat16()
    model(x).float().sum().backward()
    model.finish_gradient_synchronization()
    grads = {name: param.grad for name, param in module.named_parameters()}
    assert grads["linear.bias"].dtype == grads["linear.weight"].dtype == torch.float32
    # vectors without a matrix are whole and the same on all ranks
    assert grads["norm.weight"].shape == (4,)
    assert len({tuple(g) for g in gather_objects(grads["norm.weight"].tolist())}) == 1


def check_two_passes_of_a_language_model_share_a_backward() -> None:
    """The head's matrix is read without calling it, last in each pass."""
    for tied in (False, True):
        config = ModelConfig(
            vocab_size=11, context_length=4, d_model=8, num_layers=2, num_heads=2, d_ff=8
        )
        config = dataclasses.replace(config, tied_embeddings=tied)
        device = current_device()
        losses = []
        for _ in range(2):
            generator = torch.Generator(device).manual_seed(0)
            model = TransformerLM(config, device=device, generator=generator)
            losses.append(MeanLoss(model, device, None, 0.0))
        alone, divided = losses[0], divide_loss(losses[1], None)
        tokens = torch.arange(8, device=device).view(2, 1, 4)
        for call in (alone, divided):
            (call(tokens[0], tokens[1]) + call(tokens[1], tokens[0])).backward()
        divided.finish_gradient_synchronization()
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (alone, divided)]
        update(*optimizers)
        full = divided.full_parameters()
        for name, param in alone.named_parameters():
            torch.testing.assert_close(full[name], param.detach())
