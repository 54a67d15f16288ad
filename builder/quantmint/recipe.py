"""The recipe: what a release is, as its author writes it (TOML, closed schema).

Pure: text in, values out. A recipe says what is wanted and what is accepted, never how or where it is run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from quantmint.artifact import DIGEST_PATTERN, Digest, RelPath
from quantmint.document import Document, author, json_schema
from quantmint.errors import ReleaseError
from quantmint.evidence import Threshold
from quantmint.geometry import Geometry
from quantmint.launch import LaunchRecipe
from quantmint.placement import Placement, Rule, layer_numbers
from quantmint.targets import TARGETS
from quantmint.tiers import compressed, exl3

SCHEMA_ID = "https://quantmint.dev/schema/recipe.json"
SCHEMA_LINE = "#:schema ../schema/recipe.json"
"""First line of every recipe: editors complete and check the file by it."""

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,63}$")]
Line = Annotated[str, Field(min_length=1, max_length=400, pattern=r"^[^\r\n]*$")]
Count = Annotated[int, Field(ge=1, le=2**40)]
GIB = 1024**3

_HF = re.compile(r"^hf:(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)@(?P<revision>[0-9a-f]{7,40})$", re.ASCII)


class Authored(Document):
    """A table of the recipe; attribute docstrings become the hover texts of editors."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Model(Authored):
    """The model that is quantized."""

    architecture: Literal["laguna"]
    """Decides which tensors a checkpoint has."""
    config: RelPath
    """A config.json in this project that gives the model's geometry; the source's must agree with it."""


class Source(Authored):
    """Where bytes come from, and what pins them."""

    uri: Annotated[str, Field(pattern=r"^(dir:.+|hf:[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+@[0-9a-f]{7,40})$")]
    """`dir:PATH` (relative to the project), or `hf:ORG/MODEL@COMMIT`; a commit prefix plans but does not run."""
    digest: Digest | None = None
    """Tree digest of the folder; `just pin` writes it. Needed for `dir:`, optional beside a whole commit."""

    @property
    def kind(self) -> Literal["dir", "hf"]:
        """The scheme of the uri."""
        return "hf" if self.uri.startswith("hf:") else "dir"

    @property
    def path(self) -> str:
        """The folder of a `dir:` source, as written."""
        return self.uri.removeprefix("dir:")

    @property
    def repository(self) -> str:
        """`ORG/MODEL` of an `hf:` source."""
        return self.uri.removeprefix("hf:").partition("@")[0]

    @property
    def revision(self) -> str:
        """The commit of an `hf:` source, whole or a prefix."""
        return self.uri.partition("@")[2]

    @property
    def pinned(self) -> bool:
        """Whether the bytes are decided: a digest, or a whole commit."""
        return self.digest is not None or (self.kind == "hf" and len(self.revision) == 40)

    def require_pinned(self, name: str, *, file: str | None = None) -> None:
        """Raise SOURCE_UNPINNED unless the bytes are decided.

        Raises:
            ReleaseError: SOURCE_UNPINNED.
        """
        if not self.pinned:
            wanted = "a digest" if self.kind == "dir" else "a commit of 40 digits or a digest"
            raise ReleaseError(
                "SOURCE_UNPINNED", f"source {name} is not pinned", file=file, expected=wanted, actual=self.uri
            )


class Calibration(Authored):
    """What a build stage looks at: a prompts file of this project, or a public data set by name."""

    prompts: RelPath | None = None
    """JSON Lines of this project, one object with a `text` a line."""
    dataset: Line | None = None
    """A public data set; its bytes are fetched and pinned by the stage that needs them."""
    samples: Count
    """How many texts."""
    tokens: Count
    """How many tokens of each text, at most."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.prompts is None) == (self.dataset is None):
            raise ValueError("give either prompts or dataset")
        return self


class Limits(Authored):
    """How a stage is run; never part of its identity."""

    memory_gib: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Memory limit in GiB; the image's own by default."""
    deadline_seconds: Annotated[int, Field(ge=1, le=7 * 86400)] | None = None
    """When the stage is killed."""


