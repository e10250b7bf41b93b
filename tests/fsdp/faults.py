"""Deliberate faults in this room; the tests catch each of them (`tests/test_faults.py`)."""

from tests.fault import Fault

FLAT, WRAPPER = "lib/fsdp/flat_parameters.py", "lib/fsdp/wrapper.py"
CHECKPOINTING = "lib/fsdp/activation_checkpointing.py"
TEST = "tests/fsdp/test_wrapper.py"
TEST_CHECKPOINTING = "tests/fsdp/test_activation_checkpointing.py"
FAULTS = [
    # the first element of a parameter that a slice cuts
    Fault(
        FLAT,
        "first = self.begin - self.starts[index]",
        "first = self.begin - self.starts[index] + 1",
        TEST,
    ),
    # the sum in place of the mean
    Fault(FLAT, "            mean.div_(self.ranks)\n", "            pass\n", TEST),
    # the gradient of an empty shard keeps that of the whole slice
    Fault(FLAT, "part = part.clone()", "pass", TEST),
    # micro-batches replace one another
    Fault(
        FLAT, "(torch._foreach_add_ if add else torch._foreach_copy_)", "torch._foreach_copy_", TEST
    ),
    # gathered parameters stay
    Fault(WRAPPER, "before is not block:", "before is not block and step < 0:", TEST),
    # nothing is prefetched in backward
    Fault(WRAPPER, "self._enter(block, step=-1)", "self._enter(block, step=0)", TEST),
    # each rank's norm of its own shards
    Fault(
        WRAPPER,
        "            dist.all_reduce(square, group=self.group)\n",
        "            pass\n",
        TEST,
    ),
    # unused parameters keep gradients of zeros, with which AdamW decays them
    Fault(
        WRAPPER,
        "            if not has:\n                param.grad = None",
        "            if not has:\n                pass",
        TEST,
    ),
    # a gradient that came late is lost
    Fault(WRAPPER, "if block.is_sent and whole.grad is not None:", "if False:", TEST),
    # every block is checkpointed
    Fault(
        CHECKPOINTING,
        "        if index % every:\n            return block(*arguments)\n",
        "",
        TEST_CHECKPOINTING,
    ),
    # attention is computed again
    Fault(
        CHECKPOINTING,
        "CheckpointPolicy.MUST_SAVE if is_kept",
        "CheckpointPolicy.PREFER_RECOMPUTE if is_kept",
        TEST_CHECKPOINTING,
    ),
    # norms are counted once on each rank
    Fault(
        "lib/sharded_optimizer/optimizer.py",
        "            square -= (world_size(self.group) - 1) *",
        "            square -= 0 *",
        TEST,
    ),
]
