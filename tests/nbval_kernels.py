"""A plugin for pytest: nbval reaches its kernels through files, as `python -m lib run` does."""

import nbval.kernel
from jupyter_client.manager import KernelManager

from lib.tools.publish.execute import connection

nbval.kernel.KernelManager = lambda **options: KernelManager(**connection(), **options)
