#!/usr/bin/env bash
# Make the model and the data in $DATA, then train with $PYTHON (.venv of the checkout, or python).
# Further arguments are hydra overrides. WARM_STEPS is the length of the model's warm start.
set -euo pipefail
RECIPE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$RECIPE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export RECIPE DATA="${DATA:-$PWD/runs/$(basename "$RECIPE")}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

ARGUMENTS=(--config-dir "$RECIPE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$DATA/outputs'" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$PYTHON" "$RECIPE/data.py" --out "$DATA" --steps "${WARM_STEPS:-400}"
exec "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
