"""Deliberate faults in this room; the tests catch each of them (`tests/test_faults.py`)."""

from tests.fault import Fault

ON_TWO_RANKS = "tests/sharded_optimizer/test_optimizer.py::test_on_two_ranks"
TRAINING = "tests/sharded_optimizer/test_optimizer.py::test_training_equals_that_of_one_process"
FLAT = "lib/sharded_optimizer/flat_slices.py"
WHOLE = "lib/sharded_optimizer/whole_parameters.py"
OPTIMIZER = "lib/sharded_optimizer/optimizer.py"
SAVED = "lib/sharded_optimizer/saved_state.py"
MEMORY = "lib/sharded_optimizer/memory_formula.py"
TEST = "tests/sharded_optimizer/test_optimizer.py"
TEST_MEMORY = "tests/sharded_optimizer/test_memory_formula.py"
FAULTS = [
    Fault(
        WHOLE,
        "key=lambda index: -sizes[index]",
        "key=lambda index: sizes[index]",
        "tests/sharded_optimizer/test_whole_parameters.py",
    ),
    # a parameter frozen since the backward pass is updated by its owner alone
    Fault(
        WHOLE,
        "any(param.requires_grad or param.grad is not None for param in message)",
        "any(param.requires_grad for param in message)",
        ON_TWO_RANKS,
    ),
    # slices that do not start at 16 bytes
    Fault(
        FLAT,
        "self.slice_length = -(-self.starts[-1] // (step * ranks)) * step",
        "self.slice_length = -(-self.starts[-1] // ranks)",
        ON_TWO_RANKS,
    ),
    # the first element of a parameter that a slice cuts
    Fault(
        FLAT,
        "start = max(0, self.begin - param_start)",
        "start = max(0, self.begin - param_start + 1)",
        TRAINING,
    ),
    # a second backward pass replaces the gradients of the first
    Fault(
        FLAT,
        "shard.grad = grad if shard.grad is None else shard.grad.add_(grad)",
        "shard.grad = grad",
        ON_TWO_RANKS,
    ),
    # parameters whose gradients a wrapper averaged are not gathered
    Fault(
        FLAT,
        "if bucket.is_trained:\n                    bucket.start_gathering()",
        "if bucket.has_means:\n                    bucket.start_gathering()",
        TRAINING,
    ),
    # replays that the other ranks never see
    Fault(
        FLAT, "self.must_gather = self.starts_in_forward", "self.must_gather = False", ON_TWO_RANKS
    ),
    # three buckets held at a time
    Fault(
        FLAT,
        "self.order[self.num_started - 2].free_sent()",
        "self.order[max(0, self.num_started - 3)].free_sent()",
        ON_TWO_RANKS,
    ),
    # each rank clips by the norm of its own part
    Fault(
        OPTIMIZER, "dist.all_reduce(square, group=self.group)", "square = square.clone()", TRAINING
    ),
    # schedulers have no effect
    Fault(
        OPTIMIZER,
        "inner_group.update(settings_of(group))\n        self.inner.step(**options)",
        "inner_group.update({})\n        self.inner.step(**options)",
        TRAINING,
    ),
    # averaged gradients that nobody takes
    Fault(
        OPTIMIZER,
        "shard.leaf.grad = shard.grad",
        "shard.leaf.grad = shard.param.grad",
        ON_TWO_RANKS,
    ),
    # a moment of the elements before the shard's
    Fault(
        SAVED,
        "slice(max(shard.start, part.start) - part.start,",
        "slice(max(shard.start, part.start) - shard.start,",
        "tests/sharded_optimizer/test_optimizer.py::"
        "test_three_ranks_resume_on_other_numbers_and_strategies",
    ),
    Fault(
        SAVED, 'require(len(saves) == 1, f"the shards', 'require(saves, f"the shards', ON_TWO_RANKS
    ),
    Fault(
        MEMORY,
        "state = matrices * (8 if element_bytes == 4 else 12) + norms * 8",
        "state = matrices * 8 + norms * 8",
        TEST_MEMORY,
    ),
    Fault(
        MEMORY,
        "end_of_backward = kept + self.gradients + self.communication",
        "end_of_backward = kept + self.gradients",
        TEST_MEMORY,
    ),
    Fault(MEMORY, "inputs = config.num_layers *", "inputs = 2 * config.num_layers *", TEST_MEMORY),
    # a copy lacks what torch does not know
    Fault(
        OPTIMIZER,
        "return super().__getstate__() | {name: getattr(self, name) for name in own}",
        "return super().__getstate__()",
        "tests/sharded_optimizer/test_optimizer.py::test_a_copy_on_a_single_rank_goes_on_as_the_original",
    ),
    # all parameters are awaited before the first part runs
    Fault(
        FLAT,
        "        this.wait_for_parameters(part.parameters())",
        "        this.wait_for_parameters()",
        ON_TWO_RANKS,
    ),
    # ranks with different optimizers
    Fault(OPTIMIZER, '"optimizer_cls": type(empty).__qualname__', '"reduces": ""', TEST),
    # parameters in another order on another rank
    Fault(OPTIMIZER, "            self._check_values()\n", "", ON_TWO_RANKS),
    # a wrapper averages the same gradients
    Fault(FLAT, "        self._check_not_wrapped(params)\n", "", ON_TWO_RANKS),
    # a parameter trained twice
    Fault(OPTIMIZER, 'require(is_once, "params must', 'require(True, "params must', TEST),
]
