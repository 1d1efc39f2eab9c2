#!/usr/bin/env bash
# dev/data/fetch.sh: fetches a well-known data set into data/. Needs the network and curl; nothing in llm.cu needs it.
#
#   dev/data/fetch.sh tinyshakespeare      1.1 MB of text
#   dev/data/fetch.sh tinystories          2.2 GB of text and 22 MB held out
#   dev/data/fetch.sh fineweb-edu [N]      N token shards (default 1) of 200 MB, 100M GPT-2 tokens each, and one held out
#   dev/data/fetch.sh gpt2-tokenizer       GPT-2's tokenizer.json, with which FineWeb-Edu was tokenized
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "dev/data/fetch.sh: $*" >&2; exit 2; }

hugging_face=https://huggingface.co

# get URL FILE: resumes what was broken off, skips what is there, and leaves FILE only when it is complete.
get() {
    mkdir -p "$(dirname "$2")"
    if [ -e "$2" ]; then echo "$2 is there already"; return; fi
    echo "fetching $2"
    curl --fail --location --retry 3 --continue-at - --output "$2.part" "$1" ||
        fail "$1 could not be fetched, for the reason that curl gives above; the same command again continues"
    mv "$2.part" "$2"
}

case "${1:-}" in
tinyshakespeare)
    get https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt data/tinyshakespeare.txt
    echo "now: ./train_gpt --data data/tinyshakespeare.txt"
    ;;
tinystories)
    from=$hugging_face/datasets/roneneldan/TinyStories/resolve/main
    get $from/TinyStoriesV2-GPT4-valid.txt data/tinystories/valid.txt
    get $from/TinyStoriesV2-GPT4-train.txt data/tinystories/train.txt
    echo "now: ./train_gpt --data data/tinystories/train.txt --val data/tinystories/valid.txt"
    ;;
fineweb-edu)
    [[ ${2:-1} =~ ^([1-9][0-9]{0,2}|1000)$ ]] || fail "fineweb-edu $2: give the number of shards, 1 to 1000"
    from=$hugging_face/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main
    for name in val_000000 $(seq --format=train_%06g 1 "${2:-1}"); do
        get "$from/edu_fineweb_$name.bin" "data/fineweb-edu/edu_fineweb_$name.bin"
    done
    echo "now: ./train_gpt --model gpt2 --data data/fineweb-edu        (shards named val are held out)"
    ;;
gpt2-tokenizer)
    get $hugging_face/openai-community/gpt2/resolve/main/tokenizer.json data/gpt2/tokenizer.json
    ;;
*)
    sed -n 's/^#   //p' dev/data/fetch.sh
    [ "${1:-}" = --help ] || exit 2
    ;;
esac
