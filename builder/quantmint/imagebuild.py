"""Builds the images with the `docker` command, because BuildKit is what the Docker library cannot drive.

Bases become digests first, wheels are fetched first, then the build runs without a network in a folder of exactly what
it needs. An image that was built from the same bytes is never built again; whatever is built is pinned at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from quantmint import wheelhouse
from quantmint.artifact import digest_of
from quantmint.document import canonical
from quantmint.errors import ReleaseError
from quantmint.images import (
    IMAGES,
    MACHINES,
    Base,
    Bases,
    Image,
    Lock,
    Pins,
    Platform,
    known,
    merged,
    parse_pins,
    pinned,
    render_pins,
)
from quantmint.runner import OnEvent
from quantmint.store import Store, disk_errors, hash_file
from quantmint.wheels import whole_wheel

BUILD_LABEL = "dev.quantmint.build"
LOCK_LABEL = "dev.quantmint.lock"
LOCAL_PINS = "Written by `quantmint images build`: what was built on this machine. Comes before images/pins.toml."


# pins on disk


def committed_pins(root: Path) -> Pins:
    """`images/pins.toml` of the project at `root`; empty pins when there is none."""
    return _read(root / "images" / "pins.toml") or Pins(schema=1)


def current_pins(root: Path, state: Path, *, override: Path | None = None) -> Pins:
    """The pins that count: `override` alone when given, else `state`/pins.toml over `images/pins.toml`.

    Raises:
        ReleaseError: RECIPE_SYNTAX, UNKNOWN_KEY or INVALID_VALUE; SOURCE_MISSING when `override` does not exist.
    """
    if override is None:
        return merged(committed_pins(root), _read(state / "pins.toml"))
    found = _read(override)
    if found is None:
        raise ReleaseError("SOURCE_MISSING", "the pins file does not exist", file=str(override))
    return found


def _read(path: Path) -> Pins | None:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return None
    return parse_pins(text, file=path.name)


def _write(pins: Pins, path: Path, comment: str) -> None:
    with disk_errors():
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(render_pins(pins, comment=comment), "utf-8")
        part.rename(path)


# the engine, through its command


class Engine:
    """The `docker` command with BuildKit, talking to the engine that its environment (DOCKER_HOST) names.

    Raises:
        ReleaseError: ENGINE_UNREACHABLE when there is no command or no engine answers.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**environment, "DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
        self._command = self._find()
        answer = self.run("version", "--format", "{{.Server.Os}}/{{.Server.Arch}}", failing="ENGINE_UNREACHABLE")
        if answer not in get_args(Platform):
            raise ReleaseError("IMAGE_PLATFORM", "no images are known for this engine's platform", actual=answer)
        self.platform = cast("Platform", answer)

    def _find(self) -> str:
        """The first `docker` that can build with BuildKit: up to version 22 built in, later by its buildx plugin."""
        folders = [*self._environment.get("PATH", os.defpath).split(":"), "/usr/bin"]
        candidates = dict.fromkeys(found for folder in folders if (found := shutil.which("docker", path=folder)))
        for candidate in candidates:
            plugin = subprocess.run(  # noqa: S603  a docker of PATH
                [candidate, "buildx", "version"], env=self._environment, capture_output=True, check=False
            )
            if plugin.returncode == 0:
                return candidate
            said = subprocess.run(  # noqa: S603
                [candidate, "--version"], env=self._environment, capture_output=True, text=True, check=False
            ).stdout
            major = said.removeprefix("Docker version ").partition(".")[0]
            if major.isdigit() and int(major) < 23:
                return candidate
        if candidates:
            raise ReleaseError(
                "ENGINE_UNREACHABLE",
                "the docker command cannot build with BuildKit",
                expected="docker with buildx, or Docker 20.10 to 22",
                actual=", ".join(candidates),
                hint="Install docker-buildx (docker-buildx-plugin).",
            )
        raise ReleaseError(
            "ENGINE_UNREACHABLE", "there is no docker command", hint="Install docker.io or docker-ce-cli."
        )

    def run(self, *arguments: str, failing: str = "ENGINE_ERROR") -> str:
        """Its trimmed output; a failure becomes the error code `failing`."""
        done = subprocess.run(  # noqa: S603  the docker found above
            [self._command, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = done.stderr.strip()[-600:]
            code = "DISK_FULL" if "no space left on device" in said else failing
            raise ReleaseError(code, f"docker {arguments[0]}: {said}")
        return done.stdout.strip()

    def label(self, reference: str, label: str) -> str | None:
        """A label of an image that this engine has; None when it has no such image or the image no such label."""
        try:
            found = json.loads(self.run("image", "inspect", "--format", "{{json .Config.Labels}}", reference))
        except ReleaseError:
            return None
        return (found or {}).get(label)

    def digest_reference(self, reference: str, repository: str) -> str:
        """`repository@sha256:…` as the engine knows the image after a pull or push."""
        digests = json.loads(self.run("image", "inspect", "--format", "{{json .RepoDigests}}", reference)) or []
        for digest in digests:
            if str(digest).startswith(repository + "@"):
                return str(digest)
        raise ReleaseError("ENGINE_ERROR", f"the engine states no digest of {reference} in {repository}")

    def build(self, arguments: list[str], log: Path, on_event: OnEvent, name: str) -> None:
        """Run `docker build`, every line to `log` and, as `log` events, to `on_event`.

        Raises:
            ReleaseError: IMAGE_BUILD_FAILED naming the log, or DISK_FULL.
        """
        tail: list[str] = []
        command = [self._command, "build", *arguments]
        with (
            log.open("w", encoding="utf-8") as sink,
            subprocess.Popen(  # noqa: S603  the docker found above
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            ) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    sink.write(line)
                    tail = [*tail[-30:], line.rstrip()]
                    if line.strip():
                        on_event({"event": "log", "image": name, "text": line.rstrip()})
            except BaseException:
                process.terminate()
                raise
        if process.returncode == 0:
            return
        said = "\n".join(tail)
        if "no space left on device" in said.lower():
            raise ReleaseError("DISK_FULL", f"the engine's disk filled up while building {name}", file=str(log))
        reasons = [line for line in tail if "ERROR" in line or line.startswith("failed to")] or tail[-1:]
        raise ReleaseError("IMAGE_BUILD_FAILED", f"building {name}: {' '.join(reasons)[-600:]}", file=str(log))


# verbs


@dataclass(frozen=True)
class Listed:
    """One row of `images list`: an image on a platform, the digest of its lock and its reference, None where absent."""

    name: str
    purpose: str
    platform: str
    lock: str | None
    reference: str | None


def listing(*, root: Path, pins: Pins) -> tuple[Listed, ...]:
    """Every known image on every platform."""
    rows: list[Listed] = []
    for image in IMAGES.values():
        try:
            lock = wheelhouse.lock_of(root, image.name).digest
        except ReleaseError as error:
            if error.code != "LOCK_MISSING":
                raise
            lock = None
        on = pins.images[image.name].platforms if image.name in pins.images else {}
        rows += [Listed(image.name, image.purpose, where, lock, on.get(where)) for where in get_args(Platform)]
    return tuple(rows)


def build(
    names: Iterable[str] = (),
    *,
    root: Path,
    state: Path,
    environment: Mapping[str, str],
    on_event: OnEvent,
    builder_image: str | None = None,
    runtime_image: str | None = None,
    registry: str | None = None,
) -> Pins:
    """Build and pin images (all of them when `names` is empty) for the engine's platform; `state`/pins.toml afterwards.

    `environment` is that of the docker command (PATH, HOME, DOCKER_HOST). Bases are tags or `repository@sha256:…`; None
    takes those of the pins. What a tag was resolved to is recorded and stands until a base is given again. With
    `registry` (`host:port[/path]`) images are pushed there and pinned as `registry/quantmint/NAME@sha256:…`; without,
    as IDs of images of this engine. An image that was built and pinned from the same Dockerfile, lock, bases and wheel
    is left alone. Emits `note`, `progress` (wheels) and `log` (lines of the build) events; the log of the last build of
    each image stays in `state`/logs.

    Raises:
        ReleaseError: INVALID_ARGUMENT, LOCK_MISSING, WHEELS_UNAVAILABLE, ENGINE_UNREACHABLE, ENGINE_ERROR,
            IMAGE_ABSENT, IMAGE_PLATFORM, IMAGE_BUILD_FAILED or DISK_FULL.
    """
    wanted = [known(name) for name in dict.fromkeys(names)] or list(IMAGES.values())
    engine = Engine(environment)
    store = Store(state)
    target = store.folder() / "pins.toml"
    waiting = {"event": "note", "text": "another process is building images"}
    with store.lock("images", waiting=lambda: on_event(waiting)):
        pins = current_pins(root, store.root)
        builder, build_from = _base(engine, "builder", builder_image, pins, on_event)
        runtime, run_on = _base(engine, "runtime", runtime_image, pins, on_event)
        bases = Bases(builder=builder, runtime=runtime)
        workshop = _Workshop(engine, root, store, build_from, run_on, registry, on_event)
        local = Pins(schema=1, bases=bases, images=(_read(target) or Pins(schema=1)).images)
        for image in wanted:
            earlier = local.images[image.name].platforms.get(engine.platform) if image.name in local.images else None
            local = pinned(local, image.name, engine.platform, workshop.reference(image, earlier))
            _write(local, target, LOCAL_PINS)
    return local


def _base(
    engine: Engine, kind: Literal["builder", "runtime"], given: str | None, pins: Pins, on_event: OnEvent
) -> tuple[Base, str]:
    """A base as pins record it, and its reference on the engine's platform."""
    if given is not None:
        digest = given if "@sha256:" in given else _pulled(engine, given, on_event)
        return Base(ref=given, platforms={engine.platform: digest}), digest
    if pins.bases is None:
        raise ReleaseError(
            "INVALID_ARGUMENT",
            f"no {kind} base is given and none is pinned",
            file="images/pins.toml",
            expected=f"[bases.{kind}]",
        )
    recorded = pins.bases.builder if kind == "builder" else pins.bases.runtime
    digest = recorded.platforms.get(engine.platform) or _pulled(engine, recorded.ref, on_event)
    return Base(ref=recorded.ref, platforms={**recorded.platforms, engine.platform: digest}), digest


def _pulled(engine: Engine, tag: str, on_event: OnEvent) -> str:
    """`repository@sha256:…` of what a tag stands for now, on the engine's platform."""
    on_event({"event": "note", "text": f"resolving {tag}"})
    engine.run("pull", "--quiet", "--platform", engine.platform, tag, failing="IMAGE_ABSENT")
    repository = tag.rpartition(":")[0] if ":" in tag.rpartition("/")[2] else tag
    for prefix in ("docker.io/library/", "docker.io/"):
        repository = repository.removeprefix(prefix)
    return engine.digest_reference(tag, repository)


@dataclass(frozen=True)
class _Workshop:
    """Where images are made: an engine, a project, a store and the two bases."""

    engine: Engine
    root: Path
    store: Store
    builder: str
    runtime: str
    registry: str | None
    on_event: OnEvent

    def reference(self, image: Image, earlier: str | None) -> str:
        """The reference of `image` made from what stands in the project now: `earlier` if that is it, else built."""
        lock = wheelhouse.lock_of(self.root, image.name)
        with tempfile.TemporaryDirectory(dir=self.store.folder("drafts"), prefix="image-") as folder:
            own = whole_wheel(self.root, Path(folder) / "own") if image.name == "verify" else None
            digest = self._made_from(image, lock, own)
            repository = f"{self.registry}/quantmint/{image.name}" if self.registry is not None else None
            suits = earlier is not None and earlier.partition("@")[0] == (repository or earlier)
            if earlier is not None and suits and self.engine.label(earlier, BUILD_LABEL) == digest:
                self._note(f"{image.name} is up to date")
                return earlier
            name = f"{repository or f'quantmint/{image.name}'}:{digest.removeprefix('sha256:')[:16]}"
            if self.engine.label(name, BUILD_LABEL) != digest:
                self._lay_out(image, own, Path(folder) / "build")
                self._build(image, lock, digest, name, Path(folder) / "build")
        if repository is None:
            return self.engine.run("image", "inspect", "--format", "{{.Id}}", name)
        self._note(f"pushing {image.name}")
        self.engine.run("push", "--quiet", name)
        return self.engine.digest_reference(name, repository)

    def _note(self, text: str) -> None:
        self.on_event({"event": "note", "text": text})

    def _made_from(self, image: Image, lock: Lock, own: Path | None) -> str:
        """Digest of everything that decides what the image holds; the image's label `BUILD_LABEL`."""
        inputs = {
            "dockerfile": hash_file(self.root / "Dockerfile")[0],
            "target": image.target,
            "lock": lock.digest,
            "finish": hash_file(self.root / wheelhouse.FINISH)[0],
            "builder": self.builder,
            "runtime": self.runtime,
            "platform": self.engine.platform,
            "project": hash_file(own)[0] if own is not None else None,
        }
        return digest_of(canonical(inputs))

    def _lay_out(self, image: Image, own: Path | None, folder: Path) -> None:
        """The build folder: exactly what the Dockerfile names, wheels as hard links."""
        wheels = wheelhouse.fetch(
            image.name,
            root=self.root,
            state=self.store.root,
            on_event=self.on_event,
            machine=MACHINES[self.engine.platform],
        )
        with disk_errors():
            for part in ("wheelhouse", "project"):
                (folder / part).mkdir(parents=True)
            shutil.copyfile(self.root / "Dockerfile", folder / "Dockerfile")
            shutil.copyfile(self.root / image.lock, folder / "requirements.lock")
            shutil.copyfile(self.root / wheelhouse.FINISH, folder / "finish.py")
            for wheel in wheels:
                os.link(wheel, folder / "wheelhouse" / wheel.name)
            if own is not None:
                shutil.copyfile(own, folder / "project" / own.name)

    def _build(self, image: Image, lock: Lock, digest: str, name: str, folder: Path) -> None:
        self._note(f"building {image.name}")
        log = self.store.folder("logs") / f"image-{image.name}.log"
        arguments = {
            "BUILDER_IMAGE": self.builder,
            "RUNTIME_IMAGE": self.runtime,
            "LOCK_DIGEST": lock.digest,
            "BUILD_DIGEST": digest,
        }
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        command = [
            "--network=none",
            "--progress=plain",
            f"--target={image.target}",
            f"--tag={name}",
            *given,
            str(folder),
        ]
        self.engine.build(command, log, self.on_event, image.name)
