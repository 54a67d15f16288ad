"""The overlay's own document and its decision: doubt is a refusal. No engine is needed here."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantmint_overlay_laguna import knowledge
from quantmint_overlay_laguna.knowledge import OverlayRefusedError, decide, digest, read

SOURCES = {"engine.a:f": "def f(): ...", "engine.a:g": "def g(): ...", "engine.b:C.h": "def h(self): ..."}
TEXT = f"""
schema = 1
overlay = "laguna"

[[fixes]]
name = "everywhere"
when = "always"
why = "because"
replaces = ["engine.a:f"]
relies-on = ["engine.a:g"]

[[fixes]]
name = "on-cpu"
when = "cpu"
why = "because"
label = "emulation"
replaces = ["engine.b:C.h"]

[[engines]]
distribution = "engine"
version = "1.0"

[engines.sources]
{"".join(f'"{name}" = "{digest(text)}"' + chr(10) for name, text in SOURCES.items())}
"""
KNOWN = {"engine": "1.0"}


def decided(device="cpu", disabled=frozenset(), installed=None, **changed):
    sources = {**SOURCES, **changed}
    return decide(
        read(TEXT), KNOWN if installed is None else installed, device, disabled=disabled, source=sources.__getitem__
    )


def test_a_known_engine_gets_every_fix_of_its_device():
    decision = decided()
    assert decision.applied == ("everywhere", "on-cpu")
    assert decision.labels == ("emulation",)
    assert decision.as_json()["fixes"] == {"everywhere": "applied", "on-cpu": "applied"}
    assert decision.as_json()["sources"] == {name: digest(text) for name, text in SOURCES.items()}


def test_a_gpu_engine_is_not_asked_about_what_only_the_cpu_needs():
    decision = decide(
        read(TEXT),
        KNOWN,
        "cuda",
        disabled=frozenset(),
        source={"engine.a:f": SOURCES["engine.a:f"], "engine.a:g": SOURCES["engine.a:g"]}.__getitem__,
    )
    assert decision.applied == ("everywhere",)
    assert decision.not_applicable == ("on-cpu",)
    assert decision.labels == ()


def test_a_disabled_fix_is_recorded_as_disabled():
    decision = decided(disabled=frozenset({"everywhere"}))
    assert decision.applied == ("on-cpu",)
    assert decision.as_json()["fixes"] == {"everywhere": "disabled", "on-cpu": "applied"}


def test_an_unknown_name_in_the_switch_is_refused():
    with pytest.raises(OverlayRefusedError, match="no fix is named everywhre; the fixes are everywhere, on-cpu"):
        decided(disabled=frozenset({"everywhre"}))


@pytest.mark.parametrize("installed", [{}, {"engine": "1.0.1"}, {"other": "1.0"}])
def test_an_engine_that_is_not_listed_is_refused(installed):
    with pytest.raises(OverlayRefusedError, match="nothing was patched"):
        decided(installed=installed)


@given(st.sampled_from(sorted(SOURCES)), st.text())
def test_any_other_source_is_refused_and_named(name, text):
    if text == SOURCES[name]:
        return
    with pytest.raises(OverlayRefusedError) as caught:
        decided(**{name: text})
    assert name in str(caught.value)
    assert digest(text) in str(caught.value)
    assert "nothing was patched" in str(caught.value)


def test_source_that_cannot_be_read_is_refused():
    def unreadable(function):
        raise OSError(function)

    with pytest.raises(OverlayRefusedError, match="cannot be read"):
        decide(read(TEXT), KNOWN, "cpu", disabled=frozenset(), source=unreadable)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ("schema = 1", "schema = 1\nextra = 1", "extra"),
        ('when = "cpu"', 'when = "tpu"', "when"),
        ('name = "on-cpu"', 'name = "everywhere"', "named twice"),
        ('"engine.b:C.h" = "sha256', '"engine.b:C.i" = "sha256', "disagree on engine.b:C.h, engine.b:C.i"),
        ("sha256:", "md5:", "engines.0.sources"),
        ("overlay =", "overlay", "not valid TOML"),
    ],
)
def test_the_document_is_closed(old, new, message):
    assert old in TEXT
    with pytest.raises(OverlayRefusedError, match=message):
        read(TEXT.replace(old, new, 1))


def test_the_shipped_document_is_whole():
    overlay = knowledge.shipped()
    assert overlay.overlay == "laguna"
    assert {fix.name: fix.when for fix in overlay.fixes} == {
        "router-bias": "always",
        "cpu-router": "cpu",
        "cpu-nvfp4": "cpu",
    }
    assert next(fix for fix in overlay.fixes if fix.name == "cpu-nvfp4").label == "dequantized emulation"


def test_the_entry_point_imports_nothing_that_could_fail(root):
    project = tomllib.loads((root / "overlays/laguna/pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "quantmint_overlay_laguna": "quantmint_overlay_laguna:register"
    }
    text = resources.files("quantmint_overlay_laguna").joinpath("__init__.py").read_text()
    top = [line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert set(top) == {"__future__", "copy", "json", "logging", "os", "typing"}
