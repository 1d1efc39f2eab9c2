#!/usr/bin/env bash
# test/fuzz.sh SECONDS FUZZER...: runs what `make fuzz` has built.
#
# The corpus of a fuzzer, build/fuzz/corpus/FUZZER, begins with golden files that its reader accepts.
set -eu
cd "$(dirname "$0")/.."
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || { echo "test/fuzz.sh ${1:-}: give whole seconds, at least 1 (make fuzz: FUZZ_SECONDS)" >&2; exit 2; }
seconds=$1
shift
for fuzzer in "$@"; do
    [ -x "build/fuzz/$fuzzer" ] || { echo "test/fuzz.sh: there is no build/fuzz/$fuzzer: \`make fuzz\` builds it" >&2; exit 2; }
done

# Prints the number as N little-endian bytes.
little_endian() {
    local n=$1 bytes=$2
    for ((; bytes > 0; bytes--, n >>= 8)); do printf "\\x$(printf %02x $((n & 255)))"; done
}

seed() {
    case $1 in
        fuzz_tokenizer) # whole files, and patterns
            for file in test/golden/tokenizer/*/tokenizer.json; do cp "$file" "$2/$(basename "$(dirname "$file")")"; done
            printf '%s' "(?i:'s)|[^\\r\\n\\p{L}\\w]?+\\p{Han}++|\\p{N}{1,3}+| ?\\b[^\\s]+(?<=a)\\h|\\s+(?!\\S)" > "$2/pattern" ;;
        fuzz_safetensors) # the first byte chooses between the parsers of index and file
            { printf '\0' && cat test/golden/llama_sharded/model.safetensors.index.json; } > "$2/index"
            { printf '\1' && cat test/golden/llama_sharded/model-00004-of-00004.safetensors; } > "$2/file" ;;
        fuzz_bin) # magic, version, tokens, 253 numbers that are not used; then the tokens
            { little_endian 20240520 4; little_endian 1 4; little_endian 3 4; head -c 1012 /dev/zero; printf 112233; } > "$2/16bit"
            { little_endian 20240801 4; little_endian 7 4; little_endian 2 4; head -c 1012 /dev/zero; printf 11112222; } > "$2/32bit" ;;
    esac
}

status=0
for fuzzer in "$@"; do
    corpus=build/fuzz/corpus/$fuzzer
    mkdir -p "$corpus"
    seed "$fuzzer" "$corpus"
    printf '  %-18s ' "$fuzzer"
    if "build/fuzz/$fuzzer" "$corpus" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 -max_len=65536 \
        -artifact_prefix="build/fuzz/$fuzzer-" > "build/fuzz/$fuzzer.log" 2>&1; then
        echo "nothing found in $(sed -n 's/^Done \([0-9]*\) runs in \([0-9]*\) second.*/\1 inputs, \2 s/p' "build/fuzz/$fuzzer.log")"
    else
        echo "FOUND SOMETHING; the end of build/fuzz/$fuzzer.log:"
        tail -n 40 "build/fuzz/$fuzzer.log"
        status=1
    fi
done
exit $status
