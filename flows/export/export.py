"""Write a policy version into a new folder, complete or not at all, and push it to the hub."""

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from flows.export.model_card import model_card
from flows.export.plan import ExportPlan
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.stored_adapter import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    adapter_settings,
    read_adapter_config,
)
from tasks.models.files import model_digest, weights_folder
from tasks.storage.filesystem.files import settle_folder

CARD_FILE, RECORD_FILE = "README.md", "grpo.json"
"""RECORD_FILE: what `grpo sample` needs of the run to sample as in training."""

# Where diffusers looks for the settings of an adapter; without them it takes alpha for the rank.
_METADATA = "lora_adapter_metadata"


class ExportSummary(BaseModel):
    """What was exported.

    Attributes:
        policy: policy version.
        policy_digest: sha256 of its weights.
        kind: `adapter` in peft's format, or `model`.
        folder: absolute path.
        url: address of the repository on the hub; None where it was not pushed.
    """

    run: str
    policy: int
    policy_digest: str
    kind: str
    folder: str
    url: str | None


def export(plan: ExportPlan) -> ExportSummary:
    """Write the folder and push it, as planned.

    Raises:
        StaleReferenceError: a stored file was changed since the plan.
        OSError: the disk refuses the files, or the hub the upload; the message says what is complete.
    """
    plan.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.folder.parent, prefix=".grpo-export-") as scratch:
        staged = Path(scratch) / "export"
        staged.mkdir()
        weights = weights_folder(plan.store.local_files(plan.weights, Path(scratch) / "policy"), plan.policy)
        if plan.base is None:
            _write_adapter(weights, staged)
        else:
            section = plan.config.policy
            family = policy_family(section.kind)
            family.save_whole(plan.base, weights, staged, dtype=getattr(torch, section.dtype))
        (staged / RECORD_FILE).write_text(
            json.dumps(_record(plan, staged), indent=1, ensure_ascii=False), encoding="utf-8"
        )
        (staged / CARD_FILE).write_text(model_card(plan), encoding="utf-8")
        settle_folder(staged)
        # Replaces an empty folder only.
        staged.rename(plan.folder)
    return ExportSummary(
        run=plan.store.run,
        policy=plan.policy.version,
        policy_digest=plan.policy.digest,
        kind="adapter" if plan.base is None else "model",
        folder=str(plan.folder),
        url=None if plan.repository is None else _push(plan.folder, plan.repository),
    )


def _write_adapter(weights: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = json.loads(shutil.copyfile(weights / ADAPTER_CONFIG_FILE, folder / ADAPTER_CONFIG_FILE).read_text())
    metadata = {"format": "pt", _METADATA: json.dumps(config, sort_keys=True)}
    save_file(load_file(weights / ADAPTER_FILE), folder / ADAPTER_FILE, metadata)


def _record(plan: ExportPlan, exported: Path) -> dict[str, Any]:
    config, policy, digest = plan.config, plan.config.policy.model_dump(mode="json"), plan.base_digest
    if plan.base is None and policy["adapter"] is not None:
        # The export has what the run began with and what it learned, as one adapter over the model itself.
        settings = adapter_settings(read_adapter_config(exported, str(plan.folder)))
        policy |= {"adapter": None, "lora": asdict(settings)}
        digest = model_digest(config.policy.model, config.policy.revision)
    return {
        "policy": policy,
        "rollout": config.rollout.model_dump(mode="json"),
        "base_digest": digest,
        "version": plan.policy.version,
        "digest": plan.policy.digest,
    }


def _push(folder: Path, repository: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        api = HfApi()
        created = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Export of a trained policy")
    except (OSError, HTTPError) as error:
        later = f"{folder} is complete: upload it later with `hf upload {repository} {folder}`"
        raise OSError(f"the hub refused the upload ({str(error).strip().splitlines()[0]}). {later}") from error
    return str(created)
