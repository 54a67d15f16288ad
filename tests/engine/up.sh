#!/bin/bash
# From nothing to an engine with every image: `up.sh DIR [--local] [IMAGE…]`. Ends with DIR/env, to be sourced; all of it is cached
# in DIR, so a second call takes seconds. --local: build without pushing to the registry. PYTHON names the Python that has Quantmint (default: the project's .venv).
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
dir=${1:?a folder for the engine}
shift
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}

set -a
eval "$("$here/engine.sh" start "$dir")"
eval "$(python3 "$here/bases.py" "$dir" "$QUANTMINT_REGISTRY")"
set +a
"$python" "$here/build.py" "$dir/state" "$@" >/dev/null
cat >"$dir/env.part" <<ENV
export DOCKER_HOST=$DOCKER_HOST
export QUANTMINT_REGISTRY=$QUANTMINT_REGISTRY
export QUANTMINT_BUILDER_IMAGE=$QUANTMINT_BUILDER_IMAGE
export QUANTMINT_RUNTIME_IMAGE=$QUANTMINT_RUNTIME_IMAGE
export QUANTMINT_PINS=$dir/state/pins.toml
ENV
mv "$dir/env.part" "$dir/env"
echo "engine up; source $dir/env" >&2
