#!/usr/bin/env bash
# Train on episodes of an environment: KIND=gymnasium with GYM_ENV, or KIND=openenv with OPENENV_URL, by one runner with
# SLOTS episodes at a time. MODEL is the model; without it one of random weights is made. Arguments are hydra overrides.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
RECIPE="$HERE/../verifiers_env" # whose settings and data these are
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export RECIPE PYTHON DATA="${DATA:-$PWD/runs/$(basename "$HERE")}" GYM_ENV="${GYM_ENV:-FrozenLake-v1}" KIND="${KIND:-gymnasium}"
MAKE=() && [ -n "${MODEL:-}" ] || MAKE=(--make-model "$DATA/model")
export MODEL="${MODEL:-$DATA/model}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
PACKAGES="${PACKAGES:-$DATA/packages}" # the folder of the environment of packages
FILE="$DATA/checkpoints/trajectories.sqlite.admin.json"

ARGUMENTS=(--config-dir "$RECIPE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$DATA/outputs'" trainer.project_name=environments
  "actor_rollout_ref.rollout.agent.agent_loop_config_path='$HERE/agents.yaml'"
  actor_rollout_ref.rollout.agent.default_agent_loop=environment "$@")

with_packages() { # in a subshell, whose process it becomes
  export PYTHONPATH="$HERE/../..${PYTHONPATH:+:$PYTHONPATH}"
  exec "$PACKAGES/bin/python" "$@"
}
runner() { # waits for the run's address, then works until it is stopped
  until [ -f "$FILE" ]; do sleep 1; done
  with_packages -m seamless_verl.cli runner --admin-file "$FILE" --slots "${SLOTS:-16}" \
    --agent "environment=$HERE/environments.py:$KIND"
}

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
if [ ! -x "$PACKAGES/bin/python" ]; then
  "$PYTHON" -m venv "$PACKAGES" && "$PACKAGES/bin/python" -m pip install --quiet -r "$HERE/requirements.txt"
fi
(with_packages "$HERE/environments.py") # refuse an environment that cannot work
for seed in $(seq "${EPISODES:-256}"); do # what an episode begins with is the environment's
  echo '{"source": "environments", "prompt": [{"role": "user", "content": ""}], "index": '"$seed"', "key": ""}'
done | "$PYTHON" "$RECIPE/data.py" --out "$DATA" "${MAKE[@]}" --val "${VAL:-64}"
rm -f "$FILE" # one that a killed run left names nobody
source "$HERE/../beside.sh"
runner &
pids+=($!)
run_beside "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
