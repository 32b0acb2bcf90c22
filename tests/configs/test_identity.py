"""What identifies a run: the settings that determine results, by their paths in the file."""

from pathlib import Path
from typing import Any

import pytest

import configs
from configs.loader import read_config
from configs.schema import changed_settings, run_identity

TINY = Path(configs.__file__).parent / "tiny.yaml"


def identity(*overrides: str) -> dict[str, Any]:
    # A revision is one of a hub name.
    return run_identity(read_config(TINY, ["policy.model=organisation/model", *overrides]))


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("run.keep_policies={last: 1}", None),
        ("update.ema=null", None),
        ("update.ema=0.9", "update.ema None -> 0.9"),
        ("policy.adapter=null", None),
        ("data.split=test", "data.split None -> test"),
        ("data.streaming=true", None),
        ("policy.revision=v1", "policy.revision None -> v1"),
        ("policy.attn_implementation=eager", "policy.attn_implementation None -> eager"),
        ("policy.denoising_lora=null", None),
        ("policy.lora.use_dora=false", None),
        ("policy.lora.init_lora_weights=true", None),
        ("policy.lora.init_lora_weights=olora", "policy.lora.init_lora_weights True -> olora"),
        ("policy.lora.modules_to_save=[norm]", "policy.lora.modules_to_save None -> ['norm']"),
        ("update.micro_batch_size=24", None),
    ],
)
def test_a_setting_counts_where_it_changes_results(override: str, change: str | None) -> None:
    assert list(changed_settings(identity(), identity(override))) == ([change] if change else [])
