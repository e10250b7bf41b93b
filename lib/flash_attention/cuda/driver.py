"""Load machine code into a GPU and launch it, through CUDA's driver."""

import ctypes
import functools

import torch

SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver, which every machine with an NVIDIA GPU has."""
    library = ctypes.CDLL("libcuda.so.1")
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, *[pointer] * 3]
    library.cuTensorMapEncodeTiled.argtypes = [
        *[pointer, number, number],
        *[pointer] * 5,
        *[number] * 4,
    ]
    return library


class Function:
    """A kernel in the memory of one GPU, to launch with one structure as its argument."""

    def __init__(self, image: bytes, name: str, *, device: int, threads: int, shared_bytes: int):
        self.device, self.threads, self.shared_bytes = device, threads, shared_bytes
        self.handle, module = ctypes.c_void_p(), ctypes.c_void_p()
        use_context(device)
        check(driver().cuModuleLoadData(ctypes.byref(module), image))
        check(driver().cuModuleGetFunction(ctypes.byref(self.handle), module, name.encode()))
        # beyond 48 KiB only on request
        check(driver().cuFuncSetAttribute(self.handle, SHARED_BYTES_ATTRIBUTE, shared_bytes))

    def __call__(self, blocks: int, argument: ctypes.Structure) -> None:
        """Launch `blocks` blocks on the current stream of this GPU."""
        use_context(self.device)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        grid, block = (blocks, 1, 1), (self.threads, 1, 1)
        shared, queue = self.shared_bytes, ctypes.c_void_p(stream)
        check(driver().cuLaunchKernel(self.handle, *grid, *block, shared, queue, arguments, None))


def use_context(device: int) -> None:
    """Make PyTorch's context of a GPU the current one; a thread of autograd may have none yet."""
    check(driver().cuCtxSetCurrent(_context(device)))


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    check(driver().cuDeviceGet(ctypes.byref(handle), device))
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    return context


def check(status: int) -> None:
    """Raise RuntimeError with the driver's words for a status that is not 0."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")
