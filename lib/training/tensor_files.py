"""Files of tensors: safetensors, written one tensor after another, and nested values beside them.

A file is 8 bytes with the header's length, the header in JSON, then the tensors' bytes. The header
has dtype, shape and offsets of each tensor, and the metadata, texts by name. See
https://github.com/huggingface/safetensors#format.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lib.core.files import atomic_write
from lib.core.settings import require

# The dtypes that safetensors has, and their names there.
DTYPES = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
DTYPES |= {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.complex64: "C64"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
DTYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write `tensors` to the disk, whole or not at all, with one of them at a time on the CPU.

    Tied ones are stored once, with the other names as metadata beside that given.
    """
    tied = find_tied(tensors)
    # the widest first, so that each starts at a multiple of its element's size
    names = sorted(tensors.keys() - tied, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata | tied} if metadata or tied else {}
    stop = 0
    for name in names:
        tensor, start = tensors[name], stop
        stop = start + tensor.nbytes
        kind = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = kind | {"data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            plain = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            # one element may have any stride
            flat = plain.as_strided((plain.numel(),), (1,))
            file.write(flat.view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in `path`, which are read from the disk when they are used, and the metadata."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    tied = {name: tensors[kept] for name, kept in metadata.items() if kept in tensors}
    return tensors | tied, {name: text for name, text in metadata.items() if name not in tied}


def check_tensors(what: str, tensors: Mapping[Any, Any]) -> None:
    """Raise a `ValueError` that names the tensor of `what` that cannot be written."""
    for name, value in tensors.items():
        is_tensor = isinstance(value, Tensor)
        fits = is_tensor and value.layout == torch.strided and value.dtype in DTYPES
        found = f"{value.layout} {value.dtype}" if is_tensor else type(value).__name__
        message = f"{what}: {name} must be a dense tensor of a dtype that safetensors has"
        require(fits, f"{message}, got {found}")


def find_tied(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Each name whose tensor came before under another name -> that other name."""
    first, tied = {}, {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # x and x.conj() share memory, and differ in how it is read
        kept = first.setdefault((*memory, tensor.is_conj(), tensor.is_neg()), name)
        if kept != name:
            tied[name] = kept
    return tied


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON values that `unpack` restores; its tensors go into `tensors`, by path."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[k, pack(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    return value


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Restore the value that `pack` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in content}
    return {"list": list, "tuple": tuple}[kind](unpack(item, tensors) for item in content)
