"""Deliberate faults in this room; the tests catch each of them (`tests/test_faults.py`)."""

from tests.fault import Fault

FAULTS = [
    Fault(
        "lib/ddp/ring.py",
        "sent = [(rank - number) % ranks for rank in range(ranks)]",
        "sent = [(rank + number) % ranks for rank in range(ranks)]",
        "tests/ddp/test_ring.py",
    ),
    Fault(
        "lib/ddp/costs.py",
        "slow = (hosts - 1) / (ranks - 1)",
        "slow = hosts / (ranks - 1)",
        "tests/ddp/test_costs.py",
    ),
    Fault(
        "lib/ddp/costs.py",
        "start = max(ready if overlap else backward_ms, end)",
        "start = ready if overlap else backward_ms",
        "tests/ddp/test_costs.py",
    ),
    # what is sent after backward slows nothing down
    Fault(
        "lib/ddp/costs.py",
        "    if overlap and ranks > 1:\n",
        "    if ranks > 1:\n",
        "tests/ddp/test_costs.py",
    ),
    # padding to the next multiple becomes padding to the one before
    Fault(
        "lib/ddp/buckets.py",
        "self.lengths = [-(-param.numel() // step) * step for param in self.params]",
        "self.lengths = [param.numel() // step * step for param in self.params]",
        "tests/ddp/test_buckets.py",
    ),
    Fault(
        "lib/ddp/buckets.py",
        "if bucket and cap_bytes is not None and size > limit:",
        "if bucket and cap_bytes is not None and size >= limit:",
        "tests/ddp/test_buckets.py",
    ),
    # the sum in place of the mean
    Fault(
        "lib/ddp/buckets.py",
        "self.divisor = None if averages else dist.get_world_size(group)",
        "self.divisor = None",
        "tests/ddp/test_wrappers.py::test_training_equals_that_of_one_process",
    ),
    # unused parameters keep gradients of zeros, with which AdamW decays them
    Fault(
        "lib/ddp/wrappers.py",
        "                if share == 0:\n                    self.params[index].grad = None",
        "                if share < 0:\n                    self.params[index].grad = None",
        "tests/ddp/test_wrappers.py::test_training_equals_that_of_one_process",
    ),
    # who has gradients is sent before that is known
    Fault(
        "lib/ddp/wrappers.py",
        "is_last = bucket is self.buckets[-1]",
        "is_last = bucket is self.buckets[0]",
        "tests/ddp/test_wrappers.py::test_on_two_ranks",
    ),
    Fault(
        "lib/ddp/wrappers.py",
        "        if not self.is_syncing:\n            return\n",
        "",
        "tests/ddp/test_wrappers.py::test_on_two_ranks",
    ),
    # no broadcast of rank 0's weights
    Fault(
        "lib/ddp/wrappers.py",
        "            broadcast_module(module, group)\n            self._replace_earlier()",
        "            self._replace_earlier()",
        "tests/ddp/test_wrappers.py::test_training_equals_that_of_one_process",
    ),
    Fault(
        "lib/ddp/process_group.py",
        "total /= world_size(group)",
        "total /= max(1, world_size(group) - 1)",
        "tests/ddp/test_process_group.py",
    ),
    # a rank that fails alone, while the others go on
    Fault(
        "lib/ddp/process_group.py",
        "    if first is None:\n        return result\n    raise mark_collective",
        "    if error is None:\n        return result\n    raise mark_collective",
        "tests/ddp/test_process_group.py",
    ),
    # what ranks of an earlier start left is taken for an answer
    Fault(
        "lib/ddp/process_group.py",
        'prefix = store.get(f"prefix for/{own}").decode()',
        'prefix = store.get(f"prefix for/{rank}").decode()',
        "tests/ddp/test_process_group.py",
    ),
    # the last exception in place of the first
    Fault(
        "lib/ddp/launcher.py",
        'rank = min(failures, key=lambda r: failures[r]["time"])',
        'rank = max(failures, key=lambda r: failures[r]["time"])',
        "tests/ddp/test_launcher.py::test_the_rank_that_failed_first_is_the_cause",
    ),
    # ranks outlive the process that launched them
    Fault(
        "lib/ddp/launcher.py",
        "    threading.Thread(target=_end_with_parent, daemon=True).start()\n",
        "",
        "tests/ddp/test_launcher.py::test_ranks_end_with_the_process_that_launched_them",
    ),
    # ranks have the environment of the first launch
    Fault(
        "lib/ddp/launcher.py",
        "    os.environ.clear()\n    os.environ.update(environment)\n",
        "",
        "tests/ddp/test_launcher.py::test_ranks_have_the_environment_of_each_launch",
    ),
    # an earlier wrapper of the module averages the same gradients once more
    Fault(
        "lib/ddp/wrappers.py",
        "                    del hooks[number]\n",
        "",
        "tests/ddp/test_wrappers.py::test_on_two_ranks",
    ),
    Fault(
        "lib/ddp/wrappers.py",
        "        if self._is_wrapped and [param.dtype for param in self.params] != self.dtypes:",
        "        if False:",
        "tests/ddp/test_wrappers.py::test_on_two_ranks",
    ),
    # ranks with buckets of other sizes
    Fault(
        "lib/ddp/wrappers.py",
        '"bucket_cap_mb": cap, "packed"',
        '"packed"',
        "tests/ddp/test_wrappers.py",
    ),
    # PyTorch's wrapper outlives the group
    Fault(
        "lib/ddp/wrappers.py",
        "            before_leaving(self.free)\n",
        "",
        "tests/ddp/test_wrappers.py",
    ),
    # what holds the group lets go too late
    Fault(
        "lib/ddp/process_group.py",
        "    _let_go()\n    dist.destroy_process_group()\n",
        "    dist.destroy_process_group()\n    _let_go()\n",
        "tests/ddp/test_process_group.py",
    ),
    # a simulated collective starts when this rank calls it, not the last
    Fault(
        "lib/ddp/simulated_network.py",
        'start = max(self.free, *(float(call["time"]) for call in calls))',
        "start = max(self.free, called)",
        "tests/ddp/test_simulated_network.py",
    ),
    # results before the time is up
    Fault(
        "lib/ddp/simulated_network.py",
        "        self.group.clock.sleep_until(self.free)\n        hand_over()",
        "        hand_over()\n        self.group.clock.sleep_until(self.free)",
        "tests/ddp/test_simulated_network.py",
    ),
    # a buffer that others still read is filled again
    Fault(
        "lib/ddp/simulated_network.py",
        "if self.last_call[number] <= read and",
        "if",
        "tests/ddp/test_simulated_network.py",
    ),
    # ranks whose calls differ get each other's data
    Fault(
        "lib/ddp/simulated_network.py",
        'if call["what"] != slots[self.own]["what"]:',
        "if False:",
        "tests/ddp/test_simulated_network.py",
    ),
    Fault(
        "lib/ddp/simulated_network.py",
        "return Link(link.latency_us * slower, link.bandwidth_gbs * smaller / slower)",
        "return Link(link.latency_us * slower, link.bandwidth_gbs / slower)",
        "tests/ddp/test_simulated_network.py",
    ),
    # an interrupted rank that is still importing PyTorch prints a traceback
    Fault(
        "lib/ddp/launcher.py",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {})",
        "tests/ddp/test_launcher.py::test_an_interrupt_ends_ranks_that_are_starting_without_a_word",
    ),
]
