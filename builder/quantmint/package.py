"""The package: what gates found becomes evidence, and stage outputs become the folder that is sealed.

Every byte comes from the store, the plan or the card; nothing is edited on the way. No time, host name or path of this
machine gets into a package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantmint import __version__
from quantmint.artifact import Tree, digest_of
from quantmint.card import render
from quantmint.errors import ReleaseError
from quantmint.evidence import Evidence, EvidenceFile, Verdict, judge
from quantmint.execute import Finished
from quantmint.geometry import Geometry
from quantmint.manifest import (
    PLAN_FILE,
    RECIPE_FILE,
    Builder,
    Grade,
    Overlay,
    Predicate,
    Quantization,
    SkippedGate,
    Source,
    development_because,
)
from quantmint.placement import Placement
from quantmint.plan import Plan
from quantmint.project import Prepared
from quantmint.store import Store, clear, disk_errors

CARD = "README.md"
ANY_TARGET = "any"
"""Target of a check, which holds wherever the package is."""


def evidence_of(plan: Plan, done: Mapping[str, Finished], skipped: tuple[str, ...]) -> tuple[Evidence, ...]:
    """What was found so far, judged by the plan's thresholds; a skipped gate is NOT_RUN."""
    found: list[Evidence] = []
    for entry in plan.acceptance:
        target = entry.target or ANY_TARGET
        if entry.stage in done:
            finished = done[entry.stage]
            report = finished.record.report
            verdict, reasons = judge(entry.thresholds, report.measurements)
            files = tuple(
                EvidenceFile(path=f"evidence/{entry.stage}/{artifact.path}", size=artifact.size, digest=artifact.digest)
                for tree in finished.record.outputs.values()
                for artifact in tree.artifacts
            )
            found.append(
                Evidence(
                    gate=entry.stage, target=target, verdict=verdict, reasons=reasons, thresholds=entry.thresholds,
                    measurements=report.measurements, environment=report.environment, files=files,
                    stage_key=finished.key,
                )
            )  # fmt: skip
        elif entry.stage in skipped:
            found.append(
                Evidence(
                    gate=entry.stage, target=target, verdict=Verdict.NOT_RUN, reasons=("skipped on request",),
                    thresholds=entry.thresholds, measurements={}, environment={}, files=(),
                )
            )  # fmt: skip
    return tuple(found)


def demand_passed(evidence: tuple[Evidence, ...], store: Store, recipe: str) -> None:
    """Return when every gate passed or was skipped on request; else lay the raw evidence out for reading.

    Raises:
        ReleaseError: GATE_FAILED (also for ANOMALOUS), or GATE_INCONCLUSIVE when nothing worse was found.
    """
    bad = [entry for entry in evidence if entry.verdict not in (Verdict.PASSED, Verdict.NOT_RUN)]
    if not bad:
        return
    folder = store.folder("failed", recipe)
    clear(folder)
    for entry in bad:
        for file in entry.files:
            with disk_errors():
                store.copy_out(file, folder / file.path.removeprefix("evidence/"))
    worst = next((entry for entry in bad if entry.verdict is not Verdict.INCONCLUSIVE), bad[0])
    told = "; ".join(f"{entry.gate} on {entry.target}: {entry.verdict.value}" for entry in bad)
    raise ReleaseError(
        "GATE_INCONCLUSIVE" if worst.verdict is Verdict.INCONCLUSIVE else "GATE_FAILED",
        told,
        expected="; ".join(f"{t.measurement} {t.op} {t.value}" for t in worst.thresholds),
        actual="; ".join(worst.reasons),
        hint=f"Nothing was published. The raw evidence lies in {folder}.",
    )


def grade_of(plan: Plan, evidence: tuple[Evidence, ...], *, signed: bool) -> tuple[Grade, tuple[str, ...]]:
    """The grade that a release earns, and why it is not better; `signed`: by a key that lasts."""
    reasons = development_because(
        plan.runner,
        ((entry.gate, entry.verdict) for entry in evidence),
        unasked=[target for target in plan.targets if target not in {entry.target for entry in evidence}],
        bare=[entry.gate for entry in evidence if entry.thresholds and not entry.files],
    )
    if not reasons and not signed:
        reasons = ("signed with a throw-away key",)
    return ("development", reasons) if reasons else ("release", ())


