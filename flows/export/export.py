"""Write a policy version into a new folder, complete or not at all, and push it to the hub."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.sections import PolicySection
from flows.export.evaluated import evaluation_card
from flows.export.model_card import another_function, model_card
from flows.export.plan import ExportPlan
from flows.export.usage import DIFFUSERS_FILE
from grpo_core.errors import InputError
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.settings import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from grpo_core.rollouts.streams import Stream
from tasks.models.initial import RECORD_FILE, weights_folder
from tasks.reports.report import Report
from tasks.reports.text import counted, relative
from tasks.storage.files import dump_checked, fsync_folder
from tasks.verification.evaluation_card import EVALUATION_FILE

CARD_FILE, VERIFICATION_FILE = "README.md", "verification.json"

# Where diffusers looks for the settings of an adapter; without them it takes alpha for the rank.
_METADATA = "lora_adapter_metadata"
_PEFT_PREFIX, _DIFFUSERS_PREFIX = "base_model.model.", "transformer."


class ExportSummary(BaseModel):
    """What was exported.

    Attributes:
        policy_digest: sha256 of its weights.
        kind: `adapter`, in the formats of peft and diffusers, or `merged`, a model.
        heldout_prompts: number of held-out prompts that evaluation.json has, to repeat the evaluation.
        url: address of the repository on the hub; None where it was not pushed.
        quantization: of the base that the adapters were trained over, in a few words; None: it is not quantized.
    """

    run: str
    policy: int
    policy_digest: str
    kind: str
    folder: str
    heldout_prompts: int
    url: str | None
    quantization: str | None = None

    def report(self, usage: str) -> Report:
        """Return what was written, where it is, and the lines of Python that use it."""
        facts = [
            ("written", "a merged model" if self.kind == "merged" else "an adapter, in peft's format"),
            ("policy digest", self.policy_digest[:16]),
            ("folder", relative(self.folder)),
            *([("evaluation.json", counted(self.heldout_prompts, "held-out prompt"))] if self.heldout_prompts else []),
            *([("hub", self.url)] if self.url else []),
        ]
        notes = [] if self.quantization is None else [another_function(self.quantization, self.kind)]
        return Report(f"{self.run}, policy {self.policy}", facts, notes=[*notes, usage])


def export(plan: ExportPlan) -> ExportSummary:
    """Write the folder and push it, as planned.

    Raises:
        InputError: the adapter is of a kind that can only be exported merged into its model.
        StaleReferenceError: a stored file was changed since the plan.
        OSError: the disk refuses the files, or the hub the upload; the message says what is complete.
    """
    plan.folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=plan.folder.parent, prefix=".grpo-export-") as scratch,
        plan.store.reading() as read,
    ):
        staged = Path(scratch) / "export"
        staged.mkdir()
        section, streams = plan.config.policy, plan.config.policy.streams
        version = read(plan.weights)
        weights = {stream: weights_folder(version, plan.policy, stream) for stream in streams}
        if plan.base is not None:
            family = policy_family(section.kind)
            family.save_whole(plan.base, weights, staged, dtype=getattr(torch, section.dtype))
        else:
            for stream, folder in weights.items():
                write_adapter(stream, folder, staged / stream if len(streams) > 1 else staged, section)
        (staged / RECORD_FILE).write_text(json.dumps(_record(plan), indent=1, ensure_ascii=False), encoding="utf-8")
        written = fsync_folder(staged)
        card = evaluation_card(plan, {name: each for name, each in written.items() if name != RECORD_FILE}, staged)
        if card is not None:
            (staged / EVALUATION_FILE).write_text(card.model_dump_json(indent=1), encoding="utf-8")
        if plan.verification is not None:
            (staged / VERIFICATION_FILE).write_bytes(dump_checked(plan.verification.model_dump(mode="json")))
        (staged / CARD_FILE).write_text(model_card(plan, card), encoding="utf-8")
        fsync_folder(staged, written)
        # Replaces an empty folder only.
        staged.rename(plan.folder)
    return ExportSummary(
        run=plan.store.run,
        policy=plan.policy.version,
        policy_digest=plan.policy.digest,
        kind="adapter" if plan.base is None else "merged",
        folder=str(plan.folder),
        heldout_prompts=0 if card is None else len(card.prompts),
        url=None if plan.repository is None else _push(plan.folder, plan.repository),
        quantization=None if section.quantization is None else section.quantization.description,
    )


def write_adapter(stream: Stream, weights: Path, folder: Path, section: PolicySection) -> None:
    """Write a stored adapter for peft, and of a denoising model for diffusers too, which refuses whole modules."""
    folder.mkdir(exist_ok=True)
    config, state = json.loads((weights / ADAPTER_CONFIG_FILE).read_text()), load_file(weights / ADAPTER_FILE)
    # Of a revision, the stored one names this machine's copy.
    config |= {"base_model_name_or_path": section.model, "revision": section.revision}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))
    _save(state, config, folder / ADAPTER_FILE)
    if stream != "denoising":
        return
    if config.get("modules_to_save"):
        hint = "diffusers loads adapters alone; export the merged model with --merged."
        raise InputError("policy.lora.modules_to_save", config["modules_to_save"], hint)
    # In diffusers names and settings have a prefix, and alpha is among the settings alone.
    renamed = {f"{_DIFFUSERS_PREFIX}{name.removeprefix(_PEFT_PREFIX)}": value for name, value in state.items()}
    _save(renamed, {f"{_DIFFUSERS_PREFIX}{name}": value for name, value in config.items()}, folder / DIFFUSERS_FILE)


def _save(state: dict[str, Tensor], settings: Mapping[str, Any], file: Path) -> None:
    save_file(state, file, {"format": "pt", _METADATA: json.dumps(settings, sort_keys=True)})


def _record(plan: ExportPlan) -> dict[str, Any]:
    config = plan.config
    return {
        "policy": config.policy.model_dump(mode="json"),
        # Whoever draws with the export sees what the evaluations showed.
        "rollout": config.evaluation_rollout.model_dump(mode="json"),
        # Of a run that started from an adapter it covers that too, which the export does not need.
        "base_digest": plan.base_digest if config.policy.adapter is None else None,
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
