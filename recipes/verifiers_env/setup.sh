#!/usr/bin/env bash
# Make the environment of verifiers, apart from the trainer's, whose openai and transformers it would move. Once: with
# the same requirements a second call returns at once.
#   recipes/verifiers_env/setup.sh FOLDER [PACKAGE ...]     packages of environments, for `pip install`
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
TARGET="${1:?name the folder of the environment}"
UV="$(dirname "$(command -v "$PYTHON")")/uv"
shift

mkdir -p "$(dirname "$TARGET")"
exec 9>"$TARGET.lock"
flock 9 # two at once would build into each other
STAMP="$TARGET/.made-$(sha256sum "$HERE/requirements.txt" | cut -c1-16)"
if [ ! -e "$STAMP" ]; then
  echo "Installing verifiers (400 MB) into $TARGET" >&2
  "$PYTHON" -m venv --clear "$TARGET"
  if [ -x "$UV" ]; then # a tenth of pip's time
    UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" UV_LINK_MODE="${UV_LINK_MODE:-copy}" \
      "$UV" pip install --quiet --python "$TARGET/bin/python" --no-deps -r "$HERE/requirements.txt"
  else
    "$TARGET/bin/python" -m pip install --quiet --no-deps -r "$HERE/requirements.txt"
  fi
  touch "$STAMP"
fi
[ $# -eq 0 ] || "$TARGET/bin/python" -m pip install --quiet "$@"
