"""The job contract: stages, jobs, reports, stage keys and the table of handlers.

A stage is one sealed step. Its key is a function of what decides its outcome and of nothing else: hints (memory,
deadline, paths, time) never enter it. Handlers are named here and imported only inside an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from quantmint.artifact import Digest, RelPath, digest_of
from quantmint.document import Document, canonical
from quantmint.evidence import Scalar

CONTRACT: Literal[1] = 1
"""Version of the job contract; part of every stage key."""

HANDLERS: dict[str, tuple[str, int]] = {
    "fetch": ("host", 1),
    "quantize/modelopt": ("quantmint.quantize.modelopt", 1),
    "check/checkpoint": ("quantmint.gates.checkpoint", 2),
    "gates/load": ("quantmint.gates.load", 2),
    "gates/api": ("quantmint.gates.api", 2),
    "selftest": ("quantmint.gates.selftest", 1),
}
"""Handler id → (module with a `run` function, VERSION). Raise VERSION whenever outcomes may change. `host`: no job."""

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,63}$")]


class Emit(Protocol):
    """How a handler tells of progress: `emit("progress", done=3, total=10, unit="layers")`, `emit("note", text=…)`."""

    def __call__(self, event: str, /, **fields: Scalar) -> None: ...


class Handler(Protocol):
    """`run(params, inputs, out, scratch, emit)` → measurements.

    `inputs` maps each declared input to a read-only file or folder; `out` is empty and takes exactly the declared
    outputs; `scratch` survives failure and is the only place to resume from.
    """

    def __call__(
        self, params: Mapping[str, Any], inputs: Mapping[str, Path], out: Path, scratch: Path, emit: Emit, /
    ) -> Mapping[str, Scalar]: ...


class Output(Document):
    """A declared output: a file or a folder (`tree`) under `job/out/`, at `path`."""

    name: Name
    kind: Literal["file", "tree"]
    path: RelPath


class Hints(Document):
    """How to run a stage; never part of its key. Memory in bytes, deadline in seconds."""

    memory: Annotated[int, Field(gt=0)] = 4 * 1024**3
    deadline: Annotated[int, Field(gt=0)] = 3600
    scratch: int = 0


class InputRef(Document):
    """Where an input comes from: pinned (`digest` known in the plan) or the output of an earlier stage.

    A `tree` input is a folder `in/<name>/` and its digest a `Tree.digest`; a `file` input is the file `in/<name>`
    itself and its digest that of its bytes. Wheels are trees of one file, so that they keep their names.
    """

    name: Name
    kind: Literal["file", "tree"] = "tree"
    stage: Name | None = None
    output: Name | None = None
    digest: Digest | None = None


class Stage(Document):
    """One step of a plan."""

    name: Name
    kind: Literal["fetch", "build", "check", "gate"]
    handler: str
    version: int
    image: Name | None = None
    params: dict[str, Any]
    seed: int = 0
    inputs: tuple[InputRef, ...] = ()
    outputs: tuple[Output, ...] = ()
    hints: Hints = Hints()


class JobInput(Document):
    """An input as the job sees it: `in/<name>`, a file or a tree, with its digest (of the file, or `Tree.digest`)."""

    name: Name
    path: RelPath
    kind: Literal["file", "tree"]
    digest: Digest


class Job(Document):
    """`job/job.json`: everything a worker needs; relative paths only, no host names."""

    contract: Literal[1]
    stage: Name
    handler: str
    version: int
    params: dict[str, Any]
    seed: int
    inputs: tuple[JobInput, ...]
    outputs: tuple[Output, ...]
    key: Digest


class JobReport(Document):
    """`job/out/report.json`, written last and by rename: the truth about a job; an exit code is only a hint."""

    contract: Literal[1]
    key: Digest
    status: Literal["completed", "failed"]
    measurements: dict[str, Scalar]
    environment: dict[str, Scalar]
    error: dict[str, Scalar] | None = None


def stage_key(stage: Stage, *, inputs: Mapping[str, str], image: str, runner: str, device_class: str) -> str:
    """SHA-256 of the canonical form of everything that decides a stage's outcome, and of nothing else.

    That is: contract, handler id and version, params, seed, input digests, outputs, image, runner, device class.
    """
    return digest_of(
        canonical(
            {
                "contract": CONTRACT,
                "handler": stage.handler,
                "version": stage.version,
                "params": stage.params,
                "seed": stage.seed,
                "inputs": dict(inputs),
                "outputs": [output.as_json() for output in stage.outputs],
                "image": image,
                "runner": runner,
                "deviceClass": device_class,
            }
        )
    )
