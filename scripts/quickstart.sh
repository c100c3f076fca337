#!/usr/bin/env bash
# quickstart.sh - from a fresh clone to a GPT that writes little stories, in one go: make quickstart
#
# Installs what is missing, builds, generates the corpus (data/make_corpus.py: a grammar whose entropy is known), trains
# for two to eight minutes on two cores (seconds on a GPU), shows the loss falling towards that entropy, and samples.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n== %s\n' "$*"; }

say "1/4 tools and build"
scripts/setup.sh g++ python3
make --no-print-directory -j"$(nproc)" all

say "2/4 corpus: stories from a grammar of ours, whose entropy is known"
corpus=data/corpus
if [ ! -s $corpus/corpus.json ]; then python3 data/make_corpus.py; fi
floor=$(python3 -c 'import json, sys; print("%.4f" % json.load(open(sys.argv[1]))["window"]["nats_per_byte"])' $corpus/corpus.json)

say "3/4 training: the loss starts near ln 256 = 5.55 nats a byte and cannot fall below the corpus's entropy; a perfect model would reach $floor"
out=out/quickstart
# A quickstart begins afresh; what an earlier one left stays beside it under another name until the next one.
if [ -e $out ]; then rm -rf $out.previous && mv $out $out.previous; fi
./train_gpt -c scripts/examples/quickstart.json

say "4/4 what it learned"
python3 scripts/plot_log.py $out/log.jsonl --corpus $corpus/corpus.json --table --title "quickstart: loss and the corpus's entropy" -l quickstart
echo
echo "a sample:"
./train_gpt -c scripts/examples/quickstart.json --generate "One "

cat <<TEXT

That was a GPT trained from nothing. What next:
  ./train_gpt -c scripts/examples/quickstart.json run.steps=5000     go on training (it resumes from $out)
  ./train_gpt -c scripts/examples/quickstart.json --generate "The"   another sample
  ./train_gpt -c scripts/examples/quickstart.json data.train=YOUR.txt data.val=null run.output_dir=out/mine
                                                                     your own text
  README.md                                                          GPT-2 124M on a GPU, fine-tuning, how the code reads
TEXT
