"""From a recipe to a plan: stages with pinned inputs, and the arithmetic of the package before any byte is read.

Pure: a plan is a function of its arguments. It never looks at the machine, a registry, or the source itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from quantmint import tiers
from quantmint.artifact import Digest, Tree
from quantmint.checkpoint import TensorSpec, carried_over, encode_index, shards
from quantmint.document import Document
from quantmint.evidence import Scalar, Threshold
from quantmint.geometry import Geometry, ModelTensor, Role
from quantmint.placement import Placement, Stored, compact
from quantmint.recipe import GIB, Calibration, Gate, Limits, Recipe
from quantmint.stage import HANDLERS, Hints, InputRef, Name, Output, Stage
from quantmint.targets import TARGETS
from quantmint.tiers import NOMINAL_BITS, Precision

UNPINNED = "unpinned"
CHECK_THRESHOLDS = tuple(
    Threshold(measurement=name, op="==", value=0)
    for name in (
        "tensors_missing", "tensors_unexpected", "tensors_wrong_shape", "tensors_changed", "fused_scales_unequal",
        "files_missing", "files_unexpected", "files_changed", "config_changed", "metadata_surplus", "documents_wrong",
    )
)  # fmt: skip
"""What every plan demands of its checkpoint, whatever the recipe says; its sizes come from the plan's own numbers."""

ERROR_MAX = 0.2
"""Largest relative error ‖W - Ŵ‖ / ‖W‖ of a quantized matrix that every plan accepts.

For weights of bell shape NVFP4 gives 0.09 to 0.12 (16 values share an E4M3 scale, e2m1 keeps one fraction bit), FP8
0.03. Codes that are zero give 1, random ones more than 1, a scale that is wrong by a power of two 0.5 or more.
"""

TITLES: Mapping[Role, str] = {
    Role.ROUTED_EXPERTS: "routed experts",
    Role.SHARED_EXPERT: "shared experts",
    Role.ROUTER: "routers",
    Role.ROUTER_BIAS: "router biases",
    Role.ATTENTION: "attention",
    Role.NORM: "norms",
    Role.EMBEDDING: "embedding",
    Role.HEAD: "head",
    Role.DENSE_MLP: "dense MLP",
}
FORMS: Mapping[Precision, str] = {
    Precision.BF16: "BF16",
    Precision.FP8_W8A8: "FP8 W8A8",
    Precision.NVFP4_W4A16: "NVFP4 W4A16",
}


class PlannedSource(Document):
    """A source: what pins it, and its bytes (expected from the geometry when it has not been fetched)."""

    name: Name
    uri: str
    digest: Digest | None = None
    pinned: bool
    nbytes: int


class PlannedImage(Document):
    """An image that stages run in; `reference` is `unpinned` when nothing pins it on this platform."""

    name: Name
    reference: str


class Component(Document):
    """A line of the arithmetic: so many tensors of one kind and form take so many bytes."""

    name: str
    layers: str | None = None
    tensors: int
    nbytes: int


class Expected(Document):
    """What the package will weigh, from the configuration alone.

    `tensor_bytes` is exact. `package_bytes` adds weight-file headers, the index and the files carried over from a
    source that is at hand. Bits are those of the routed experts: `nominal` counts codes, `effective` everything stored
    for them; `model_bits` is all tensor bytes over all weights. `peak_disk_bytes`: sources, stage outputs and package.
    """

    tensors: int
    tensor_bytes: int
    package_bytes: int
    peak_disk_bytes: int
    expert_weights: int
    nominal_bits: float
    effective_bits: float
    model_bits: float


class Acceptance(Document):
    """What decides about a stage: its measurements are judged by these thresholds; `target` is None for a check."""

    stage: Name
    target: str | None = None
    thresholds: tuple[Threshold, ...]


