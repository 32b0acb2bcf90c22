"""RUN, RUN@N and RUN@best, as every command and setting reads them."""

import pytest

from configs.policy_name import PolicyName


@pytest.mark.parametrize(
    ("text", "run", "version"),
    [
        ("tiny", "tiny", None),
        ("tiny@0", "tiny", "0"),
        ("tiny@20", "tiny", "20"),
        ("tiny@best", "tiny", "best"),
        ("tiny~1@3", "tiny~1", "3"),
        ("s3://bucket/runs/tiny@3", "s3://bucket/runs/tiny", "3"),
        # The folder above has an @ in its name.
        ("/home/me@work/runs/tiny", "/home/me@work/runs/tiny", None),
        ("runs@2/tiny@4", "runs@2/tiny", "4"),
        # What is no version belongs to the run, which there is none of.
        *((text, text, None) for text in ("tiny@last", "tiny@-1", "tiny@1.5", "tiny@", "@3", "tiny@1234567890")),
    ],
)
def test_what_people_write(text: str, run: str, version: str | None) -> None:
    assert PolicyName.parse(text) == PolicyName(run, version)
