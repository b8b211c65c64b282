#!/usr/bin/env bash
# Fetch the model and the tasks' package, make the data in $DATA, then train with $PYTHON (.venv of the checkout, or
# python). Further arguments are hydra overrides. CONFIG=turns trains the agent; PACKAGES is where the packages are.
set -euo pipefail
RECIPE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$RECIPE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export RECIPE PYTHON DATA="${DATA:-$PWD/runs/$(basename "$RECIPE")}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
PACKAGES="${PACKAGES:-$DATA/packages}"

ARGUMENTS=(--config-dir "$RECIPE" --config-name "${CONFIG:-config}"
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$DATA/outputs'" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$RECIPE/setup.sh" "$PACKAGES"
"$PYTHON" "$RECIPE/data.py" --packages "$PACKAGES" --out "$DATA"
exec "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