class Quantize(Limits):
    """Build by quantizing a BF16 source in place, module by module."""

    producer: Literal["modelopt"]
    """Who quantizes."""
    source: Name
    """The BF16 checkpoint."""
    tokenizer: Name | None = None
    """Another source for tokenizer, template and generation config; `source` by default."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of everything random in the producer."""
    algorithm: Literal["max", "mse-fp8-sweep"] = "max"
    """How NVFP4 block scales are chosen: block maximum, or the E4M3 scale of least squared error (needs CUDA)."""
    kv_cache_scales: bool = False
    """Also store FP8 scales for the KV cache, two a layer."""
    shard_bytes: Annotated[int, Field(ge=1_000_000)] = 10_000_000_000
    """Largest payload of one weight file, in bytes."""
    calibration: Calibration | None = None
    """Texts for activation scales; not needed for weight-only formats."""
    placement: Annotated[tuple[Rule, ...], Field(min_length=1)]
    """Which modules get which precision; what no rule names stays BF16."""

    @model_validator(mode="after")
    def _activations_need_texts(self) -> Self:
        needs = self.kv_cache_scales or any(rule.precision.value == "fp8-w8a8" for rule in self.placement)
        if needs and self.calibration is None:
            raise ValueError("activation or KV-cache scales need a calibration table")
        return self


class Hot(Authored):
    """The experts that keep the source's form."""

    experts_per_layer: Count
    """How many experts of each sparse layer."""
    precision: Literal["nvfp4"]
    """Their form."""
    source: Name
    """The checkpoint whose bytes they keep; also everything that is not a routed expert."""
    byte_exact: Literal[True] = True
    """Each tensor has the very bytes of the source."""


class Tail(Authored):
    """The experts that are re-quantized to few bits."""

    experts_per_layer: Count
    """How many experts of each sparse layer."""
    format: Literal["exl3"]
    """Their form."""
    source: Name
    """The unquantized checkpoint they are made from."""
    bits: Annotated[int, Field(ge=1, le=8)]
    """Bits of a trellis code."""
    codebook: Literal["mcg", "mul1", "3inst"] = "mcg"
    """Codebook; b12x serves mcg alone."""
    slices: Annotated[int, Field(ge=1, le=16)] = 1
    """Independent slices along the intermediate axis, one for each rank of tensor parallelism."""
    up_divisor: Annotated[int, Field(ge=1)] = 1
    """What up_proj was divided by before quantizing, to be multiplied back by the runtime."""


class Tiers(Limits):
    """Build a two-tier hybrid: hot experts byte-exact, tail experts re-quantized."""

    scoring: Literal["reap"]
    """How experts are ranked: mean over routed tokens of router weight times L2 norm of the expert's output."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of everything random in the tail's quantizer."""
    kv_cache_scales: bool = False
    """The hot source carries FP8 scales for the KV cache, two a layer, and they are kept."""
    shard_bytes: Annotated[int, Field(ge=1_000_000)] = 10_000_000_000
    """Largest payload of one weight file, in bytes."""
    calibration: Calibration
    """Texts for the ranking and for the tail's Hessians."""
    hot: Hot
    tail: Tail

    def fits(self, geometry: Geometry) -> None:
        """Refuse experts that do not add up to the model's, and slices that EXL3 cannot cut.

        Raises:
            ReleaseError: INVALID_VALUE.
        """
        hot, tail = self.hot.experts_per_layer, self.tail.experts_per_layer
        if hot + tail != geometry.num_experts:
            raise ReleaseError(
                "INVALID_VALUE",
                "tiers: hot and tail experts do not add up to the model's",
                expected=f"{geometry.num_experts} experts a layer",
                actual=f"{hot} + {tail} = {hot + tail}",
            )
        for tensor in geometry.tensors:
            if tensor.expert == 0 and tensor.layer == geometry.sparse_layers[0]:
                compressed(tensor.spec)
                exl3(tensor.spec, bits=self.tail.bits, slices=self.tail.slices, codebook=self.tail.codebook)


class Overlay(Authored):
    """The plug-in for the engine that the package needs."""

    path: RelPath
    """Its project folder."""


class TargetEntry(Authored):
    """A device class that the release promises."""

    name: Annotated[str, Field(json_schema_extra={"enum": sorted(TARGETS)})]
    """A device class."""


