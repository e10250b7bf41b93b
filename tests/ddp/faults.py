"""Deliberate faults in this room; the tests catch each of them (`tests/test_faults.py`)."""

from tests.fault import Fault

COSTS = "lib/ddp/costs.py"
BUCKETS = "lib/ddp/buckets.py"
WRAPPERS = "lib/ddp/wrappers.py"
GROUP = "lib/ddp/process_group.py"
LAUNCHER = "lib/ddp/launcher.py"
NETWORK = "lib/ddp/simulated_network.py"
TEST_COSTS = "tests/ddp/test_costs.py"
TEST_BUCKETS = "tests/ddp/test_buckets.py"
TEST_WRAPPERS = "tests/ddp/test_wrappers.py"
TEST_GROUP = "tests/ddp/test_process_group.py"
TEST_NETWORK = "tests/ddp/test_simulated_network.py"
ON_TWO_RANKS = "tests/ddp/test_wrappers.py::test_on_two_ranks"
TRAINING = "tests/ddp/test_wrappers.py::test_training_equals_that_of_one_process"
FAULTS = [
    Fault(
        "lib/ddp/ring.py",
        "sent = [(rank - number) % ranks for rank in range(ranks)]",
        "sent = [(rank + number) % ranks for rank in range(ranks)]",
        "tests/ddp/test_ring.py",
    ),
    Fault(
        LAUNCHER,
        "    gc.freeze()\n",
        "",
        "tests/ddp/test_launcher.py -k looks_for_garbage",
    ),
    Fault(COSTS, "slow = (hosts - 1) / (ranks - 1)", "slow = hosts / (ranks - 1)", TEST_COSTS),
    Fault(
        COSTS,
        "start = max(ready if overlap else backward_ms, end)",
        "start = ready if overlap else backward_ms",
        TEST_COSTS,
    ),
    # what is sent after backward slows nothing down
    Fault(COSTS, "    if overlap and ranks > 1:\n", "    if ranks > 1:\n", TEST_COSTS),
    # padding to the next multiple becomes padding to the one before
    Fault(
        BUCKETS,
        "self.lengths = [-(-param.numel() // step) * step for param in self.params]",
        "self.lengths = [param.numel() // step * step for param in self.params]",
        TEST_BUCKETS,
    ),
    Fault(
        BUCKETS,
        "if bucket and cap_bytes is not None and size > limit:",
        "if bucket and cap_bytes is not None and size >= limit:",
        TEST_BUCKETS,
    ),
    # the sum in place of the mean
    Fault(
        BUCKETS,
        "self.divisor = None if averages else dist.get_world_size(group)",
        "self.divisor = None",
        TRAINING,
    ),
    # unused parameters keep gradients of zeros, with which AdamW decays them
    Fault(
        WRAPPERS,
        "                if share == 0:\n                    self.params[index].grad = None",
        "                if share < 0:\n                    self.params[index].grad = None",
        TRAINING,
    ),
    # who has gradients is sent before that is known
    Fault(
        WRAPPERS,
        "is_last = bucket is self.buckets[-1]",
        "is_last = bucket is self.buckets[0]",
        ON_TWO_RANKS,
    ),
    Fault(WRAPPERS, "        if not self.is_syncing:\n            return\n", "", ON_TWO_RANKS),
    # no broadcast of rank 0's weights
    Fault(
        WRAPPERS,
        "            broadcast_module(module, group)\n            self._replace_earlier()\n"
        "            self._register_hooks()",
        "            self._replace_earlier()\n            self._register_hooks()",
        TRAINING,
    ),
    Fault(
        GROUP, "total /= world_size(group)", "total /= max(1, world_size(group) - 1)", TEST_GROUP
    ),
    # a rank that fails alone, while the others go on
    Fault(
        GROUP,
        "    if first is None:\n        return result\n    raise mark_collective",
        "    if error is None:\n        return result\n    raise mark_collective",
        TEST_GROUP,
    ),
    # what ranks of an earlier start left is taken for an answer
    Fault(
        GROUP,
        'prefix = store.get(f"prefix for/{own}").decode()',
        'prefix = store.get(f"prefix for/{rank}").decode()',
        TEST_GROUP,
    ),
    # the last exception in place of the first
    Fault(
        LAUNCHER,
        'earliest = min(failures, key=lambda r: failures[r]["time"], default=None)',
        'earliest = max(failures, key=lambda r: failures[r]["time"], default=None)',
        "tests/ddp/test_launcher.py::test_the_rank_that_failed_first_is_the_cause",
    ),
    # ranks outlive the process that launched them
    Fault(
        LAUNCHER,
        "    threading.Thread(target=_end_with_parent, daemon=True).start()\n",
        "",
        "tests/ddp/test_launcher.py::test_ranks_end_with_the_process_that_launched_them",
    ),
    # ranks have the environment of the first launch
    Fault(
        LAUNCHER,
        "    os.environ.clear()\n    os.environ.update(environment)\n",
        "",
        "tests/ddp/test_launcher.py::test_ranks_have_the_environment_of_each_launch",
    ),
    # an earlier wrapper of the module averages the same gradients once more
    Fault(WRAPPERS, "                    del hooks[number]\n", "", ON_TWO_RANKS),
    Fault(
        WRAPPERS,
        "        if self._is_wrapped and [param.dtype for param in self.params] != self.dtypes:",
        "        if False:",
        ON_TWO_RANKS,
    ),
    # ranks with buckets of other sizes
    Fault(WRAPPERS, '"bucket_cap_mb": cap, "packed"', '"packed"', TEST_WRAPPERS),
    # parameters are compared by name, and used by position
    Fault(GROUP, "            if pair[0] != pair[1]:", "            if False:", TEST_GROUP),
    # a copy has no hooks
    Fault(
        WRAPPERS,
        "        super().__setstate__(state)\n        if world_size(self.group) > 1:",
        "        super().__setstate__(state)\n        if world_size(self.group) < 1:",
        ON_TWO_RANKS,
    ),
    # gradients of parameters that were replaced stay each rank's own
    Fault(
        WRAPPERS,
        "            if part._parameters.get(key) is not param:",
        "            if False:",
        "tests/sharded_optimizer/test_kinds_and_events.py",
    ),
    # what others raised because a rank died is named in its place
    Fault(
        LAUNCHER, "    if died:\n", "    if died and not failures:\n", "tests/ddp/test_launcher.py"
    ),
    # PyTorch's wrapper outlives the group
    Fault(WRAPPERS, "        before_leaving(self.free)\n", "", TEST_WRAPPERS),
    # what holds the group lets go too late
    Fault(
        GROUP,
        "    _let_go()\n    dist.destroy_process_group()\n",
        "    dist.destroy_process_group()\n    _let_go()\n",
        TEST_GROUP,
    ),
    # a simulated collective starts when this rank calls it, not the last
    Fault(
        NETWORK,
        'start = max(self.free, *(float(call["time"]) for call in calls))',
        "start = max(self.free, called)",
        TEST_NETWORK,
    ),
    # results before the time is up
    Fault(
        NETWORK,
        "        self.group.clock.sleep_until(self.free)\n        hand_over()",
        "        hand_over()\n        self.group.clock.sleep_until(self.free)",
        TEST_NETWORK,
    ),
    # a buffer that others still read is filled again
    Fault(NETWORK, "if self.last_call[number] <= read and", "if", TEST_NETWORK),
    # ranks whose calls differ get each other's data
    Fault(NETWORK, 'if call["what"] != slots[self.own]["what"]:', "if False:", TEST_NETWORK),
    Fault(
        NETWORK,
        "return Link(link.latency_us * slower, link.bandwidth_gbs * smaller / slower)",
        "return Link(link.latency_us * slower, link.bandwidth_gbs / slower)",
        TEST_NETWORK,
    ),
    # an interrupted rank that is still importing PyTorch prints a traceback
    Fault(
        LAUNCHER,
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {})",
        "tests/ddp/test_launcher.py::test_an_interrupt_ends_ranks_that_are_starting_without_a_word",
    ),
]
