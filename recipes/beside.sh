# Sourced by recipes that start runners: `pids` are theirs, and all of them end with the script.
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT

run_beside() { # COMMAND...: exits as it does; where a runner ends first, ends it, since it would wait in vain
  local run code=0
  "$@" &
  run=$!
  wait -n || code=$?
  if kill "$run" 2>/dev/null; then
    echo "a runner has ended before the run: the run ends, too" >&2
    [ "$code" != 0 ] || code=1
  fi
  exit "$code"
}
