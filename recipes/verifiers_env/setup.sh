#!/usr/bin/env bash
# Make the environment of verifiers, apart from the trainer's, whose openai and transformers it would move. Once: with
# the same requirements a second call returns at once.
#   recipes/verifiers_env/setup.sh FOLDER [PACKAGE ...]     packages of environments, for `pip install`
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
TARGET="${1:?name the folder of the environment}"
shift

mkdir -p "$(dirname "$TARGET")"
exec 9>"$TARGET.lock"
flock 9 # two at once would build into each other
STAMP="$TARGET/.made-$(sha256sum "$HERE/requirements.txt" | cut -c1-16)"
if [ ! -e "$STAMP" ]; then
  echo "Installing verifiers (570 MB) into $TARGET" >&2
  "$PYTHON" -m venv --clear --without-pip "$TARGET"
  "$PYTHON" -m pip --python "$TARGET/bin/python" install --quiet --no-deps -r "$HERE/requirements.txt"
  touch "$STAMP"
fi
[ $# -eq 0 ] || "$PYTHON" -m pip --python "$TARGET/bin/python" install --quiet "$@"
