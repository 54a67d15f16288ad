"""The door to pip: locks with hashes, one wheelhouse for all images, and the process runner's virtual environments.

Wheels are for the Python of the images, whatever Python runs here. Nothing is ever installed without its hash, nothing
is built from source, and an environment is made offline, from the wheelhouse alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from quantmint.artifact import digest_of
from quantmint.document import canonical, parse_json
from quantmint.errors import ReleaseError
from quantmint.images import (
    ELSEWHERE,
    MACHINES,
    PYTHON,
    Image,
    Lock,
    Requirement,
    known,
    normal,
    parse_lock,
    parse_wheel,
    render_lock,
)
from quantmint.runner import NATIVE, OnEvent
from quantmint.store import Store, clear, disk_errors, hash_file, held_locks

BATCH = 12
"""Requirements that one call of pip fetches: the most that an interrupted download loses."""
GLIBC = range(36, 4, -1)
"""Minor versions of glibc 2 whose wheels run on the images: up to that of Debian bookworm."""
FINISH = "images/finish.py"


def lock_of(root: Path, name: str) -> Lock:
    """The lock of image `name` in the project at `root`.

    Raises:
        ReleaseError: INVALID_ARGUMENT, LOCK_MISSING or INVALID_VALUE.
    """
    image = known(name)
    try:
        text = (root / image.lock).read_text("utf-8")
    except FileNotFoundError:
        raise ReleaseError("LOCK_MISSING", f"image {name} has no lock file", file=image.lock) from None
    return parse_lock(text, file=image.lock)


# fetching


def fetch(name: str, *, root: Path, state: Path, on_event: OnEvent, machine: str | None = None) -> tuple[Path, ...]:
    """Bring every wheel that image `name` locks for `machine` (default: this one) into `state`/wheelhouse.

    Files that are there are kept, a killed run goes on where it stood, and a complete wheelhouse needs no network.
    Emits `progress` events with unit `wheels`. The wheels, in the order of the lock.

    Raises:
        ReleaseError: LOCK_MISSING, WHEELS_UNAVAILABLE, DISK_FULL or MISSING_EXTRA (this Python has no pip).
    """
    image, lock = known(name), lock_of(root, name)
    machine = machine or platform.machine()
    store = Store(state)
    house = store.folder("wheelhouse")
    note = store.folder("wheelhouse", "complete") / f"{lock.digest.removeprefix('sha256:')}-{machine}.json"
    complete = _noted(note, house)
    if complete is not None:
        return complete
    with store.lock("wheelhouse", waiting=lambda: on_event({"event": "note", "text": "waiting for the wheelhouse"})):
        complete = _noted(note, house)
        if complete is not None:
            return complete
        found = _present(lock, house, machine)
        missing = [entry for entry in lock.requirements if entry.name not in found]
        for batch in _batches(missing):
            _tell(on_event, name, len(found), len(lock.requirements))
            _download(image, batch, house, machine)
            found.update(_present(Lock(requirements=tuple(batch), digest=lock.digest), house, machine))
            absent = [entry.name for entry in batch if entry.name not in found]
            if absent:
                names = ", ".join(absent)
                raise ReleaseError("WHEELS_UNAVAILABLE", f"pip brought no wheel for {names}", file=image.lock)
        _tell(on_event, name, len(found), len(lock.requirements))
        wheels = tuple(found[entry.name] for entry in lock.requirements)
        rows: list[tuple[str, int]] = [(wheel.name, wheel.stat().st_size) for wheel in wheels]
        with disk_errors():
            note.with_suffix(".part").write_bytes(canonical(rows))
            note.with_suffix(".part").rename(note)
        return wheels


def _tell(on_event: OnEvent, name: str, done: int, total: int) -> None:
    on_event({"event": "progress", "text": f"wheels of {name}", "done": done, "total": total, "unit": "wheels"})


def _noted(note: Path, house: Path) -> tuple[Path, ...] | None:
    """The wheels of a complete fetch, when each still stands there with its size; pip checks hashes once more."""
    try:
        rows = json.loads(note.read_bytes())
        wheels = tuple(house / str(file) for file, _ in rows)
        whole = all(wheel.stat().st_size == size for wheel, (_, size) in zip(wheels, rows, strict=True))
    except (OSError, ValueError):
        return None
    return wheels if whole else None


def _present(lock: Lock, house: Path, machine: str) -> dict[str, Path]:
    """Wheels of the wheelhouse that satisfy a requirement by hash and run on `machine`, by requirement name."""
    wanted = {(entry.name, entry.version): entry for entry in lock.requirements}
    found: dict[str, Path] = {}
    for file in sorted(house.glob("*.whl")):
        wheel = parse_wheel(file.name)
        entry = wanted.get((wheel.name, wheel.version)) if wheel is not None else None
        if wheel is None or entry is None or not wheel.runs_on(machine):
            continue
        if hash_file(file)[0] in entry.hashes:
            found[entry.name] = file
    return found


def _batches(missing: Sequence[Requirement]) -> Iterator[list[Requirement]]:
    """The common ones in groups, then each that may need another index alone."""
    apart = [entry for entry in missing if f"{entry.name}=={entry.version}" in ELSEWHERE]
    common = [entry for entry in missing if entry not in apart]
    for start in range(0, len(common), BATCH):
        yield common[start : start + BATCH]
    for entry in apart:
        yield [entry]


def _download(image: Image, batch: Sequence[Requirement], house: Path, machine: str) -> None:
    tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"manylinux2014_{machine}", f"linux_{machine}"]
    if machine == "x86_64":
        tags += ["manylinux2010_x86_64", "manylinux1_x86_64"]
    with disk_errors(), tempfile.TemporaryDirectory(dir=house, prefix="fetch-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(render_lock(batch, comment=""), "utf-8")
        target = Path(folder) / "wheels"
        command = [
            "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
            "--implementation=cp", f"--python-version={PYTHON}", f"--abi=cp{PYTHON.replace('.', '')}",
            *[f"--platform={tag}" for tag in tags],
            "--dest", str(target), "--requirement", str(requirements),
        ]  # fmt: skip
        try:
            _pip(*command)
        except ReleaseError as error:
            elsewhere = any(f"{entry.name}=={entry.version}" in ELSEWHERE for entry in batch)
            if error.code != "WHEELS_UNAVAILABLE" or image.index is None or not elsewhere:
                raise
            _pip(*command, f"--extra-index-url={image.index}", "--timeout=20", "--retries=1")
        for wheel in sorted(target.glob("*.whl")):
            wheel.rename(house / wheel.name)


def _run(command: list[str], more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python that sees no packages but its own; it holds our locks for as long as it lives, also when we die."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(  # noqa: S603  our own words
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONNOUSERSITE": "1", **(more or {})},
        pass_fds=held_locks(),
    )


def _pip(*arguments: str, python: Path | None = None) -> str:
    """Run pip with this interpreter, on the environment of `python` when given; its output.

    Raises:
        ReleaseError: WHEELS_UNAVAILABLE with pip's last words, DISK_FULL or MISSING_EXTRA.
    """
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    if python is not None:
        command += ["--python", str(python)]
    done = _run([*command, *arguments])
    if done.returncode == 0:
        return done.stdout
    said = done.stderr + done.stdout
    if "No space left on device" in said:
        raise ReleaseError("DISK_FULL", "the disk filled up while pip was working")
    if "No module named pip" in said:
        raise ReleaseError(
            "MISSING_EXTRA", "this Python has no pip", hint="Run python3 -m ensurepip, or install python3-pip."
        )
    errors = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()[-3:]
    raise ReleaseError("WHEELS_UNAVAILABLE", f"pip failed: {' '.join(errors)[:800]}")


# environments of the process runner


def environment(name: str, *, root: Path, state: Path, on_event: OnEvent) -> tuple[Path, str]:
    """The Python of a virtual environment that holds what image `name` locks, and the digest of what it was made from.

    Made offline from the wheelhouse (see `fetch`) at `state`/environments, once for each digest; processes that ask at
    once wait for the first, and one that a killed process left half made is made anew.

    Raises:
        ReleaseError: as `fetch`, and INTERPRETER_MISSING when this machine has no Python `PYTHON`.
    """
    image, lock = known(name), lock_of(root, name)
    finish = root / FINISH
    digest = digest_of(
        canonical(
            {
                "lock": lock.digest,
                "finish": digest_of(finish.read_bytes()),
                "provides": [list(pair) for pair in image.provides],
                "libraries": [list(pair) for pair in image.libraries],
            }
        )
    )
    store = Store(state)
    folder = store.folder("environments") / f"{name}-{digest.removeprefix('sha256:')[:16]}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.is_file() and python.exists():
        return python, digest
    base = interpreter(state, on_event)
    fetch(name, root=root, state=state, on_event=on_event)
    waiting = {"event": "note", "text": f"another process is making the environment of {name}"}
    with store.lock(f"environment-{folder.name}", waiting=lambda: on_event(waiting)), disk_errors():
        if complete.is_file() and python.exists():
            return python, digest
        clear(folder)
        on_event({"event": "note", "text": f"making the environment of {name}"})
        _python([base, "-m", "venv", "--without-pip", str(folder)])
        _pip(
            "install", "--quiet", "--isolated", "--no-index", "--no-deps", "--no-compile", "--require-hashes",
            "--no-warn-script-location", "--only-binary=:all:", "--find-links", str(state / "wheelhouse"),
            "--requirement", str(root / image.lock),
            python=python,
        )  # fmt: skip
        site = folder / "lib" / f"python{PYTHON}" / "site-packages"
        _python([str(python), str(finish), str(site), *[f"{alias}={of}" for alias, of in image.provides]])
        present = {normal(info.name.partition("-")[0]) for info in site.glob("*.dist-info")}
        absent = [entry.name for entry in lock.requirements if entry.name not in present]
        if absent:
            raise ReleaseError("ENVIRONMENT_BROKEN", f"pip left out {', '.join(absent[:5])}", expected=image.lock)
        for library, package in image.libraries:
            bring(library, package, folder / NATIVE)
        complete.write_text(digest + "\n", "utf-8")
    return python, digest


def bring(library: str, package: str, target: Path) -> None:
    """Make sure that a shared library can be loaded: this machine's, or one unpacked from its Debian package.

    Raises:
        ReleaseError: ENVIRONMENT_BROKEN, telling which package to install.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(library)
        return
    with tempfile.TemporaryDirectory() as folder:
        for command in (["apt-get", "download", package], ["sh", "-c", "dpkg-deb -x *.deb tree"]):
            with contextlib.suppress(OSError):
                subprocess.run(command, cwd=folder, capture_output=True, check=False)  # noqa: S603  our own words
        found = next(Path(folder, "tree").rglob(library), None)
        if found is None:
            raise ReleaseError(
                "ENVIRONMENT_BROKEN",
                f"the shared library {library} is missing and could not be fetched",
                expected=library,
                hint=f"apt-get install {package}, or use a Docker engine.",
            )
        target.mkdir(exist_ok=True)
        shutil.copyfile(found, target / library)


