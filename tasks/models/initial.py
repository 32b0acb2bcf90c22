"""What training starts from: the model's files, their digests, and a stored adapter over them."""

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from fsspec.implementations.local import LocalFileSystem

from configs.sections import PolicySection
from grpo_core.errors import InputError
from grpo_core.hub import cached_folder, download_command, fetch, one_message
from grpo_core.policies.trained.settings import (
    PLACE,
    CopyName,
    LoraSettings,
    Reference,
    TrainingChoice,
    adapter_settings,
    read_adapter_config,
    refuse_other_settings,
)
from grpo_core.policies.trained.whole import FULL_WEIGHTS
from grpo_core.rollouts.streams import STREAMS, Stream
from grpo_core.seeds import file_sha256
from tasks.progress import log
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import sha256_of

RECORD_FILE = "grpo.json"  # in an exported folder: what `grpo sample` needs of the run to sample as in training

_DETERMINING = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}
_LOCAL = LocalFileSystem()


def model_digest(model: str, revision: str | None = None) -> str:
    """Compute the digest of a model: of a folder's files, or the commit of a hub `snapshot` (`forget_hub`)."""
    if not Path(model).expanduser().is_dir():
        return _hub_commit(model, revision)
    digest = hashlib.sha256()
    for name, known in model_files(model).items():
        add_digest(digest, name, known)
    return digest.hexdigest()


def model_files(model: str) -> dict[str, str]:
    """Return the sha256 of the files that determine a model, by their names in its folder; empty for a hub name."""
    folder = Path(model).expanduser()
    paths = sorted(folder.rglob("*")) if folder.is_dir() else []
    found = [path for path in paths if path.suffix in _DETERMINING and path.is_file()]
    return {path.relative_to(folder).as_posix(): file_sha256(str(path)) for path in found}


@lru_cache(maxsize=4)
def _hub_commit(model: str, revision: str | None) -> str:
    return model_folder(model, revision).name


forget_hub = _hub_commit.cache_clear


def model_folder(model: str, revision: str | None = None) -> Path:
    """Return a model's folder on this machine: the one that is named, or the `snapshot` of a hub name."""
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else snapshot("policy.model", model, revision)


def snapshot(place: str, name: str, revision: str | None, *, patterns: Collection[str] = ()) -> Path:
    """Return the local folder of a hub repository, which is downloaded unless the hub is switched off.

    `patterns` are of the files that are needed of a repository that is no model. InputError, which names the setting
    `place`, if files are not on this machine and cannot be downloaded.
    """
    command = "" if patterns else download_command(name, revision)
    with one_message(place, name, name, command):
        return fetch(name, revision, patterns, report=lambda download: log(f"downloading {name}: {download}"))


def local_source(model: str, revision: str | None) -> str:
    """Return what a model is loaded from: its name, or a hub revision's folder or `model@revision` without one."""
    if revision is None:
        return model
    folder = cached_folder(model, revision)
    return f"{model}@{revision}" if folder is None else str(folder)


def add_digest(digest: "hashlib._Hash", name: str, known: str) -> None:
    """Add a file's name and sha256 to a digest."""
    digest.update(name.encode() + b"\0" + bytes.fromhex(known))


COPIES: tuple[CopyName, ...] = get_args(CopyName)
WEIGHT_FILES = ("adapter_model*.safetensors", *FULL_WEIGHTS)
OPTIMIZER_FILE = "optimizer.safetensors"  # beside the weights of a version


def component_folder(policy: Path, stream: Stream) -> Path:
    """Return where a policy's files of one component are; copies of its weights are in subfolders."""
    return policy / stream


def weights_folder(checkpoint: Path, policy: PolicyRef, stream: Stream) -> Path:
    """Return the folder with the weights of a component that a reference to a version, or to a copy, names."""
    own = component_folder(checkpoint, stream)
    return own if policy.copy_name is None else copy_folder(own, policy.copy_name) or own


def copy_folder(component: Path, name: CopyName) -> Path | None:
    """Return the folder of a copy of a component's weights; None where none is kept."""
    return folder if (folder := component / name).is_dir() else None


def weights_digest(folder: Path, known: Mapping[Path, str] = MappingProxyType({}), copy: CopyName | None = None) -> str:
    """Compute a sha256 over the weight files of a policy's components, or of a folder of weights.

    Weights of one component have one digest, wherever they are. Files whose sha256 is known are not read. For a `copy`,
    a component without such a copy has its own weights, unless it is the reference.
    """
    digest = hashlib.sha256()
    for name, part in _components(folder).items():
        own = part if copy is None else copy_folder(part, copy) or (None if copy == "reference" else part)
        found = [] if own is None else [path for pattern in WEIGHT_FILES for path in sorted(own.glob(pattern))]
        for path in found:
            add_digest(digest, f"{name}{path.name}", known.get(path) or sha256_of(_LOCAL, str(path)))
    return digest.hexdigest()


def copy_digests(folder: Path, known: Mapping[Path, str] = MappingProxyType({})) -> dict[CopyName, str]:
    """Compute `weights_digest` of every copy that a policy's folder has of a component's weights."""
    kept = [name for name in COPIES if any(copy_folder(part, name) for part in _components(folder).values())]
    return {name: weights_digest(folder, known, name) for name in kept}


def _components(folder: Path) -> dict[str, Path]:
    """Return the components' folders, by what stands before the names of their files; one component has no prefix."""
    parts = [path for stream in STREAMS if (path := folder / stream).is_dir()] or [folder]
    return {f"{part.name}/" if len(parts) > 1 else "": part for part in parts}


def initial_digest(policy: PolicySection, store: ArtifactStore | None, version: ArtifactRef | None) -> str:
    """Compute the digest of version 0: of the model's files, and of the adapter that training starts from.

    `version` in `store` is the checkpoint that the adapter RUN@VERSION means; None for any other adapter. InputError as
    for `snapshot` and `fetched_adapter`.
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

    Arguments are those of `initial_digest`, where the reference's weights are kept when every weight of a component is
    trained, and the seed for the random half of new adapters. InputError if there is no such adapter, it was trained
    over another model, or contradicts policy.lora.
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
    return TrainingChoice(
        settings,
        policy.frozen,
        reference,
        policy.gradient_checkpointing,
        seed,
        adapter,
        hub,
        freeze_vision=policy.freeze_vision,
        quantization=policy.quantization,
    )


def _component_adapter(folder: Path, stream: Stream, policy: PolicySection) -> Path:
    """Return the folder of one component's adapter: its own, or the given one of a policy that trains one component."""
    own = folder / stream
    if own.is_dir():
        return own
    if len(policy.streams) > 1:
        hint = f"It has no folder {stream}; policy.train names several components, and each needs its own adapter."
        raise InputError(PLACE, policy.adapter, hint)
    return folder


@contextmanager
def fetched_adapter(
    policy: PolicySection, store: ArtifactStore | None, version: ArtifactRef | None
) -> Iterator[Path | None]:
    """Give the local folder of the adapter that training starts from; None without one, InputError if missing."""
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
