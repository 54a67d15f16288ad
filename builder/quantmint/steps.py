"""Which stages of a plan a run executes, and what must hold before the first of them starts.

Pure choices over a plan, and one look at the free disk. A gate can be skipped, but only by name, and it is sealed as
skipped; nothing else of a plan can be left out of what is published.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from quantmint.artifact import Tree
from quantmint.errors import ReleaseError
from quantmint.execute import Finished
from quantmint.plan import Plan, gigabytes
from quantmint.stage import CONTRACT, JobReport, Stage
from quantmint.store import Record, Store


@dataclass(frozen=True)
class Choice:
    """What to do of a plan.

    `only`: stop after this stage and publish nothing. `skipped`: gates left out. `since`: run anew from this stage on.
    """

    only: str | None = None
    skipped: tuple[str, ...] = ()
    since: str | None = None
    order: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, *, only: str | None = None, skip: tuple[str, ...] = (), since: str | None = None) -> Choice:
        """A choice that fits `plan`.

        Raises:
            ReleaseError: INVALID_ARGUMENT for a stage that the plan does not have, or a skipped stage that is no gate.
        """
        order = tuple(stage.name for stage in plan.stages)
        for name in (only, since, *skip):
            if name is not None and name not in order:
                raise ReleaseError(
                    "INVALID_ARGUMENT", f"the plan has no stage {name!r}", expected=", ".join(order), actual=name
                )
        for name in skip:
            if plan.stage(name).kind != "gate":
                raise ReleaseError(
                    "INVALID_ARGUMENT",
                    f"{name} is not a gate; only gates can be skipped",
                    expected=", ".join(stage.name for stage in plan.stages if stage.kind == "gate"),
                    actual=name,
                )
        return cls(only, skip, since, order)

    @property
    def publishes(self) -> bool:
        """Whether the run goes on to a package."""
        return self.only is None

    def stages(self, plan: Plan) -> tuple[Stage, ...]:
        """The stages to execute, in order: all but skipped ones, or what `only` needs and itself."""
        if self.only is None:
            return tuple(stage for stage in plan.stages if stage.name not in self.skipped)
        wanted = {self.only}
        for stage in reversed(plan.stages):
            if stage.name in wanted:
                wanted.update(ref.stage for ref in stage.inputs if ref.stage is not None)
        return tuple(stage for stage in plan.stages if stage.name in wanted)

    def fresh(self, stage: str) -> bool:
        """Whether `stage` is executed although the store may have it."""
        return self.since is not None and self.order.index(stage) >= self.order.index(self.since)


def preflight(plan: Plan, store: Store, choice: Choice, *, device_class: str) -> None:
    """Refuse at once what could only fail later.

    Raises:
        ReleaseError: SOURCE_UNPINNED; NOT_RUNNABLE_HERE for handlers that this version lacks and gates of other
            devices; DISK_FULL when less is free than the plan expects at its peak.
    """
    lacking = [stage for stage in choice.stages(plan) if stage.handler in plan.not_runnable]
    unpinned = [source for source in plan.sources if not source.pinned]
    if unpinned:
        raise ReleaseError(
            "SOURCE_UNPINNED",
            f"source {unpinned[0].name} is not pinned",
            expected="a digest or a full commit",
            actual=unpinned[0].uri,
        )
    if lacking:
        raise ReleaseError(
            "NOT_RUNNABLE_HERE",
            f"recipe {plan.recipe}: this version has no {', '.join(sorted({stage.handler for stage in lacking}))}",
            actual=", ".join(stage.name for stage in lacking),
        )
    targets = {entry.stage: entry.target for entry in plan.acceptance}
    elsewhere = [s.name for s in choice.stages(plan) if s.kind == "gate" and targets.get(s.name) != device_class]
    if elsewhere:
        raise ReleaseError(
            "NOT_RUNNABLE_HERE",
            f"gate {elsewhere[0]} asks a question of another device",
            expected=str(targets.get(elsewhere[0])),
            actual=device_class,
        )
    free = shutil.disk_usage(store.folder()).free
    if free < plan.expected.peak_disk_bytes:
        raise ReleaseError(
            "DISK_FULL",
            "the plan needs more disk than is free",
            expected=f"{gigabytes(plan.expected.peak_disk_bytes)} free",
            actual=gigabytes(free),
        )


def fetched(stage: Stage, trees: Mapping[str, Tree], key: str) -> Finished:
    """The fetch stage as if a job had reported: its outputs are the trees of the sources."""
    report = JobReport(contract=CONTRACT, key=key, status="completed", measurements={}, environment={})
    return Finished(stage, key, Record(report=report, outputs=dict(trees)), cached=False)