def assemble(
    folder: Path, prepared: Prepared, store: Store, done: Mapping[str, Finished], evidence: tuple[Evidence, ...],
    *, images: Mapping[str, str], signed: bool, epoch: int,
) -> Predicate:  # fmt: skip
    """Lay the package out in the empty `folder` and return what its manifest claims.

    `images` maps each image to what it was; `signed` tells whether a lasting key will sign.

    Raises:
        ReleaseError: STORE_CORRUPT or DISK_FULL.
    """
    recipe, plan = prepared.authored.recipe, prepared.plan
    stage, output = plan.package
    checkpoint = done[stage].record.outputs[output]
    for artifact in checkpoint.artifacts:
        if artifact.path not in (CARD, ".gitattributes"):
            store.copy_out(artifact, folder / artifact.path)
    for entry in evidence:
        for file in entry.files:
            store.copy_out(file, folder / file.path)
    overlay = _overlay(folder, prepared, store)
    grade, reasons = grade_of(plan, evidence, signed=signed)
    texts = {f"launch/{launch.target}.toml": launch.toml().encode() for launch in recipe.launch}
    texts[PLAN_FILE] = plan.canonical()
    texts[RECIPE_FILE] = prepared.authored.data
    texts[CARD] = render(recipe, plan, evidence, overlay=overlay, grade=grade, reasons=reasons)
    if recipe.license_file is not None and not (folder / "LICENSE").exists():
        license_digest = plan.files[recipe.license_file]
        store.copy_out(prepared.pinned[license_digest].artifacts[0], folder / "LICENSE")
    for name, data in texts.items():
        with disk_errors():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return _predicate(prepared, done, evidence, overlay, grade, images, epoch)


def _overlay(folder: Path, prepared: Prepared, store: Store) -> Overlay | None:
    if prepared.overlay is None:
        return None
    wheel = prepared.overlay.artifacts[0]
    path = f"overlay/{wheel.path}"
    store.copy_out(wheel, folder / path)
    return Overlay(file=path, digest=wheel.digest, engine=", ".join(prepared.engines))


def _predicate(
    prepared: Prepared, done: Mapping[str, Finished], evidence: tuple[Evidence, ...], overlay: Overlay | None,
    grade: Grade, images: Mapping[str, str], epoch: int,
) -> Predicate:  # fmt: skip
    recipe, plan = prepared.authored.recipe, prepared.plan
    built_from = recipe.sources[recipe.build_source]
    source: Tree = done["fetch"].record.outputs[recipe.build_source]
    skipped = tuple(
        SkippedGate(gate=entry.gate, target=entry.target, reason="; ".join(entry.reasons))
        for entry in evidence
        if entry.verdict is Verdict.NOT_RUN
    )
    return Predicate(
        release=recipe.name,
        grade=grade,
        source=Source(uri=built_from.uri, revision=built_from.revision or None, files=source.digest),
        recipe=plan.recipe_digest,
        plan=digest_of(plan.canonical()),
        runner=plan.runner,
        images=dict(images),
        overlay=overlay,
        quantization=Quantization(placement=_placement(prepared), effective_bits=plan.expected.effective_bits),
        targets=plan.targets,
        gates=evidence,
        skipped_gates=skipped,
        epoch=epoch,
        builder=Builder(name="quantmint", version=__version__, wheel=prepared.worker),
    )


def _placement(prepared: Prepared) -> dict[str, str]:
    """Module group → precision and layers, for people who read the manifest."""
    recipe = prepared.authored.recipe
    if recipe.quantize is not None:
        geometry = Geometry.of(prepared.config, file=recipe.model.config)
        table = Placement.of(recipe.quantize.placement, geometry, kv_scales=recipe.quantize.kv_cache_scales).by_layer()
        return {role: ", ".join(f"{name}: {layers}" for name, layers in row.items()) for role, row in table.items()}
    assert recipe.tiers is not None
    hot, tail = recipe.tiers.hot, recipe.tiers.tail
    return {
        "routed-experts": f"{hot.experts_per_layer} hot experts {hot.precision}, "
        f"{tail.experts_per_layer} tail experts {tail.format} {tail.bits} bits"
    }
