#!/usr/bin/env bash
# Usage: mongo-image.sh [VERSION]
#
# Prints one line, NAME:TAG of a local image whose containers take mongod's arguments as their command, such as
# `--replSet rs0 --bind_ip_all`; everything else goes to stderr, and nothing does when the image is there already.
#
# The official image is used where it is to be had. Where no registry answers, one is made of the mongod that mongod.sh
# beside this file obtains and of this machine's libraries: no shell in it, nothing but the server. Either has /data/db.
# Where mongod is one that runs under Wine, this machine's Wine and a shell are in it too; that takes Debian.
# Images of older recipes stay, since another checkout may use them: `docker image ls mongosub-mongod` lists them.

set -euo pipefail
umask 022 # the files in the image have to be readable by any user, whatever the caller's umask

DEFAULT_VERSION=6.0.27
# The only place that names it. MONGOSUB_OFFICIAL_IMAGE names a mirror's; set but empty, no registry is ever asked.
OFFICIAL_IMAGE=${MONGOSUB_OFFICIAL_IMAGE-mongo}
# Bounds a pull that works, some 250 MB. An unreachable registry does not take it up: the engine gives up by itself, at
# once without a name server and in half a minute behind a firewall that drops packets.
PULL_SECONDS=300
# Without a slash: should the tag be missing, the engine asks its hub for it under a name that no stranger can register.
LOCAL_IMAGE=mongosub-mongod

say() { printf 'mongo-image.sh: %s\n' "$*" >&2; }
die() {
  say "$@"
  exit 1
}

have() { docker image inspect "$1" >/dev/null 2>&1; }

# Holds until this shell ends; see mongod.sh, which has made sure of Python by the time it is needed here.
lock() {
  local python=python3
  command -v "$python" >/dev/null || python=python
  exec 9>"$1"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

pull_official() {
  [ -n "$OFFICIAL_IMAGE" ] || return 1
  say "asking for $OFFICIAL_IMAGE:$version"
  timeout "$PULL_SECONDS" docker pull --quiet "$OFFICIAL_IMAGE:$version" >/dev/null 2>&1
}

# fill MONGOD-ROOT STAGE
fill() {
  local root=$1 stage=$2 library libc
  local programs=("$root/bin/mongod")
  mkdir -p "$stage/bin" "$stage/lib" "$stage/lib64" "$stage/data/db" "$stage/etc" "$stage/tmp"
  chmod 1777 "$stage/tmp" "$stage/data/db" # also for `docker run --user`
  if [ -d "$root/wine" ]; then
    fill_wine "$root" "$stage"
  else
    cp "$root/bin/mongod" "$stage/bin/mongod" # its debug information was stripped by whoever packed the wheel
    cp -a "$root/lib/." "$stage/lib/"
  fi
  LD_LIBRARY_PATH=$root/lib ldd "${programs[@]}" \
    | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }' | grep -v ':$' | sort -u >"$stage.libraries" \
    || die "ldd does not tell which libraries ${programs[*]} need."
  while read -r library; do
    case $library in
      "$root"/*) ;; # there already, with its links
      */ld-linux-*) cp -L "$library" "$stage/lib64/" ;; # where the binary itself says it is
      *) cp -L "$library" "$stage/lib/" ;;
    esac
  done <"$stage.libraries"
  # Looking up names: a part of libc since glibc 2.34, before that libraries which it opens by name and ldd cannot see.
  libc=$(grep -m 1 '/libc\.so\.6$' "$stage.libraries") || die "ldd names no libc for $root/bin/mongod."
  for library in libnss_files.so.2 libnss_dns.so.2; do
    [ ! -e "${libc%/*}/$library" ] || cp -L "${libc%/*}/$library" "$stage/lib/"
  done
  printf 'hosts: files dns\n' >"$stage/etc/nsswitch.conf"
  printf 'root:x:0:0:root:/:/bin/false\n' >"$stage/etc/passwd"
  printf 'root:x:0:\n' >"$stage/etc/group"
}

