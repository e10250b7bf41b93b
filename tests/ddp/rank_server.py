"""The server that ranks start from (`lib.ddp.launcher`), with more loaded than torch."""

import multiprocessing
from multiprocessing import forkserver

# Modules that take seconds to load, the same for all test files: pytest has one server, which the
# first file starts. Switching deterministic algorithms loads torch's compiler, and compiling loads
# the rest of it; FSDP2 and ZeroRedundancyOptimizer load much of torch.distributed.
LOADED = ["torch._inductor", "torch._inductor.config", "torch._inductor.compile_fx"]
LOADED += ["torch.distributed.fsdp", "torch.distributed.optim"]
LOADED += ["lib.training.loop", "lib.data.prepare", "lib.sharded_optimizer.optimizer", "pytest"]
LOADED += ["lib.tools.benchmarks.communication", "lib.fsdp.wrapper"]


def start_server() -> None:
    """Start the server before `launch` does, which would have it load torch alone."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(LOADED)
        forkserver.ensure_running()
