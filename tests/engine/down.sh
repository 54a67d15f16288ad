#!/bin/bash
# Stop the engine and the registry that `up.sh DIR` started. What they hold stays in DIR for the next time.
set -euo pipefail
exec "$(cd "$(dirname "$0")" && pwd)/engine.sh" stop "${1:?the folder given to up.sh}"
