"""The launch recipe: the exact serving command as data, the same for the gates and for whoever downloads a package.

Pure values: nothing is started here. A recipe can hold neither a host path nor an environment variable that is not
listed below, and it can never switch off a fix of an overlay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from quantmint.document import Document

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]
Toggle = bool | int | str

ENVIRONMENT = frozenset(
    {
        "CUTE_DSL_ARCH",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "VLLM_ATTENTION_BACKEND",
        "VLLM_B12X_MOE_FP4_FORCE_A16",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
    }
)
"""Environment variables that a recipe may set."""

FIXED_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Set for every server: it reads the package alone and reports to nobody."""

OWNED_FLAGS = frozenset(
    {
        "--default-chat-template-kwargs",
        "--enable-auto-tool-choice",
        "--host",
        "--kv-cache-dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--model",
        "--port",
        "--reasoning-parser",
        "--served-model-name",
        "--tool-call-parser",
    }
)
"""Flags that fields of the recipe or the caller render; `flags` may not repeat them."""

FLAGS = frozenset(
    {
        "--async-scheduling",
        "--attention-backend",
        "--block-size",
        "--compilation-config",
        "--cpu-offload-gb",
        "--data-parallel-size",
        "--disable-custom-all-reduce",
        "--distributed-executor-backend",
        "--dtype",
        "--enable-chunked-prefill",
        "--enable-expert-parallel",
        "--enable-prefix-caching",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "--headless",
        "--kv-cache-memory-bytes",
        "--master-addr",
        "--master-port",
        "--max-logprobs",
        "--max-num-batched-tokens",
        "--moe-backend",
        "--nnodes",
        "--no-async-scheduling",
        "--no-enable-chunked-prefill",
        "--no-enable-prefix-caching",
        "--node-rank",
        "--pipeline-parallel-size",
        "--safetensors-load-strategy",
        "--seed",
        "--structured-outputs-config",
        "--tensor-parallel-size",
    }
)
"""Engine flags that a recipe may give, by their whole names: the engine itself would accept any abbreviation."""

EXECUTORS = frozenset({"external_launcher", "mp", "ray", "uni"})
"""Values of --distributed-executor-backend; anything else would name a class to import."""

_NUMBER = re.compile(r"-\d+(\.\d+)?", re.ASCII)


class LaunchRecipe(Document):
    """How a package is served on a target: `context_length` in tokens, `flags` some of `FLAGS`, verbatim."""

    version: Literal[1] = 1
    target: Name
    served_model_name: Name
    context_length: Annotated[int, Field(ge=1)]
    max_num_seqs: Annotated[int, Field(ge=1)]
    kv_cache_dtype: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")] = "auto"
    reasoning_parser: Name | None = None
    tool_call_parser: Name | None = None
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    chat_template_defaults: Annotated[dict[str, Toggle], Field(default_factory=dict)]
    environment: Annotated[dict[str, str], Field(default_factory=dict)]

    @model_validator(mode="after")
    def _contained(self) -> Self:
        for variable, value in self.environment.items():
            if variable not in ENVIRONMENT:
                raise ValueError(f"environment: {variable} may not be set; allowed: {', '.join(sorted(ENVIRONMENT))}")
            if "\x00" in value or "/" in value:
                raise ValueError(f"environment: {variable} holds a path or a NUL")
        _check_flags(self.flags)
        return self

    def engine_flags(self) -> tuple[str, ...]:
        """Every engine argument but the package, the host and the port."""
        rendered = [
            "--served-model-name",
            self.served_model_name,
            "--max-model-len",
            str(self.context_length),
            "--max-num-seqs",
            str(self.max_num_seqs),
            "--kv-cache-dtype",
            self.kv_cache_dtype,
        ]
        if self.reasoning_parser is not None:
            rendered += ["--reasoning-parser", self.reasoning_parser]
        if self.tool_call_parser is not None:
            rendered += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_call_parser]
        if self.chat_template_defaults:
            rendered += ["--default-chat-template-kwargs", json.dumps(self.chat_template_defaults, sort_keys=True)]
        return (*rendered, *self.flags)

    def argv(self, package: str, host: str, port: int) -> tuple[str, ...]:
        """The command that serves the folder `package`, to be run as is, without a shell."""
        server = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", package)
        return (*server, "--host", host, "--port", str(port), *self.engine_flags())

    def process_environment(self) -> dict[str, str]:
        """The variables to set for the server, sorted by name."""
        return dict(sorted({**FIXED_ENVIRONMENT, **self.environment}.items()))

    def toml(self) -> str:
        """The recipe as TOML, one text for one value; `document.author` reads it back."""
        tables: dict[str, Mapping[str, Any]] = {
            "chat_template_defaults": self.chat_template_defaults,
            "environment": self.environment,
        }
        lines = [f"{name} = {_toml(value)}" for name, value in self.as_json().items() if name not in tables]
        for name, table in tables.items():
            if table:
                lines += ["", f"[{name}]", *(f"{_toml(key)} = {_toml(value)}" for key, value in sorted(table.items()))]
        return "\n".join(lines) + "\n"


def _check_flags(flags: tuple[str, ...]) -> None:
    """Each item is an allowed flag, alone or with `=VALUE`, or the one value of the flag before it.

    Raises:
        ValueError: it is something else, or a value names a place on a host.
    """
    waiting: str | None = None
    for item in flags:
        if item.startswith("-") and not _NUMBER.fullmatch(item):
            name, given, value = item.partition("=")
            if name in OWNED_FLAGS:
                raise ValueError(f"flags: {name} has a field of its own")
            if name not in FLAGS:
                raise ValueError(f"flags: {name[:80]!r} is not allowed in a launch recipe; allowed: {_listed(FLAGS)}")
            waiting = None if given else name
        elif waiting is None:
            raise ValueError(f"flags: {item[:80]!r} is the value of no flag")
        else:
            name, given, value, waiting = waiting, "=", item, None
        if "\x00" in value or value.startswith(("/", "~")) or '"/' in value:
            raise ValueError(f"flags: {value[:80]!r} names a place on a host")
        if given and name == "--distributed-executor-backend" and value not in EXECUTORS:
            raise ValueError(f"flags: {name} is one of {_listed(EXECUTORS)}")


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _toml(value: Any) -> str:
    """A JSON scalar or list as a TOML value on one line."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return json.dumps(value)
