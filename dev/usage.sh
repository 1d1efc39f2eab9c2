# dev/usage.sh: how the scripts begin that the Makefile calls with a folder. They source it, from the repository's root:
#
#     . dev/usage.sh dev/NAME.sh "$@"
#
# Without a folder the script prints the comment at its head and ends.
[[ ${2:-} == [!-]* ]] || { sed -n '2,/^[^#]/s/^# \?//p' "$1"; [ "${2:-}" = --help ] && exit 0; exit 2; }
