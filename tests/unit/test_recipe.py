"""Recipes: the three that ship are sound, and every mistake gets one clear error."""

from __future__ import annotations

import json
import re
import tomllib

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.errors import ReleaseError
from quantmint.geometry import Geometry
from quantmint.recipe import RESERVED_STAGES, SCHEMA_LINE, Recipe, Source, pin, schema

NAMES = ("demo", "hybrid-3.25", "nvfp4-w4a16-quality")
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def texts(root):
    return {name: (root / f"manifests/recipes/{name}.toml").read_text("utf-8") for name in NAMES}


@pytest.fixture
def demo(texts):
    return texts["demo"]


def refused(text, code, *words):
    with pytest.raises(ReleaseError) as caught:
        Recipe.parse(text, file="some.toml")
    error = caught.value
    assert (error.code, error.file, error.exit_code) == (code, "some.toml", 2)
    for word in words:
        assert word in error.message
    return error


def swap(text, old, new):
    assert old in text
    return text.replace(old, new, 1)


def test_every_recipe_of_the_project_is_tested(root):
    assert tuple(sorted(path.stem for path in (root / "manifests/recipes").glob("*.toml"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_recipes_parse_and_fit_their_models(root, texts, name):
    recipe = Recipe.parse(texts[name], file=name)
    assert recipe.name == name
    config = json.loads((root / recipe.model.config).read_bytes())
    recipe.fits(Geometry.of(config), file=name)
    for path in recipe.files:
        assert (root / path).is_file()
    for gate in recipe.gates:
        assert recipe.launch_for(gate.target) is not None


@pytest.mark.parametrize("name", NAMES)
def test_editors_can_complete_and_check_every_recipe(texts, name):
    assert texts[name].splitlines()[0] == SCHEMA_LINE
    document = json.loads(schema())
    jsonschema.Draft202012Validator.check_schema(document)
    jsonschema.validate(tomllib.loads(texts[name]), document, cls=jsonschema.Draft202012Validator)


def test_the_schema_tells_what_a_key_means_and_refuses_what_the_parser_refuses(demo):
    document = json.loads(schema())
    assert document["properties"]["license"]["description"]
    wrong = tomllib.loads(demo) | {"tittle": "x"}
    with pytest.raises(jsonschema.ValidationError, match="tittle"):
        jsonschema.validate(wrong, document)


def test_the_published_schema_is_current(root):
    assert (root / "manifests/schema/recipe.json").read_bytes() == schema()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title =", "tittle =", ("'tittle'", "'title'")),
        ("[quantize]", "[quantise]", ("'quantise'", "'quantize'")),
        (
            'producer = "modelopt"\n',
            'producer = "modelopt"\nshard_byte = 1\n',
            ("'quantize.shard_byte'", "'shard_bytes'"),
        ),
        ('modules = "routed-experts"', 'module = "routed-experts"', ("quantize.placement.0.module", "'modules'")),
        ("served_model_name", "serve_model_name", ("launch.0.serve_model_name", "'served_model_name'")),
        ("[sources.base]\n", '[sources.base]\ndigset = "x"\n', ("sources.base.digset",)),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(demo, old, new, words):
    refused(swap(demo, old, new), "UNKNOWN_KEY", *words)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema = 1", "schema = 2", ("schema",)),
        ("schema = 1", 'schema = "1"', ("schema",)),
        ('name = "demo"', 'name = "De mo"', ("name",)),
        ("shard_bytes = 5_000_000", "shard_bytes = 5_000_000.0", ("quantize.shard_bytes",)),
        ("shard_bytes = 5_000_000", "shard_bytes = true", ("quantize.shard_bytes",)),
        ('precision = "nvfp4-w4a16"', 'precision = "nvfp5"', ("quantize.placement.0.precision",)),
        ('layers = "all"', 'layers = "1..3"', ("quantize.placement.0.layers",)),
        ('layers = "all"', 'layers = "3-1"', ("backwards",)),
        ('modules = "routed-experts"', 'modules = "router"', ("quantize.placement.0.modules",)),
        ('precision = "nvfp4-w4a16"', 'precision = "fp8-w8a8"', ("calibration",)),
        ('source = "base"', 'source = "bass"', ("quantize.source", "'bass'", "base")),
        ('uri = "dir:tests/fixtures/tiny-laguna"', 'uri = "hf:poolside/Laguna@main"', ("sources.base.uri",)),
        ('uri = "dir:tests/fixtures/tiny-laguna"', 'uri = "https://example.org/x"', ("sources.base.uri",)),
        ('config = "tests', 'config = "/tests', ("model.config",)),
        ('config = "tests', 'config = "../tests', ("model.config",)),
        ('architecture = "laguna"', 'architecture = "llama"', ("model.architecture",)),
        ('[[targets]]\nname = "cpu"', '[[targets]]\nname = "gpu"', ("targets.0.name", "'gpu'", "cpu, gb10")),
        ('[[targets]]\nname = "cpu"', '[[targets]]\nname = "cpu"\n[[targets]]\nname = "cpu"', ("targets", "twice")),
        ('[[targets]]\nname = "cpu"', '[[targets]]\nname = "h200"', ("gates.load.target", "'cpu'")),
        ('name = "api"', 'name = "load"', ("gates", "'load'", "twice")),
        ('name = "api"', 'name = "check"', ("gates.check", "belongs")),
        ('op = ">="', 'op = "="', ("gates.1.thresholds.0.op",)),
        ('probes = "tests/fixtures/tiny-laguna.probes.json"\n', "", ("gates.api", "probes")),
        ('handler = "gates/load"', 'handler = "gates/other"', ("gates.0", "thresholds")),
        ('[[targets]]\nname = "cpu"', '[[targets]]\nname = "cpu"\n[[targets]]\nname = "h200"', ("no gate", "'h200'")),
        ('handler = "gates/load"', 'handler = "load"', ("gates.0.handler",)),
        ('handler = "gates/load"', 'handler = "gates/load"\nparams = { launch = 1 }', ("gates.0", "launch")),
        ('[[launch]]\ntarget = "cpu"', '[[launch]]\ntarget = "gb10"', ("launch.0.target",)),
        ('handler = "gates/load"', 'handler = "gates/load"\nsources = ["other"]', ("gates.load.sources", "'other'")),
        ('handler = "gates/load"', "handler = 1979-05-27", ("date",)),
        ("memory_gib = 4", "memory_gib = 0", ("memory_gib",)),
    ],
)
def test_a_wrong_value_is_named(demo, old, new, words):
    refused(swap(demo, old, new), "INVALID_VALUE", *words)


def test_text_that_is_not_toml(demo):
    error = refused(swap(demo, "schema = 1", "schema = "), "RECIPE_SYNTAX")
    assert "line 2" in error.message


def test_a_recipe_builds_in_exactly_one_way(demo, texts):
    start, end = demo.index("[quantize]"), demo.index("[overlay]")
    refused(demo[:start] + demo[end:], "INVALID_VALUE", "either a quantize table or a tiers table")
    hybrid = texts["hybrid-3.25"]
    tables = (
        hybrid[hybrid.index("[tiers]") : hybrid.index("[overlay]")]
        .replace('"bf16"', '"base"')
        .replace('"nvfp4"\nbyte', '"base"\nbyte')
    )
    refused(swap(demo, "[overlay]", f"{tables}[overlay]"), "INVALID_VALUE", "either a quantize table or a tiers table")


def test_calibration_has_one_origin(demo):
    both = 'calibration = { prompts = "p.jsonl", dataset = "d", samples = 1, tokens = 1 }\n'
    refused(swap(demo, 'source = "base"\n', f'source = "base"\n{both}'), "INVALID_VALUE", "either prompts or dataset")
    neither = "calibration = { samples = 1, tokens = 1 }\n"
    refused(
        swap(demo, 'source = "base"\n', f'source = "base"\n{neither}'), "INVALID_VALUE", "either prompts or dataset"
    )


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("nvfp4-w4a16-quality", 'layers = "1-5"', 'layers = "0-5"', ("layer 0 has no routed-experts",)),
        ("nvfp4-w4a16-quality", 'layers = "9-47"', 'layers = "9-48"', ("layer 48 has no routed-experts",)),
        ("nvfp4-w4a16-quality", 'layers = "6-8"', 'layers = "5-8"', ("layer 5 are placed twice",)),
        ("hybrid-3.25", "experts_per_layer = 64", "experts_per_layer = 65", ("do not add up",)),
        ("hybrid-3.25", "slices = 2", "slices = 16", ("EXL3 slices",)),
    ],
)
def test_a_recipe_that_does_not_fit_its_model(root, texts, name, old, new, words):
    recipe = Recipe.parse(swap(texts[name], old, new), file="some.toml")
    geometry = Geometry.of(json.loads((root / recipe.model.config).read_bytes()))
    with pytest.raises(ReleaseError) as caught:
        recipe.fits(geometry, file="some.toml")
    assert (caught.value.code, caught.value.file) == ("INVALID_VALUE", "some.toml")
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("uri", "digest", "pinned"),
    [
        ("dir:a/b", None, False),
        ("dir:a/b", DIGEST, True),
        ("hf:org/model@a50e85e7", None, False),
        ("hf:org/model@a50e85e7", DIGEST, True),
        ("hf:org/model@" + "0" * 40, None, True),
    ],
)
def test_what_pins_a_source(uri, digest, pinned):
    source = Source(uri=uri, digest=digest)
    assert source.pinned is pinned
    if pinned:
        source.require_pinned("base")
    else:
        with pytest.raises(ReleaseError) as caught:
            source.require_pinned("base", file="some.toml")
        assert (caught.value.code, caught.value.file, caught.value.actual) == ("SOURCE_UNPINNED", "some.toml", uri)


