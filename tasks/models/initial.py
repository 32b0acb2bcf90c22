"""What training starts from: the model's files, and a stored adapter over them, found, compared and fetched."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from configs.sections import PolicySection
from grpo_core.errors import InputError
from grpo_core.policies.trained import LoraSettings, Reference, TrainingChoice
from grpo_core.policies.trained.stored_adapter import (
    PLACE,
    adapter_settings,
    read_adapter_config,
    refuse_other_settings,
)
from grpo_core.streams import STREAMS, Stream
from tasks.models.files import model_digest, snapshot, weights_digest
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore


def initial_digest(policy: PolicySection, store: ArtifactStore | None, version: ArtifactRef | None) -> str:
    """Compute the digest of version 0: of the model's files, and of the adapter that training starts from.

    Args:
        store: has the version; None without one.
        version: the checkpoint that the adapter RUN@VERSION means; None for any other.

    Raises:
        InputError: the hub's files are not on this machine and cannot be downloaded, or there is no such adapter.
    """
    digest = model_digest(policy.model, policy.revision)
    if policy.adapter is None:
        return digest
    described = [digest]
    with fetched_adapter(policy, store, version) as folder:
        assert folder is not None, "the policy has one"
        for stream in policy.streams:
            adapter = _component_adapter(folder, stream, policy)
            config = read_adapter_config(adapter, policy.adapter)
            # Its base is in the digest by content.
            del config["base_model_name_or_path"]
            described += [weights_digest(adapter), json.dumps(config, sort_keys=True)]
    return hashlib.sha256(" ".join(described).encode()).hexdigest()


@contextmanager
def training_choices(
    policy: PolicySection,
    store: ArtifactStore | None,
    version: ArtifactRef | None,
    *,
    references: Mapping[Stream, Reference] = MappingProxyType({}),
    seed: int = 0,
) -> Iterator[Mapping[Stream, TrainingChoice]]:
    """Return which parameters of each component are trained; an adapter's files are there inside the context.

    Args:
        store: has the version; None without one.
        version: the checkpoint that the adapter RUN@VERSION means; None for any other.
        references: where the reference's weights are kept when every weight of a component is trained; nowhere for
            those left out.
        seed: for the random half of new adapters.

    Raises:
        InputError: there is no such adapter, it was trained over another model, or contradicts policy.lora.
    """
    with fetched_adapter(policy, store, version) as folder:
        yield {
            # Each component's adapters are random on their own.
            stream: _choice(policy, stream, folder, references.get(stream, "none"), seed + STREAMS.index(stream))
            for stream in policy.streams
        }


def _choice(
    policy: PolicySection, stream: Stream, adapters: Path | None, reference: Reference, seed: int
) -> TrainingChoice:
    settings: LoraSettings | None = policy.lora_of(stream)
    adapter = None
    if adapters is not None and policy.adapter is not None:
        adapter = _component_adapter(adapters, stream, policy)
        config = read_adapter_config(adapter, policy.adapter)
        stored = adapter_settings(config)
        if settings is not None:
            refuse_other_settings(stored, settings, policy.adapter)
        _refuse_other_base(policy, str(config.get("base_model_name_or_path") or ""), config.get("revision"))
        settings = stored
    hub = (policy.model, policy.revision) if policy.revision is not None else None
    return TrainingChoice(settings, policy.frozen, reference, policy.gradient_checkpointing, seed, adapter, hub)


def _component_adapter(folder: Path, stream: Stream, policy: PolicySection) -> Path:
    """Return the folder of one component's adapter: its own, or the given one of a policy that trains one component."""
    own = folder / stream
    if own.is_dir():
        return own
    if len(policy.streams) > 1:
        hint = (
            f"It has no folder {stream}; policy.train names several components, and each needs an adapter of its own."
        )
        raise InputError(PLACE, policy.adapter, hint)
    return folder


@contextmanager
def fetched_adapter(
    policy: PolicySection, store: ArtifactStore | None, version: ArtifactRef | None
) -> Iterator[Path | None]:
    """Give the local folder of the adapter that training starts from; None without one.

    Raises:
        InputError: there is no such folder or hub repository, or the version was pruned.
    """
    name = policy.adapter
    if name is None:
        yield None
        return
    folder = Path(name).expanduser()
    if version is not None:
        assert store is not None, "the version is in a store"
        with store.reading() as read:
            yield read(version)
    elif folder.is_dir():
        yield folder
    elif name.count("/") == 1 and not folder.parent.is_dir() and not name.startswith((".", "~", "/")):
        yield snapshot(PLACE, name, None, patterns=["adapter_*", "*/adapter_*"])
    else:
        raise InputError(PLACE, name, "There is no such folder. Give an adapter's folder, RUN@VERSION or a hub name.")


def _refuse_other_base(policy: PolicySection, base: str, revision: str | None) -> None:
    """Refuse an adapter that was trained over another model: one of another name, unless its files are the same."""
    if base == policy.model:
        if revision not in (None, "main", policy.revision):
            hint = f"It was trained over revision {revision} of {base}; set policy.revision to that."
            raise InputError(PLACE, policy.adapter, hint)
        return
    with contextlib.suppress(InputError):
        if base and Path(base).expanduser().is_dir() and model_digest(base) == model_digest(policy.model):
            return
    hint = (
        f"It was trained over {base or 'a model that it does not name'}, and policy.model is {policy.model}. Set "
        "policy.model to that one; if they are the same, set base_model_name_or_path in its adapter_config.json."
    )
    raise InputError(PLACE, policy.adapter, hint)
