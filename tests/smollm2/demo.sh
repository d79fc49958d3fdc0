#!/bin/sh
# What half and a quarter of its KV cache cost a trained model, in the commands a user would type.
# demo.sh MODEL FIT_TEXT TEST_TEXT FOLDER: the last one is new, and keeps both conversions.
set -eu
model=$1 fit=$2 test=$3 out=$4
type() {
    printf '\n$ %s\n' "$*"
    "$@"
}
type rehead plan "$model" --context 1024
type rehead eval "$model" --data "$test" --length 1024
for share in 0.5 0.25; do
    type rehead convert "$model" "$out/mla-$share" --to mla --kv-fraction $share --calibration "$fit" --test "$test" \
        --allow-loss
done
for folder in "$model" "$out/mla-0.5" "$out/mla-0.25"; do
    type rehead generate "$folder" --prompt "The capital of France is" --max-new-tokens 24 --temperature 0
done
printf '\nwhat became of each layer: %s\n' "$out/mla-0.5/CONVERSION.md" "$out/mla-0.25/CONVERSION.md"
