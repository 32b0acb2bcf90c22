"""Repositories of the Hugging Face Hub: which of their files are loaded, downloads, and a message for each failure."""

import fnmatch
import glob
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_core.errors import InputError, first_line
from grpo_core.pipeline_files import INDEX_FILE, pipeline_parts

DESCRIPTIONS = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Configuration and tokenizer of a model."""

SAFETENSORS, PICKLES = "model*.safetensors", "pytorch_model*.bin"
"""Weight files of a transformers model."""

_WEIGHTS = re.compile(r"(model|diffusion_pytorch_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLED = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_ANY_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|gguf|pb|ot|npz|mlmodel|tflite)(\.index(\.\w+)?\.json)?"
)


def loaded_files(names: Iterable[str], parts: Collection[str] = ()) -> list[str]:
    """Return the files of a repository that loading its model reads, in their order.

    Weights are safetensors of the plain variant, in `parts`: the folders that a pipeline's index names, none for a
    transformers model, which may have pickled weights if it has no others.
    """
    known = list(names)
    pickled = not parts and not any(_WEIGHTS.fullmatch(name) for name in known)
    weights = _PICKLED if pickled else _WEIGHTS

    def is_loaded(name: str) -> bool:
        folder, _, file = name.rpartition("/")
        if _ANY_WEIGHTS.fullmatch(file):
            return weights.fullmatch(file) is not None and folder in (parts or ("",))
        return name.partition("/")[0] in parts or (not folder and any(fnmatch.fnmatch(file, d) for d in DESCRIPTIONS))

    return [name for name in known if is_loaded(name)]


def download_command(repo: str, revision: str | None = None) -> str:
    """Return the command of the Hub's client that downloads what a model is loaded from, and little else."""
    wanted = [*DESCRIPTIONS, SAFETENSORS, "*/model*.safetensors", "*/diffusion_pytorch_model*.safetensors"]
    others = ["original/*", "onnx/*", "*.fp16*"]
    options = [f"--include '{each}'" for each in wanted] + [f"--exclude '{each}'" for each in others]
    at = f" --revision {revision}" if revision else ""
    return f"hf download {repo}{at} {' '.join(options)}"


@dataclass(frozen=True)
class Download:
    """The files of a repository that a model is loaded from, with their sizes in bytes, and those not in the cache.

    `revision` is a branch, a tag or a commit here and below; None: main.
    """

    repo: str
    revision: str | None
    sizes: Mapping[str, int]
    missing: Collection[str]

    def __str__(self) -> str:
        files = f"{len(self.missing)} file{'s' * (len(self.missing) != 1)}"
        return f"{sum(self.sizes[name] for name in self.missing) / 1e9:.3g} GB in {files}"

    def run(self, *, weights: bool = True) -> Path:
        """Download into the local cache, weights only if wanted; return the folder. Raises what `one_message` turns."""
        import huggingface_hub

        chosen = [glob.escape(name) for name in self.sizes if weights or not _is_weights(name)]
        return Path(huggingface_hub.snapshot_download(self.repo, revision=self.revision, allow_patterns=chosen))


def plan_download(repo: str, revision: str | None = None, patterns: Collection[str] = ()) -> Download:
    """Ask the Hub for the files of a model, or those of these patterns; raises what `one_message` turns."""
    import huggingface_hub

    info = huggingface_hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    if info.gated:
        huggingface_hub.HfApi().auth_check(repo)
    if patterns:
        chosen = [name for name in sizes if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    else:
        index = huggingface_hub.hf_hub_download(repo, INDEX_FILE, revision=info.sha) if INDEX_FILE in sizes else None
        chosen = loaded_files(sizes, _parts(index))
    cached = {name: huggingface_hub.try_to_load_from_cache(repo, name, revision=info.sha) for name in chosen}
    missing = [name for name, found in cached.items() if not isinstance(found, str)]
    return Download(repo, revision, {name: sizes[name] for name in chosen}, missing)


def cached_folder(repo: str, revision: str | None = None, patterns: Collection[str] = ()) -> Path | None:
    """Return the folder of a model in the local cache with all files that loading it reads; None without one."""
    import huggingface_hub
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HFValidationError, LocalEntryNotFoundError

    try:
        index = huggingface_hub.try_to_load_from_cache(repo, INDEX_FILE, revision=revision)
        names = [each.path for each in huggingface_hub.get_cached_repo_tree(repo, revision=revision)]
        wanted = [*patterns] or [
            *map(glob.escape, loaded_files(names, _parts(index if isinstance(index, str) else None)))
        ]
    except CachedRepoTreeNotFoundError:
        # Other clients keep no list of a repository's files.
        wanted = [*patterns]
    except HFValidationError:
        return None
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, local_files_only=True, allow_patterns=wanted or None
            )
        )
    except LocalEntryNotFoundError:
        return None
    return folder if wanted or any(_is_weights(path.name) for path in folder.rglob("*")) else None