def interpreter(state: Path, on_event: OnEvent, *, version: str = PYTHON) -> str:
    """A Python of `version`: this one, one that the machine has, or one that uv fetches into `state`/pythons.

    What uv fetches is python-build-standalone, checked against the hashes that uv itself carries.

    Raises:
        ReleaseError: INTERPRETER_MISSING.
    """
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is not None:
        return found
    said = "uv is not there to fetch it"
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is not None:
        place = {"UV_PYTHON_INSTALL_DIR": str(state / "pythons")}
        looking = [uv, "python", "find", "--no-project", "--quiet", version]
        done = _run(looking, place)
        if done.returncode != 0:
            on_event({"event": "note", "text": f"fetching Python {version} (python-build-standalone, by uv)"})
            fetched = _run([uv, "python", "install", "--no-bin", version], place)
            said = f"uv could not fetch it: {fetched.stderr.strip()[-300:]}"
            done = _run(looking, place)
        if done.returncode == 0:
            return done.stdout.strip()
    raise ReleaseError(
        "INTERPRETER_MISSING",
        f"the process runner needs Python {version}, as the images have it; {said}",
        expected=f"python{version} on PATH",
        actual=f"Python {sys.version_info[0]}.{sys.version_info[1]}",
    )


def _python(command: list[str]) -> None:
    done = _run(command)
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip()
        if "No space left on device" in said:
            raise ReleaseError("DISK_FULL", "the disk filled up while an environment was being made")
        raise ReleaseError("ENVIRONMENT_BROKEN", f"making an environment failed: {said[-800:]}")


