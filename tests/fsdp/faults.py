"""Deliberate faults in this room; the tests catch each of them (`tests/test_faults.py`)."""

from tests.fault import Fault

WRAPPER, CHECKPOINTING = "tests/fsdp/test_wrapper.py", "tests/fsdp/test_activation_checkpointing.py"
FAULTS = [
    # the first element of a parameter that a slice cuts
    Fault(
        "lib/fsdp/flat_parameters.py",
        "first = self.begin - self.starts[index]",
        "first = self.begin - self.starts[index] + 1",
        WRAPPER,
    ),
    # the sum in place of the mean
    Fault(
        "lib/fsdp/flat_parameters.py",
        "            mean.div_(self.ranks)\n",
        "            pass\n",
        WRAPPER,
    ),
    # the gradient of an empty shard keeps that of the whole slice
    Fault(
        "lib/fsdp/flat_parameters.py",
        "part = part.clone()",
        "pass",
        WRAPPER,
    ),
    # micro-batches replace one another
    Fault(
        "lib/fsdp/flat_parameters.py",
        "(torch._foreach_add_ if add else torch._foreach_copy_)",
        "torch._foreach_copy_",
        WRAPPER,
    ),
    # gathered parameters stay
    Fault(
        "lib/fsdp/wrapper.py",
        "(self.reshards or step < 0)",
        "step < 0",
        WRAPPER,
    ),
    # nothing is prefetched in backward
    Fault(
        "lib/fsdp/wrapper.py",
        "self._enter(block, step=-1)",
        "self._enter(block, step=0)",
        WRAPPER,
    ),
    # a shared matrix on "meta" is drawn by the first of its modules
    Fault(
        "lib/fsdp/wrapper.py",
        "shares == 1 or not param.is_meta,",
        "True,",
        WRAPPER,
    ),
    # a tied model on "meta" gets an embedding with the scale of one that is not tied
    Fault(
        "lib/fsdp/wrapper.py",
        "if is_container and on_meta:",
        "if False:",
        WRAPPER,
    ),
    # each rank's norm of its own shards
    Fault(
        "lib/fsdp/wrapper.py",
        "            dist.all_reduce(square, group=self.group)\n",
        "            pass\n",
        WRAPPER,
    ),
    # unused parameters keep gradients of zeros, with which AdamW decays them
    Fault(
        "lib/fsdp/wrapper.py",
        "            if not has:\n                param.grad = None",
        "            if not has:\n                pass",
        WRAPPER,
    ),
    # a gradient that came late is lost
    Fault(
        "lib/fsdp/wrapper.py",
        "if block.is_sent and whole.grad is not None:",
        "if False:",
        WRAPPER,
    ),
    # a resumed run with the shards of some ranks
    Fault(
        "lib/fsdp/wrapper.py",
        'if own is not None and own["world_size"] == self.ranks:',
        "if own is not None:",
        WRAPPER,
    ),
    # every block is checkpointed
    Fault(
        "lib/fsdp/activation_checkpointing.py",
        "        if index % every:\n            return block(*arguments)\n",
        "",
        CHECKPOINTING,
    ),
    # attention is computed again
    Fault(
        "lib/fsdp/activation_checkpointing.py",
        "CheckpointPolicy.MUST_SAVE if is_kept",
        "CheckpointPolicy.PREFER_RECOMPUTE if is_kept",
        CHECKPOINTING,
    ),
    # norms are counted once on each rank
    Fault(
        "lib/sharded_optimizer/optimizer.py",
        "            square -= (world_size(self.group) - 1) *",
        "            square -= 0 *",
        WRAPPER,
    ),
]
