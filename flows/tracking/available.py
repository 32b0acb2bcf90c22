"""Which trackers accelerate knows, and which of them are installed."""

from collections.abc import Iterator, Sequence

from grpo_core.errors import InputError

EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
"""Trackers for which this package has an extra; it has the name of the tracker."""


def tracker_problems(names: Sequence[str]) -> Iterator[InputError]:
    """Report trackers that accelerate does not know, or whose package is not installed."""
    if not names:
        return
    # It imports torch, which a command without trackers may not need yet.
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    missing = {str(name) for name in LoggerType} - {str(name) for name in get_available_trackers()}
    # Those that a program has registered need no package.
    installed = sorted({*LOGGER_TYPE_TO_CLASS} - missing)
    here = f"Installed here: {', '.join(installed) or 'none'}."
    for index, name in enumerate(names):
        if name in installed:
            continue
        if name in LOGGER_TYPE_TO_CLASS:
            package = {"mlflow": "mlflow-skinny"}.get(name, name)
            extra = f", which the extra {name} of this package brings" if name in EXTRAS else ""
            hint = f"Its package is missing: `uv pip install {package}`{extra}. {here}"
        else:
            hint = f"There is no such tracker; choose among {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}. {here}"
        yield InputError(f"run.trackers.{index}", name, hint)
