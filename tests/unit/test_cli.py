"""The command line: bad input is one clear error with the right exit code, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantmint import cli
from quantmint.errors import CODES
from quantmint.manifest import FINDINGS


@pytest.fixture
def project(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own: the real tree without weights, and a tiny source folder."""
    copy = tmp_path / "project"
    for name in ("pyproject.toml", "LICENSE", "builder", "manifests", "overlays", "images"):
        origin = root / name
        if origin.is_dir():
            shutil.copytree(origin, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(origin, copy / name)
    fixtures = copy / "tests" / "fixtures" / "tiny-laguna"
    fixtures.mkdir(parents=True)
    (fixtures.parent / "tiny-laguna.probes.json").write_text("[]")
    shutil.copy(root / "tests" / "fixtures" / "tiny-laguna" / "config.json", fixtures)
    monkeypatch.setenv("QUANTMINT_ROOT", str(copy))
    monkeypatch.setenv("QUANTMINT_STORE", str(tmp_path / "state"))
    monkeypatch.delenv("QUANTMINT_PINS", raising=False)
    return copy


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code, out, _ = ask(capsys, *arguments, "--json")
    found = json.loads(out)["error"]
    assert code == found["exit_code"] == int(CODES[found["code"]].exit_code)
    assert found["hint"]
    assert isinstance(found, dict)
    return found


def edited(project: Path, old: str, new: str) -> None:
    path = project / "manifests" / "recipes" / "demo.toml"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")


def test_an_unknown_recipe_gets_the_nearest_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = error(capsys, "release", "dmeo")
    assert found["code"] == "UNKNOWN_RECIPE"
    assert "did you mean 'demo'" in str(found["message"])


def test_an_unknown_key_gets_the_nearest_key(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(project, "title =", "titel =")
    found = error(capsys, "plan", "demo")
    assert (found["code"], found["file"]) == ("UNKNOWN_KEY", "manifests/recipes/demo.toml")
    assert "did you mean 'title'" in str(found["message"])


def test_a_wrong_type_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(project, "schema = 1", 'schema = "one"')
    found = error(capsys, "plan", "demo")
    assert found["code"] == "INVALID_VALUE"
    assert found["actual"] == "'one'"


def test_a_changed_source_is_refused_before_anything_runs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = error(capsys, "release", "demo", "--runner", "process", "--progress", "quiet", "--only", "fetch")
    assert found["code"] == "SOURCE_CHANGED"
    assert str(found["expected"]).startswith("sha256:")
    assert str(found["actual"]).startswith("sha256:")
    assert not (project / "dist").exists()


def test_a_missing_source_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(project, 'uri = "dir:tests/fixtures/tiny-laguna"', 'uri = "dir:tests/fixtures/elsewhere"')
    found = error(capsys, "release", "demo", "--runner", "process", "--progress", "quiet")
    assert (found["code"], found["file"]) == ("SOURCE_MISSING", "tests/fixtures/elsewhere")


@pytest.mark.parametrize("named", ["overlays/laguna", "tests/fixtures/tiny-laguna.probes.json", "LICENSE"])
def test_what_a_recipe_names_and_is_not_there_stops_it_before_anything_runs(
    project: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    edited(project, f'"{named}"', f'"{named}-elsewhere"')
    found = error(capsys, "release", "demo", "--runner", "process", "--progress", "quiet", "--dry-run")
    assert (found["code"], found["file"]) == ("SOURCE_MISSING", f"{named}-elsewhere")


def test_an_occupied_output_is_refused_and_untouched(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    found = error(capsys, "release", "demo", "--runner", "process", "--progress", "quiet", "--out", str(out))
    assert found["code"] == "OUTPUT_NOT_EMPTY"
    assert [entry.name for entry in out.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(("text", "code"), [(None, "KEY_MISSING"), ("not a key", "KEY_INVALID")])
def test_a_bad_signing_key_stops_before_any_stage(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, code: str
) -> None:
    key = tmp_path / "key.pem"
    if text is not None:
        key.write_text(text)
    found = error(capsys, "release", "demo", "--runner", "process", "--key", str(key))
    assert found["code"] == code
    assert "not a key" not in str(found)


def test_an_unreachable_engine_is_told(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    found = error(capsys, "release", "demo", "--runner", "container", "--progress", "quiet")
    assert found["code"] == "ENGINE_UNREACHABLE"


@pytest.mark.parametrize("recipe", ["hybrid-3.25", "nvfp4-w4a16-quality"])
def test_the_real_releases_plan_but_do_not_run_here(
    project: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    code, out, _ = ask(capsys, "plan", recipe, "--json")
    assert code == 0
    assert json.loads(out)["not_runnable"]
    found = error(capsys, "release", recipe, "--runner", "process", "--progress", "quiet")
    assert found["code"] in ("NOT_RUNNABLE_HERE", "SOURCE_UNPINNED")


@pytest.mark.parametrize(
    "arguments", [("--only", "nosuch"), ("--skip", "quantize"), ("--from", "nosuch"), ("--progress", "loud")]
)
def test_arguments_that_do_not_fit_the_plan(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    assert error(capsys, "release", "demo", "--runner", "process", *arguments)["code"] == "INVALID_ARGUMENT"


def test_a_full_disk_is_told_before_it_is_full(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(project, "[sources.base]", "[sources.base]")
    usage = shutil.disk_usage(project)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1))
    assert error(capsys, "release", "demo", "--runner", "process", "--progress", "quiet")["code"] == "DISK_FULL"


def test_explain_knows_every_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "explain", "--json")
    assert code == 0
    assert {row["code"] for row in json.loads(out)} == {*CODES, *FINDINGS}
    assert error(capsys, "explain", "GATE_FALED")["code"] == "UNKNOWN_CODE"


def test_usage_errors_are_json_where_json_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert error(capsys, "verify")["code"] == "INVALID_ARGUMENT"
    assert error(capsys, "release", "demo", "--epoch", "99999999999999999999")["code"] == "INVALID_ARGUMENT"


def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ask(capsys, "verify")
    assert code == 2
    assert "error" in err


def test_keys_are_made_once_and_never_without_a_passphrase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(capsys, "keys", "generate", str(tmp_path / "a.key"))["code"] == "KEY_PASSPHRASE"
    assert not list(tmp_path.glob("a.key*"))
    monkeypatch.setenv("QUANTMINT_KEY_PASSPHRASE", "correct horse")
    code, out, err = ask(capsys, "keys", "generate", str(tmp_path / "a.key"), "--json")
    assert code == 0, err
    assert json.loads(out)["keyId"]
    assert "ENCRYPTED" in (tmp_path / "a.key").read_text()
    assert error(capsys, "keys", "generate", str(tmp_path / "a.key"))["code"] == "KEY_EXISTS"


def test_outside_a_project_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUANTMINT_ROOT", str(tmp_path))
    assert error(capsys, "plan", "demo")["code"] == "SOURCE_MISSING"


def test_foreign_text_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from quantmint.console import say

    say("a\x1b[31mb")
    assert "\x1b" not in capsys.readouterr().err
