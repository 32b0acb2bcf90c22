"""A stored verification as tables, for the command and the model card, and what a reader of it should know first."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from pydantic import ValidationError

from grpo_core.errors import InputError
from tasks.reports.report import Cells, Fact, Notice, Report, Table
from tasks.reports.text import counted
from tasks.runs.lookup import read_description, read_starts, spans
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import load_checked
from tasks.verification.records import Difference, Level, Machine, StageKind, StageVerification, VerificationReport

LEVELS: Mapping[Level, str] = {
    "equal": "equal to the bit",
    "rounding": "within rounding",
    "differs": "differs",
    "untried": "not tried",
}
"""How people read each level."""

_HEADINGS: Mapping[Level, str] = {**LEVELS, "equal": "equal", "rounding": "rounding"}
"""Of the columns, short enough for a terminal of 80 characters."""

MAX_ROWS = 20
_TENSORS = ".safetensors"
_LETTERS = 12


def verification_file(run: str) -> str:
    """Return where the last verification of a run is stored, relative to the storage root."""
    return f".verifications/{run}.json"


def read_verification(store: ArtifactStore) -> VerificationReport | None:
    """Read the stored verification of a run; None without one, InputError for a damaged file."""
    place = verification_file(store.run)
    content = store.read_shared(place)
    if content is None:
        return None
    try:
        return VerificationReport.model_validate(load_checked(content))
    except (ValueError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(place, reason, f"It is damaged; `grpo verify {store.run}` writes it again.") from error


def shortcomings(report: VerificationReport, policy: PolicyRef, lineage: str | None, last: int) -> list[str]:
    """Say why a verification does not vouch for a policy version as it is; nothing where it does.

    Args:
        policy: the version; where its digest names a copy, such as a moving average, the digest is not compared.
        lineage: of the run.
        last: the run's last policy version.
    """
    again = f"run grpo verify {report.run} again"
    verified = report.policies.get(policy.version)
    found = []
    if report.lineage != lineage:
        found.append(f"It is of another run of this name, with other settings, code or prompts; {again}.")
    newest = max(report.policies, default=0) if report.last_version is None else report.last_version
    if newest < last:
        since = spans(range(newest + 1, last + 1))
        found.append(f"It is older than what the run did since, iterations {since}; {again}.")
    elif policy.copy_name is None and verified not in (None, policy.digest):
        found.append(f"Version {policy.version} has other weights than those that were verified; {again}.")
    if not report.complete:
        found.append("It was stopped before everything that was chosen had been computed again.")
    if roots := len(report.roots):
        found.append(f"It found differences: {counted(roots, 'stage')}, named below.")
    return found


def verification_report(report: VerificationReport, notices: Sequence[str] = (), *, title: str = "") -> Report:
    """Return what was verified as tables: by kind of stage, each difference at its root, and what was not tried."""
    differing = [each for each in report.stages if each.level == "differs"]
    untried = Counter((each.kind, each.reason or "no reason was recorded") for each in report.stages if _untried(each))
    follow = len(differing) - len(report.roots)
    return Report(
        title,
        facts=_facts(report),
        tables=[
            Table("Stages computed again", _by_kind(report.stages), texts=["iterations"]),
            Table(
                "Differences",
                [_root(each) for each in report.roots],
                texts=["first difference", "probable cause"],
                note=f"Further stages that follow from these: {follow}." if follow else "",
            ).head(MAX_ROWS, "differences", "verification.json"),
            _explained(report),
            Table(
                "Not tried",
                [{"stage": kind, "stages": str(count), "reason": why} for (kind, why), count in untried.items()],
                texts=["reason"],
            ),
        ],
        notices=[
            Notice("This verification does not vouch for the policy as it is", list(notices)),
            Notice("What reading alone showed", report.problems),
        ],
    )


def _untried(stage: StageVerification) -> bool:
    return stage.level == "untried"


def _by_kind(stages: Iterable[StageVerification]) -> list[Cells]:
    kinds: dict[str, list[StageVerification]] = {}
    for each in sorted(stages, key=lambda stage: get_args(StageKind).index(stage.kind)):
        kinds.setdefault(each.kind, []).append(each)
    return [
        {
            "stage": kind,
            "stages": str(len(found)),
            **{title: str(sum(each.level == level for each in found)) for level, title in _HEADINGS.items()},
            "iterations": places([each.folder for each in found]),
        }
        for kind, found in kinds.items()
    ]


def places(folders: Iterable[str]) -> str:
    """Return the numbers in the folders of artifacts, of iterations and versions, as people write them."""
    found = set()
    for folder in folders:
        names = folder.replace("iteration_", "").split("/")
        found |= {int(name) for name in names if len(name) >= 6 and name.isdecimal()}
    return spans(sorted(found))


def _root(stage: StageVerification) -> Cells:
    first = next(iter(stage.differences), None)
    said = ""
    if first is not None:
        where = ", ".join(each for each in (first.sample_id, first.place, first.index) if each)
        said = f"{where}: stored {first.stored}, computed {first.computed} ({first.count:,} of {first.total:,})"
    return {"stage": stage.title, "first difference": said, "probable cause": stage.cause or "not known"}


def _explained(report: VerificationReport) -> Table:
    """Return how far values are apart that count as equal, by column or tensor, and why they may be."""
    rounded = [each for each in report.stages if each.level == "rounding"]
    by_place: dict[str, list[Difference]] = {}
    for each in (difference for stage in rounded for difference in stage.differences):
        file, is_tensor, _ = each.place.partition(_TENSORS)
        by_place.setdefault(f"{file}{_TENSORS}" if is_tensor else each.place, []).append(each)
    rows = [
        {
            "value": place,
            "stages": str(len(found)),
            "differ": f"{sum(each.count for each in found):,} of {sum(each.total for each in found):,}",
            "largest": f"{max(each.largest or 0.0 for each in found):.3g}",
            "limit": f"{max(report.tolerance * each.allowance for each in found):,.0f}",
        }
        for place, found in by_place.items()
    ]
    reasons = "; ".join(dict.fromkeys(each.cause or "not known" for each in rounded))
    note = f"Units in the last place of float32 at the largest value. Why: {reasons}." if rounded else ""
    return Table("Rounding", rows, texts=["value"], note=note)


def verdict(report: VerificationReport) -> str:
    """Say in one line how a run compares with itself."""
    levels = Counter(each.level for each in report.stages)
    tried = counted(sum(levels.values()) - levels["untried"], "stage")
    equal = [f"{levels[level]} {LEVELS[level]}" for level in ("equal", "rounding") if levels[level]]
    differ = [f"{levels['differs']} differ from {counted(len(report.roots), 'cause')}"] if levels["differs"] else []
    said = ", ".join([*equal, *differ]) or "none"
    problems = f"; {counted(len(report.problems), 'problem')} besides" if report.problems else ""
    return f"{report.run}: {tried} computed again, {said}{problems}"


def _facts(report: VerificationReport) -> list[Fact]:
    policies = sorted(report.policies.items())
    shown = ", ".join(f"{version}: {digest[:_LETTERS]}" for version, digest in policies[-3:])
    made = dict.fromkeys(machine_in_words(each) for each in report.made_by)
    code = [f"{name} {digest[:_LETTERS]}" for name, digest in sorted(report.fingerprints.items())]
    return [
        ("run", f"{report.run}, lineage {(report.lineage or 'not recorded')[:_LETTERS]}"),
        *([("policies", f"{'..., ' * (len(policies) > 3)}{shown}")] if policies else []),
        ("fingerprints of the code", ", ".join(code)),
        *(("made by", each) for each in made),
        ("verified by", machine_in_words(report.verified_by)),
        *package_facts(report.made_by, report.verified_by),
        ("chosen", report.chosen),
        ("checksums and joins", counted(report.artifacts, "artifact") if report.artifacts else "not checked"),
        ("tolerance", f"{report.tolerance:g} ULP of float32" if report.tolerance else "none: bits"),
        ("verified", f"{report.at:%Y-%m-%d %H:%M} UTC, in {report.seconds:,.0f} s"),
    ]


def machine_in_words(machine: Machine) -> str:
    """Say what computed: its processor and the commit of the code."""
    processor = machine.processor or "a processor that was not recorded"
    return f"{processor}, code {machine.code or 'without a commit'}"


def package_facts(made_by: Iterable[Machine], here: Machine) -> list[Fact]:
    """Return the packages here, and those that had another version when the stored values were made."""
    others = (
        {name: version for name, version in each.versions.items() if here.versions.get(name) != version}
        for each in made_by
    )
    made = dict.fromkeys(map(_packages_in_words, others))
    return [
        ("packages", _packages_in_words(here.versions)),
        *(("made with other versions", each) for each in made if each),
    ]


def _packages_in_words(versions: Mapping[str, str]) -> str:
    """List the packages that are installed, with their versions."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if version != "none")


def recorded_machines(reader: RunReader) -> tuple[Machine, ...]:
    """Return what a run recorded of each of its starts; older ones have the package versions of the last."""
    versions = read_description(reader.store).get("versions", {})
    return tuple(
        Machine(code=each.code, processor=each.processor, versions=each.versions or versions)
        for each in read_starts(reader)
    )
