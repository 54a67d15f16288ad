"""The container runner: jobs in digest-pinned images of a real Docker engine, sealed off from everything else.

The only importer of docker. Network off, root read-only, non-root, no capabilities, explicit memory, own deadline;
containers are removed whatever happens, and those of killed builders are found by label. No host value enters one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.types
import requests.exceptions

from quantmint.artifact import digest_of
from quantmint.errors import ReleaseError
from quantmint.images import portable
from quantmint.process import MAX_LINE, abandoned, builder_mark, parse_event
from quantmint.runner import ENVIRONMENT, Ended, OnEvent, RunnerKind, wheels
from quantmint.stage import Hints

LABEL = "dev.quantmint.job"
WORKDIR = "/job"
UNPRIVILEGED = 65532
TMPFS_BYTES = 2 * 1024**3
SHM_BYTES = 1024**3
SCRATCHPAD = "/tmp"  # noqa: S108  inside the container: a tmpfs of its own
MAX_ENGINE_LOG = "256m"
ANY_API_VERSION = "1.44"
"""Never sent: the one question asked with it is unversioned."""


@contextlib.contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """The one table from docker's and requests' exceptions to ours."""
    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise ReleaseError("IMAGE_ABSENT", f"{doing}: {error.explanation or error}") from error
    except docker.errors.APIError as error:
        if "no space left on device" in str(error):
            raise ReleaseError("DISK_FULL", f"{doing}: the engine's disk is full") from error
        raise ReleaseError("ENGINE_ERROR", f"{doing}: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise ReleaseError("ENGINE_UNREACHABLE", f"{doing}: {type(error).__name__}: {error}"[:500]) from error


def connect(timeout: int = 60) -> docker.DockerClient:
    """A client of the engine that DOCKER_HOST names, or of the local one, known to answer and speaking its version.

    Raises:
        ReleaseError: ENGINE_UNREACHABLE.
    """
    with engine_errors("connecting to the Docker engine"):
        _knock()
        asking = docker.from_env(version=ANY_API_VERSION, timeout=timeout)
        try:
            spoken = asking.api.version(api_version=False)["ApiVersion"]
        finally:
            asking.close()
        return docker.from_env(version=spoken, timeout=timeout)


def _knock() -> None:
    """Connect to the engine's local socket once: docker-py leaks the socket of a connection that is refused."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.connect("/" + host.removeprefix("unix://").lstrip("/"))


def label(client: docker.DockerClient, reference: str, name: str) -> str | None:
    """A label of an image that the engine has; None when it has neither the image nor the label."""
    try:
        with engine_errors("looking for an image"):
            return (client.images.get(reference).labels or {}).get(name)
    except ReleaseError as error:
        if error.code != "IMAGE_ABSENT":
            raise
        return None


def answers() -> bool:
    """Whether a Docker engine answers within two seconds."""
    try:
        connect(timeout=2).close()
    except ReleaseError:
        return False
    return True


def engine_platform(client: docker.DockerClient) -> str:
    """`linux/amd64` or `linux/arm64` as the engine reports itself."""
    with engine_errors("asking the engine's platform"):
        version = client.version()
    return f"{version['Os']}/{version['Arch']}"


