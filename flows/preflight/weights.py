"""Where the weights of a run's model are: on this machine, or what the first start downloads."""

from dataclasses import dataclass
from pathlib import Path

from configs.schema import RunConfig
from flows.preflight.model import source_of
from grpo_core.errors import InputError
from grpo_core.hub import cached_folder, download_command, one_message, plan_download


@dataclass(frozen=True)
class ModelWeights:
    """Why a run cannot have the weights, whether files here describe the model, and what a start downloads."""

    problem: InputError | None = None
    described: bool = True
    notes: tuple[str, ...] = ()


def find_weights(config: RunConfig) -> ModelWeights:
    """Find the weights; of a model that is on the Hub only, what describes it is downloaded for the other checks."""
    model, revision, source = config.policy.model, config.policy.revision, source_of(config)
    if (folder := Path(source).expanduser()).is_dir():
        hint = "The folder holds no weights; save the model there."
        return ModelWeights(None if any(folder.rglob("*.safetensors")) else InputError("policy.model", model, hint))
    if cached_folder(model, revision) is not None:
        return ModelWeights()
    from huggingface_hub import constants

    try:
        with one_message("policy.model", model, model, download_command(model, revision)):
            download = plan_download(model, revision)
            download.run(weights=False)
    except InputError as error:
        return ModelWeights(error, described=False)
    note = f"they are not here yet: `grpo train` downloads {download} from the Hugging Face Hub into"
    # Checks find the files of a branch or commit only with its weights.
    return ModelWeights(None, revision is None, (f"{note} {constants.HF_HUB_CACHE}",))
