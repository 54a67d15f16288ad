# Verbs only: every recipe calls one program. `./just VERB` also makes the environment that they need.

bin := justfile_directory() / ".venv/bin"
export PATH := bin + ":" + env("PATH")
set positional-arguments

# List the verbs
_default:
    @just --list

# Build, gate, seal, publish and verify a release: just release demo
[group: 'release']
release NAME *ARGS:
    @quantmint release "$@"

# Write the digests of a recipe's local sources into it: just pin demo
[group: 'release']
pin NAME *ARGS:
    @quantmint pin "$@"

# Resolve the hash-locked requirements of the images anew
[group: 'release']
lock *NAMES:
    @quantmint images lock "$@"

# Run the tests; those that need a Docker engine or heavy environments run where these are
[group: 'work']
test *ARGS:
    @pytest "$@"

# Everything that must be green: lint, types, import contracts, tests
[group: 'work']
check: lint
    @pytest

# Lint, types and import contracts alone
[group: 'work']
lint:
    @ruff check .
    @ruff format --check .
    @mypy
    @lint-imports --no-logo

# Update the golden files and the published schemas; look at the difference before committing it
[group: 'work']
bless:
    @quantmint schema --write
    @QUANTMINT_BLESS=1 pytest tests/unit -q -k golden

# Remove what was built here: packages, the store, caches
[group: 'work']
clean:
    rm -rf dist .quantmint .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