class Plan(Document):
    """Everything that will be done, and what must come out."""

    plan: Literal[1] = 1
    recipe: str
    title: str
    recipe_digest: Digest
    runner: Literal["container", "process"]
    platform: str
    sources: tuple[PlannedSource, ...]
    images: tuple[PlannedImage, ...]
    wheels: dict[str, Digest] = Field(default_factory=dict)
    files: dict[str, Digest] = Field(default_factory=dict)
    stages: tuple[Stage, ...]
    package: tuple[Name, Name]
    """Stage and output that is the checkpoint of the package."""
    expected: Expected
    arithmetic: tuple[Component, ...]
    targets: tuple[str, ...]
    acceptance: tuple[Acceptance, ...]
    not_runnable: tuple[str, ...] = ()
    """Handlers that this version does not have."""

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            KeyError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def accepted(self, stage: str) -> tuple[Threshold, ...]:
        """Thresholds that judge `stage`; none for a stage that is not judged."""
        return next((entry.thresholds for entry in self.acceptance if entry.stage == stage), ())

    def tables(self) -> tuple[Table, ...]:
        """The plan as tables for people, in reading order."""
        return (
            self._stage_table(),
            self._input_table(),
            self._arithmetic_table(),
            self._acceptance_table(),
            self._expected_table(),
        )

    def text(self) -> str:
        """The tables as plain text."""
        return f"{self.title} ({self.recipe})\n\n" + "\n".join(table.text() for table in self.tables())

    def _stage_table(self) -> Table:
        references = {image.name: image.reference for image in self.images}
        rows = []
        for stage in self.stages:
            feeds = ", ".join(f"{ref.stage}/{ref.output}" if ref.stage else ref.name for ref in stage.inputs)
            image = f"{stage.image} {_short(references[stage.image])}" if stage.image else "host"
            handler = stage.handler + ("" if stage.handler in HANDLERS else " (not in this version)")
            rows.append((stage.name, stage.kind, handler, image, feeds))
        return Table("Stages", ("stage", "kind", "handler", "image", "inputs"), tuple(rows))

    def _acceptance_table(self) -> Table:
        rows = tuple(
            (entry.stage, entry.target or "any", f"{line.measurement} {line.op} {json.dumps(line.value)}")
            for entry in self.acceptance
            for line in entry.thresholds
        )
        return Table("Locked acceptance", ("stage", "target", "measurement"), rows)

    def _input_table(self) -> Table:
        rows = [
            (f"source {s.name}", s.uri, _short(s.digest or ("commit" if s.pinned else UNPINNED))) for s in self.sources
        ]
        rows += [(f"wheel {name}", "", _short(digest)) for name, digest in sorted(self.wheels.items())]
        rows += [("file", path, _short(digest)) for path, digest in sorted(self.files.items())]
        return Table("Pinned inputs", ("input", "from", "digest"), tuple(rows))

    def _arithmetic_table(self) -> Table:
        rows = [(part.name, part.layers or "", f"{part.tensors:,}", f"{part.nbytes:,}") for part in self.arithmetic]
        rows.append(("total", "", f"{self.expected.tensors:,}", f"{self.expected.tensor_bytes:,}"))
        return Table("Tensors", ("component", "layers", "tensors", "bytes"), tuple(rows))

    def _expected_table(self) -> Table:
        found = self.expected
        rows = (
            ("package", gigabytes(found.package_bytes)),
            ("peak disk", gigabytes(found.peak_disk_bytes)),
            ("nominal bits per expert weight", f"{found.nominal_bits:.4f}"),
            ("effective bits per expert weight", f"{found.effective_bits:.4f}"),
            ("bits per weight of the model", f"{found.model_bits:.4f}"),
            ("targets", ", ".join(TARGETS[name].title for name in self.targets)),
        )
        return Table("Expected", ("what", "value"), rows)


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people: plain strings."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """Columns padded to their widest cell, no line ends in a space."""
        grid = (self.columns, *self.rows)
        widths = [max(len(row[column]) for row in grid) for column in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, *lines]) + "\n"


def gigabytes(count: int) -> str:
    """Bytes for people, in both units: GB is 10^9 and GiB 2^30."""
    if count < 10**9:
        return f"{count:,} B ({count / 10**6:.2f} MB, {count / 2**20:.2f} MiB)"
    return f"{count:,} B ({count / 10**9:.2f} GB, {count / GIB:.2f} GiB)"


def _short(digest: str) -> str:
    name, at, value = digest.rpartition("sha256:")
    return f"{name}{at}{value[:12]}" if at else digest


# --- expectations ---


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What the build makes: components in reading order, all tensors, and the routed experts' share.

    `quantized_tensors` counts those that an engine decodes together: codes and scales of 4 bits and fewer.
    """

    components: tuple[Component, ...]
    specs: tuple[TensorSpec, ...]
    nominal_bits: float
    expert_bytes: int
    quantized_tensors: int