# locks


def lock(name: str, *, root: Path, on_event: OnEvent) -> Path:
    """Resolve the authored requirements of image `name` anew and write its lock file; the file.

    Needs Python `PYTHON` on Linux x86_64 or aarch64, because pip evaluates conditions for the Python that runs it. Each
    entry takes the hashes of all wheels of its version for glibc Linux on both machines, from the configured index.

    Raises:
        ReleaseError: INTERPRETER_MISSING, SOURCE_MISSING, WHEELS_UNAVAILABLE or INVALID_VALUE.
    """
    image = known(name)
    source = root / image.source
    if not source.is_file():
        raise ReleaseError("SOURCE_MISSING", f"image {name} has no requirements file", file=image.source)
    if f"{sys.version_info[0]}.{sys.version_info[1]}" != PYTHON or platform.machine() not in MACHINES.values():
        raise ReleaseError(
            "INTERPRETER_MISSING",
            "locks are made with the Python of the images",
            expected=f"Python {PYTHON} on {' or '.join(MACHINES.values())}",
            actual=f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}",
        )
    on_event({"event": "note", "text": f"resolving the requirements of {name}"})
    arguments = [
        "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--report=-",
        "--requirement", str(source),
    ]  # fmt: skip
    try:
        report = _pip(*arguments)
    except ReleaseError as error:
        if error.code != "WHEELS_UNAVAILABLE" or image.index is None:
            raise
        report = _pip(*arguments, f"--extra-index-url={image.index}", "--timeout=20", "--retries=1")
    chosen = [row for row in json.loads(report)["install"] if normal(row["metadata"]["name"]) not in image.without]
    index, certificates = _configured()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: _requirement(row, index, certificates, image.lock), chosen))
    requirements = [requirement for requirement, _ in found]
    gaps = {
        machine: [requirement.name for requirement, machines in found if machine not in machines]
        for machine in MACHINES.values()
    }
    comment = _header(image, requirements, gaps)
    text = render_lock(requirements, comment=comment)
    parse_lock(text, file=image.lock)
    target = root / image.lock
    part = target.with_suffix(".part")
    with disk_errors():
        part.write_text(text, "utf-8")
        part.rename(target)
    return target


