"""Buckets: filled in order within their cap, and packed without a change."""

import pytest
import torch
from torch import nn

from lib.ddp.flat import Bucket, fill_buckets
from lib.ddp.settings import default_bucket_cap_mb


@pytest.mark.parametrize(
    ("sizes_mb", "cap_mb", "expected"),
    [
        # the first is small, later ones fill up to exactly the cap
        ([0.5, 0.5, 0.5, 1, 2, 2, 1], 4, [[0.5, 0.5], [0.5, 1, 2], [2, 1]]),
        # a parameter above the cap has its own
        ([8, 1, 1, 8, 1], 2, [[8], [1, 1], [8], [1]]),
        ([8, 1, 1], None, [[8, 1, 1]]),
    ],
)
def test_buckets_fill_in_order_within_their_cap(sizes_mb, cap_mb, expected):
    params = [nn.Parameter(torch.empty(int(size * 2**18), device="meta")) for size in sizes_mb]
    buckets = fill_buckets(params, cap_bytes=None if cap_mb is None else cap_mb * 2**20)
    found = [[param.nbytes / 2**20 for param in bucket] for bucket in buckets]
    assert found == expected


def test_a_bucket_has_one_dtype_and_they_come_in_the_order_of_their_last_parameters():
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    params = [nn.Parameter(torch.empty(4, dtype=dtype)) for dtype in dtypes]
    buckets = fill_buckets(params)
    assert [bucket[0].dtype for bucket in buckets] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_keeps_tensors_and_aligns_them(dtype):
    shapes = [(3,), (), (2, 5), (0,), (4, 4)]
    params = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
    grads = [torch.randn(shape).to(dtype) for shape in shapes]
    # as a transposed weight has
    grads[4] = grads[4].T
    last = torch.ones(5, dtype=dtype)
    bucket = Bucket(params)
    buffer = bucket.pack(grads, last)
    assert torch.equal(buffer[-5:], last)
    views = bucket.views(buffer)
    for view, grad in zip(views, grads):
        assert torch.equal(view, grad)
        assert view.storage_offset() * buffer.element_size() % 16 == 0
    buffer.fill_(7)
    assert all((view == 7).all() for view in views)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_slices_hold_every_element_once(ranks):
    params = [nn.Parameter(torch.randn(shape)) for shape in [(3,), (), (2, 5), (0,), (4, 4)]]
    bucket = Bucket(params, ranks)
    buffer = bucket.pack([param.detach() for param in params])
    assert len(buffer) == bucket.length == ranks * bucket.slice_length
    assert bucket.slice_length % 4 == 0
    found = {param: torch.zeros(param.numel()) for param in params}
    for number, own in enumerate(buffer.split(bucket.slice_length)):
        for param, start, stop, offset in bucket.parts(number):
            found[param][start:stop] += own[offset : offset + stop - start]
    assert all(torch.equal(found[param], param.flatten()) for param in params)


@pytest.mark.parametrize(("mebibytes", "cap"), [(0, 25), (800, 25), (801, 25), (3200, 100)])
def test_a_bucket_is_25_mebibytes_or_a_32nd_of_all_gradients(mebibytes, cap):
    assert default_bucket_cap_mb(mebibytes * 2**20) == cap
    assert default_bucket_cap_mb(3698 * 2**20) == 116
