# dev/script.sh: what the scripts share that the Makefile calls with a folder. They source it, from the repository's root:
#
#     . dev/script.sh dev/NAME.sh "$@"
#
# Without a folder the script prints the comment at its head and ends.
script=$1
export LC_ALL=C  # numbers are 1.5 for awk and sort, not 1,5 as in some countries
[[ ${2:-} == [!-]* ]] || { sed -n '2,/^[^#]/s/^# \?//p' "$script"; [ "${2:-}" = --help ] && exit 0; exit 2; }

refuse() {
    echo "$script: $1" >&2
    exit 2
}
# expect_program FILE TARGET: ends the script where FILE, which `make TARGET` builds, is not there.
expect_program() { [ -x "$1" ] || refuse "there is no $1: \`make $2\` builds it"; }
# expect_words NAME WORD...: ends the script where the variable NAME has a word that is none of these.
expect_words() {
    local name=$1 word
    shift
    for word in ${!name}; do
        [[ " $* " == *" $word "* ]] || refuse "$name: $word: use some of $*"
    done
}