class ContainerRunner:
    """Runs jobs in containers. `references` maps image names to `repo@sha256:…` or `sha256:…` (a local image)."""

    kind: RunnerKind = "container"

    def __init__(self, client: docker.DockerClient, references: Mapping[str, str], state: Path) -> None:
        self._client = client
        self._references = references
        self._platform = engine_platform(client)
        self._scope = digest_of(str(state).encode())[7:23]
        self._ready: set[str] = set()

    def identity(self, image: str) -> str:
        """The digest of the image's reference; pulls the image when the engine lacks it."""
        reference = self._reference(image)
        if image not in self._ready:
            self._ensure(image, reference)
            self._ready.add(image)
        return "sha256:" + reference.rpartition("sha256:")[2]

    def describe(self, image: str) -> str:
        """The reference of `image`, without a registry host that is this machine; or the ID of a local image."""
        return portable(self._reference(image))

    def _reference(self, image: str) -> str:
        if image not in self._references:
            raise ReleaseError("IMAGE_UNPINNED", f"no digest is pinned for image {image} on {self._platform}")
        return self._references[image]

    def _ensure(self, image: str, reference: str) -> None:
        try:
            with engine_errors(f"looking for image {image}"):
                found = self._client.images.get(reference)
        except ReleaseError as error:
            if error.code != "IMAGE_ABSENT":
                raise
            if "@" not in reference:
                raise ReleaseError(
                    "IMAGE_ABSENT", f"image {image} is not in the engine", expected=reference, actual="absent"
                ) from None
            found = self._pull(image, reference)
        architecture = f"{found.attrs['Os']}/{found.attrs['Architecture']}"
        if architecture != self._platform:
            raise ReleaseError(
                "IMAGE_PLATFORM",
                f"image {image} is of another platform",
                file=reference,
                expected=self._platform,
                actual=architecture,
            )
        if "@" in reference and reference not in (found.attrs.get("RepoDigests") or []):
            raise ReleaseError("IMAGE_ABSENT", f"the engine has image {image} under another digest", expected=reference)

    def _pull(self, image: str, reference: str) -> Any:
        """Pull by digest. docker-py's `images.pull` ignores errors in the stream, so the stream is read here."""
        repository, _, digest = reference.partition("@")
        with engine_errors(f"pulling image {image}"):
            try:
                for line in self._client.api.pull(repository, tag=digest, stream=True, decode=True):
                    if "error" in line:
                        raise _absent(image, reference, str(line["error"]))
            except docker.errors.APIError as error:
                raise _absent(image, reference, str(error.explanation or error)) from error
            return self._client.images.get(reference)

    def run(self, folder: Path, image: str, hints: Hints, log: Path, on_event: OnEvent) -> Ended:
        """See `Runner.run`."""
        self.identity(image)
        user = _prepare_owner(folder)
        with engine_errors(f"starting a container of {image}"):
            container = self._client.containers.create(
                self._reference(image),
                command=["python3", "-P", "-m", "quantmint.worker", WORKDIR],
                entrypoint=[],
                environment={
                    **ENVIRONMENT,
                    "HOME": SCRATCHPAD,
                    "TMPDIR": SCRATCHPAD,
                    "PYTHONPATH": self._pythonpath(folder, image),
                },
                working_dir=WORKDIR,
                user=f"{user[0]}:{user[1]}",
                network_mode="none",
                use_config_proxy=False,
                log_config=docker.types.LogConfig(type="json-file", config={"max-size": MAX_ENGINE_LOG}),
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                mem_limit=hints.memory,
                memswap_limit=hints.memory,
                pids_limit=4096,
                shm_size=SHM_BYTES,
                tmpfs={"/tmp": f"rw,exec,nosuid,nodev,size={TMPFS_BYTES},mode=1777"},  # noqa: S108
                mounts=[
                    docker.types.Mount(f"{WORKDIR}/{name}", str(folder / name), type="bind", read_only=read_only)
                    for name, read_only in (("job.json", True), ("in", True), ("out", False), ("scratch", False))
                ],
                labels={LABEL: self._scope, f"{LABEL}.owner": builder_mark()},
            )
        try:
            with engine_errors(f"running a container of {image}"):
                return self._follow(container, hints, log, on_event)
        finally:
            self._remove(container)

    def _pythonpath(self, folder: Path, image: str) -> str:
        with engine_errors(f"inspecting image {image}"):
            found = self._client.images.get(self._reference(image))
        baked = dict(row.split("=", 1) for row in found.attrs["Config"].get("Env") or []).get("PYTHONPATH", "")
        ours = [f"{WORKDIR}/{name}" for name in wheels(folder)]
        return ":".join([*ours, *([baked] if baked else [])])

    def _follow(self, container: Any, hints: Hints, log: Path, on_event: OnEvent) -> Ended:
        container.start()
        with _streams(container, log, on_event):
            deadline = time.monotonic() + hints.deadline
            try:
                while True:
                    container.reload()
                    state = container.attrs["State"]
                    if state["Status"] not in ("created", "running"):
                        break
                    if time.monotonic() > deadline:
                        container.kill()
                        return Ended(137, "deadline")
                    time.sleep(0.15)
            except BaseException:
                self._remove(container)  # before its streams are waited for, or they would not end
                raise
        return Ended(int(state["ExitCode"]), "memory" if state.get("OOMKilled") else "exited")

    def _remove(self, container: Any) -> None:
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
            container.remove(force=True, v=True)

    def sweep(self) -> int:
        """Remove this store's containers whose builder is gone."""
        removed = 0
        with engine_errors("looking for abandoned containers"):
            for container in self._client.containers.list(all=True, filters={"label": f"{LABEL}={self._scope}"}):
                if abandoned(container.labels.get(f"{LABEL}.owner", "")):
                    self._remove(container)
                    removed += 1
        return removed


def _absent(image: str, reference: str, said: str) -> ReleaseError:
    return ReleaseError(
        "IMAGE_ABSENT",
        f"image {image} is not in the engine and could not be pulled: {said}"[:500],
        expected=reference,
        actual="absent",
    )


def _prepare_owner(folder: Path) -> tuple[int, int]:
    """User and group of the container: this user, or an unprivileged one to whom root gives the job's two folders."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    for name in ("out", "scratch"):
        root = folder / name
        for path in (root, *root.rglob("*")):
            os.chown(path, UNPRIVILEGED, UNPRIVILEGED, follow_symlinks=False)
    return UNPRIVILEGED, UNPRIVILEGED


@contextlib.contextmanager
def _streams(container: Any, log: Path, on_event: OnEvent) -> Iterator[None]:
    """Read a started container's stdout as events and its stderr into `log`, to their ends.

    The end of a stream says nothing about the job: an engine that dies ends it cleanly.
    """
    sources = [container.logs(stdout=out, stderr=not out, stream=True, follow=True) for out in (True, False)]
    readers = [
        threading.Thread(target=_read_events, args=(sources[0], on_event), daemon=True),
        threading.Thread(target=_read_log, args=(sources[1], log), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        for reader, source in zip(readers, sources, strict=True):
            reader.join(5)
            if reader.is_alive():
                continue
            with contextlib.suppress(OSError):
                source._response.close()  # noqa: SLF001  the stream's own close() leaves the response open


def _read_log(source: Iterator[bytes], log: Path) -> None:
    with contextlib.suppress(requests.exceptions.RequestException, OSError, ValueError), log.open("ab") as sink:
        for chunk in source:
            sink.write(chunk)
            sink.flush()


def _read_events(source: Iterator[bytes], on_event: OnEvent) -> None:
    pending = b""
    with contextlib.suppress(requests.exceptions.RequestException, OSError, ValueError):
        for chunk in source:
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                event = parse_event(line.decode("utf-8", "replace"))
                if event is not None:
                    with contextlib.suppress(OSError):
                        on_event(event)
            pending = pending[-MAX_LINE:]
