# Sourced by ./demo and ./test, which set $root:  make_venv WHAT_TO_INSTALL  leaves $venv ready.
# It works only when the stamp inside $venv does not match. The stamp is written last, so an
# interrupted installation is done again.

case ${RAFFIA_VENV:-} in
    '') venv=$root/.venv ;;
    /*) venv=$RAFFIA_VENV ;;
    *) venv=$(pwd)/$RAFFIA_VENV ;;
esac

fail() {
    echo "$1" >&2
    exit 1
}

fingerprint() { # changes with what was asked for, the checkout's place and the Python
    echo "$1 $root"
    "$venv/bin/python" -c 'import sys; print(sys.version)'
    cksum <"$root/pyproject.toml"
    cksum <"$root/constraints.txt"
}

is_ready() {
    [ -x "$venv/bin/python" ] && [ -f "$venv/raffia-stamp" ] || return 1
    for installed in "$1" '.[dev]'; do # what ./test installs is enough for ./demo
        [ "$(fingerprint "$installed")" != "$(cat "$venv/raffia-stamp")" ] || return 0
    done
    return 1
}

make_venv() {
    if is_ready "$1"; then return; fi
    python=${PYTHON:-python3}
    command -v "$python" >/dev/null ||
        fail "no $python here; install Python 3.11 or newer, or name one: PYTHON=/path/to/python3.11 $0"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$python is $("$python" --version 2>&1); Raffia needs 3.11 or newer. Name one: PYTHON=python3.11 $0"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv is not a virtual environment; remove it, or name another place: RAFFIA_VENV=/path $0"
    fi

    rm -f "$venv/raffia-stamp"
    echo "+ $python -m venv $venv"
    "$python" -m venv "$venv"
    # pip even where uv is: uv reads neither PIP_FIND_LINKS nor pip.conf, and the wrong torch is gigabytes.
    echo "+ pip install -c constraints.txt -e $1    (minutes, the first time)"
    if [ -t 1 ]; then quiet=; else quiet=--quiet; fi
    (cd "$root" && "$venv/bin/python" -m pip install $quiet -c constraints.txt -e "$1")
    fingerprint "$1" >"$venv/raffia-stamp.new"
    mv "$venv/raffia-stamp.new" "$venv/raffia-stamp"
}
