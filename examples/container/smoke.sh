#!/bin/sh
# Ten seconds that show whether an image, or a machine, can train: a run on digits, its check, a prediction.
# Writes into the folder that is given and into TMPDIR alone, and needs no network and no home.
set -eu
folder=${1:?usage: smoke.sh FOLDER, which is made and must not exist}
mkdir "$folder"
equipoise train --data digits --epochs 2 --run-dir "$folder/run" --log json > "$folder/events.jsonl"
equipoise verify "$folder/run"
equipoise predict "$folder/run" --output "$folder/predicted.csv" --json