def fetch(
    repo: str, revision: str | None, patterns: Collection[str] = (), report: Callable[[Download], None] = lambda _: None
) -> Path:
    """Return the folder of a repository in the local cache, after a reported download of what is missing.

    A complete copy in the cache is used where the Hub gives no answer, or none to this person.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        download = plan_download(repo, revision, patterns)
    except (HTTPError, OSError):
        if (here := cached_folder(repo, revision, patterns)) is not None:
            return here
        raise
    if download.missing:
        report(download)
    return download.run()


def _is_weights(name: str) -> bool:
    return _ANY_WEIGHTS.fullmatch(name.rpartition("/")[2]) is not None and not name.endswith(".json")


def _parts(index: str | None) -> Collection[str]:
    if index is None:
        return ()
    content = json.loads(Path(index).read_text(encoding="utf-8"))
    return pipeline_parts(content) if isinstance(content, dict) else ()


@contextmanager
def one_message(place: str, value: str | None, repo: str, command: str = "") -> Iterator[None]:
    """Turn every failure of the Hub into one InputError; `command` downloads `repo` on another machine."""
    from huggingface_hub import errors

    try:
        yield
    # HTTPError is the base of all that the Hub's HTTP client raises, a broken connection among it.
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:  # type: ignore[attr-defined]
        raise InputError(place, value, _failure_hint(error, repo, command or f"hf download {repo}")) from error


_LOGIN = "run `hf auth login`, or set HF_TOKEN"


def _failure_hint(error: Exception, repo: str, command: str) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    page = f"{huggingface_hub.constants.ENDPOINT}/{repo}"
    denied = getattr(getattr(_cause(error), "response", None), "status_code", None)
    hints: Mapping[type[Exception], str] = {
        errors.GatedRepoError: f"Its owners ask for consent: accept the terms on {page}, then {_LOGIN}.",
        errors.RepositoryNotFoundError: f"There is no such repository ({page}). If it is private or gated, {_LOGIN}.",
        errors.RevisionNotFoundError: "The repository has no such revision. Set a branch, a tag or a complete commit.",
        errors.RemoteEntryNotFoundError: f"The repository has no such file. {page}/tree/main lists them.",
        errors.HFValidationError: f"There is no folder {Path(repo).absolute()}, and this is no name on the Hub.",
    }
    for kind, hint in hints.items():
        if isinstance(error, kind):
            return hint
    if denied in (401, 403):
        return f"The Hub denies access ({denied}): accept the terms on {page} if it asks for consent, then {_LOGIN}."
    if huggingface_hub.is_offline_mode():
        return offline_hint(command)
    return f"It could not be downloaded ({first_line(error)}). Check the network and try again, or set a local path."


def _cause(error: BaseException) -> BaseException:
    """Return what an error that the Hub's client wraps was raised for."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def offline_hint(command: str) -> str:
    """Say what to do about files that are not here while the Hub is switched off, with the command that gets them."""
    return (
        "It is not in the local cache of the Hugging Face Hub, and downloads are off: HF_HUB_OFFLINE is set, or the Hub"
        f" does not answer. Unset HF_HUB_OFFLINE, or run `{command}` on a machine that shares the cache, or set a local"
        " path."
    )