class Gate(Limits):
    """A question asked on a target, and what is accepted."""

    name: Name
    """Its name in evidence and card."""
    handler: Annotated[str, Field(pattern=r"^[a-z]+/[a-z0-9-]+$")]
    """Who measures."""
    target: str
    """One of the targets."""
    params: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Locked parameters of the measurement."""
    thresholds: tuple[Threshold, ...] = ()
    """Locked acceptance, beyond what every gate of this handler demands anyway; it can only add."""
    probes: RelPath | None = None
    """A file of this project with the probes, pinned by its digest in the plan."""
    sources: tuple[Name, ...] = ()
    """Sources that the gate compares with."""

    @model_validator(mode="after")
    def _no_reserved_parameter(self) -> Self:
        if "launch" in self.params:
            raise ValueError("params: launch is taken from the recipe's launch table")
        if not self.thresholds and self.handler not in SERVING_HANDLERS:
            raise ValueError(f"thresholds: nothing is accepted; {self.handler} has no acceptance of its own")
        return self


class Card(Authored):
    """What the model card says beyond what the evidence says."""

    summary: Annotated[str, Field(min_length=1, max_length=4000)]
    """What the release is."""
    intended_use: Annotated[str, Field(min_length=1, max_length=4000)]
    """What it is for."""
    limitations: tuple[Line, ...] = ()
    """What is pending, and what is not claimed."""
    tags: tuple[Line, ...] = ()
    """Hub tags."""
    base_model: tuple[Line, ...] = ()
    """Hub names of the models it derives from."""
    base_model_relation: Literal["quantized"] = "quantized"
    """How it derives from them."""
    pipeline_tag: Line = "text-generation"
    """Hub task."""
    library_name: Line = "vllm"
    """Hub library."""
    language: tuple[Line, ...] = ("en",)
    """Languages of the model."""


class Recipe(Authored):
    """A release, as its author wants it."""

    model_config = ConfigDict(title="Quantmint recipe")

    schema_version: Literal[1] = Field(alias="schema")
    """Version of this format."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")]
    """Name of the release; the file is called NAME.toml."""
    title: Line
    """Heading of the card."""
    license: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$")]
    """Licence identifier as the Hub writes it."""
    license_file: RelPath | None = None
    """Text to ship as LICENSE when the source brings none."""
    model: Model
    sources: Annotated[dict[Name, Source], Field(min_length=1)]
    """Pinned sources by name."""
    quantize: Quantize | None = None
    tiers: Tiers | None = None
    overlay: Overlay | None = None
    targets: Annotated[tuple[TargetEntry, ...], Field(min_length=1)]
    """Device classes that the release promises."""
    gates: Annotated[tuple[Gate, ...], Field(min_length=1)]
    """Questions that must be answered before anything is published."""
    launch: tuple[LaunchRecipe, ...] = ()
    """How the package is served, one entry for each target."""
    card: Card

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if (self.quantize is None) == (self.tiers is None):
            raise ValueError("give either a quantize table or a tiers table")
        for name, where in self._named_sources():
            if name not in self.sources:
                raise ValueError(f"{where}: no source is called {name!r}; known: {', '.join(self.sources)}")
        targets = [target.name for target in self.targets]
        for number, name in enumerate(targets):
            if name not in TARGETS:
                raise ValueError(f"targets.{number}.name: unknown target {name!r}; known: {', '.join(TARGETS)}")
        _distinct("targets", targets)
        _distinct("gates", [gate.name for gate in self.gates])
        _distinct("launch", [launch.target for launch in self.launch])
        for where, name in [
            *((f"gates.{gate.name}.target", gate.target) for gate in self.gates),
            *((f"launch.{number}.target", launch.target) for number, launch in enumerate(self.launch)),
        ]:
            if name not in targets:
                raise ValueError(f"{where}: {name!r} is not one of the recipe's targets: {', '.join(targets)}")
        for gate in self.gates:
            if gate.name in RESERVED_STAGES:
                raise ValueError(f"gates.{gate.name}: the name belongs to a stage of every plan")
        self._every_target_is_asked(targets)
        return self

    def _every_target_is_asked(self, targets: list[str]) -> None:
        asked = {gate.target for gate in self.gates}
        for name in targets:
            if name not in asked:
                raise ValueError(f"targets: no gate asks anything on {name!r}, so nothing may be promised for it")
        for gate in self.gates:
            if gate.handler in SERVING_HANDLERS and self.launch_for(gate.target) is None:
                raise ValueError(f"gates.{gate.name}: {gate.handler} needs a launch entry for {gate.target!r}")
            if gate.handler == "gates/api" and gate.probes is None:
                raise ValueError(f"gates.{gate.name}: gates/api needs probes, or it would ask almost nothing")

    def _named_sources(self) -> Iterable[tuple[str, str]]:
        if self.quantize is not None:
            yield self.quantize.source, "quantize.source"
            if self.quantize.tokenizer is not None:
                yield self.quantize.tokenizer, "quantize.tokenizer"
        if self.tiers is not None:
            yield self.tiers.hot.source, "tiers.hot.source"
            yield self.tiers.tail.source, "tiers.tail.source"
        for gate in self.gates:
            yield from ((name, f"gates.{gate.name}.sources") for name in gate.sources)

    @classmethod
    def parse(cls, text: str, *, file: str) -> Recipe:
        """The recipe in `text`.

        Raises:
            ReleaseError: RECIPE_SYNTAX, UNKNOWN_KEY or INVALID_VALUE, naming `file` and the key.
        """
        recipe = author(cls, text, file=file)
        try:
            for rule in recipe.quantize.placement if recipe.quantize else ():
                layer_numbers(rule.layers)
        except ReleaseError as error:
            raise _at(error, file) from None
        return recipe

    def fits(self, geometry: Geometry, *, file: str) -> None:
        """Refuse a recipe that does not fit its model: layers that are not there, experts, slices.

        Raises:
            ReleaseError: INVALID_VALUE, naming `file`.
        """
        try:
            if self.quantize is not None:
                Placement.of(self.quantize.placement, geometry, kv_scales=self.quantize.kv_cache_scales)
            if self.tiers is not None:
                self.tiers.fits(geometry)
        except ReleaseError as error:
            raise _at(error, file) from None

    @property
    def build_source(self) -> str:
        """Name of the source that the package derives from: its config, its non-expert tensors, its tokenizer."""
        if self.quantize is not None:
            return self.quantize.source
        assert self.tiers is not None
        return self.tiers.hot.source

    @property
    def files(self) -> tuple[str, ...]:
        """Every file of the project that the recipe names, sorted; a plan holds their digests."""
        named = {self.model.config}
        named.update(path for path in (self.license_file, *(gate.probes for gate in self.gates)) if path is not None)
        tables = (self.quantize.calibration if self.quantize else None, self.tiers.calibration if self.tiers else None)
        named.update(table.prompts for table in tables if table is not None and table.prompts is not None)
        return tuple(sorted(named))

    def launch_for(self, target: str) -> LaunchRecipe | None:
        """The launch recipe of a target, or None."""
        return next((launch for launch in self.launch if launch.target == target), None)


