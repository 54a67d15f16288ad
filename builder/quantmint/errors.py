"""The one root error of Quantmint and the closed table of its codes.

Every refusal a person can meet is a `ReleaseError` whose code stands in `CODES`; the table gives the exit code and
the standing advice. Nothing here does I/O. A bug is never dressed up as a `ReleaseError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Process exit codes of the command line."""

    OK = 0
    GATE_FAILED = 1
    USER_INPUT = 2
    ENVIRONMENT = 3
    REMOTE = 4
    INCONCLUSIVE = 5
    INTEGRITY = 6
    BUG = 70
    INTERRUPTED = 130


@dataclass(frozen=True)
class Code:
    """What one error code means: its exit code, a one-line meaning and what to do about it."""

    exit_code: Exit
    meaning: str
    hint: str


CODES: dict[str, Code] = {
    # authored input
    "UNKNOWN_RECIPE": Code(
        Exit.USER_INPUT, "No recipe of that name exists.", "List manifests/recipes/, or pass the path of a .toml file."
    ),
    "RECIPE_SYNTAX": Code(Exit.USER_INPUT, "The file is not valid TOML.", "Fix the line that the message names."),
    "UNKNOWN_KEY": Code(
        Exit.USER_INPUT,
        "An authored document has a key that its schema does not know.",
        "Remove or correct the key; the schema is published under manifests/schema/.",
    ),
    "INVALID_VALUE": Code(
        Exit.USER_INPUT, "A value of an authored document has the wrong type or range.", "Correct the value."
    ),
    "INVALID_ARGUMENT": Code(Exit.USER_INPUT, "A command-line argument cannot be used.", "See --help of the verb."),
    "SOURCE_MISSING": Code(
        Exit.USER_INPUT,
        "The source directory or one of its files does not exist.",
        "Check the source uri of the recipe.",
    ),
    "SOURCE_CHANGED": Code(
        Exit.INTEGRITY,
        "The source differs from what the recipe pinned.",
        "Restore the source, or pin the new bytes with `just pin` after reviewing them.",
    ),
    "SOURCE_UNPINNED": Code(
        Exit.USER_INPUT, "The source has no digest or commit in the recipe.", "Pin it: `just pin` prints the digest."
    ),
    "NOT_RUNNABLE_HERE": Code(
        Exit.ENVIRONMENT,
        "The recipe plans a stage that this installation cannot execute.",
        "Use `quantmint plan` to inspect it, and a machine and version that have the stage to run it.",
    ),
    "OUTPUT_NOT_EMPTY": Code(
        Exit.USER_INPUT,
        "The output directory holds something that Quantmint did not publish there.",
        "Choose another --out, or move the directory away.",
    ),
    # tensors and trees
    "ILLEGAL_PATH": Code(
        Exit.INTEGRITY,
        "A path in a document is absolute, escapes its root, or is not portable.",
        "Do not use this package; report it to whoever published it.",
    ),
    "CORRUPT_SHARD": Code(
        Exit.INTEGRITY,
        "A safetensors file does not say what its bytes hold.",
        "Fetch the file again from its pinned source.",
    ),
    "LFS_POINTER": Code(
        Exit.INTEGRITY, "A Git LFS pointer stands where a weight file should be.", "Fetch the real file (git lfs pull)."
    ),
    "CHECKPOINT_MISMATCH": Code(
        Exit.INTEGRITY,
        "The quantized checkpoint does not hold what the source and the recipe imply.",
        "Read the differences listed; the exporter dropped, renamed or resized tensors.",
    ),
    "UNSUPPORTED_MODEL": Code(
        Exit.USER_INPUT,
        "The model configuration is of an architecture that is not known here.",
        "See `model` of the recipe.",
    ),
    # documents received
    "DUPLICATE_KEY": Code(Exit.INTEGRITY, "A JSON document names one key twice.", "Do not trust this document."),
    "MALFORMED_DOCUMENT": Code(
        Exit.INTEGRITY,
        "A received document cannot be read as what it claims to be.",
        "Fetch it again; do not trust it.",
    ),
    # environment
    "ENGINE_UNREACHABLE": Code(
        Exit.ENVIRONMENT,
        "No Docker engine answers.",
        "Start the engine, set DOCKER_HOST, or use --runner process (grade: development).",
    ),
    "ENGINE_ERROR": Code(
        Exit.ENVIRONMENT, "The Docker engine refused or failed a request.", "Read the engine's message."
    ),
    "IMAGE_ABSENT": Code(
        Exit.ENVIRONMENT,
        "A pinned image is neither in the engine nor in its registry.",
        "Build it: `quantmint images build`.",
    ),
    "IMAGE_PLATFORM": Code(
        Exit.ENVIRONMENT,
        "A pinned image is of another platform than the engine.",
        "Pin a digest for this platform, or run on the platform of the pin.",
    ),
    "IMAGE_UNPINNED": Code(
        Exit.ENVIRONMENT,
        "No digest is pinned for an image on this platform.",
        "Build and pin it: `quantmint images build`.",
    ),
    "IMAGE_BUILD_FAILED": Code(
        Exit.ENVIRONMENT, "Building an image failed.", "Read the build log that the message names."
    ),
    "LOCK_MISSING": Code(
        Exit.ENVIRONMENT, "An image has no hash-locked requirements file.", "Run `quantmint images lock`."
    ),
    "INTERPRETER_MISSING": Code(
        Exit.ENVIRONMENT,
        "This machine lacks the Python version that the images have.",
        "Install that Python, or use a Docker engine and --runner container.",
    ),
    "ENVIRONMENT_BROKEN": Code(
        Exit.ENVIRONMENT,
        "A virtual environment could not be made.",
        "Read the message; then run again: it is made anew.",
    ),
    "WHEELS_UNAVAILABLE": Code(
        Exit.REMOTE,
        "Hash-locked wheels could not be fetched.",
        "Check the network and the package index, then run again.",
    ),
    "DISK_FULL": Code(
        Exit.ENVIRONMENT,
        "The disk is full.",
        "Free space, or move the store with QUANTMINT_STORE; then run again: it resumes.",
    ),
    "STORAGE_UNUSABLE": Code(
        Exit.ENVIRONMENT,
        "A file or folder cannot be made, read or written.",
        "Check the path, its permissions and what stands in its place.",
    ),
    "INTERRUPTED": Code(
        Exit.INTERRUPTED, "The run was interrupted.", "Finished stages are kept; run the same command again to go on."
    ),
    "STORE_CORRUPT": Code(
        Exit.INTEGRITY,
        "A blob of the store no longer has the bytes of its name.",
        "Run again: the blob was set aside and its stage will be executed anew.",
    ),
    "MISSING_EXTRA": Code(
        Exit.ENVIRONMENT, "An optional library is not installed.", "Install the extra that the message names."
    ),
    # jobs
    "BROKEN_WORKER": Code(
        Exit.ENVIRONMENT,
        "A stage ended without a report.",
        "Read its log with `quantmint logs STAGE`; run again: finished stages are kept.",
    ),
    "STAGE_FAILED": Code(Exit.ENVIRONMENT, "A stage reported an error.", "Read its log with `quantmint logs STAGE`."),
    "STAGE_DEADLINE": Code(
        Exit.ENVIRONMENT,
        "A stage ran past its deadline and was killed.",
        "Raise its deadline in the recipe, or look at its log.",
    ),
    "STAGE_OUT_OF_MEMORY": Code(
        Exit.ENVIRONMENT,
        "A stage was killed for memory.",
        "Raise its memory limit in the recipe, or use a larger machine.",
    ),
    "OUTPUT_MISSING": Code(
        Exit.INTEGRITY,
        "A stage did not write an output that it declares.",
        "This is a defect of the stage; keep its log.",
    ),
    "OUTPUT_UNDECLARED": Code(
        Exit.INTEGRITY,
        "A stage wrote something that it does not declare.",
        "This is a defect of the stage; keep its log.",
    ),
    "GATE_FAILED": Code(
        Exit.GATE_FAILED,
        "A gate did not pass; nothing was published.",
        "Read the reasons and the raw evidence that the message names.",
    ),
    "GATE_INCONCLUSIVE": Code(
        Exit.INCONCLUSIVE,
        "A gate could not decide; nothing was published.",
        "Read the reasons; measure again with more data.",
    ),
    # keys and signatures
    "KEY_MISSING": Code(
        Exit.USER_INPUT, "The key file does not exist.", "Check the path; `quantmint keys generate` makes one."
    ),
    "KEY_INVALID": Code(
        Exit.USER_INPUT, "The file is not a key of a supported kind.", "Use an ECDSA P-256 key in PEM form."
    ),
    "KEY_PASSPHRASE": Code(
        Exit.USER_INPUT,
        "The private key is encrypted and no passphrase, or a wrong one, was given.",
        "Set QUANTMINT_KEY_PASSPHRASE or type it when asked.",
    ),
    "KEY_EXISTS": Code(Exit.USER_INPUT, "A key file of that name exists already.", "Choose another name."),
    "SIGNATURE_MISSING": Code(
        Exit.INTEGRITY, "The package carries no release statement.", "Fetch the package again, or do not trust it."
    ),
    "SIGNATURE_INVALID": Code(
        Exit.INTEGRITY,
        "The signature does not fit the statement and the key.",
        "Check that the key is the publisher's.",
    ),
    "SEAL_REFUSED": Code(
        Exit.INTEGRITY,
        "The package is not fit to be sealed, or contradicts what its release statement would claim.",
        "Read the message; nothing was signed. Assemble the package again from its stages.",
    ),
    "PACKAGE_MISSING": Code(Exit.USER_INPUT, "There is no package at that path.", "Check the path."),
    "VERIFICATION_FAILED": Code(
        Exit.INTEGRITY,
        "The package is not what was signed.",
        "Do not use it; fetch the files named in the findings again and verify again.",
    ),
    "TARGET_UNSUPPORTED": Code(Exit.USER_INPUT, "A publishing target of that kind is not known.", "Use dir:PATH."),
    "REMOTE_FAILED": Code(Exit.REMOTE, "A remote service failed or refused.", "Try again later; nothing was lost."),
    "UNKNOWN_CODE": Code(Exit.USER_INPUT, "No error code of that name exists.", "`quantmint explain` lists them."),
}


class ReleaseError(Exception):
    """A broken promise, told once.

    `code` stands in `CODES`. `file`, `expected` and `actual` are shown when given; `hint` defaults to the table's.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        file: str | None = None,
        expected: str | None = None,
        actual: str | None = None,
        hint: str | None = None,
    ) -> None:
        entry = CODES[code]
        super().__init__(message)
        self.code = code
        self.message = message
        self.file = file
        self.expected = expected
        self.actual = actual
        self.hint = hint or entry.hint
        self.exit_code = entry.exit_code

    def as_json(self) -> dict[str, str | int]:
        """The error as one flat JSON object; absent fields are left out."""
        fields: dict[str, str | int | None] = {
            "code": self.code,
            "exit_code": int(self.exit_code),
            "message": self.message,
            "file": self.file,
            "expected": self.expected,
            "actual": self.actual,
            "hint": self.hint,
        }
        return {name: value for name, value in fields.items() if value is not None}
