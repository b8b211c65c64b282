#!/bin/sh
# Run a command in a root of its own, which has the system's programs, the paths SEEN and the folders in OWN, as USER.
#   unshare --mount --pid --fork enter.sh OWN SEEN USER WORKDIR COMMAND...     SEEN is split at colons
# 125, as of `docker run`: the sandbox could not be made.
OWN="$1" SEEN="$2" USER_ID="$3" WORKDIR="$4"
shift 4
ROOT="$OWN/../root"
failed() {
  echo "the sandbox could not be made: $1" >&2
  exit 125
}
show() { # a path of this system, at its place
  if [ -d "$1" ]; then mkdir -p "$ROOT$1"; else mkdir -p "$ROOT$(dirname "$1")" && : >"$ROOT$1"; fi
  mount --rbind "$1" "$ROOT$1" || failed "$1"
}

mount -t tmpfs -o mode=755 sandbox "$ROOT" || failed "tmpfs"
for path in "$OWN"/*; do
  chown -R "$USER_ID:$USER_ID" "$path" || failed "$path"
  mkdir "$ROOT/${path##*/}" && mount --bind "$path" "$ROOT/${path##*/}" || failed "$path"
done
for path in /usr /bin /sbin /lib /lib32 /lib64 /libx32 /etc /dev; do
  if [ -L "$path" ]; then cp -P "$path" "$ROOT"; elif [ -e "$path" ]; then show "$path"; fi
done
mkdir "$ROOT/proc" && mount -t proc proc "$ROOT/proc" || failed "/proc"
mount -t tmpfs -o mode=1777 sandbox "$ROOT/dev/shm" || failed "/dev/shm"
IFS=:
for path in $SEEN; do show "$path"; done
unset IFS
export HOME=/tmp/home TMPDIR=/tmp
AS="--userspec=$USER_ID:$USER_ID --groups=$USER_ID"
[ "$USER_ID" != 0 ] || AS="" # root of a user namespace already, in which no groups can be set
exec chroot $AS "$ROOT" \
  setpriv --no-new-privs --inh-caps=-all --bounding-set=-all --pdeathsig KILL \
  sh -c 'cd "$0" && exec "$@"' "$WORKDIR" "$@"
