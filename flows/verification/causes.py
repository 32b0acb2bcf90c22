"""Why a stage may differ, from what the run and this checkout record: code, packages, machine, settings, files."""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

from flows.verification.stored_stages import Reference, StoredStage, artifact_of
from tasks.execution.fingerprint import changed_versions, reached_modules
from tasks.execution.stage import stage_named
from tasks.process import CHECKOUT
from tasks.runs.layout import (
    ADVANTAGES,
    POLICIES,
    ROLLOUTS,
    is_evaluation,
    iteration_folder,
    parse_iteration,
    policy_folder,
)
from tasks.runs.reader import RunReader
from tasks.storage.files import is_local
from tasks.verification.records import Difference, Machine

_SHOWN = 3
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
"""What a run records may be a stranger's, and git takes other words for options."""
_FUNCTION = re.compile(r"^@@[^@]*@@ (?:async )?(?:def|class) (\w+)|^[+-](?:async )?(?:def|class) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Evidence:
    """What is recorded on both sides.

    Attributes:
        reader: of the run.
        recorded: fingerprints of the stages' code when the run was made, `here` those of this checkout.
        made_by: the machines of the run's starts; `verified_by` this one.
        changed: settings in config.yaml, and inputs on this machine, that are not those that the run recorded.
        problems: what plans that the prompt files give have in place of what the rows say, by the plan's title.
    """

    reader: RunReader
    recorded: Mapping[str, str]
    here: Mapping[str, str]
    made_by: Sequence[Machine]
    verified_by: Machine
    changed: Sequence[str]
    problems: Sequence[str]

    @cached_property
    def of_rounding(self) -> str | None:
        """What explains another rounding: another processor, or other packages; None where both are the run's."""
        found = []
        known = [each for each in self.made_by if each.processor is not None]
        processors = sorted({str(each.processor) for each in known} - {self.verified_by.processor})
        if processors:
            found.append(f"computed by {' and '.join(processors)}, here by {self.verified_by.processor}")
        if len(known) < max(1, len(self.made_by)):
            found.append("the run does not record every processor that computed it")
        for machine in self.made_by:
            found += changed_versions(machine.versions, self.verified_by.versions) if machine.versions else []
        return "; ".join(dict.fromkeys(found)) or None

    def is_other_code(self, stage: StoredStage) -> bool:
        """Whether the code of a stage is not the code that the run recorded."""
        name = _code_name(stage)
        return name in self.recorded and name in self.here and self.recorded[name] != self.here[name]


def _code_name(stage: StoredStage) -> str:
    if stage.task.name == "score reward":
        return f"score {stage.arguments['section'].label}"
    return "compute advantages" if stage.task.name == "copy advantages" else stage.task.name


def cause_of(
    stage: StoredStage, differences: Sequence[Difference], computed: Reference | None, evidence: Evidence
) -> str:
    """Return the likely causes of a difference, the surest first."""
    found = [
        *_changed_inputs(stage, evidence),
        *_changed_code(stage, evidence),
        *_same_files(stage, differences, evidence.reader),
        *_settings(differences),
        *(_counts(stage, computed) if computed is not None else ()),
        *_written_after(stage, evidence.reader),
        *([evidence.of_rounding] if evidence.of_rounding is not None else []),
    ]
    files = ", ".join(dict.fromkeys(each.place.partition(",")[0] for each in differences[:_SHOWN]))
    unexplained = f"code, settings, packages and processor are those of the run, so {files} was probably changed since"
    return "; ".join(found) or unexplained


_DECIDING: Mapping[str, tuple[str, ...]] = {
    "collect rollouts": ("run.seed ", "policy.", "rollout.", "the model ", "the adapter "),
    "score reward": ("rewards.{label} ", "rewards.{label}."),
    "compute advantages": ("rewards.", "advantages."),
    "copy advantages": ("rewards.", "advantages."),
    "update policy": ("run.", "policy.", "update.", "the model ", "the adapter ", "the loss "),
}
"""How settings and inputs begin that decide a stage's result, by the stage's name."""


def _changed_inputs(stage: StoredStage, evidence: Evidence) -> Iterator[str]:
    """Yield the settings, files and plans that decide this stage and are not those that the run recorded."""
    label = getattr(stage.arguments.get("section"), "label", "")
    deciding = tuple(each.format(label=label) for each in _DECIDING.get(stage.task.name, ()))
    yield from (each for each in evidence.changed if each.startswith(deciding))
    if stage.task.name == "collect rollouts":
        yield from (each for each in evidence.problems if each.startswith(f"{stage.arguments['plan'].title}: "))


def _changed_code(stage: StoredStage, evidence: Evidence) -> Iterator[str]:
    if not evidence.is_other_code(stage):
        return
    commits = sorted({each.code.removesuffix("-dirty") for each in evidence.made_by if each.code is not None})
    modules = reached_modules(stage_named(stage.task.name).roots(stage.arguments))
    files = [f"{module.replace('.', '/')}{end}" for module in modules for end in (".py", "/__init__.py")]
    named = [each for commit in commits for each in changed_functions(commit, files)]
    shown = ", ".join(dict.fromkeys(named[:_SHOWN])) or f"recorded at {', '.join(commits) or 'an unknown commit'}"
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    yield f"the code of {_code_name(stage)} changed: {shown}{more}"


def changed_functions(commit: str, files: Sequence[str]) -> list[str]:
    """Return `file: function` of what changed in these files of the checkout since a commit; empty without git."""
    if not _COMMIT.fullmatch(commit):
        return []
    command = ["git", "-C", str(CHECKOUT), "diff", "-U0", "--no-color", "--no-ext-diff", commit, "--", *files]
    try:
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found: list[str] = []
    for part in text.split("\ndiff --git "):
        name = re.search(r" b/(\S+)", part)
        if name is None:
            continue
        functions = [first or second for first, second in _FUNCTION.findall(part)]
        found += [f"{name[1]}: {each}" for each in functions] or [name[1]]
    return list(dict.fromkeys(found))


def _same_files(stage: StoredStage, differences: Sequence[Difference], reader: RunReader) -> Iterator[str]:
    """Say whose weights or optimizer a version has, if those that differ are the files of another version."""
    if stage.kind != "update":
        return
    own = reader.find(stage.folder)
    if own is None:
        return
    for version in reader.policies():
        other = reader.find(policy_folder(version))
        if other is None or policy_folder(version) == stage.folder:
            continue
        same = [name for name, sha256 in own.manifest.files.items() if other.manifest.files.get(name) == sha256]
        same = [name for name in same if any(each.place.startswith(f"{name}, ") for each in differences)]
        if same:
            yield f"it has the {' and '.join(sorted(same)[:_SHOWN])} of policy version {version}"


def _settings(differences: Sequence[Difference]) -> Iterator[str]:
    settings = [each for each in differences if each.place.rpartition(", ")[2] in _OF_SETTINGS]
    for each in settings[:_SHOWN]:
        name = each.place.rpartition(", ")[2]
        yield f"the rows say {name} {each.stored}, and config.yaml gives {each.computed}"


_OF_SETTINGS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "max_length", "max_completion_length", "stop", "system_prompt"),
        *("height", "width", "num_inference_steps", "guidance_scale", "negative_prompt", "max_sequence_length"),
        *("seed", "noise_seed", "step_seed", "sde_type", "noise_level", "sde_window", "sde_window_size"),
        *("sde_window_range", "sde_window_every", "logprob_reduction", "window_start"),
        *("policy_version", "policy_digest"),
    }
)
"""Columns of rollouts that the configuration decides, and no model."""