def _forecast_quantize(placement: Placement, geometry: Geometry) -> _Forecast:
    stored = placement.stored()
    groups: dict[tuple[str, str], list[Stored]] = {}
    for entry in stored:
        if entry.source is None:
            key = ("KV-cache scales", "FP8")
        else:
            form = entry.spec.dtype if entry.copied else FORMS[entry.precision]
            key = (TITLES[entry.source.role], form)
        groups.setdefault(key, []).append(entry)
    components = [
        Component(
            name=f"{title}, {form}",
            layers=_layers(entry.source.layer for entry in entries if entry.source is not None),
            tensors=len(entries),
            nbytes=sum(entry.spec.nbytes for entry in entries),
        )
        for (title, form), entries in groups.items()
    ]
    experts = _experts(geometry)
    nominal = sum(
        tiers.weights_in((tensor.spec,)) * NOMINAL_BITS[placement.precision(tensor)] for tensor in experts
    ) / tiers.weights_in([tensor.spec for tensor in experts])
    expert_bytes = sum(e.spec.nbytes for e in stored if e.source is not None and e.source.role is Role.ROUTED_EXPERTS)
    packed = sum(entry.precision is Precision.NVFP4_W4A16 for entry in stored)
    return _Forecast(_ordered(components), tuple(entry.spec for entry in stored), nominal, expert_bytes, packed)


def _forecast_tiers(recipe: Recipe, geometry: Geometry) -> _Forecast:
    assert recipe.tiers is not None
    hot_count, tail = recipe.tiers.hot.experts_per_layer, recipe.tiers.tail
    specs: list[TensorSpec] = []
    groups: dict[str, list[TensorSpec]] = {}
    others: dict[str, list[ModelTensor]] = {}
    label_hot = f"hot experts ({hot_count} a layer), NVFP4 as in the source"
    label_tail = f"tail experts ({tail.experts_per_layer} a layer)"
    vectors = f"{label_tail}, suh and svh"
    codes = f"{label_tail}, EXL3 {tail.bits}-bit trellis"
    for tensor in geometry.tensors:
        if tensor.role is not Role.ROUTED_EXPERTS:
            others.setdefault(f"{TITLES[tensor.role]}, {tensor.spec.dtype}", []).append(tensor)
            specs.append(tensor.spec)
        elif tensor.expert is not None and tensor.expert < hot_count:
            made = tiers.compressed(tensor.spec)
            groups.setdefault(label_hot, []).extend(made)
            specs.extend(made)
        else:
            made = tiers.exl3(tensor.spec, bits=tail.bits, slices=tail.slices, codebook=tail.codebook)
            for spec in made:
                kind = spec.name.rpartition(".")[2]
                label = {"trellis": codes, "suh": vectors, "svh": vectors}.get(
                    kind, f"{label_tail}, codebook multipliers"
                )
                groups.setdefault(label, []).append(spec)
            specs.extend(made)
    expert_bytes = sum(tiers.nbytes(group) for group in groups.values())
    sparse = compact(geometry.sparse_layers)
    components = [
        Component(name=label, layers=sparse, tensors=len(group), nbytes=tiers.nbytes(group))
        for label, group in groups.items()
    ]
    for label, members in others.items():
        group = [member.spec for member in members]
        layers = _layers(member.layer for member in members)
        components.append(Component(name=label, layers=layers, tensors=len(group), nbytes=tiers.nbytes(group)))
    if recipe.tiers.kv_cache_scales:
        scales = kv_scales_of_source(geometry)
        specs.extend(scales)
        components.append(
            Component(
                name="KV-cache scales, as in the source",
                layers=compact(range(geometry.num_hidden_layers)),
                tensors=len(scales),
                nbytes=tiers.nbytes(scales),
            )
        )
    nominal = (hot_count * 4 + tail.experts_per_layer * tail.bits) / geometry.num_experts
    packed = sum(map(len, groups.values()))
    return _Forecast(_ordered(components), tuple(specs), nominal, expert_bytes, packed)


