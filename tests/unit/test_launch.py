"""The launch recipe is one text for one value, and holds nothing of a host."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.document import author
from quantmint.errors import ReleaseError
from quantmint.launch import FLAGS, OWNED_FLAGS, LaunchRecipe

GIVEN = (
    ("--enforce-eager",),
    ("--seed=3",),
    ("--max-logprobs", "-1"),
    ("--structured-outputs-config", '{"a": "b\\n\x7f ü"}'),
    ("--distributed-executor-backend", "mp"),
)
BASE = {"target": "cpu", "served_model_name": "tiny", "context_length": 4096, "max_num_seqs": 4}


def recipe(**more):
    return LaunchRecipe(**{**BASE, **more})


def test_argv_is_the_whole_command():
    argv = recipe(
        reasoning_parser="poolside_v1",
        tool_call_parser="poolside_v1",
        kv_cache_dtype="fp8",
        chat_template_defaults={"enable_thinking": True},
        flags=("--enforce-eager",),
    ).argv("pkg", "127.0.0.1", 8000)
    assert argv == (
        "python", "-m", "vllm.entrypoints.openai.api_server", "--model", "pkg", "--host", "127.0.0.1", "--port", "8000",
        "--served-model-name", "tiny", "--max-model-len", "4096", "--max-num-seqs", "4", "--kv-cache-dtype", "fp8",
        "--reasoning-parser", "poolside_v1", "--enable-auto-tool-choice", "--tool-call-parser", "poolside_v1",
        "--default-chat-template-kwargs", '{"enable_thinking": true}', "--enforce-eager",
    )  # fmt: skip


def test_a_recipe_without_parsers_renders_no_parser_flags():
    assert not [flag for flag in recipe().engine_flags() if "parser" in flag or "tool" in flag or "template" in flag]


@given(
    notes=st.lists(st.text(st.characters(exclude_categories=("Cs",))), max_size=3).map(tuple),
    flags=st.lists(st.sampled_from(GIVEN), max_size=3).map(lambda drawn: tuple(chain.from_iterable(drawn))),
    defaults=st.dictionaries(st.text("ab. \"'", min_size=1), st.booleans() | st.integers(0, 9) | st.text('a\\"\n')),
    environment=st.dictionaries(st.sampled_from(["VLLM_ATTENTION_BACKEND", "OMP_NUM_THREADS"]), st.text("a1,=\"'")),
)
def test_toml_reads_back_as_the_same_value(notes, flags, defaults, environment):
    first = recipe(notes=notes, flags=flags, chat_template_defaults=defaults, environment=environment)
    again = author(LaunchRecipe, first.toml(), file="launch.toml")
    assert again == first
    assert again.toml() == first.toml()


@pytest.mark.parametrize(
    "more",
    [
        {"flags": ("--port", "1")},
        {"flags": ("--max_model_len=9",)},
        {"flags": ("--trust-remote-code",)},
        {"flags": ("--api-key=x",)},
        {"flags": ("--chat-template", "/home/me/t.jinja")},
        {"flags": ("--chat-template=/home/me/t.jinja",)},
        {"environment": {"LD_PRELOAD": "x.so"}},
        {"environment": {"QUANTMINT_OVERLAY_DISABLE": "router-bias"}},
        {"environment": {"VLLM_ATTENTION_BACKEND": "a/b"}},
        {"environment": {"VLLM_PLUGINS": ""}},
        {"flags": ("--trust-remote",)},
        {"flags": ("--trust-remote-code=true",)},
        {"flags": ("--max-model-le", "9")},
        {"flags": ("--enforce",)},
        {"flags": ("--enforce_eager",)},
        {"flags": ("--seed", "--trust-remote")},
        {"flags": ("--compilation-config.level", "3")},
        {"flags": ("-O3",)},
        {"flags": ("-tp", "2")},
        {"flags": ("--config", "x.yaml")},
        {"flags": ("stray",)},
        {"flags": ("--enforce-eager", "true", "stray")},
        {"flags": ("--seed=1", "2")},
        {"flags": ("--compilation-config", '{"cache_dir": "/home/me"}')},
        {"flags": ("--dtype", "~/x")},
        {"flags": ("--distributed-executor-backend", "my.Executor")},
        {"flags": ("--distributed-executor-backend=my.Executor",)},
        {"served_model_name": "a b"},
        {"context_length": 0},
    ],
)
def test_what_may_not_stand_in_a_recipe(more):
    text = recipe().toml()
    lines = [line for line in text.splitlines() if line.split(" ")[0] not in more]
    draft = LaunchRecipe.model_construct(**{**recipe().model_dump(), **more}).toml().splitlines()
    added = draft[-3:] if "environment" in more else [line for line in draft if line.split(" ")[0] in more]
    with pytest.raises(ReleaseError) as caught:
        author(LaunchRecipe, "\n".join([*lines, *added]), file="launch.toml")
    assert caught.value.code == "INVALID_VALUE"


def test_the_server_environment_is_offline_and_silent():
    environment = recipe(environment={"VLLM_CPU_KVCACHE_SPACE": "1"}).process_environment()
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert list(environment) == sorted(environment)


def test_no_allowed_flag_abbreviates_a_field_or_runs_foreign_code():
    assert not FLAGS & OWNED_FLAGS
    assert not [flag for flag in FLAGS if any(word in flag for word in ("trust", "plugin", "download", "key", "host"))]
    for owned in OWNED_FLAGS:
        assert not [flag for flag in FLAGS if owned.startswith(flag)]
