#!/usr/bin/env bash
# Compare SRPO's and ScaleRL's resampling with plain GRPO at equal tokens, three seeds each.
# Further arguments are those of `seamless-verl compare`, such as --steps 40 --seeds 1,2, or overrides of every arm.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"

ARMS=(grpo:seamless.sampler.name=null srpo:seamless.sampler.name=srpo scalerl:seamless.sampler.threshold=0.9)
exec "$PYTHON" -m seamless_verl.cli compare "$HERE" actor_rollout_ref.rollout.val_kwargs.n=2 --equal-tokens \
  --validate 12 --steps 72 --seeds 1,2,3 --arms "$(IFS=, && echo "${ARMS[*]}")" "$@"
