"""A stored verification as tables, for the command and the model card, and what a reader of it should know first."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError

from grpo_core.errors import InputError
from tasks.reports.report import Cells, Fact, Notice, Report, Table
from tasks.reports.text import counted
from tasks.runs.lookup import read_description, read_starts, spans
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import load_checked
from tasks.verification.records import Level, Machine, StageVerification, VerificationReport

LEVELS: Mapping[Level, str] = {
    "equal": "equal to the bit",
    "rounding": "within rounding",
    "differs": "differs",
    "untried": "not tried",
}
"""How people read each level."""

MAX_ROWS = 20
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


def verification_report(report: VerificationReport, notices: Sequence[str] = ()) -> Report:
    """Return what was verified as tables: by kind of stage, each difference at its root, and what was not tried."""
    differing = [each for each in report.stages if each.level == "differs"]
    untried = Counter((each.kind, each.reason or "no reason was recorded") for each in report.stages if _untried(each))
    follow = len(differing) - len(report.roots)
    return Report(
        "",
        facts=_facts(report),
        tables=[
            Table("Stages computed again", _by_kind(report.stages), texts=["iterations"]),
            Table(
                "Differences",
                [_root(each) for each in report.roots],
                texts=["first difference", "probable cause"],
                note=f"Further stages that follow from these: {follow}." if follow else "",
            ).head(MAX_ROWS, "differences", "verification.json"),
            Table("Rounding", _explained(report.stages), texts=["reason"]),
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
    for each in stages:
        kinds.setdefault(each.kind, []).append(each)
    return [
        {
            "stage": kind,
            "chosen": str(len(found)),
            **{title: str(sum(each.level == level for each in found)) for level, title in LEVELS.items()},
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


def _explained(stages: Iterable[StageVerification]) -> list[Cells]:
    rounded = [each for each in stages if each.level == "rounding"]
    reasons = dict.fromkeys(each.cause or "not known" for each in rounded)
    rows = []
    for reason in reasons:
        own = [each for each in rounded if (each.cause or "not known") == reason]
        largest = max((d.largest for each in own for d in each.differences if d.largest is not None), default=None)
        ulp = "none" if largest is None else f"{largest:.3g}"
        rows.append({"stages": str(len(own)), "largest, ULP of float32": ulp, "reason": reason})
    return rows


def _facts(report: VerificationReport) -> list[Fact]:
    policies = sorted(report.policies.items())
    made = dict.fromkeys(machine_in_words(each) for each in report.made_by)
    packages = dict.fromkeys(packages_in_words(each.versions) for each in (*report.made_by, report.verified_by))
    code = [f"{name} {digest[:_LETTERS]}" for name, digest in sorted(report.fingerprints.items())]
    return [
        ("run", f"{report.run}, lineage {(report.lineage or 'not recorded')[:_LETTERS]}"),
        ("policies", ", ".join(f"{version}: {digest[:_LETTERS]}" for version, digest in policies[-3:])),
        ("fingerprints of the code", ", ".join(code)),
        *(("made by", each) for each in made),
        ("verified by", machine_in_words(report.verified_by)),
        *(("packages", each) for each in packages),
        ("chosen", report.chosen),
        ("checksums and joins", counted(report.artifacts, "artifact")),
        ("tolerance, ULP of float32", f"{report.tolerance:g}"),
        ("verified", f"{report.at:%Y-%m-%d %H:%M} UTC, in {report.seconds:,.0f} s"),
    ]


def machine_in_words(machine: Machine) -> str:
    """Say what computed: its processor and the commit of the code."""
    processor = machine.processor or "a processor that was not recorded"
    return f"{processor}, code {machine.code or 'without a commit'}"


def packages_in_words(versions: Mapping[str, str]) -> str:
    """List the packages that are installed, with their versions."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if version != "none")


def recorded_machines(reader: RunReader) -> tuple[Machine, ...]:
    """Return what a run recorded of each of its starts; older ones have the package versions of the last."""
    versions = read_description(reader.store).get("versions", {})
    return tuple(
        Machine(code=each.code, processor=each.processor, versions=each.versions or versions)
        for each in read_starts(reader)
    )