def test_the_parts_of_a_source():
    source = Source(uri="hf:poolside/Laguna-S-2.1@a50e85e7")
    assert (source.kind, source.repository, source.revision) == ("hf", "poolside/Laguna-S-2.1", "a50e85e7")
    assert (Source(uri="dir:a/b@c").kind, Source(uri="dir:a/b@c").path) == ("dir", "a/b@c")


def test_pinning_changes_one_line_and_can_be_repeated(demo):
    bare = re.sub(r"digest = .*\n", "", demo)
    once = pin(bare, "base", DIGEST)
    assert Recipe.parse(once, file="x").sources["base"].digest == DIGEST
    assert [line for line in once.splitlines() if line not in bare.splitlines()] == [f'digest = "{DIGEST}"']
    assert once.splitlines()[once.splitlines().index("[sources.base]") + 2].startswith("digest")
    other = DIGEST.replace("ab", "cd")
    assert pin(once, "base", other) == once.replace(DIGEST, other)


@given(st.text("abc =\n[]#\"'", max_size=40))
def test_pinning_leaves_everything_before_its_table_alone(noise):
    before = f'x = """{noise.replace(chr(34), "")}"""\n'
    text = before + '[sources.base]\nuri = "dir:x"'
    if "[" not in noise:
        assert pin(text, "base", DIGEST) == f'{before}[sources.base]\nuri = "dir:x"\ndigest = "{DIGEST}"\n'


