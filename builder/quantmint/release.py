"""The straight line from a recipe to a verified package. Read this first.

Each step is one call into its own room. Nothing is sealed before every gate was judged, nothing is published before it
was sealed and re-read. Signing and publishing are never cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantmint.artifact import digest_of
from quantmint.evidence import Evidence
from quantmint.execute import Finished, Walk
from quantmint.package import assemble, demand_passed, evidence_of
from quantmint.project import Prepared, Project
from quantmint.publish import key_place, publish, recover, require_free, require_key_place, require_parent, staging
from quantmint.seal import seal
from quantmint.signers import Signer, generate
from quantmint.source import fetch
from quantmint.stage import Stage
from quantmint.steps import Choice, fetched, preflight
from quantmint.verify import VerifyReport, verify


@dataclass(frozen=True)
class Receipt:
    """What a run did: finished stages, evidence, and, unless it stopped early, the package that verified."""

    done: Mapping[str, Finished]
    evidence: tuple[Evidence, ...]
    package: Path | None = None
    public_key: Path | None = None
    report: VerifyReport | None = None


def release(
    project: Project,
    prepared: Prepared,
    walk: Walk,
    choice: Choice,
    *,
    out: Path,
    signer: Signer | None,
    epoch: int = 0,
) -> Receipt:
    """Build, gate, seal, publish and verify; without `signer` with a throw-away key and grade `development`.

    Raises:
        ReleaseError: whatever stopped the line; nothing was published then.
    """
    plan, name = prepared.plan, prepared.authored.recipe.name
    preflight(plan, project.store, choice, device_class=walk.device_class)
    if choice.publishes:
        require_parent(out)
        recover(out)
        require_free(out, name)
        require_key_place(out, project.store, signer.public.pem if signer else None)
    walk.runner.sweep()
    project.store.sweep()
    done: dict[str, Finished] = {}
    for stage in choice.stages(plan):
        host = stage.kind == "fetch"
        done[stage.name] = (
            take(project, prepared, walk, stage) if host else walk.execute(stage, done, fresh=choice.fresh(stage.name))
        )
        if stage.kind == "check":
            demand_passed(evidence_of(plan, done, choice.skipped), project.store, name)
    evidence = evidence_of(plan, done, choice.skipped)
    demand_passed(evidence, project.store, name)
    if not choice.publishes:
        return Receipt(done, evidence)
    images = {image.name: walk.runner.describe(image.name) for image in plan.images}
    key = signer or generate()
    with staging(out) as folder:
        predicate = assemble(
            folder, prepared, project.store, done, evidence, images=images, signed=signer is not None, epoch=epoch
        )
        seal(folder, predicate, key)
        with project.store.lock(f"publish-{digest_of(str(out).encode())[7:]}"):
            publish(folder, out, name, key.public.pem, project.store)
            report = verify(out, key_place(out))
    report.demand_ok()
    return Receipt(done, evidence, out, key_place(out), report)


def take(project: Project, prepared: Prepared, walk: Walk, stage: Stage) -> Finished:
    """The fetch stage: every source into the store, each time, since a source can change."""
    key, recipe = prepared.plan.recipe_digest, prepared.authored
    walk.watcher.started(stage.name, key=key)

    def notice(text: str, done: int, total: int) -> None:
        walk.watcher.event(
            stage.name, {"event": "progress", "text": text, "done": done, "total": total, "unit": "files"}
        )

    trees = {
        name: fetch(name, source, root=project.root, store=project.store, recipe=recipe.file, notice=notice)
        for name, source in recipe.recipe.sources.items()
    }
    walk.note(stage, key, "done")
    walk.watcher.finished(stage.name, cached=False)
    return fetched(stage, trees, key)
