"""The URL of a root: no secret in it, and none in a message."""

import subprocess
import sys

import pytest

from configs.loader import read_config
from flows.preflight.inputs import check_inputs
from grpo_core.errors import InputError
from tasks.storage.filesystem.roots import open_root


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        ("s3://KEY:12/34HIDDEN@bucket/runs", "s3://***@bucket/runs"),
        ("s3a://KEY:12/34HIDDEN@bucket/runs", "s3a://***@bucket/runs"),
        ("s3://KEY:HID/DEN/@bucket/runs", "s3://***@bucket/runs"),
        ("s3://KEY:443/HIDDEN@bucket", "s3://***@bucket"),
        ("s3://KEY@bucket/runs", "s3://***@bucket/runs"),
        ("sftp://me:HIDDEN@host:22/runs", "sftp://***@host:22/runs"),
        ("simplecache::s3://k:HIDDEN@bucket/runs", "simplecache::s3://***@bucket/runs"),
    ],
)
def test_credentials_are_refused_and_not_repeated(root: str, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        open_root(root)
    assert (caught.value.place, caught.value.value) == ("storage.root", shown)
    for secret in ("HIDDEN", "12/34", "KEY@"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("s3://bucket/runs@home/a:b@c", "bucket/runs@home/a:b@c"),
        (
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
        ),
        ("file:///tmp/a@b:c", "/tmp/a@b:c"),
        ("memory://bucket:80/a@b", "/bucket:80/a@b"),
    ],
)
def test_other_signs_in_a_path_are_no_credentials(root: str, path: str) -> None:
    assert open_root(root)[1] == path


def test_without_its_package_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from grpo_core.errors import InputError\n"
        "from tasks.storage.filesystem.roots import open_root\n"
        "try:\n    open_root('s3://bucket/runs')\n"
        "except InputError as error:\n    print(error.place, error.value, error.hint)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout.startswith("storage.root s3://bucket/runs")
    assert "s3fs" in ended.stdout


def test_a_folder_for_copies_that_cannot_be_written_is_reported_before_the_run_starts(bucket: str) -> None:
    overrides = [f"storage.root={bucket}/runs", "storage.cache_dir=/dev/null", "run.name=run"]
    with pytest.raises(InputError) as caught:
        check_inputs(read_config("configs/tiny.yaml", overrides))
    assert [error.place for error in caught.value.errors] == ["storage.cache_dir"]
