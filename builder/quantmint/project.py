"""The project folder on this machine: its recipes, pins, overlays and the state folder beside them.

Reads what people wrote and turns it into a plan; decides nothing. Paths of this machine never leave it.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmint.artifact import Tree, digest_of, legal_path
from quantmint.document import parse_json
from quantmint.errors import ReleaseError
from quantmint.images import Pins, portable, resolve
from quantmint.plan import Plan, make_plan
from quantmint.recipe import Recipe
from quantmint.runner import RunnerKind
from quantmint.source import tree_at
from quantmint.store import Store, clear
from quantmint.wheels import overlay_wheel, worker_wheel


@dataclass(frozen=True)
class Authored:
    """A recipe and the bytes it was read from; `file` names it in messages."""

    recipe: Recipe
    file: str
    data: bytes


@dataclass(frozen=True)
class Prepared:
    """A plan, and the trees of its inputs that are pinned by digest (all of them already in the store)."""

    authored: Authored
    plan: Plan
    pinned: Mapping[str, Tree]
    overlay: Tree | None
    engines: tuple[str, ...]
    worker: str
    config: Any


@dataclass(frozen=True)
class Project:
    """A folder with `manifests/recipes/`, and a store."""

    root: Path
    store: Store

    @classmethod
    def find(cls, start: Path, state: Path | None) -> Project:
        """The project that `start` is in; `state` is the state folder, by default `.quantmint` of the project.

        Raises:
            ReleaseError: SOURCE_MISSING when neither `start` nor a folder above it is a project.
        """
        for folder in (start.absolute(), *start.absolute().parents):
            if (folder / "manifests" / "recipes").is_dir() and (folder / "pyproject.toml").is_file():
                return cls(folder, Store(state or folder / ".quantmint"))
        raise ReleaseError(
            "SOURCE_MISSING",
            "this folder is not inside a Quantmint project",
            expected="a folder with pyproject.toml and manifests/recipes/",
            hint="Run quantmint from a clone of the project.",
        )

    def recipe_names(self) -> list[str]:
        """Names of the project's recipes, sorted."""
        return sorted(path.stem for path in (self.root / "manifests" / "recipes").glob("*.toml"))

    def read_recipe(self, name: str) -> Authored:
        """The recipe called `name`, or in the file `name` when it ends in `.toml`.

        Raises:
            ReleaseError: UNKNOWN_RECIPE with the nearest name; what `Recipe.parse` says.
        """
        path = Path(name) if name.endswith(".toml") else self.root / "manifests" / "recipes" / f"{name}.toml"
        file = path.name if name.endswith(".toml") else f"manifests/recipes/{path.name}"
        try:
            data = path.read_bytes()
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise ReleaseError("RECIPE_SYNTAX", "the recipe is not UTF-8", file=file) from None
        except (OSError, ValueError):
            known = self.recipe_names()
            near = difflib.get_close_matches(name, known, n=1)
            raise ReleaseError(
                "UNKNOWN_RECIPE",
                f"there is no recipe {name[:80]!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                file=file[:120],
                expected=", ".join(known),
                actual=name[:80],
            ) from None
        recipe = Recipe.parse(text, file=file)
        if recipe.name != path.stem:
            raise ReleaseError(
                "INVALID_VALUE", "a recipe is called like its file", file=file, expected=path.stem, actual=recipe.name
            )
        return Authored(recipe, file, data)

    def require_files(self, authored: Authored) -> None:
        """Return when everything of this project that the recipe names is here; a plan can do without, a run cannot.

        Raises:
            ReleaseError: SOURCE_MISSING, naming what the recipe names.
        """
        recipe = authored.recipe
        named = [(name, self.root / legal_path(name)) for name in recipe.files]
        if recipe.overlay is not None:
            named.append((recipe.overlay.path, self.root / legal_path(recipe.overlay.path) / "pyproject.toml"))
        for name, place in named:
            if not place.is_file():
                raise ReleaseError(
                    "SOURCE_MISSING",
                    f"{authored.file} names {name}, which does not exist",
                    file=name,
                    expected="a file of this project",
                    actual="nothing",
                )

    def prepare(self, authored: Authored, *, runner: RunnerKind, platform: str, pins: Pins) -> Prepared:
        """Read the recipe's small files, build our wheels, and make the plan. No source is fetched and no job is run.

        Raises:
            ReleaseError: SOURCE_MISSING for a file that the recipe names; what `make_plan` says.
        """
        recipe = authored.recipe
        pinned: dict[str, Tree] = {}
        files: dict[str, str] = {}
        for name in recipe.files:
            place = self.root / legal_path(name)
            if not place.is_file():
                if name == recipe.model.config:
                    raise ReleaseError("SOURCE_MISSING", "the model's configuration does not exist", file=name)
                continue
            artifact = self.store.add_file(place)
            files[name] = artifact.digest
            pinned[artifact.digest] = Tree.of([artifact])
        worker = self._wheel(worker_wheel, self.root)
        wheels = {"worker": worker.digest}
        pinned[worker.digest] = worker
        overlay = None
        if recipe.overlay is not None and (self.root / legal_path(recipe.overlay.path)).is_dir():
            overlay = self._wheel(overlay_wheel, self.root / recipe.overlay.path)
            wheels["overlay"] = overlay.digest
            pinned[overlay.digest] = overlay
        sources = {
            name: tree_at(self.root, source)
            for name, source in recipe.sources.items()
            if source.kind == "dir" and (self.root / source.path).is_dir()
        }

        def reference(image: str) -> str | None:
            try:
                return portable(resolve(pins, image, platform))
            except ReleaseError:
                return None

        config = self._config(recipe.model.config)
        plan = make_plan(
            recipe,
            file=authored.file,
            recipe_digest=digest_of(authored.data),
            config=config,
            images=reference if runner == "container" else lambda _image: None,
            runner=runner,
            platform=platform,
            wheels=wheels,
            files=files,
            sources=sources,
        )
        engines = _engines(self.store, overlay) if overlay is not None else ()
        return Prepared(authored, plan, pinned, overlay, engines, worker.artifacts[0].digest, config)

    def _wheel(self, build: Callable[[Path, Path], Path], root: Path) -> Tree:
        """A wheel built in a folder of this process's own and taken into the store."""
        folder = self.store.folder("drafts", f"{root.name}.{os.getpid()}")
        try:
            return Tree.of([self.store.add_file(build(root, folder))])
        finally:
            clear(folder)

    def _config(self, name: str) -> Any:
        """The model's configuration; it is of this project, so a mistake in it is the author's."""
        try:
            return parse_json((self.root / name).read_bytes(), file=name)
        except ReleaseError as error:
            raise ReleaseError("INVALID_VALUE", f"the model's configuration: {error.message}", file=name) from None


def _engines(store: Store, overlay: Tree) -> tuple[str, ...]:
    """The engines that an overlay wheel says it knows, `distribution version`, from the overlay.toml inside it."""
    with zipfile.ZipFile(store.blob(overlay.artifacts[0].digest)) as wheel:
        name = next((entry for entry in wheel.namelist() if entry.endswith("/overlay.toml")), None)
        if name is None:
            raise ReleaseError(
                "SOURCE_MISSING", "the overlay's wheel holds no overlay.toml", file=overlay.artifacts[0].path
            )
        engines = tomllib.loads(wheel.read(name).decode("utf-8")).get("engines", [])
    return tuple(f"{engine['distribution']} {engine['version']}" for engine in engines)