# Wine where Debian has it, and mongod's directory with its prefix. Adds to `programs` what needs libraries.
fill_wine() { # MONGOD-ROOT STAGE
  local root=$1 stage=$2 file builtin
  dpkg -L wine64 libwine >"$stage.wine" 2>/dev/null \
    || die "an image of mongod $version takes Debian's packages wine64 and libwine, which are not installed here."
  mkdir -p "$stage/mongod"
  cp -a "$root/mongod" "$root/bin" "$root/wine" "$stage/mongod/"
  grep -e /lib/wine/ -e /wine/x86_64- -e /share/wine/ "$stage.wine" | sed 's,^/,,' \
    | tar -C / --no-recursion --files-from=- -c | tar -C "$stage" -x
  # The prefix holds Wine's libraries once more, which is half of the image.
  for file in "$stage"/mongod/wine/drive_c/windows/system32/*; do
    builtin=$(echo "$stage"/usr/lib/*/wine/x86_64-windows/"${file##*/}")
    if cmp -s "$file" "$builtin"; then ln -sf "${builtin#"$stage"}" "$file"; fi
  done
  printf '#!/bin/sh\nexec /mongod/mongod "$@"\n' >"$stage/bin/mongod"
  chmod 755 "$stage/bin/mongod"
  cp -L /bin/sh "$stage/bin/sh"
  programs=(/bin/sh "$stage"/usr/lib/wine/wine*64)
  # Without those for sound, graphics and devices: they need the libraries of a desktop.
  for file in bcrypt crypt32 dnsapi netapi32 nsiproxy ntdll secur32 win32u ws2_32; do
    programs+=("$(echo /usr/lib/*/wine/x86_64-unix/"$file.so")")
  done
  # Opened by name: by Wine for cryptography, by libc for the end of a thread.
  for file in libgnutls.so.30 libgcc_s.so.1; do
    file=$(ldconfig -p | awk -v name="$file" '$1 == name && /x86-64/ && !found { print $NF; found = 1 }')
    [ -n "$file" ] || continue
    cp -L "$file" "$stage/lib/"
    programs+=("$file")
  done
}

# Tagged last, so that nobody finds an image which does not start. No VOLUME: it would leave one behind for every container
# that is removed without being told to remove its volumes.
build() { # MONGOD-ROOT WORK TAG
  local id said
  say "making $3"
  fill "$1" "$2/stage"
  # The library path is said, because where a loader looks by itself is up to the distribution it comes from.
  id=$(tar -C "$2/stage" --numeric-owner --owner=0 --group=0 -c . | docker import \
    -c 'ENTRYPOINT ["/bin/mongod"]' -c 'ENV LD_LIBRARY_PATH=/lib' -c 'EXPOSE 27017' -) \
    || die "the container engine did not take the image, for the reason above."
  if ! said=$(docker run --rm --network none "$id" --version 2>&1); then
    docker image rm "$id" >/dev/null 2>&1 || true
    die "mongod $version does not start in a container: ${said##*$'\n'}"
  fi
  docker tag "$id" "$3"
}

main() {
  local here mongod cache recipe image
  version=${1:-$DEFAULT_VERSION}
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  command -v docker >/dev/null || die "the docker command is not on the PATH."
  # The scripts themselves are the recipe: whatever is changed in them, the next run makes a new image.
  recipe=$(cat "$here/mongod.sh" "$here/mongo-image.sh" | cksum)
  image=$LOCAL_IMAGE:$version-${recipe%% *}

  # What was made here comes first, so that a machine without a registry asks for it once and not at every call.
  if have "$image"; then
    printf '%s\n' "$image"
    return
  fi
  if [ -n "$OFFICIAL_IMAGE" ] && have "$OFFICIAL_IMAGE:$version"; then
    printf '%s\n' "$OFFICIAL_IMAGE:$version"
    return
  fi
  docker version >/dev/null 2>&1 || die "no container engine answers the docker command."
  if pull_official; then
    printf '%s\n' "$OFFICIAL_IMAGE:$version"
    return
  fi

  mongod=$("$BASH" "$here/mongod.sh" "$version") || exit # it has said why
  cache=${mongod%/*/mongod}
  lock "$cache/.image-$version.lock"
  if ! have "$image"; then # another run may have made it meanwhile
    rm -rf "$cache/.image-$version".tmp.* # of runs that were killed: whoever holds the lock is the only one to make them
    work=$(mktemp -d "$cache/.image-$version.tmp.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    build "${mongod%/mongod}" "$work" "$image"
  fi
  printf '%s\n' "$image"
}

main "$@" </dev/null
