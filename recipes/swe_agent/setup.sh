#!/usr/bin/env bash
# Make the agents' environment: mini-swe-agent and what its command line imports, apart from the trainer's, whose
# openai it would move. Once: with the same requirements a second call returns at once.
#   recipes/swe_agent/setup.sh FOLDER
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
TARGET="${1:?name the folder of the environment}"
REQUIREMENTS="$HERE/requirements.txt"
UV="$(dirname "$(command -v "$PYTHON")")/uv"

mkdir -p "$(dirname "$TARGET")"
exec 9>"$TARGET.lock"
flock 9 # two at once would build into each other
STAMP="$TARGET/.made-$(sha256sum "$REQUIREMENTS" | cut -c1-16)"
[ -e "$STAMP" ] && exit 0

if [ -x "$UV" ]; then # a tenth of pip's time
  "$PYTHON" -m venv --clear --without-pip "$TARGET"
  UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" UV_LINK_MODE="${UV_LINK_MODE:-copy}" \
    "$UV" pip install --quiet --python "$TARGET/bin/python" --no-deps -r "$REQUIREMENTS"
else
  "$PYTHON" -m venv --clear "$TARGET"
  "$TARGET/bin/python" -m pip install --quiet --no-deps -r "$REQUIREMENTS"
fi
# Shows that it starts, and leaves the bytecode, without which every start takes several times as long.
TRIAL="$(mktemp -d)"
trap 'rm -rf "$TRIAL"' EXIT
env -u PYTHONDONTWRITEBYTECODE HOME="$TRIAL" MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 \
  LITELLM_LOCAL_MODEL_COST_MAP=True "$TARGET/bin/python" \
  -c 'import minisweagent.run.mini, minisweagent.agents.default, minisweagent.environments.local, minisweagent.models.litellm_textbased_model'
touch "$STAMP"
