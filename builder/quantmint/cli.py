"""The command line: arguments in, rooms called, words and exit codes out.

The only place that exits or reads the environment. Everything heavy is imported inside the verb that needs it, so that
`--help` answers at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

import typer

from quantmint import __version__
from quantmint.console import Mode, give, give_json, plain, say, table, tell_error, watcher
from quantmint.errors import CODES, Exit, ReleaseError

if TYPE_CHECKING:
    from types import FrameType

    from quantmint.images import Pins
    from quantmint.project import Prepared, Project
    from quantmint.runner import Runner, RunnerKind
    from quantmint.signers import Signer

app = typer.Typer(
    name="quantmint",
    help="Build, gate, seal, publish and verify releases of quantized LLMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
images_app = typer.Typer(help="Build, list and lock the images that stages run in.", no_args_is_help=True)
keys_app = typer.Typer(help="Make signing keys.", no_args_is_help=True)
app.add_typer(images_app, name="images")
app.add_typer(keys_app, name="keys")

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a recipe, or path of a .toml file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
Progress = Annotated[
    str, typer.Option("--progress", metavar="auto|plain|json|quiet", help="How progress is shown on stderr.")
]
RunnerName = Annotated[
    str,
    typer.Option("--runner", metavar="auto|container|process", help="auto: containers when a Docker engine answers."),
]
Package = Annotated[Path, typer.Argument(metavar="PACKAGE", help="Folder of a package.")]
Key = Annotated[Path, typer.Option("--key", metavar="PUB", help="The publisher's public key (PEM).")]


def _state() -> Path | None:
    value = os.environ.get("QUANTMINT_STORE")
    return Path(value) if value else None


def _project() -> Project:
    from quantmint.project import Project

    return Project.find(Path(os.environ.get("QUANTMINT_ROOT") or Path.cwd()), _state())


def _pins(project: Project) -> Pins:
    from quantmint.imagebuild import current_pins

    override = os.environ.get("QUANTMINT_PINS")
    return current_pins(project.root, project.store.root, override=Path(override) if override else None)


def _choice(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ReleaseError(
            "INVALID_ARGUMENT", f"{name}: {value!r} is not known", expected=", ".join(known), actual=value
        )
    return value


def _mode(value: str) -> Mode:
    _choice("--progress", value, ("auto", "plain", "json", "quiet"))
    return cast("Mode", value)


def _machine() -> str:
    import platform

    machine = platform.machine()
    return {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}.get(machine, f"linux/{machine}")


def _runner_kind(value: str) -> RunnerKind:
    """The runner to use; a plain notice when no engine answers and none was demanded."""
    _choice("--runner", value, ("auto", "container", "process"))
    if value == "auto":
        from quantmint.container import answers

        if answers():
            return "container"
        say("No Docker engine answers: stages run as processes of this user, without isolation (grade: development).")
        return "process"
    return "container" if value == "container" else "process"


@contextlib.contextmanager
def _runner(kind: RunnerKind, project: Project, shown: Any, needed: tuple[str, ...]) -> Iterator[tuple[Runner, str]]:
    """The runner and the platform its images are for; images that are not pinned yet are built first."""
    if kind == "process":
        from quantmint.process import ProcessRunner
        from quantmint.wheelhouse import environment

        def made(image: str) -> tuple[Path, str]:
            return environment(
                image,
                root=project.root,
                state=project.store.root,
                on_event=lambda event: shown.event("environment", event),
            )

        yield ProcessRunner(made, project.store.folder("jobs")), _machine()
        return
    from quantmint.container import ContainerRunner, connect, engine_platform

    client = connect()
    try:
        platform = engine_platform(client)
        references = _references(client, project, needed, platform, shown)
        yield ContainerRunner(client, references, project.store.root), platform
    finally:
        client.close()


def _references(client: Any, project: Project, needed: tuple[str, ...], platform: str, shown: Any) -> dict[str, str]:
    """References of the needed images; those that are not there, or made from another lock, are built first."""
    from quantmint.container import label
    from quantmint.imagebuild import LOCK_LABEL, build, committed_pins
    from quantmint.images import IMAGES, resolve
    from quantmint.wheelhouse import lock_of

    found: dict[str, str] = {}
    absent: list[str] = []
    pins = _pins(project)
    ours = not os.environ.get("QUANTMINT_PINS")
    published = {
        reference for image in committed_pins(project.root).images.values() for reference in image.platforms.values()
    }
    for name in needed:
        try:
            found[name] = resolve(pins, name, platform)
        except ReleaseError:
            absent.append(name)
        else:
            local = ours and name in IMAGES and found[name] not in published
            if local and label(client, found[name], LOCK_LABEL) != lock_of(project.root, name).digest:
                absent.append(name)
    buildable = [name for name in absent if name in IMAGES]
    if buildable and ours:
        say(
            f"Images not built on this machine from today's locks: {', '.join(buildable)}. Building takes some minutes."
        )
        pins = build(
            buildable,
            root=project.root,
            state=project.store.root,
            environment=dict(os.environ),
            on_event=lambda event: shown.event("images", event),
            builder_image=os.environ.get("QUANTMINT_BUILDER_IMAGE"),
            runtime_image=os.environ.get("QUANTMINT_RUNTIME_IMAGE"),
            registry=os.environ.get("QUANTMINT_REGISTRY"),
        )
        found.update({name: resolve(pins, name, platform) for name in buildable})
    return found


def _passphrase() -> str | None:
    value = os.environ.get("QUANTMINT_KEY_PASSPHRASE")
    if value is not None:
        return value
    if not sys.stdin.isatty():
        return None
    import getpass

    return getpass.getpass("Passphrase of the signing key: ", stream=sys.stderr)


@app.command()
def release(
    recipe: RecipeName,
    runner: RunnerName = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the package goes [dist/RECIPE].")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="URI", help="Signing key; without it a throw-away key.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="STAGE", help="Stop after this stage; publish nothing.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="GATE", help="Leave a gate out; sealed as NOT_RUN.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Execute anew from this stage on.")
    ] = None,
    epoch: Annotated[
        int, typer.Option("--epoch", min=0, max=2**53 - 1, help="Roll-back counter of the release; may only grow.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be done, and do nothing.")] = False,
    progress: Progress = "auto",
    as_json: AsJson = False,
) -> None:
    """Build a release from a recipe: stages, gates, card, seal, publish, verify."""
    from quantmint.execute import Walk
    from quantmint.release import release as run
    from quantmint.steps import Choice, preflight

    project = _project()
    authored = project.read_recipe(recipe)
    mode = _mode(progress)
    signer = _signer(key)
    kind = _runner_kind(runner)
    if dry_run:
        prepared = project.prepare(authored, runner=kind, platform=_machine(), pins=_pins(project))
        choice = Choice.of(prepared.plan, only=only, skip=tuple(skip or ()), since=since)
        preflight(prepared.plan, project.store, choice, device_class="cpu")
        project.require_files(authored)
        _show_plan(prepared, as_json=as_json)
        return
    pins = _pins(project)
    first = project.prepare(authored, runner=kind, platform=_machine(), pins=pins)
    choice = Choice.of(first.plan, only=only, skip=tuple(skip or ()), since=since)
    preflight(first.plan, project.store, choice, device_class="cpu")
    project.require_files(authored)
    needed = tuple(sorted({stage.image for stage in choice.stages(first.plan) if stage.image is not None}))
    shown = watcher(mode)
    target = (out or project.root / "dist" / authored.recipe.name).absolute()
    try:
        with _runner(kind, project, shown, needed) as (runner_here, platform):
            now = _pins(project)
            same = (platform, now) == (_machine(), pins)
            prepared = first if same else project.prepare(authored, runner=kind, platform=platform, pins=now)
            walk = Walk(
                project.store,
                runner_here,
                shown,
                prepared.pinned,
                "cpu",
                project.store.root / "logs" / authored.recipe.name,
            )
            receipt = run(project, prepared, walk, choice, out=target, signer=signer, epoch=epoch)
    finally:
        shown.close()
    _tell_receipt(receipt, prepared, as_json=as_json)


def _signer(uri: str | None) -> Signer | None:
    if uri is None:
        return None
    from quantmint.signers import load_signer

    return load_signer(uri, _passphrase)


def _tell_receipt(receipt: Any, prepared: Prepared, *, as_json: bool) -> None:
    stages = [{"stage": name, "key": done.key, "cached": done.cached} for name, done in receipt.done.items()]
    gates = [
        {"gate": entry.gate, "target": entry.target, "verdict": entry.verdict.value, "reasons": list(entry.reasons)}
        for entry in receipt.evidence
    ]
    if as_json:
        value: dict[str, Any] = {"recipe": prepared.authored.recipe.name, "stages": stages, "gates": gates}
        if receipt.report is not None:
            value.update(
                package=str(receipt.package), publicKey=str(receipt.public_key), grade=receipt.report.grade,
                subjects=receipt.report.subjects, bytes=receipt.report.bytes_hashed, statement=receipt.report.statement,
            )  # fmt: skip
        give_json(value)
        return
    for entry in receipt.evidence:
        give(
            f"{entry.gate} on {entry.target}: {entry.verdict.value}"
            + (f" ({'; '.join(entry.reasons)})" if entry.reasons else "")
        )
    if receipt.report is None:
        give("Stopped as asked; nothing was published.")
        return
    give(
        f"Published {receipt.package} ({receipt.report.subjects} files, {receipt.report.bytes_hashed:,} bytes, "
        f"grade {receipt.report.grade})"
    )
    give(f"Public key {receipt.public_key}")
    give(f"Check it: quantmint verify {_shown_path(receipt.package)} --key {_shown_path(receipt.public_key)}")


def _shown_path(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _show_plan(prepared: Prepared, *, as_json: bool) -> None:
    if as_json:
        give_json(prepared.plan.as_json())
        return
    give(f"{prepared.plan.title} ({prepared.plan.recipe})\n")
    for entry in prepared.plan.tables():
        table(entry)


@app.command()
def plan(recipe: RecipeName, runner: RunnerName = "container", as_json: AsJson = False) -> None:
    """Show what a release would do and weigh: stages, images, inputs, tensors, bits, bytes, peak disk."""
    project = _project()
    kind: RunnerKind = "process" if _choice("--runner", runner, ("container", "process")) == "process" else "container"
    prepared = project.prepare(project.read_recipe(recipe), runner=kind, platform=_machine(), pins=_pins(project))
    _show_plan(prepared, as_json=as_json)


@app.command()
def verify(
    package: Package,
    key: Key,
    digest: Annotated[
        str, typer.Option("--digest", metavar="blake3|sha256", help="Which signed digest is recomputed.")
    ] = "blake3",
    as_json: AsJson = False,
) -> None:
    """Verify a package, offline: signature, then every file. Exit 0 when nothing differs, 6 otherwise."""
    from quantmint.verify import verify as run

    algorithm: Literal["blake3", "sha256"] = (
        "sha256" if _choice("--digest", digest, ("blake3", "sha256")) == "sha256" else "blake3"
    )
    report = run(package, key, algorithm=algorithm)
    if as_json:
        give_json({**report.as_json(), "ok": report.ok})
        raise typer.Exit(Exit.OK if report.ok else Exit.INTEGRITY)
    for finding in report.findings:
        give(f"{finding.code}: {finding.message}")
        for name, value in (("expected", finding.expected), ("found", finding.actual)):
            if value:
                give(f"  {name}: {value}")
    for gate in report.gates:
        give(
            f"gate {gate.gate} on {gate.target}: {gate.verdict}"
            + (f" ({'; '.join(gate.reasons)})" if gate.reasons else "")
        )
    if report.model_signature == "absent" and report.ok:
        give("model.sig is absent; stock tools cannot check this package")
    report.demand_ok()
    give(
        f"verified {report.release}: {report.files_hashed} files, {report.bytes_hashed:,} bytes, grade {report.grade}, "
        f"key {report.key[:16]}"
    )


@app.command()
def inspect(
    package: Package, key: Annotated[Path | None, typer.Option("--key", metavar="PUB")] = None, as_json: AsJson = False
) -> None:
    """Show the release statement of a package. Without --key its signature is not checked, and that is said."""
    from quantmint.verify import read_release

    found = read_release(package, public_key=key)
    checked = key is not None
    value = {"signatureChecked": checked, "statement": found.digest, "predicate": dict(found.statement.predicate)}
    if as_json:
        give_json(value)
        return
    if not checked:
        say("The signature was NOT checked (no --key): this is what the package says of itself.")
    predicate = found.predicate
    give(
        f"release {predicate.release}, grade {predicate.grade} (claimed), epoch {predicate.epoch}, "
        f"runner {predicate.runner}"
    )
    give(f"source {predicate.source.uri} {predicate.source.files}")
    for gate in predicate.gates:
        give(f"gate {gate.gate} on {gate.target}: {gate.verdict}")
    for subject in found.statement.subjects:
        give(f"{subject.digest.sha256}  {subject.size if subject.size is not None else '?':>12}  {subject.name}")


@app.command()
def card(
    package: Package,
    check: Annotated[
        bool, typer.Option("--check", help="Render the card anew and compare; exit 6 when it differs.")
    ] = False,
) -> None:
    """Render the card of a package from its sealed plan, recipe and evidence; to stdout, or compared with README.md."""
    from quantmint.rerender import rerender

    text = rerender(package)
    if not check:
        sys.stdout.write(text.decode("utf-8"))
        return
    there = (package / "README.md").read_bytes() if (package / "README.md").is_file() else b""
    if there != text:
        from quantmint.artifact import digest_of

        raise ReleaseError(
            "VERIFICATION_FAILED", "the card is not what the evidence renders to", file="README.md",
            expected=digest_of(text), actual=digest_of(there),
        )  # fmt: skip
    give("the card is what the evidence renders to")


@app.command()
def status(recipe: RecipeName, runner: RunnerName = "auto", as_json: AsJson = False) -> None:
    """Show which stages of a recipe were executed last, and how they ended."""
    from quantmint.execute import last_runs

    _choice("--runner", runner, ("auto", "container", "process"))
    project = _project()
    authored = project.read_recipe(recipe)
    prepared = project.prepare(authored, runner="container", platform=_machine(), pins=_pins(project))
    rows = last_runs(project.store, authored.recipe.name, [stage.name for stage in prepared.plan.stages])
    if as_json:
        give_json({"recipe": authored.recipe.name, "stages": rows})
        return
    for row in rows:
        give(
            f"{row['stage']:<12} {row['state']:<10} {row.get('runner', ''):<10} {row.get('key', '')[:23]}  "
            f"{row.get('message', '')}".rstrip()
        )


@app.command()
def logs(
    stage: Annotated[str, typer.Argument(metavar="STAGE")],
    recipe: Annotated[str | None, typer.Option("--recipe", help="Recipe, when several have such a stage.")] = None,
) -> None:
    """Print the log of the last execution of a stage."""
    project = _project()
    if "/" in stage or (recipe is not None and "/" in recipe):
        raise ReleaseError("INVALID_ARGUMENT", "not the name of a stage or a recipe", actual=stage)
    found = sorted(
        (path for path in (project.store.root / "logs").glob(f"{recipe or '*'}/{stage}.log")),
        key=lambda path: path.stat().st_mtime,
    )
    if not found:
        raise ReleaseError("INVALID_ARGUMENT", f"no execution of stage {stage!r} left a log here", actual=stage)
    sys.stdout.write(found[-1].read_bytes().decode("utf-8", "replace"))


@app.command()
def explain(code: Annotated[str | None, typer.Argument(metavar="CODE")] = None, as_json: AsJson = False) -> None:
    """Explain an error or finding code; without one, list them all."""
    from quantmint.manifest import FINDINGS

    rows: list[dict[str, Any]] = [
        {"code": name, "kind": "error", "exit": int(entry.exit_code), "meaning": entry.meaning, "hint": entry.hint}
        for name, entry in sorted(CODES.items())
    ]
    rows += [{"code": name, "kind": "finding", "exit": 6, "meaning": text} for name, text in sorted(FINDINGS.items())]
    if code is not None:
        import difflib

        chosen = [row for row in rows if row["code"] == code.upper()]
        if not chosen:
            near = difflib.get_close_matches(code.upper(), [row["code"] for row in rows], n=1)
            raise ReleaseError(
                "UNKNOWN_CODE", f"no code {code[:60]!r}" + (f"; did you mean {near[0]}?" if near else "")
            )
        rows = chosen
    if as_json:
        give_json(rows)
        return
    for row in rows:
        give(f"{row['code']} ({row['kind']}, exit {row['exit']}): {row['meaning']}")
        if code is not None and row.get("hint"):
            give(f"  {row['hint']}")


@app.command()
def doctor(runner: RunnerName = "auto", progress: Progress = "auto", as_json: AsJson = False) -> None:
    """Test this machine: engine, images, isolation of a real job, disk. Exit 3 when something is not as it must be."""
    from quantmint.doctor import examine

    project = _project()
    shown = watcher(_mode(progress))
    kind = _runner_kind(runner)
    try:
        with _runner(kind, project, shown, ("verify",)) as (runner_here, _platform):
            rows = examine(project, runner_here, shown)
    finally:
        shown.close()
    healthy = all(row.healthy for row in rows)
    if as_json:
        give_json({"healthy": healthy, "rows": [row.as_json() for row in rows]})
    else:
        for row in rows:
            give(f"{'ok  ' if row.healthy else 'BAD '} {row.what}: {row.found}")
    raise typer.Exit(Exit.OK if healthy else Exit.ENVIRONMENT)


@app.command()
def pin(recipe: RecipeName, as_json: AsJson = False) -> None:
    """Write the digest of each dir: source, as it is now, into the recipe. Review the change before committing it."""
    from quantmint.recipe import pin as rewritten
    from quantmint.source import tree_at
    from quantmint.store import disk_errors

    project = _project()
    authored = project.read_recipe(recipe)
    path = project.root / authored.file if not recipe.endswith(".toml") else Path(recipe)
    text = authored.data.decode("utf-8")
    digests = {
        name: tree_at(project.root, source).digest
        for name, source in authored.recipe.sources.items()
        if source.kind == "dir"
    }
    for name, digest in digests.items():
        text = rewritten(text, name, digest)
    with disk_errors():
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text, "utf-8")
        draft.replace(path)
    if as_json:
        give_json(digests)
    else:
        for name, digest in digests.items():
            give(f"{name} {digest}")


@app.command()
def schema(
    write: Annotated[
        bool, typer.Option("--write", help="Write the files of manifests/schema/ instead of printing.")
    ] = False,
) -> None:
    """Print or write the JSON Schemas of recipes and release statements."""
    from quantmint import manifest, recipe

    project = _project()
    for name, data in (("recipe.json", recipe.schema()), ("release.json", manifest.schema())):
        if write:
            (project.root / "manifests" / "schema" / name).write_bytes(data)
            say(f"manifests/schema/{name}")
        else:
            sys.stdout.write(data.decode("utf-8"))


@images_app.command("build")
def images_build(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="All images when none is named.")
    ] = None,
    builder_image: Annotated[
        str | None, typer.Option(envvar="QUANTMINT_BUILDER_IMAGE", help="Base to build in.")
    ] = None,
    runtime_image: Annotated[
        str | None, typer.Option(envvar="QUANTMINT_RUNTIME_IMAGE", help="Base to build on.")
    ] = None,
    registry: Annotated[
        str | None, typer.Option(envvar="QUANTMINT_REGISTRY", help="Push to and pin in this registry.")
    ] = None,
    progress: Progress = "auto",
    as_json: AsJson = False,
) -> None:
    """Build images from their hash-locked wheels, and pin what was built."""
    from quantmint.imagebuild import build

    project = _project()
    shown = watcher(_mode(progress))
    try:
        pins = build(
            names or (), root=project.root, state=project.store.root, environment=dict(os.environ),
            on_event=lambda event: shown.event("images", event), builder_image=builder_image,
            runtime_image=runtime_image, registry=registry,
        )  # fmt: skip
    finally:
        shown.close()
    if as_json:
        give_json(pins.as_json())
        return
    for name, pinned in sorted(pins.images.items()):
        for platform, reference in sorted(pinned.platforms.items()):
            give(f"{name} {platform} {reference}")


@images_app.command("list")
def images_list(as_json: AsJson = False) -> None:
    """List the images, their locks and what they are pinned to."""
    from dataclasses import asdict

    from quantmint.imagebuild import listing

    project = _project()
    rows = listing(root=project.root, pins=_pins(project))
    if as_json:
        give_json([asdict(row) for row in rows])
        return
    for row in rows:
        give(
            f"{row.name:<10} {row.platform:<12} {row.reference or 'not pinned'}  "
            f"lock {(row.lock or 'missing')[:19]}  {row.purpose}"
        )


@images_app.command("lock")
def images_lock(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None, progress: Progress = "auto"
) -> None:
    """Resolve the requirements of images anew and write their hash-locked files."""
    from quantmint.images import IMAGES, known
    from quantmint.wheelhouse import lock

    project = _project()
    shown = watcher(_mode(progress))
    try:
        for name in names or sorted(IMAGES):
            written = lock(known(name).name, root=project.root, on_event=lambda event: shown.event("images", event))
            say(str(written.relative_to(project.root)))
    finally:
        shown.close()


@keys_app.command("generate")
def keys_generate(
    private: Annotated[Path, typer.Argument(metavar="FILE", help="Where the private key goes; FILE.pub beside it.")],
    unencrypted: Annotated[
        bool, typer.Option("--unencrypted", help="Keep the private key without a passphrase.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an ECDSA P-256 signing key: an encrypted private key, and a public key to hand out."""
    from quantmint.signers import generate, write_private, write_public

    public = private.with_name(private.name + ".pub")
    if public.exists():
        raise ReleaseError("KEY_EXISTS", "a public key of that name exists already", file=str(public))
    signer = generate()
    write_private(signer, private, passphrase=None if unencrypted else _new_passphrase, unencrypted=unencrypted)
    write_public(signer.public, public)
    if as_json:
        give_json({"private": str(private), "public": str(public), "keyId": signer.public.key_id})
    else:
        give(
            f"private key {private} (keep it secret)\npublic key {public} (hand it out)\nkey id {signer.public.key_id}"
        )