def _requirement(
    row: dict[str, Any], index: str, certificates: str | None, file: str
) -> tuple[Requirement, frozenset[str]]:
    """The locked form of what pip chose, and the machines that its wheels serve."""
    name, version = normal(row["metadata"]["name"]), str(row["metadata"]["version"])
    used = _hash_used(row, name)
    elsewhere = ELSEWHERE.get(f"{name}=={version}")
    if elsewhere is not None:
        if used not in elsewhere:
            raise ReleaseError(
                "INVALID_VALUE", f"the wheel of {name} is not the published one", file=file,
                expected=", ".join(elsewhere), actual=used,
            )  # fmt: skip
        return Requirement(name=name, version=version, hashes=tuple(sorted(elsewhere))), frozenset(MACHINES.values())
    wheels = _wheels_of_index(index, certificates, name, version)
    machines = frozenset(machine for served in wheels.values() for machine in served)
    return Requirement(name=name, version=version, hashes=tuple(sorted({used, *wheels}))), machines


def _hash_used(row: dict[str, Any], name: str) -> str:
    """The hash of the wheel that pip chose."""
    found = row["download_info"]
    stated = found.get("archive_info", {}).get("hashes", {}).get("sha256")
    if stated is not None:
        return f"sha256:{stated}"
    url = urlsplit(found["url"])
    if url.scheme == "file":
        return hash_file(Path(unquote(url.path)))[0]
    raise ReleaseError("WHEELS_UNAVAILABLE", f"the index states no hash for the wheel of {name}")


def _wheels_of_index(index: str, certificates: str | None, name: str, version: str) -> dict[str, frozenset[str]]:
    """Hashes of all fitting wheels of a version with their machines, from the simple index's JSON form (PEP 691)."""
    request = urllib.request.Request(  # noqa: S310  https, or what the person configured
        f"{index}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    try:
        with urllib.request.urlopen(  # noqa: S310
            request, timeout=60, context=ssl.create_default_context(cafile=certificates)
        ) as answer:
            page = parse_json(answer.read(), file=f"{name} on the package index")
    except (urllib.error.URLError, OSError) as error:
        raise ReleaseError("WHEELS_UNAVAILABLE", f"the package index does not answer for {name}: {error}") from error
    wheels: dict[str, frozenset[str]] = {}
    for file in page.get("files", []):
        wheel = parse_wheel(str(file.get("filename", "")))
        stated = file.get("hashes", {}).get("sha256")
        if wheel is not None and (wheel.name, wheel.version) == (name, version) and isinstance(stated, str):
            wheels[f"sha256:{stated}"] = wheel.machines
    return wheels


def _configured() -> tuple[str, str | None]:
    """The package index and the file of certificate authorities that pip is configured to use."""
    settings: dict[str, str] = {}
    for line in _pip("config", "list").splitlines():
        found = re.fullmatch(r"(?:global|:env:)\.(index-url|cert)='(.*)'", line)
        if found is not None:
            settings[found[1]] = found[2]
    return settings.get("index-url", "https://pypi.org/simple").rstrip("/"), settings.get("cert")


def _header(image: Image, requirements: Sequence[Requirement], gaps: Mapping[str, Sequence[str]]) -> str:
    machines = " or ".join(MACHINES.values())
    lines = [
        f"Written by `quantmint images lock {image.name}` from {image.source}. Do not edit.",
        f"Python {PYTHON}, glibc Linux. Each hash is that of a wheel for {machines}, or for both.",
    ]
    if image.without:
        lines.append(f"Left out on purpose, though something requires them: {', '.join(image.without)}.")
    lines += [f"No wheel for {machine}: {', '.join(names)}." for machine, names in gaps.items() if names]
    for entry in requirements:
        wheel = f"{entry.name}=={entry.version}"
        if wheel in ELSEWHERE:
            lines += [
                f"{wheel}: the CPU build, which the Python Package Index does not have. Where the configured index",
                f"lacks it too, it comes from {image.index}; the hashes are those that are published there.",
            ]
    return "\n".join(lines)