def _counts(stage: StoredStage, computed: Reference) -> Iterator[str]:
    stored, made = stage.artifact, artifact_of(computed)
    if stored.rows != made.rows:
        yield f"it counts {stored.rows} rows, and its inputs have {made.rows}"
    changed = [
        f"{name} {stored.metrics.get(name)} -> {made.metrics.get(name)}"
        for name in ("trained_tokens", "trained_rows", "rows", "rows_left_out")
        if stored.metrics.get(name) != made.metrics.get(name)
    ]
    yield from changed


def _written_after(stage: StoredStage, reader: RunReader) -> Iterator[str]:
    """Say that a file is newer than what was made from it, on a local disk."""
    store = reader.store
    if not is_local(store.filesystem) or (reading := _reads(stage.folder)) is None:
        return
    own, place = reader.find(stage.folder), store.manifest_path(store.path(reading))
    if own is None or not store.filesystem.exists(place):
        return
    then = _written(store.filesystem.modified(place))
    for name in own.manifest.files:
        at = _written(store.filesystem.modified(f"{store.path(stage.folder)}/{name}"))
        if at > then:
            yield f"{name} was written at {at:%Y-%m-%d %H:%M:%S} UTC, after {reading} ({then:%H:%M:%S}), made from it"
            return


def _written(at: datetime) -> datetime:
    return at.astimezone(UTC)


def _reads(folder: str) -> str | None:
    """Return an artifact that was made from the one in a folder; None where no later one is known."""
    first, _, rest = folder.partition("/")
    if is_evaluation(folder) and not folder.endswith(f"/{ADVANTAGES}"):
        return f"{'/'.join(folder.split('/')[:2])}/{ADVANTAGES}"
    if (iteration := parse_iteration(first)) is not None:
        return policy_folder(iteration) if rest == ADVANTAGES else f"{first}/{ADVANTAGES}"
    if first == POLICIES and rest.isdigit():
        return f"{iteration_folder(int(rest) + 1)}/{ROLLOUTS}"
    return None