def _new_passphrase() -> str:
    value = os.environ.get("QUANTMINT_KEY_PASSPHRASE")
    if value:
        return value
    if not sys.stdin.isatty():
        raise ReleaseError(
            "KEY_PASSPHRASE", "a passphrase for the new key is needed",
            hint="Set QUANTMINT_KEY_PASSPHRASE, run on a terminal, or ask for --unencrypted.",
        )  # fmt: skip
    import getpass

    first = getpass.getpass("New passphrase: ", stream=sys.stderr)
    if not first or first != getpass.getpass("The same again: ", stream=sys.stderr):
        raise ReleaseError("KEY_PASSPHRASE", "the passphrases are empty or differ")
    return first


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        give(__version__)
        raise typer.Exit


def _interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    as_json = "--json" in arguments
    try:
        code = app(args=arguments, prog_name="quantmint", standalone_mode=False)
    except ReleaseError as error:
        return _told(error, as_json=as_json)
    except (KeyboardInterrupt, EOFError):
        code = int(Exit.INTERRUPTED)
    except Exception as error:
        if type(error).__name__ == "Abort":  # what typer makes of Ctrl-C and of the end of input at a prompt
            code = int(Exit.INTERRUPTED)
        elif hasattr(error, "exit_code") and hasattr(error, "format_message"):
            words = plain(error.format_message())
            return _told(ReleaseError("INVALID_ARGUMENT", words, hint="quantmint VERB --help"), as_json=as_json)
        else:
            raise
    if code == int(Exit.INTERRUPTED):
        return _told(ReleaseError("INTERRUPTED", "the run was interrupted"), as_json=as_json)
    return code if isinstance(code, int) else int(Exit.OK)


def _told(error: ReleaseError, *, as_json: bool) -> int:
    tell_error(error, as_json=as_json)
    return int(error.exit_code)


def main() -> None:
    """Entry point of the `quantmint` command."""
    os.umask(0o022)  # jobs of another user and readers of packages must get in; private keys set their own mode
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    try:
        code = run(sys.argv[1:])
    except Exception as error:  # noqa: BLE001  a bug: its traceback, and the exit code that says so
        import traceback

        traceback.print_exc()
        say(
            "This is a bug in quantmint. Nothing that was finished is lost; the traceback above is what a report needs."
        )
        if "--json" in sys.argv:
            give_json(
                {"error": {"code": "BUG", "exit_code": int(Exit.BUG), "message": f"{type(error).__name__}: {error}"}}
            )
        code = int(Exit.BUG)
    sys.exit(code)


if __name__ == "__main__":
    main()
