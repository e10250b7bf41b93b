"""Direct launches: the driver gets each parameter, at the addresses of this call."""

import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
try:
    from lib.flash_attention.cuda import driver
    from lib.flash_attention.hopper import compiled, direct, launch
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

X, ROWS = torch.zeros(2, 3, 70, 64, dtype=torch.bfloat16), torch.zeros(420)
ARGUMENTS = {
    "q_desc": launch._descriptor(X, 64),
    "k_desc": launch._descriptor(X, 128),
    "lse_ptr": ROWS,
    "out_ptr": X,
    "work_list_ptr": torch.zeros(5, dtype=torch.int32),
    "heads": 3,
    "scale": 0.25,
    "CONFIG": None,
}
MAP = "tensordesc<bf16[1, 1, 64, 64],layout>"
KINDS = (MAP, MAP, "*fp32", "*bf16", "*i32", "i32", "fp32", None)
# a descriptor is a map, the shape and the strides; last comes scratch memory that no kernel has
INT, LONG, FLOAT = ctypes.c_int32, ctypes.c_uint64, ctypes.c_float
DESCRIPTOR = [LONG, *[INT] * 4, *[LONG] * 4]
PARAMETERS = [*DESCRIPTOR, *DESCRIPTOR, *[LONG] * 3, INT, FLOAT, LONG, LONG]
NAMES, ADDRESSES = ("k_desc", "lse_ptr", "out_ptr", "q_desc"), (0x2000, 0x3000, 0x4000, 0x1000)


def make_binary() -> compiled.Binary:
    """A binary of what Triton could have made."""
    metas = [{"block_size": [1, 1, rows, 64], "swizzle": 3, "elem_type": 10} for rows in (64, 128)]
    about = {"name": "kernel", "num_warps": 12, "shared": 999, "tensordesc_meta": metas}
    types = tuple((name, kind) for name, kind in zip(ARGUMENTS, KINDS) if name != "CONFIG")
    return compiled.Binary.of(types, {"cubin": b"code\n\0"}, about)


def launch_of(grid: int, arguments: dict = ARGUMENTS) -> direct.DirectLaunch:
    function = SimpleNamespace(handle=77, device=ROWS.device.index)
    return direct.DirectLaunch(make_binary(), function, (grid,), arguments, NAMES)


@pytest.fixture
def calls(monkeypatch):
    """The launches that the driver was asked for: settings, and values of all parameters."""
    found = []

    def encode(place, dtype, rank, address, shape, strides, block, *rest):
        # the address and the box stand for the map
        ctypes.c_uint64.from_address(place).value = address
        ctypes.c_uint64.from_address(place + 8).value = block[1]
        assert (dtype, rank, list(shape), list(strides)) == (
            9,
            4,
            [64, 70, 3, 2],
            [128, 128 * 70, 128 * 210],
        )
        return 0

    def run(*arguments):
        *settings, parameters, _ = arguments
        values = [kind.from_address(at).value for at, kind in zip(parameters, PARAMETERS)]
        boxes = [LONG.from_address(parameters[i] + 8).value for i in (0, 9)]
        found.append((settings, values, boxes))
        return 0

    fake = SimpleNamespace(cuTensorMapEncodeTiled=encode, cuLaunchKernel=run)
    fake.cuGetErrorString = lambda status, text: None
    for module in (direct, driver):
        monkeypatch.setattr(module, "driver", lambda: fake)
    streams = iter((5, 6))
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: next(streams), raising=False
    )
    return found


def test_the_driver_gets_every_parameter_at_the_addresses_of_the_call(calls):
    again = launch_of(40)
    again(ADDRESSES)
    again((0x9000, 0x3000, 0x8000, 0x1000))
    shape = [2, 3, 70, 64, 13440, 4480, 64, 1]
    work_list = ARGUMENTS["work_list_ptr"].data_ptr()
    rest = [work_list, 3, 0.25, 0, 0]
    (settings, values, boxes), (later_settings, later, _) = calls
    assert settings == [77, 40, 1, 1, 384, 1, 1, 999, 5]
    assert later_settings[-1] == 6
    assert values == [0x1000, *shape, 0x2000, *shape, 0x3000, 0x4000, *rest]
    assert later == [0x1000, *shape, 0x9000, *shape, 0x3000, 0x8000, *rest]
    assert boxes == [64, 128]


def test_a_tensor_that_comes_back_to_its_address_has_its_map_already(calls, monkeypatch):
    again = launch_of(40)
    again(ADDRESSES)
    monkeypatch.setattr(direct.driver(), "cuTensorMapEncodeTiled", None)
    again((0x2000, 0x3000, 0x8000, 0x1000))
    (_, first, boxes), (_, second, same_boxes) = calls
    assert boxes == same_boxes
    assert [i for i, (a, b) in enumerate(zip(first, second)) if a != b] == [19]


def test_tensors_that_come_back_have_their_parameters_packed_already(calls, monkeypatch):
    again = launch_of(40)
    again(ADDRESSES)
    monkeypatch.setattr(ctypes, "addressof", None)
    again(ADDRESSES)
    assert calls[0][1:] == calls[1][1:]


@pytest.mark.usefixtures("calls")
def test_it_keeps_no_tensor_in_memory():
    tensors = [torch.zeros_like(X) for _ in range(3)]
    descriptors = {f"{x}_desc": launch._descriptor(tensors[i], 64) for i, x in enumerate("qk")}
    arguments = ARGUMENTS | descriptors | {"out_ptr": tensors[2]}
    again = launch_of(40, arguments)
    again(ADDRESSES)
    left = [weakref.ref(x) for x in tensors]
    del tensors, descriptors, arguments
    gc.collect()
    assert not any(x() is not None for x in left)


def test_a_binary_comes_back_from_its_file_whole():
    binary = make_binary()
    assert binary.image == b"code\n\0"
    assert compiled.Binary.unpack(binary.pack()) == binary


def test_a_refused_launch_is_an_error_and_one_without_a_context_is_tried_again(calls, monkeypatch):
    again = launch_of(1)
    codes, entered = [direct.NO_CONTEXT, 0, 700], []
    monkeypatch.setattr(direct.driver(), "cuLaunchKernel", lambda *arguments: codes.pop(0))
    monkeypatch.setattr(direct, "use_context", entered.append)
    again(ADDRESSES)
    assert entered == [ROWS.device.index]
    with pytest.raises(RuntimeError, match="CUDA: unknown error"):
        again(ADDRESSES)


def test_the_first_map_of_a_thread_is_made_in_pytorchs_context(calls, monkeypatch):
    codes, entered, encode = [direct.NO_CONTEXT], [], direct.driver().cuTensorMapEncodeTiled
    monkeypatch.setattr(
        direct.driver(),
        "cuTensorMapEncodeTiled",
        lambda *arguments: codes.pop() if codes else encode(*arguments),
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(direct, "use_context", entered.append)
    launch_of(40)(ADDRESSES)
    assert entered == [2]
    assert calls[0][1][0] == 0x1000