def kv_scales_of_source(geometry: Geometry) -> tuple[TensorSpec, ...]:
    """The KV-cache scales of the published compressed-tensors checkpoint of July 2026: BF16 [1], two a layer."""
    return tuple(
        TensorSpec(f"model.layers.{layer}.self_attn.{letter}_scale", "BF16", (1,))
        for layer in range(geometry.num_hidden_layers)
        for letter in "kv"
    )


def _experts(geometry: Geometry) -> tuple[ModelTensor, ...]:
    return tuple(tensor for tensor in geometry.tensors if tensor.role is Role.ROUTED_EXPERTS)


def _layers(layers: Iterable[int | None]) -> str | None:
    return compact(layer for layer in layers if layer is not None) or None


def _ordered(components: Iterable[Component]) -> tuple[Component, ...]:
    """Routed experts first, then by weight."""
    return tuple(
        sorted(
            components, key=lambda part: ("experts" not in part.name or "shared" in part.name, -part.nbytes, part.name)
        )
    )


def _compressed_bytes(geometry: Geometry, *, kv_scales: bool) -> int:
    """Tensor bytes of a source whose routed experts are all compressed-tensors NVFP4."""
    experts = sum(tiers.nbytes(tiers.compressed(tensor.spec)) for tensor in _experts(geometry))
    others = sum(tensor.nbytes for tensor in geometry.tensors if tensor.role is not Role.ROUTED_EXPERTS)
    return experts + others + (tiers.nbytes(kv_scales_of_source(geometry)) if kv_scales else 0)


def _source_bytes(recipe: Recipe, name: str, geometry: Geometry, trees: Mapping[str, Tree]) -> int:
    if name in trees:
        return trees[name].size
    if recipe.tiers is not None and name == recipe.tiers.hot.source:
        return _compressed_bytes(geometry, kv_scales=recipe.tiers.kv_cache_scales)
    if recipe.quantize is not None and name != recipe.quantize.source:
        if name == recipe.quantize.tokenizer:
            return 0
        return _compressed_bytes(geometry, kv_scales=recipe.quantize.kv_cache_scales)
    return sum(tensor.nbytes for tensor in geometry.tensors)


# --- stages ---


