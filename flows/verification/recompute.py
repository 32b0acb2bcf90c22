"""Compute one stored stage again in a scratch root, compare, and say which difference explains which."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from configs.placement import PlacementSection
from flows.pipeline.stages import run_task
from flows.verification.causes import Evidence, cause_of
from flows.verification.stored_stages import Reference, StoredStage, artifact_of
from flows.verification.trusted import refusal, unknown_uses, uses_of_stage
from grpo_core.errors import FailedSamplesError, InputError, NonFiniteError, first_line
from grpo_core.parity import LOGP_DIFFERENCE_MAX, ParityError
from tasks.pruning import FILES_REMOVED
from tasks.pruning import PARTS as DELETED
from tasks.rollouts.engines import engine_of
from tasks.runs.layout import policy_folder
from tasks.storage.artifacts.commit import removed_by
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, stage_context, use_stage_context
from tasks.verification.compare import compare_artifacts, level_of
from tasks.verification.records import Difference, Level, StageVerification
from tasks.verification.scratch import UNREAD, bring_inputs, references_in, with_replaced

_REFUSED = (ParityError, FailedSamplesError, NonFiniteError)
"""What a stage raises because of its inputs' values: a stored result of the same inputs is another one."""
_OF_POLICY = "policy_digest"
"""Column that names the weights that sampled a row: of other weights it is another one."""

_UPSTREAM = 3
"""How many stages, one made from the other, are computed to find where a difference comes from; of changed code one."""


@dataclass
class Computed:
    """What computing a stage gave."""

    level: Level
    differences: tuple[Difference, ...] = ()
    reference: Reference | None = None  # None: it could not be computed
    store: ArtifactStore | None = None  # that has it
    reason: str | None = None


