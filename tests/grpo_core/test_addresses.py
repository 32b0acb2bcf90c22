"""What is a secret in an address, and how it is shown without it."""

import pytest

from grpo_core.addresses import hide_secrets, refuse_secrets
from grpo_core.errors import InputError

SHOWN = {
    "http://me:HIDDEN@host/p.jsonl": "http://***@host/p.jsonl",
    "https://me:HID/DEN@host:8443/p": "https://***@host:8443/p",
    "https://hf_HIDDEN@huggingface.co/x": "https://***@huggingface.co/x",
    "sftp://me:HIDDEN@host/p": "sftp://***@host/p",
    "simplecache::s3://KEY:HIDDEN@bucket/p": "simplecache::s3://***@bucket/p",
    "https://b.s3.amazonaws.com/p?X-Amz-Expires=9&X-Amz-Signature=HIDDEN": (
        "https://b.s3.amazonaws.com/p?X-Amz-Expires=9&X-Amz-Signature=***"
    ),
    "https://host/p?sig=HIDDEN&version=2#top": "https://host/p?sig=***&version=2#top",
    "https://host/p?access_token=HIDDEN": "https://host/p?access_token=***",
}
PLAIN = (
    "data/prompts.jsonl",
    "mail@host",
    "http://host:8600",
    "http://[::1]:8600/v1",
    "https://host/a@b:c",
    "https://host:443/a@b?page=2&tokens=5",
    "sftp://me@host/p",
    "abfs://container@account.dfs.core.windows.net/p",
    "hf://datasets/owner/name@main/p.parquet",
    "Rate the image. Is http://host/page: a@b in it?",
)


@pytest.mark.parametrize(("address", "shown"), SHOWN.items())
def test_secrets_are_refused_and_not_repeated(address: str, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        refuse_secrets("data.prompts", address)
    assert (caught.value.place, caught.value.value) == ("data.prompts", shown)
    assert "HIDDEN" not in str(caught.value)


@pytest.mark.parametrize("address", PLAIN)
def test_other_addresses_and_texts_stay(address: str) -> None:
    assert hide_secrets(address) == address
    refuse_secrets("data.prompts", address)