@dataclass(frozen=True, slots=True)
class _Draft:
    """What all stages of one plan share."""

    recipe: Recipe
    geometry: Geometry
    wheels: Mapping[str, str]
    files: Mapping[str, str]
    sources: Mapping[str, str | None]

    def source(self, name: str, *, called: str | None = None) -> InputRef:
        return InputRef(name=called or name, stage="fetch", output=name, digest=self.sources[name])

    def wheel(self, name: str) -> InputRef:
        return InputRef(name=name, digest=self.wheels.get(name))

    def file(self, name: str, path: str) -> InputRef:
        return InputRef(name=name, kind="file", digest=self.files.get(path))

    def calibration(self, table: Calibration | None) -> tuple[tuple[InputRef, ...], dict[str, Any]]:
        if table is None:
            return (), {}
        inputs = (self.file("prompts", table.prompts),) if table.prompts is not None else ()
        return inputs, {"calibration": table.as_json()}

    def stages(self) -> tuple[Stage, ...]:
        build = self._quantize() if self.recipe.quantize is not None else self._hybrid()
        return (self._fetch(), *build, *(self._gate(gate, build[-2].name) for gate in self.recipe.gates))

    def _fetch(self) -> Stage:
        wanted = {name: source.as_json() for name, source in self.recipe.sources.items()}
        return _stage(
            "fetch", "fetch", "fetch", None,
            params={"sources": wanted},
            outputs=tuple(Output(name=name, kind="tree", path=name) for name in sorted(self.recipe.sources)),
        )  # fmt: skip

    def _quantize(self) -> tuple[Stage, ...]:
        table = self.recipe.quantize
        assert table is not None
        inputs = [self.source(table.source, called="source"), self.wheel("worker")]
        if table.tokenizer is not None:
            inputs.append(self.source(table.tokenizer, called="tokenizer"))
        texts, calibration = self.calibration(table.calibration)
        placement = {
            "placement": [rule.as_json() for rule in table.placement],
            "kv_cache_scales": table.kv_cache_scales,
            "geometry": self.geometry.model_dump(mode="json"),
            "algorithm": table.algorithm,
            **calibration,
        }
        quantize = _stage(
            "quantize", "build", f"quantize/{table.producer}", "modelopt",
            params={
                **placement, "shard_bytes": table.shard_bytes, "seed": table.seed,
            },
            seed=table.seed, inputs=(*inputs, *texts), outputs=(_tree("checkpoint"),), limits=table,
        )  # fmt: skip
        compared = [ref for ref in inputs if ref.name in ("source", "tokenizer", "worker")]
        check = _stage(
            "check", "check", "check/checkpoint", "verify",
            params=placement,
            inputs=(*compared, InputRef(name="checkpoint", stage="quantize", output="checkpoint")),
            outputs=(_tree("evidence"),),
        )  # fmt: skip
        return quantize, check

    def _hybrid(self) -> tuple[Stage, ...]:
        table = self.recipe.tiers
        assert table is not None
        worker = self.wheel("worker")
        texts, calibration = self.calibration(table.calibration)
        hot = self.source(table.hot.source, called="hot")
        tail = self.source(table.tail.source, called="source")
        geometry = {"geometry": self.geometry.model_dump(mode="json")}
        tier_map = InputRef(name="tier_map", kind="file", stage="tiers", output="tier_map")
        counts = {"hot": table.hot.experts_per_layer, "tail": table.tail.experts_per_layer}
        saliency = _stage(
            "saliency", "build", f"calibrate/{table.scoring}", "serve",
            params={**calibration, **geometry}, seed=table.seed,
            inputs=(hot, worker, self.wheel("overlay"), *texts), outputs=(_tree("saliency"),), limits=table,
        )  # fmt: skip
        chosen = _stage(
            "tiers", "build", "tiers/choose", "verify",
            params=counts,
            inputs=(InputRef(name="saliency", stage="saliency", output="saliency"), worker),
            outputs=(Output(name="tier_map", kind="file", path="tier_map.json"),),
        )  # fmt: skip
        exl3 = table.tail.as_json()
        exl3.pop("source")
        tails = _stage(
            "tails", "build", "quantize/exl3", "exl3",
            params={**exl3, **calibration, **geometry}, seed=table.seed,
            inputs=(tail, tier_map, worker, *texts), outputs=(_tree("tails"),), limits=table,
        )  # fmt: skip
        made = InputRef(name="tails", stage="tails", output="tails")
        form = {**counts, **geometry, "tail": exl3, "kv_cache_scales": table.kv_cache_scales}
        assemble = _stage(
            "assemble", "build", "assemble/hybrid", "verify",
            params={**form, "shard_bytes": table.shard_bytes},
            inputs=(hot, made, tier_map, worker), outputs=(_tree("checkpoint"),), limits=table,
        )  # fmt: skip
        check = _stage(
            "check", "check", "check/hybrid", "verify",
            params=form,
            inputs=(hot, tier_map, worker, InputRef(name="checkpoint", stage="assemble", output="checkpoint")),
            outputs=(_tree("evidence"),),
        )  # fmt: skip
        return saliency, chosen, tails, assemble, check

    def _gate(self, gate: Gate, build: str) -> Stage:
        launch = self.recipe.launch_for(gate.target)
        params = dict(gate.params)
        if launch is not None:
            params["launch"] = launch.as_json()
        inputs = [InputRef(name="package", stage=build, output="checkpoint")]
        if self.recipe.overlay is not None:
            inputs.append(self.wheel("overlay"))
        inputs.append(self.wheel("worker"))
        if gate.probes is not None:
            inputs.append(self.file("probes", gate.probes))
        inputs += [self.source(name) for name in gate.sources]
        return _stage(
            gate.name, "gate", gate.handler, "serve",
            params=params, inputs=tuple(inputs), outputs=(_tree("evidence"),), limits=gate,
        )  # fmt: skip


