#!/usr/bin/env bash
# Make the agents' environment, the model and the repositories in $DATA, then train with $PYTHON (.venv of the
# checkout, or python). Further arguments are hydra overrides. AGENTS is the folder with the command `claude`.
set -euo pipefail
RECIPE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$RECIPE/../../.venv/bin/python"
export PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export RECIPE DATA="${DATA:-$PWD/runs/$(basename "$RECIPE")}"
GIVEN="${AGENTS:-}"
export AGENTS="${AGENTS:-$(cd "$RECIPE/../.." && pwd)/.venv-agents/bin}" # the second is where scripts/agents puts them
if [ -n "$GIVEN" ] && [ ! -x "$AGENTS/claude" ]; then
  echo "AGENTS=$AGENTS: there is no claude in this folder. Leave AGENTS out, and scripts/agents installs it" >&2
  exit 2
fi
export REPLY_TOKENS="${REPLY_TOKENS:-512}" # of one reply; a model that can write needs thousands
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

ARGUMENTS=(--config-dir "$RECIPE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$DATA/outputs'" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
[ -n "$GIVEN" ] || "$RECIPE/../../scripts/agents" >/dev/null
"$PYTHON" "$RECIPE/../swe_agent/data.py" --out "$DATA" --positions 65536
exec "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
