"""Make the two base images of the tests from Debian packages, load them and push them: `bases.py DIR REGISTRY`.

builder: a shell, python3 with pip, libnuma1. runtime: what a small public Python image has, and no pip. Both are
bookworm, whose Python is 3.11. Root file systems are kept in DIR/bases; prints `NAME=repository@sha256:…` lines.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
from pathlib import Path

SUITE = "bookworm"
MIRROR = os.environ.get("QUANTMINT_DEBIAN_MIRROR", "http://deb.debian.org/debian")
EPOCH = 1_700_000_000
CREATED = "2023-11-14T22:13:20Z"
COMMON = "base-files,base-passwd,netbase,ca-certificates,dash,python3,libstdc++6,libgomp1,zlib1g"
PACKAGES = {
    "builder": f"{COMMON},bash,coreutils,findutils,sed,grep,tar,gzip,python3-pip,libnuma1",
    "runtime": f"{COMMON},util-linux",  # vLLM on CPU asks `sh -c lscpu` for the cores
}
DROPPED = re.compile(
    r"(usr/share/(doc|man|locale|info|lintian|bug|bash-completion|perl5?|debconf)|var/(cache|log|lib/(apt|dpkg))|dev)/."
    r"|usr/lib/python3(\.11)?/(test|idlelib|tkinter|turtledemo|lib2to3|pydoc_data|ensurepip)/."
)
PASSWD = (
    b"root:x:0:0:root:/root:/usr/sbin/nologin\n"
    b"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    b"nonroot:x:65532:65532:nonroot:/nonexistent:/usr/sbin/nologin\n"
)
GROUP = b"root:x:0:\nnogroup:x:65534:\nnonroot:x:65532:\n"


def root_file_system(kind: str, target: Path) -> None:
    """Extract the packages (no maintainer script runs) and write a sorted tar whose bytes depend on them alone."""
    raw = target.with_suffix(".raw")
    command = [
        "mmdebstrap", "--quiet", "--variant=extract", "--format=tar", f"--include={PACKAGES[kind]}",
        SUITE, str(raw), MIRROR,
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)})
    part = target.with_suffix(".part")
    with tarfile.open(raw) as source, tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as sink:
        members = {entry.name.removeprefix("./").rstrip("/"): entry for entry in source}
        certificates = []
        for name, entry in sorted(members.items()):
            if name.startswith("usr/share/ca-certificates/") and entry.isreg():
                body = source.extractfile(entry)
                assert body is not None
                certificates.append(body.read())
        written = {
            "etc/passwd": (PASSWD, 0o644),
            "etc/group": (GROUP, 0o644),
            "etc/ssl/certs/ca-certificates.crt": (b"".join(certificates), 0o644),
        }
        for name in sorted({*members, *written, "tmp"} - {""}):
            if DROPPED.match(name):
                continue
            if name in written:
                data, mode = written[name]
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode, entry.mtime = len(data), mode, EPOCH
                sink.addfile(entry, io.BytesIO(data))
                continue
            if name == "tmp":
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            else:
                entry = members[name]
            entry.name, entry.mtime, entry.uname, entry.gname = name, EPOCH, "", ""
            if entry.islnk():
                entry.linkname = entry.linkname.removeprefix("./")
            sink.addfile(entry, source.extractfile(entry) if entry.isreg() else None)
    raw.unlink()
    part.rename(target)


def archive(layer: Path, target: Path, tag: str, architecture: str) -> str:
    """Write `layer` as an image that `docker load` reads; its ID, the digest of its configuration."""
    with layer.open("rb") as source:
        diff = hashlib.file_digest(source, "sha256").hexdigest()
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": CREATED,
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Cmd": ["python3"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]},
        "history": [{"created": CREATED, "created_by": "tests/engine/bases.py"}],
    }
    encoded = json.dumps(config, sort_keys=True).encode()
    identity = hashlib.sha256(encoded).hexdigest()
    index = [{"Config": f"{identity}.json", "RepoTags": [tag], "Layers": [f"{diff}/layer.tar"]}]
    with tarfile.open(target, "w") as sink:
        for name, data in ((f"{identity}.json", encoded), ("manifest.json", json.dumps(index).encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            sink.addfile(entry, io.BytesIO(data))
        entry = tarfile.TarInfo(f"{diff}/layer.tar")
        entry.size = layer.stat().st_size
        with layer.open("rb") as source:
            sink.addfile(entry, source)
    return f"sha256:{identity}"


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def main(folder: Path, registry: str) -> None:
    bases = folder / "bases"
    bases.mkdir(parents=True, exist_ok=True)
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    for kind in PACKAGES:
        layer = bases / f"{kind}-{architecture}-{recipe}.tar"
        if not layer.exists():
            root_file_system(kind, layer)
        tag = f"{registry}/base/{kind}:bookworm"
        image = bases / f"{kind}.image.tar"
        archive(layer, image, tag, architecture)
        docker("load", "--quiet", "--input", str(image))
        image.unlink()
        docker("push", "--quiet", tag)
        digests = json.loads(docker("image", "inspect", "--format", "{{json .RepoDigests}}", tag))
        reference = next(digest for digest in digests if digest.startswith(f"{registry}/base/{kind}@"))
        sys.stdout.write(f"QUANTMINT_{kind.upper()}_IMAGE={reference}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
