"""What overlay.toml says and what follows from it: which fixes apply to an engine, or why it is refused.

Pure: no vLLM, no torch, nothing is patched here. Doubt is always a refusal.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Function = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""`module:qualified.name` of a function of the engine."""


class OverlayRefusedError(RuntimeError):
    """The overlay does not know this engine; it patched nothing and the engine must not serve."""


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fix(_Closed):
    """One fix: when it applies, which functions it replaces, and on which others it relies unchanged."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    when: Literal["always", "cpu"]
    why: str
    label: str | None = None
    replaces: Annotated[tuple[Function, ...], Field(min_length=1, strict=False)]
    relies_on: Annotated[tuple[Function, ...], Field(strict=False, alias="relies-on")] = ()

    @property
    def functions(self) -> tuple[str, ...]:
        """Every function whose source must be known."""
        return (*self.replaces, *self.relies_on)


class Engine(_Closed):
    """An engine that the overlay knows: distribution, version and the digests of its functions' source."""

    distribution: str
    version: str
    sources: dict[Function, Digest]


class Overlay(_Closed):
    """overlay.toml."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    overlay: str
    fixes: Annotated[tuple[Fix, ...], Field(min_length=1, strict=False)]
    engines: Annotated[tuple[Engine, ...], Field(min_length=1, strict=False)]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        names = [fix.name for fix in self.fixes]
        if len(set(names)) != len(names):
            raise ValueError("a fix is named twice")
        known = [(engine.distribution, engine.version) for engine in self.engines]
        if len(set(known)) != len(known):
            raise ValueError("an engine is listed twice")
        wanted = {function for fix in self.fixes for function in fix.functions}
        for engine in self.engines:
            if set(engine.sources) != wanted:
                odd = ", ".join(sorted(set(engine.sources) ^ wanted))
                raise ValueError(f"{engine.distribution} {engine.version}: sources and fixes disagree on {odd}")
        return self


@dataclass(frozen=True)
class Decision:
    """What to do to one engine on one device: each fix stands in exactly one of the three groups."""

    engine: Engine
    device: str
    applied: tuple[str, ...]
    disabled: tuple[str, ...]
    not_applicable: tuple[str, ...]
    labels: tuple[str, ...]
    sources: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """The decision as JSON values."""
        fixes = dict.fromkeys(self.applied, "applied")
        fixes |= dict.fromkeys(self.disabled, "disabled") | dict.fromkeys(self.not_applicable, "not-applicable")
        return {
            "engine": {"distribution": self.engine.distribution, "version": self.engine.version},
            "device": self.device,
            "fixes": dict(sorted(fixes.items())),
            "labels": list(self.labels),
            "sources": dict(sorted(self.sources.items())),
        }


def read(text: str) -> Overlay:
    """Parse the text of an overlay.toml.

    Raises:
        OverlayRefusedError: not TOML, an unknown key, or fixes and digests that do not belong together.
    """
    try:
        return Overlay.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise OverlayRefusedError(f"overlay.toml is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise OverlayRefusedError(f"overlay.toml: {where}: {first['msg']}") from None


def shipped() -> Overlay:
    """The overlay.toml of this wheel."""
    return read(resources.files(__package__).joinpath("overlay.toml").read_text("utf-8"))


def digest(source: str) -> str:
    """SHA-256 of a function's source text, as `sha256:…`."""
    return "sha256:" + hashlib.sha256(source.encode()).hexdigest()


def decide(
    overlay: Overlay,
    installed: Mapping[str, str],
    device: str,
    *,
    disabled: frozenset[str],
    source: Callable[[str], str],
) -> Decision:
    """Which fixes to apply to the engine among `installed` (distribution → version) on `device`.

    `source` gives the source text of `module:qualified.name`; it is asked only about fixes that will be applied.

    Raises:
        OverlayRefusedError: no or several known engines, an unknown name in `disabled`, or source that differs.
    """
    unknown = disabled - {fix.name for fix in overlay.fixes}
    if unknown:
        names = ", ".join(fix.name for fix in overlay.fixes)
        raise OverlayRefusedError(f"no fix is named {', '.join(sorted(unknown))}; the fixes are {names}")
    found = [engine for engine in overlay.engines if installed.get(engine.distribution) == engine.version]
    if len(found) != 1:
        have = ", ".join(f"{name} {version}" for name, version in sorted(installed.items())) or "none"
        known = ", ".join(f"{engine.distribution} {engine.version}" for engine in overlay.engines)
        raise OverlayRefusedError(f"this overlay knows {known}; installed: {have}; nothing was patched")
    engine = found[0]
    here = [fix for fix in overlay.fixes if fix.when in ("always", device)]
    todo = [fix for fix in here if fix.name not in disabled]
    sources: dict[str, str] = {}
    for function in sorted({name for fix in todo for name in fix.functions}):
        try:
            sources[function] = digest(source(function))
        except (ImportError, AttributeError, OSError, TypeError) as error:
            raise OverlayRefusedError(f"{function} cannot be read: {error}; nothing was patched") from None
    changed = [name for name, value in sources.items() if value != engine.sources[name]]
    if changed:
        told = "; ".join(f"{name}: expected {engine.sources[name]}, found {sources[name]}" for name in changed)
        raise OverlayRefusedError(
            f"the source of {engine.distribution} {engine.version} is not the known one: {told}; nothing was patched"
        )
    return Decision(
        engine=engine,
        device=device,
        applied=tuple(fix.name for fix in todo),
        disabled=tuple(sorted(disabled)),
        not_applicable=tuple(
            fix.name for fix in overlay.fixes if fix.name not in disabled and fix.when not in ("always", device)
        ),
        labels=tuple(fix.label for fix in todo if fix.label is not None),
        sources=sources,
    )