def _tree(name: str) -> Output:
    return Output(name=name, kind="tree", path=name)


def _stage(
    name: str,
    kind: Literal["fetch", "build", "check", "gate"],
    handler: str,
    image: str | None,
    *,
    params: dict[str, Any],
    seed: int = 0,
    inputs: tuple[InputRef, ...] = (),
    outputs: tuple[Output, ...] = (),
    limits: Limits | None = None,
) -> Stage:
    hints: dict[str, int] = {}
    if limits is not None and limits.memory_gib is not None:
        hints["memory"] = limits.memory_gib * GIB
    if limits is not None and limits.deadline_seconds is not None:
        hints["deadline"] = limits.deadline_seconds
    version = HANDLERS[handler][1] if handler in HANDLERS else 0
    return Stage(
        name=name, kind=kind, handler=handler, version=version, image=image, params=params, seed=seed,
        inputs=inputs, outputs=outputs, hints=Hints(**hints),
    )  # fmt: skip


def make_plan(
    recipe: Recipe,
    *,
    file: str,
    recipe_digest: str,
    config: Any,
    images: Callable[[str], str | None],
    runner: Literal["container", "process"],
    platform: str,
    wheels: Mapping[str, str],
    files: Mapping[str, str],
    sources: Mapping[str, Tree] | None = None,
) -> Plan:
    """The plan of `recipe`.

    `file` names the recipe in errors; `recipe_digest` is that of its bytes; `config` the parsed `recipe.model.config`;
    `images` gives the reference of an image on `platform`, or None; `wheels` the tree digests of `worker` and
    `overlay`; `files` the digest of each of `recipe.files` that exists; `sources` the trees that are at hand.

    Raises:
        ReleaseError: UNSUPPORTED_MODEL or INVALID_VALUE when recipe and configuration do not fit.
    """
    geometry = Geometry.of(config, file=recipe.model.config)
    recipe.fits(geometry, file=file)
    trees = sources or {}
    if recipe.quantize is not None:
        table = recipe.quantize
        placement = Placement.of(table.placement, geometry, kv_scales=table.kv_cache_scales)
        forecast = _forecast_quantize(placement, geometry)
        matrices = sum(placement.precision(tensor) is not Precision.BF16 for tensor in geometry.tensors)
        error = Threshold(measurement="quantized_error_max", op="<=", value=ERROR_MAX)
        values = (*_lines(quantized_compared=matrices), error)
        limit = table.shard_bytes
    else:
        assert recipe.tiers is not None
        forecast = _forecast_tiers(recipe, geometry)
        values = ()
        limit = recipe.tiers.shard_bytes
    digests = {
        name: source.digest or (trees[name].digest if name in trees else None)
        for name, source in recipe.sources.items()
    }
    stages = _Draft(recipe, geometry, wheels, files, digests).stages()
    planned = tuple(
        PlannedSource(
            name=name, uri=source.uri, digest=digests[name], pinned=source.pinned,
            nbytes=_source_bytes(recipe, name, geometry, trees),
        )
        for name, source in sorted(recipe.sources.items())
    )  # fmt: skip
    expected = _expected(recipe, geometry, forecast, limit, planned, trees.get(recipe.build_source))
    sizes = _lines(tensors=expected.tensors, total_bytes=expected.tensor_bytes, effective_bits=expected.effective_bits)
    check = Acceptance(stage="check", thresholds=CHECK_THRESHOLDS + sizes + values)
    gates = (
        Acceptance(
            stage=gate.name,
            target=gate.target,
            thresholds=_merged(_demanded(gate, recipe, geometry, forecast), gate.thresholds),
        )
        for gate in recipe.gates
    )
    names = sorted({stage.image for stage in stages if stage.image is not None})
    return Plan(
        recipe=recipe.name,
        title=recipe.title,
        recipe_digest=recipe_digest,
        runner=runner,
        platform=platform,
        sources=planned,
        images=tuple(PlannedImage(name=name, reference=images(name) or UNPINNED) for name in names),
        wheels=dict(sorted(wheels.items())),
        files=dict(sorted(files.items())),
        stages=stages,
        package=("quantize" if recipe.quantize is not None else "assemble", "checkpoint"),
        expected=expected,
        arithmetic=forecast.components,
        targets=tuple(target.name for target in recipe.targets),
        acceptance=(check, *gates),
        not_runnable=tuple(sorted({stage.handler for stage in stages if stage.handler not in HANDLERS})),
    )


