"""Deliberate faults in this room; `tests/test_faults.py` shows that its tests catch each one."""

from tests.fault import Fault

FAULTS = [
    # the order of the functions never changes
    Fault(
        "lib/profiling/measurement.py",
        "candidates if number % 2 == 0 else reversed(candidates)",
        "candidates",
        "tests/profiling/test_measurement.py",
    ),
    # a sample of several calls is taken for one call
    Fault(
        "lib/profiling/measurement.py",
        "(time.perf_counter_ns() - start_ns) / 1e6 / self.calls",
        "(time.perf_counter_ns() - start_ns) / 1e6",
        "tests/profiling/test_measurement.py",
    ),
    # of the two ends of what lies inside another interval, the last one counts
    Fault(
        "lib/profiling/trace.py",
        "reach = np.maximum.accumulate(spans[:, 1])",
        "reach = spans[:, 1]",
        "tests/profiling/test_trace.py",
    ),
    # both sets of intervals together, not what is in both
    Fault(
        "lib/profiling/trace.py",
        "[states[:-1] == state]",
        "[states[:-1] >= 1]",
        "tests/profiling/test_trace.py",
    ),
    # a kernel belongs to where it runs, not to where it was launched
    Fault(
        "lib/profiling/trace.py",
        "return [launched.get(span.correlation, span.start) for span in spans]",
        "return [span.start for span in spans]",
        "tests/profiling/test_trace_summary.py",
    ),
    # communication hidden by itself
    Fault(
        "lib/profiling/trace_summary.py",
        "union(edges(spans)[works & ~is_communication])",
        "union(edges(spans)[works])",
        "tests/profiling/test_trace_summary.py",
    ),
    # kernels that the last step launched and that run after it are lost
    Fault(
        "lib/profiling/trace_summary.py",
        "kernel_end = max([end, *late])",
        "kernel_end = end",
        "tests/profiling/test_trace_summary.py",
    ),
    # an operator's time includes those it calls
    Fault(
        "lib/profiling/trace_summary.py",
        "own[around[-1]] -= times[index]",
        "own[around[0]] -= 0 * times[index]",
        "tests/profiling/test_trace_summary.py",
    ),
    # the wait of PyTorch's own wrapper in the range of backward counts as hidden
    Fault(
        "lib/profiling/timeline.py",
        'OWN_WORK = ("forward", "optimizer")',
        'OWN_WORK = ("forward", "backward", "optimizer")',
        "tests/profiling/test_timeline.py",
    ),
    # of several forward passes the end of the first counts
    Fault(
        "lib/profiling/memory_timeline.py",
        "block.end > forward_ends[following]",
        "block.end > forward_ends[0]",
        "tests/profiling/test_memory_timeline.py",
    ),
    # a gradient is a temporary of the backward pass
    Fault(
        "lib/profiling/memory_timeline.py",
        'block.category = "gradients"',
        'block.category = "other"',
        "tests/profiling/test_memory_timeline.py",
    ),
    # a multiply-add is one operation
    Fault(
        "lib/profiling/roofline.py",
        "return Cost(2 * batch * m * k * n,",
        "return Cost(batch * m * k * n,",
        "tests/profiling/test_roofline.py",
    ),
    # causal attention counts the scores that it skips
    Fault(
        "lib/profiling/roofline.py",
        "2 * heads * length * (length + 1) * head_dim",
        "4 * heads * length * length * head_dim",
        "tests/profiling/test_roofline.py",
    ),
    # the gradient of a weight is free
    Fault(
        "lib/profiling/roofline.py",
        "matmul_cost(tokens, d_out, d_in, e) + matmul_cost(d_out, tokens, d_in, e)",
        "matmul_cost(tokens, d_out, d_in, e)",
        "tests/profiling/test_roofline.py",
    ),
    # kernels that run late are lost from their step
    Fault(
        "lib/profiling/trace.py",
        "on_gpu if correlation(event) in launched]",
        'on_gpu if start <= float(event["ts"]) < end]',
        "tests/profiling/test_trace.py",
    ),
    # the median sample stands for what a machine can reach
    Fault(
        "lib/profiling/roofline.py",
        "rates.append(2e3 * size**3 / min(matmul.times_ms))",
        "rates.append(2e3 * size**3 / max(matmul.times_ms))",
        "tests/profiling/test_roofline.py",
    ),
    # the profile has no ranges
    Fault(
        "lib/profiling/profiler.py",
        """        with ranges.enabled():
            for _ in range(steps):""",
        """        if True:
            for _ in range(steps):""",
        "tests/profiling/test_profiler.py",
    ),
]
