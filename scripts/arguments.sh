# For `source` before a script changes its folder or makes anything: at --help or -h, prints the comment at the script's
# head and exits. What follows -- is another program's.
for argument in "$@"; do
    case $argument in
        -h | --help) sed -n '2,${/^#/!q; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[1]}"; exit 0 ;;
        --) break ;;
    esac
done

expect_among() {  # the names that there are, in one argument; those that were given
    local name
    for name in "${@:2}"; do
        case " $1 " in
            *" $name "*) ;;
            *) echo "$(basename "$0" .sh): there is no $name; expected names of these: $1" >&2; exit 2 ;;
        esac
    done
}

expect_modules() {  # a Python, modules that it must have
    local find='import importlib.util as u, sys; sys.exit(", ".join(x for x in sys.argv[1:] if not u.find_spec(x)) or 0)'
    local missing
    missing=$("$1" -c "$find" "${@:2}" 2>&1) || {
        echo "$(basename "$0" .sh): $1 has no ${missing##*$'\n'}; first: bash scripts/setup.sh test train" >&2
        exit 1
    }
}

from_here() {  # a path -> the same one from any folder
    case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac
}
