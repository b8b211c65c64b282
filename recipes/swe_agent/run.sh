#!/usr/bin/env bash
# Make the agents' environment, the model and the repositories in $DATA, then train with $PYTHON (.venv of the
# checkout, or python). Further arguments are hydra overrides. AGENT_ENV is where the agents' environment is.
set -euo pipefail
RECIPE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$RECIPE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export RECIPE PYTHON DATA="${DATA:-$PWD/runs/$(basename "$RECIPE")}"
export AGENT_ENV="${AGENT_ENV:-$DATA/agent-venv}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

ARGUMENTS=(--config-dir "$RECIPE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$DATA/outputs'" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$RECIPE/setup.sh" "$AGENT_ENV"
"$PYTHON" "$RECIPE/data.py" --out "$DATA"
exec "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
