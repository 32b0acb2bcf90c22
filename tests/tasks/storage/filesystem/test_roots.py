"""The URL of a root: no secret in it, and none in what is told of it."""

import pytest

from grpo_core.errors import InputError
from tasks.storage.filesystem.roots import open_root


@pytest.mark.parametrize(
    ("root", "told"),
    [
        ("s3://KEY:12/34HIDDEN@bucket/runs", "s3://***@bucket/runs"),
        ("s3a://KEY:12/34HIDDEN@bucket/runs", "s3a://***@bucket/runs"),
        ("s3://KEY:HID/DEN/@bucket/runs", "s3://***@bucket/runs"),
        ("s3://KEY:443/HIDDEN@bucket", "s3://***@bucket"),
        ("s3://KEY:HIDDEN@bucket/runs", "s3://***@bucket/runs"),
        ("s3://KEY@bucket/runs", "s3://***@bucket/runs"),
        ("sftp://me:HIDDEN@host/runs", "sftp://***@host/runs"),
    ],
)
def test_credentials_are_refused_and_not_repeated(root: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        open_root(root)
    assert caught.value.value == told
    assert "HIDDEN" not in str(caught.value)
    assert "12/34" not in str(caught.value)


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("s3://bucket/runs@home/a:b@c", "bucket/runs@home/a:b@c"),
        (
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
        ),
    ],
)
def test_other_signs_in_a_path_are_no_credentials(root: str, path: str) -> None:
    pytest.importorskip("s3fs")
    assert open_root(root)[1] == path