def _lines(**wanted: Scalar) -> tuple[Threshold, ...]:
    return tuple(Threshold(measurement=name, op="==", value=value) for name, value in wanted.items())


def _demanded(gate: Gate, recipe: Recipe, geometry: Geometry, forecast: _Forecast) -> tuple[Threshold, ...]:
    """What a gate of this handler must measure whatever the recipe says: numbers that follow from the model alone."""
    overlay = {} if recipe.overlay is None else {"overlays_applied": 1, "overlay_fixes_disabled": 0}
    if gate.handler == "gates/load":
        return _lines(
            engine_loaded=True, tensors_total=len(forecast.specs), tensors_different=0, tensors_absent=0,
            tensors_unaccounted=0, quantized_tensors=forecast.quantized_tensors, quantized_different=0,
            router_biases_compared=len(geometry.sparse_layers), parameters_engine_unmatched=0, logits_finite=True,
            **overlay,
        )  # fmt: skip
    launch = recipe.launch_for(gate.target)
    if gate.handler == "gates/api" and launch is not None:
        return _lines(
            server_ready=True, server_exits=0, server_errors=0, probes_unanswered=0, stream_mismatches=0,
            marker_leaks=0, context_length_served=launch.context_length, **overlay,
        )  # fmt: skip
    return ()


def _merged(demanded: tuple[Threshold, ...], own: tuple[Threshold, ...]) -> tuple[Threshold, ...]:
    """All lines, each once: every one of them must hold, so that a recipe can add and tighten, never loosen."""
    return tuple({line.canonical(): line for line in (*demanded, *own)}.values())


def _expected(
    recipe: Recipe,
    geometry: Geometry,
    forecast: _Forecast,
    limit: int,
    sources: tuple[PlannedSource, ...],
    tree: Tree | None,
) -> Expected:
    files = shards(forecast.specs, limit)
    carried = sum(a.size for a in tree.artifacts if carried_over(a.path)) if tree is not None else 0
    index = len(encode_index(files)) if len(files) > 1 else 0
    package = sum(shard.size for shard in files) + index + carried
    experts = tiers.weights_in([tensor.spec for tensor in _experts(geometry)])
    tensor_bytes = tiers.nbytes(forecast.specs)
    tails = sum(part.nbytes for part in forecast.components if part.name.startswith("tail")) if recipe.tiers else 0
    return Expected(
        tensors=len(forecast.specs),
        tensor_bytes=tensor_bytes,
        package_bytes=package,
        peak_disk_bytes=sum(source.nbytes for source in sources) + tails + 2 * package,
        expert_weights=experts,
        nominal_bits=forecast.nominal_bits,
        effective_bits=tiers.bits_per_weight(forecast.expert_bytes, experts),
        model_bits=tiers.bits_per_weight(tensor_bytes, tiers.weights_in([tensor.spec for tensor in geometry.tensors])),
    )
