"""Plan an export: find the run, the version and the base, and report every mistake before anything is written."""

from dataclasses import dataclass
from pathlib import Path

from configs.policy_name import BEST, PolicyName
from configs.schema import RunConfig
from flows.preflight.trust import OF_MODEL, requested_config, trusted_folders
from flows.requests import ExportRequest
from grpo_core.errors import InputError
from grpo_core.policies.trained.quantization import read_stored
from tasks.models.initial import initial_digest, model_folder
from tasks.runs.lookup import read_description
from tasks.runs.origin import Origin, origin_of
from tasks.runs.stored_policies import adapter_version, choose_policy, chosen_version, stored_versions
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import require_writable
from tasks.verification.card import read_verification
from tasks.verification.records import VerificationReport


@dataclass(frozen=True)
class ExportPlan:
    """What is exported.

    Attributes:
        origin: what the run's policy was trained from.
        policy: the version; where the run keeps a moving average of the weights, that.
        base_digest: digest of the model that was trained, and of the adapter that training started from.
        base: folder of that model; None for an adapter, which needs nothing of it.
        folder: absolute path; does not exist, or is empty.
        target_folders: where target images of held-out prompts may be read; None: the export has no prompts.
        verification: what `grpo verify` last stored about the run.
        notes: messages about damaged versions that were skipped.
    """

    store: ArtifactStore
    config: RunConfig
    origin: Origin
    policy: PolicyRef
    base_digest: str
    base: Path | None
    weights: ArtifactRef
    folder: Path
    repository: str | None
    target_folders: tuple[str, ...] | None
    verification: VerificationReport | None
    notes: tuple[str, ...]


def plan_export(request: ExportRequest) -> ExportPlan:
    """Check the request against the run and the machine; an InputError names each option."""
    folder = Path(request.folder).expanduser().absolute()
    _require_new_folder(folder)
    store, config = requested_config(request, request.overrides, OF_MODEL)
    recorded = str(read_description(store).get("model_digest", ""))
    chosen, notes = choose_policy(store, chosen_version(store, request.named.version), recorded)
    policy = chosen.averaged
    if policy.checkpoint is None:
        _refuse_initial(store, config, request.named)
    assert policy.checkpoint is not None
    merged = request.merged or not config.policy.trains_adapters
    base = _require_base(store, config, recorded) if merged or request.overrides else None
    if merged and base is not None and (stored := quantized_files(base)):
        hint = f"The base is stored quantized ({', '.join(stored)}): no weights can take the adapters; leave it out."
        raise InputError("--merged", config.policy.model, hint)
    if request.push_to_hub is not None:
        _require_hub(request.push_to_hub)
    return ExportPlan(
        store=store,
        config=config,
        origin=origin_of(store, config),
        policy=policy,
        base_digest=recorded,
        base=base if merged else None,
        weights=policy.checkpoint,
        folder=folder,
        repository=request.push_to_hub,
        target_folders=None if request.without_prompts else trusted_folders(config, trust=request.trust_code),
        verification=read_verification(store),
        notes=notes,
    )


def quantized_files(base: Path) -> list[str]:
    """Return the config.json of each network of a saved model whose weights are stored quantized."""
    return [str(file.relative_to(base)) for file in sorted(base.glob("**/config.json")) if read_stored(file)]


def _require_new_folder(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError("DIR", str(folder), "It has files. Name a new folder, or an empty one.")
    require_writable(folder, "DIR")


def _refuse_initial(store: ArtifactStore, config: RunConfig, chosen: PolicyName) -> None:
    versions = stored_versions(store)
    if not versions:
        raise InputError("RUN", store.run, "It has no policy version that is valid; train it first.")
    best = "Of the versions that are stored it has the highest held-out reward; " if chosen.version == BEST else ""
    hint = f"{best}version 0 is the model, {config.policy.model}. Choose one of {versions[0]} to {versions[-1]}."
    raise InputError("RUN", f"{store.run}@{chosen.version}", hint)


def _require_base(store: ArtifactStore, config: RunConfig, recorded: str) -> Path:
    """Return the folder of the model that was trained, which has to be the one that the run began with."""
    digest = initial_digest(config.policy, store, adapter_version(config))
    if recorded and digest != recorded:
        hint = f"Its files have changed since {store.run} began ({recorded[:12]}); restore them, or leave out --merged."
        raise InputError("policy.model", digest[:12], hint)
    return model_folder(config.policy.model, config.policy.revision)


def _require_hub(repository: str) -> None:
    """Refuse a repository that cannot be written as the hub reports it: no network, no token, no such name."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
        HfApi().whoami()
    except HFValidationError as error:
        raise InputError("--push-to-hub", repository, f"It is no repository's name ({error}).") from error
    except (OSError, HTTPError) as error:
        first_line = str(error).strip().splitlines()[0]
        hint = f"The hub does not accept it: log in with `hf auth login` and check the network ({first_line})."
        raise InputError("--push-to-hub", repository, hint) from error
