"""The default size of a bucket."""

import pytest

from lib.ddp.settings import default_bucket_cap_mb


@pytest.mark.parametrize(("mebibytes", "cap"), [(0, 25), (800, 25), (801, 25), (3200, 100)])
def test_a_bucket_is_25_mebibytes_or_a_32nd_of_all_gradients(mebibytes, cap):
    assert default_bucket_cap_mb(mebibytes * 2**20) == cap
    assert default_bucket_cap_mb(3698 * 2**20) == 116