def test_pinning_what_is_not_there(demo):
    for source, digest in (("other", DIGEST), ("base", "sha256:1")):
        with pytest.raises(ReleaseError) as caught:
            pin(demo, source, digest)
        assert caught.value.code == "INVALID_VALUE"


@pytest.mark.parametrize("handler", ["gates/load", "gates/api"])
def test_a_gate_that_serves_needs_a_launch_entry(demo, handler):
    other = "gates/api" if handler == "gates/load" else "gates/load"
    text = demo[: demo.index("[[launch]]")] + demo[demo.index("[card]") :]
    needy = f'handler = "{other}"'
    text = (
        swap(text, needy, 'handler = "gates/else"\nthresholds = [{ measurement = "x", op = "==", value = 1 }]')
        if (other == "gates/load")
        else swap(text, needy, 'handler = "gates/else"')
    )
    refused(text, "INVALID_VALUE", handler, "launch entry for 'cpu'")


def test_every_target_of_every_recipe_is_asked_how_it_loads(texts):
    for text in texts.values():
        recipe = Recipe.parse(text, file="x")
        loads = {gate.target for gate in recipe.gates if gate.handler == "gates/load"}
        assert loads == {target.name for target in recipe.targets}


def test_no_gate_can_take_the_name_of_a_stage(texts):
    for text in texts.values():
        assert not {gate.name for gate in Recipe.parse(text, file="x").gates} & RESERVED_STAGES