@dataclass
class Recomputation:
    """Computes stages of one run again, each in a scratch root of its own, and remembers what was found.

    Attributes:
        store: of the run, which is not written.
        scratch: folder for the scratch roots.
        producer: returns the stage that made an artifact of the run, given its folder; None for what is no stage.
        placement: of the stages.
        tolerance: as of `level_of`.
        trust: whether the person agrees to what the run's settings name.
        problems: of the run; damaged files are added.
        found: results by folder; those of stages that were only computed to explain another one too.
    """

    store: ArtifactStore
    scratch: Path
    producer: Callable[[str], StoredStage | None]
    placement: PlacementSection
    tolerance: float
    evidence: Evidence
    trust: bool
    problems: list[str]
    found: dict[str, StageVerification] = field(default_factory=dict)
    _computed: dict[str, Computed] = field(default_factory=dict)
    _roots: int = 0

    def verify(self, stage: StoredStage, depth: int = 0) -> StageVerification:
        """Compute a stage again, and where it differs the stages that made its inputs, up to a depth."""
        if stage.folder not in self.found:
            begun = time.perf_counter()
            computed = self._compute(stage)
            seconds = time.perf_counter() - begun
            described = self._explained(stage, computed, depth)
            self.found[stage.folder] = described.model_copy(update={"seconds": seconds})
        return self.found[stage.folder]

    def _compute(self, stage: StoredStage) -> Computed:
        if stage.folder not in self._computed:
            self._computed[stage.folder] = self._try(stage, {})
        return self._computed[stage.folder]

    def _try(self, stage: StoredStage, replaced: Mapping[str, Computed]) -> Computed:
        """Compute a stage from its stored inputs, or from others by their URI, and compare it with what is stored."""
        if unknown := unknown_uses(uses_of_stage(stage), trust=self.trust):
            return Computed("untried", reason=refusal(unknown[0]))
        rollout = stage.arguments.get("rollout")
        if rollout is not None and engine_of(rollout) == "vllm":
            return self._by_the_gate(stage)
        self._roots += 1
        scratch = ArtifactStore(str(self.scratch / f"{self._roots:06d}"), self.store.run)
        references = {uri: each.reference for uri, each in replaced.items() if each.reference is not None}
        arguments = {name: with_replaced(each, references) for name, each in stage.arguments.items()}
        try:
            for uri, each in replaced.items():
                assert each.reference is not None, "only what was computed replaces what is stored"
                assert each.store is not None, "it was computed somewhere"
                bring_inputs(each.store, scratch, stage.task.name, {uri: each.reference})
            bring_inputs(self.store, scratch, stage.task.name, arguments)
            if (reason := self._pruned_input(stage)) is not None:
                return Computed("untried", reason=reason)
            use_stage_context(replace(stage_context(), store=scratch))
            made: Reference = run_task(stage.task, stage.title, self.placement, arguments)
        except _REFUSED as error:
            refused = Difference(
                place="computing", stored="a result", computed=first_line(error), count=1, total=1, largest=None
            )
            return Computed("differs", (refused,), reason=str(error))
        except StaleReferenceError as error:
            return self._damaged(error)
        except (InputError, ImportError, ConnectionError) as error:
            return Computed("untried", reason=str(error))
        compared = self._compare(stage, made, scratch)
        if compared.level != "differs":
            # What differs may explain what was made from it.
            shutil.rmtree(scratch.root)
        return compared

    def _pruned_input(self, stage: StoredStage) -> str | None:
        """Return which part of what a stage reads was deleted on purpose, as `bring_inputs` has just found it."""
        for reference in references_in(stage.arguments):
            pruned = self.store.pruned_reason(reference, as_read=True)
            for part in removed_by(pruned):
                if pruned is not None and DELETED.get(part) not in (None, *UNREAD.get(stage.task.name, ())):
                    by, on = pruned.get("by", "grpo prune"), pruned.get("on", "an earlier day")
                    return f"the {part} of {reference.uri}, which it reads, were removed by `{by}` on {on}"
        return None

    def _compare(self, stage: StoredStage, made: Reference, scratch: ArtifactStore) -> Computed:
        stored, computed = stage.artifact, artifact_of(made)
        pruned = removed_by(self.store.pruned_reason(stored))
        if FILES_REMOVED in pruned:
            return _compare_digests(stored, computed, made, scratch)
        policy = stage.arguments.get("policy")
        previous = policy.checkpoint if isinstance(policy, PolicyRef) and stage.kind == "update" else None
        with self.store.reading() as read, scratch.reading() as read_computed:
            try:
                before, own = read(previous) if previous is not None else None, read(stored)
            except StaleReferenceError as error:
                return self._damaged(error)
            without = [DELETED[part] for part in pruned]
            differences = compare_artifacts(own, read_computed(computed), previous=before, without=without)
        return Computed(level_of(differences, self.tolerance), differences, made, scratch)

    def _by_the_gate(self, stage: StoredStage) -> Computed:
        """Return how far the log-probs of an engine are from those that the update computes again.

        Its batches round otherwise each time, so that sampling again says nothing.
        """
        plan = stage.arguments["plan"]
        update = None if stage.kind == "evaluation" else self.producer(policy_folder(plan.iteration))
        computed = self._compute(update) if update is not None else Computed("untried")
        if computed.reference is None:
            reason = "vLLM sampled it, and no update of this iteration has computed its log-probs again"
            return Computed(computed.level, computed.differences, reason=computed.reason or reason)
        found = artifact_of(computed.reference).metrics
        apart = max(value for name, value in found.items() if name.endswith(LOGP_DIFFERENCE_MAX))
        reason = (
            f"vLLM sampled it; its log-probs are within {apart:.2g} nats of those computed again, which the gate lets"
        )
        return Computed("rounding", reference=stage.stored, store=self.store, reason=f"{reason} pass")

    def _damaged(self, error: StaleReferenceError) -> Computed:
        """Return that a stage is not tried, and note the damage among the problems."""
        self.problems.append(str(error))
        return Computed("untried", reason=str(error))

    def _explained(self, stage: StoredStage, computed: Computed, depth: int) -> StageVerification:
        described = StageVerification(
            kind=stage.kind,
            title=stage.title,
            folder=stage.folder,
            level=computed.level,
            differences=computed.differences,
            reason=computed.reason if computed.level == "untried" else None,
        )
        if computed.level == "differs":
            if (upstream := self._follows(stage, depth)) is not None:
                return described.model_copy(update={"follows": upstream})
            cause = cause_of(stage, computed.differences, computed.reference, self.evidence)
            return described.model_copy(update={"cause": cause})
        if computed.level == "rounding":
            return described.model_copy(update={"cause": computed.reason or self.evidence.of_rounding})
        return described

    def _follows(self, stage: StoredStage, depth: int) -> str | None:
        """Return the title of the stages whose difference explains this one; None if it is a difference of its own.

        It does if the stage gives what is stored when it reads what computing gave, in place of what is stored.
        """
        if depth >= (1 if self.evidence.is_other_code(stage) else _UPSTREAM):
            return None
        differing: dict[str, Computed] = {}
        titles: list[str] = []
        for each in stage.arguments.values():
            for reference in references_in(each):
                producer = self.producer(reference.folder) if reference.run == self.store.run else None
                if producer is None or self.verify(producer, depth + 1).level != "differs":
                    continue
                computed = self._computed[producer.folder]
                titles.append(producer.title)
                if computed.reference is not None:
                    differing[reference.uri] = computed
        # The gate refuses what its inputs, which differ, do not agree about.
        is_refused = bool(titles) and self._computed[stage.folder].reference is None
        if is_refused or (differing and self._gives_stored(stage, differing)):
            return " and ".join(titles)
        return None

    def _gives_stored(self, stage: StoredStage, replaced: Mapping[str, Computed]) -> bool:
        """Return whether a stage gives what is stored from other inputs, but for the name of the policy in its rows."""
        computed = self._try(stage, replaced)
        left = [each for each in computed.differences if not each.place.endswith(f", {_OF_POLICY}")]
        return computed.level != "untried" and level_of(left, self.tolerance) in ("equal", "rounding")


def _compare_digests(stored: ArtifactRef, computed: ArtifactRef, made: Reference, scratch: ArtifactStore) -> Computed:
    """Compare what `grpo prune` has left of an artifact without files: the digest of its values."""
    if stored.digest == computed.digest:
        return Computed("equal", reference=made, store=scratch)
    shown = stored.digest[:16], computed.digest[:16]
    digest = Difference(place="digest of the deleted files", stored=shown[0], computed=shown[1], count=1, total=1)
    return Computed("differs", (digest,), made, scratch)
