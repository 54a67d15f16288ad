"""Pins and locks: what is read is what was written, a tag is never a pin, and the committed files hold together."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.errors import ReleaseError
from quantmint.images import (
    ELSEWHERE,
    IMAGES,
    MACHINES,
    Base,
    Bases,
    Pinned,
    Pins,
    Requirement,
    known,
    merged,
    normal,
    parse_lock,
    parse_pins,
    parse_wheel,
    pinned,
    render_lock,
    render_pins,
    resolve,
)

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
BASES = """
[bases.builder]
ref = "python:3.11"

[bases.runtime]
ref = "python:3.11-slim"
"""

digests = st.text("0123456789abcdef", min_size=64, max_size=64).map("sha256:".__add__)
references = st.one_of(
    digests, st.builds("{}@{}".format, st.sampled_from(["a/b", "127.0.0.1:5000/x/y", "ghcr.io/o/r"]), digests)
)
platforms = st.dictionaries(st.sampled_from(sorted(MACHINES)), references, max_size=2)
bases = st.builds(Base, ref=st.text(max_size=30), platforms=platforms)
pin_documents = st.builds(
    lambda both, images: Pins(schema=1, bases=both, images=images),
    st.none() | st.builds(Bases, builder=bases, runtime=bases),
    st.dictionaries(st.sampled_from(sorted(IMAGES)), st.builds(Pinned, platforms=platforms)),
)
names = st.from_regex(r"[a-z0-9](?:[a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
requirements = st.dictionaries(
    names,
    st.tuples(st.from_regex(r"[0-9][a-z0-9.+]{0,8}", fullmatch=True), st.sets(digests, min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
).map(
    lambda rows: [
        Requirement(name=name, version=version, hashes=tuple(sorted(hashes)))
        for name, (version, hashes) in rows.items()
    ]
)


def refusal(text: str) -> ReleaseError:
    with pytest.raises(ReleaseError) as caught:
        parse_pins(text, file="pins.toml")
    return caught.value


# pins


@given(pin_documents, st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=40))
def test_pins_survive_their_text(pins: Pins, comment: str) -> None:
    text = render_pins(pins, comment=comment)
    assert parse_pins(text, file="pins.toml") == pins
    assert render_pins(parse_pins(text, file="pins.toml"), comment=comment) == text


@given(pin_documents, pin_documents)
def test_local_pins_win_and_nothing_else_is_lost(committed: Pins, local: Pins) -> None:
    both = merged(committed, local)
    for name in {*committed.images, *local.images}:
        mine = local.images[name].platforms if name in local.images else {}
        theirs = committed.images[name].platforms if name in committed.images else {}
        for platform in {*mine, *theirs}:
            assert resolve(both, name, platform) == (mine.get(platform) or theirs[platform])
    assert both.bases == (local.bases or committed.bases)
    assert merged(committed, None) == committed


def test_an_image_that_is_not_pinned_here_is_named_with_where_it_is() -> None:
    pins = pinned(Pins(schema=1), "serve", "linux/amd64", f"r/serve@{A}")
    assert resolve(pins, "serve", "linux/amd64") == f"r/serve@{A}"
    with pytest.raises(ReleaseError, match="serve on linux/arm64") as caught:
        resolve(pins, "serve", "linux/arm64")
    assert (caught.value.code, caught.value.actual) == ("IMAGE_UNPINNED", "pinned for linux/amd64")
    with pytest.raises(ReleaseError) as caught:
        resolve(pins, "modelopt", "linux/amd64")
    assert (caught.value.code, caught.value.actual) == ("IMAGE_UNPINNED", "not pinned for any platform")


def test_pinning_replaces_one_platform_only() -> None:
    pins = pinned(Pins(schema=1), "serve", "linux/amd64", A)
    pins = pinned(pins, "serve", "linux/arm64", A)
    assert pinned(pins, "serve", "linux/amd64", B).images["serve"].platforms == {"linux/amd64": B, "linux/arm64": A}


@pytest.mark.parametrize(
    "reference",
    [
        "r/serve:latest",
        "r/serve",
        f"r/serve:1@{A}",
        f"r/serve@{A[:-1]}",
        f"r/serve@{A.upper()}",
        "",
        f"@{A}",
        f"r/s@{A}\\n",
    ],
)
def test_a_pin_is_a_digest_and_nothing_else(reference: str) -> None:
    error = refusal(f'schema = 1\n[images.serve.platforms]\n"linux/amd64" = "{reference}"\n')
    assert error.code == "INVALID_VALUE"
    assert error.file == "pins.toml"


def test_bad_pins_are_refused_by_name() -> None:
    assert refusal("schema = 1\n[image]\n").message == "unknown key 'image'; did you mean 'images'?"
    assert refusal(BASES).code == "INVALID_VALUE"  # no schema
    assert refusal("schema = 2\n").code == "INVALID_VALUE"
    assert refusal("schema = \n").code == "RECIPE_SYNTAX"
    assert refusal(f'schema = 1\n[images.serve.platforms]\n"linux/s390x" = "{A}"\n').code == "INVALID_VALUE"


def test_the_committed_pins_are_what_the_writer_writes(root: Path) -> None:
    text = (root / "images" / "pins.toml").read_text("utf-8")
    comment = "\n".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    pins = parse_pins(text, file="pins.toml")
    assert render_pins(pins, comment=comment) == text
    assert pins.bases is not None
    assert set(pins.images) <= set(IMAGES)


# locks


@given(requirements, st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=40))
def test_locks_survive_their_text(entries: list[Requirement], comment: str) -> None:
    text = render_lock(entries, comment=comment)
    lock = parse_lock(text, file="x.lock")
    assert list(lock.requirements) == sorted(entries, key=lambda entry: entry.name)
    assert render_lock(lock.requirements, comment=comment) == text
    assert render_lock(reversed(entries), comment=comment) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only words\n",
        "idna==3.20\n",
        "idna \\\n    --hash=" + A + "\n",
        "idna>=3 --hash=" + A + "\n",
        "idna==3 --hash=md5:abc\n",
        "--index-url https://elsewhere\nidna==3 --hash=" + A + "\n",
        "idna @ https://elsewhere/idna.whl --hash=" + A + "\n",
        "b==1 --hash=" + A + "\na==1 --hash=" + A + "\n",
        "a==1 --hash=" + A + "\na==2 --hash=" + A + "\n",
    ],
)
def test_what_is_not_locked_is_refused(text: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        parse_lock(text, file="x.lock")
    assert (caught.value.code, caught.value.file) == ("INVALID_VALUE", "x.lock")


@pytest.mark.parametrize("image", IMAGES.values(), ids=lambda image: image.name)
def test_committed_locks_hold_what_is_asked_for(image: object, root: Path) -> None:
    assert image in IMAGES.values()
    wanted = known(image.name)  # type: ignore[attr-defined]
    lock = parse_lock((root / wanted.lock).read_text("utf-8"), file=wanted.lock)
    held = {entry.name: entry.version for entry in lock.requirements}
    rows = [
        line for line in (root / wanted.source).read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]
    for row in rows:
        name, exact = re.fullmatch(r"([a-z0-9-]+)(?:==(\S+)|[<>].*)?", row).groups()  # type: ignore[union-attr]
        assert name in held
        assert exact is None or held[name] == exact
    assert held.keys().isdisjoint(wanted.without)
    for entry in lock.requirements:
        published = ELSEWHERE.get(f"{entry.name}=={entry.version}")
        assert published is None or set(entry.hashes) == set(published)
    assert ("torch" in held) == (wanted.index is not None)


def test_the_verify_image_asks_for_our_dependencies_and_not_for_builders(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    rows = [row for row in (root / "images" / "verify.in").read_text("utf-8").splitlines() if not row.startswith("#")]
    left_out = ("docker", "hatchling")
    assert sorted(rows) == sorted(row for row in project["dependencies"] if not row.startswith(left_out))


def test_every_image_is_a_target_of_the_dockerfile(root: Path) -> None:
    text = (root / "Dockerfile").read_text("utf-8")
    for image in IMAGES.values():
        assert f"FROM runtime AS {image.target}\n" in text
    assert not re.search(r"^ARG (BUILDER|RUNTIME)_IMAGE=", text, re.MULTILINE)
    assert all("${" in line or line.split()[1].isidentifier() for line in text.splitlines() if line.startswith("FROM "))


def test_an_unknown_image_is_told_with_the_known_ones() -> None:
    with pytest.raises(ReleaseError) as caught:
        known("exl9")
    assert (caught.value.code, caught.value.expected) == ("INVALID_ARGUMENT", "modelopt, serve, verify")


BOTH = frozenset(MACHINES.values())


@pytest.mark.parametrize(
    ("filename", "machines"),
    [
        ("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", {"x86_64"}),
        ("ninja-1.13.2-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl", {"aarch64"}),
        ("cryptography-50.0.2-cp39-abi3-manylinux_2_34_x86_64.whl", {"x86_64"}),
        ("six-1.17.0-py2.py3-none-any.whl", BOTH),
        ("idna-3.20-py3-none-any.whl", BOTH),
        ("numpy-2-1-cp311-cp311-linux_aarch64.whl", {"aarch64"}),
        ("numpy-2-cp312-cp312-manylinux_2_28_x86_64.whl", None),
        ("numpy-2-cp311-cp311t-manylinux_2_28_x86_64.whl", None),
        ("numpy-2-cp311-cp311-musllinux_1_2_x86_64.whl", None),
        ("numpy-2-cp311-cp311-macosx_14_0_arm64.whl", None),
        ("numpy-2-cp311-cp311-win_amd64.whl", None),
        ("numpy-2-cp312-abi3-manylinux_2_28_x86_64.whl", None),
        ("old-1-py2-none-any.whl", None),
        ("new-1-py312-none-any.whl", None),
        ("numpy-2.tar.gz", None),
        ("x.whl", None),
    ],
)
def test_wheels_are_known_by_their_names(filename: str, machines: set[str] | None) -> None:
    wheel = parse_wheel(filename)
    assert (wheel.machines if wheel is not None else None) == machines


@given(st.text(max_size=60))
def test_no_file_name_is_trouble(text: str) -> None:
    assert parse_wheel(text) is None or text.endswith(".whl")


def test_names_have_one_form() -> None:
    assert {normal(name) for name in ("Foo_Bar", "foo.bar", "FOO--bar", "foo-_bar")} == {"foo-bar"}
