"""Steps of FSDP on the simulated network take as long as predicted."""

import pytest
import torch.distributed as dist

from lib.fsdp.wrapper import FSDP
from lib.lessons.fsdp.prediction import predict_fsdp
from lib.lessons.simulated_network import NETWORKS, simulated_group
from tests.ddp.workers import launch
from tests.lessons.network_cases import (
    BACKWARD_MS,
    FORWARD_MS,
    LAYER_BYTES,
    LAYERS,
    scaled,
    stack,
    step_ms,
)

OPTIONS = {
    "prefetch": {},
    "no prefetch": {"prefetch": False},
}

pytestmark = pytest.mark.usefixtures("quick_ranks")


def steps() -> dict[tuple[str, str], tuple[float, float]]:
    """Milliseconds of a step, simulated and predicted, in each way on each network."""
    found, ranks = {}, dist.get_world_size()
    for name in NETWORKS:
        network = scaled(name)
        group = simulated_group(network)
        for how, options in OPTIONS.items():
            model = FSDP(stack(group), group=group, **options)
            took = step_ms(group, model, model.finish_gradient_synchronization)
            prediction = predict_fsdp(
                LAYERS,
                forward_ms=FORWARD_MS,
                backward_ms=BACKWARD_MS,
                gather_ms=network.collective_ms("all_gather", LAYER_BYTES, ranks),
                reduce_ms=network.collective_ms("reduce_scatter", LAYER_BYTES, ranks),
                **options,
            )
            # behind it, who has gradients
            flags = network.collective_ms("all_reduce", 4 * LAYERS, ranks)
            found[name, how] = took, prediction.step_ms + flags
    return found


def test_steps_take_as_long_as_predicted_on_every_network():
    for rank in launch(steps, 2):
        ratios = {way: took / predicted for way, (took, predicted) in rank.items()}
        assert len(ratios) == len(NETWORKS) * len(OPTIONS)
        assert {way: ratio for way, ratio in ratios.items() if abs(ratio - 1) > 0.05} == {}
        # prefetching hides most of the communication where there is less of it than computing
        fast = {how: rank["PCIe", how][0] for how in OPTIONS}
        alone = LAYERS * (FORWARD_MS + BACKWARD_MS)
        assert fast["prefetch"] - alone < 0.5 * (fast["no prefetch"] - alone)


def test_what_is_hidden_is_bounded_by_what_is_computed():
    options = {"forward_ms": 1.0, "backward_ms": 2.0, "gather_ms": 0.5, "reduce_ms": 0.5}
    prediction = predict_fsdp(4, **options)
    # the first all-gather and the last reduce-scatter are exposed
    assert prediction.exposed_ms == pytest.approx(1.0)
    # 4 + 3 all-gathers and 4 reduce-scatters
    assert prediction.communication_ms == pytest.approx(5.5)
    assert predict_fsdp(4, **options, prefetch=False).exposed_ms == pytest.approx(5.5)
    slow = predict_fsdp(4, **options | {"gather_ms": 50.0, "reduce_ms": 50.0})
    # seven all-gathers and four reduce-scatters, of which computing hides its own time at most
    assert 550.0 < slow.step_ms <= 550.0 + 12.0
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        predict_fsdp(0, **options)