SERVING_HANDLERS = frozenset({"gates/load", "gates/api"})
"""Handlers that start the engine as the launch entry of their target says."""

RESERVED_STAGES = frozenset(
    {"fetch", "quantize", "saliency", "tiers", "tails", "assemble", "check", "card", "seal", "publish", "verify"}
)
"""Stage names that no gate may take."""


def _distinct(where: str, names: list[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{where}: {twice!r} stands twice")


def _at(error: ReleaseError, file: str) -> ReleaseError:
    return ReleaseError(error.code, error.message, file=file, expected=error.expected, actual=error.actual)


def schema() -> bytes:
    """The JSON Schema of recipes, the bytes of `manifests/schema/recipe.json`."""
    return json_schema(Recipe, SCHEMA_ID)


def pin(text: str, source: str, digest: str) -> str:
    """The recipe `text` with `digest` as the digest of `[sources.<source>]`; comments and order stay.

    Raises:
        ReleaseError: INVALID_VALUE when there is no such table, or `digest` is none.
    """
    if not re.fullmatch(DIGEST_PATTERN, digest):
        raise ReleaseError("INVALID_VALUE", "not a digest", expected="sha256:…", actual=digest[:80])
    lines = text.splitlines(keepends=True)
    heads = [number for number, line in enumerate(lines) if re.match(r"\s*\[", line)]
    head = next((n for n in heads if re.match(rf"\s*\[\s*sources\.{re.escape(source)}\s*\]", lines[n])), None)
    if head is None:
        raise ReleaseError(
            "INVALID_VALUE", f"the recipe has no table [sources.{source}]", expected=f"[sources.{source}]"
        )
    end = next((number for number in heads if number > head), len(lines))
    written = f'digest = "{digest}"\n'
    for number in range(head + 1, end):
        if re.match(r"\s*digest\s*=", lines[number]):
            lines[number] = written
            return "".join(lines)
    last = max(
        (n for n in range(head, end) if lines[n].strip() and not lines[n].lstrip().startswith("#")), default=head
    )
    if not lines[last].endswith("\n"):
        lines[last] += "\n"
    lines.insert(last + 1, written)
    return "".join(lines)
