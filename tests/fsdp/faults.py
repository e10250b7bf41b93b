"""Deliberate faults in this room; the tests catch each of them (`tests/test_faults.py`)."""

from tests.fault import Fault

FLAT, WRAPPER = "lib/fsdp/flat_parameters.py", "lib/fsdp/wrapper.py"
CHECKPOINTING = "lib/fsdp/activation_checkpointing.py"
STATE = "lib/fsdp/whole_state.py"
TEST, TEST_KINDS = "tests/fsdp/test_wrapper.py", "tests/fsdp/test_kinds.py"
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
    Fault(WRAPPER, "before is not block and", "before is not block and step < 0 and", TEST),
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
    # a block that is called twice is taken for finished after the first
    Fault(WRAPPER, "block.open.add(use)", "pass", TEST_KINDS),
    # weights of a pass without backward are used again
    Fault(
        WRAPPER,
        "        # what a pass without backward left\n        self._release_all()\n",
        "",
        TEST_KINDS,
    ),
    # gradients of `no_sync` are left when it was the last pass
    Fault(WRAPPER, "self.has_unsent = not self.is_syncing", "self.has_unsent = False", TEST_KINDS),
    # a second synchronization drops what the first one averaged
    Fault(FLAT, "i in self.seen or (", "i in self.seen and (", TEST_KINDS),
    # cleared gradients come back with the next ones
    Fault(FLAT, "        self._forget_cleared()\n", "", TEST_KINDS),
    # an older graph is not told that weights have changed
    Fault(FLAT, "torch.autograd.graph.increment_version(self.buffer)", "pass", TEST_KINDS),
    # a shard that was cast or replaced is ignored
    Fault(FLAT, "        if is_moved:\n            self._follow_data()\n", "", TEST_KINDS),
    # a block whose weights are read from outside is freed too early
    Fault(WRAPPER, "            block.stays = True\n", "            pass\n", TEST_KINDS),
    # gradients in float32 whatever the parameter
    Fault(FLAT, "torch.float32 if is_narrow else own", "torch.float32", TEST_KINDS),
    # vectors are those of the module itself
    Fault(STATE, "param.detach().clone() for", "param.detach() for", TEST_KINDS),
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
        "others = (world_size(self.group) - 1) * once",
        "others = 0 * once",
        TEST,
    ),
]
