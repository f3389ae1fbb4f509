"""What the page says around its tables."""

from __future__ import annotations

__all__ = [
    "ABOUT",
    "AGREEMENT",
    "ANSWERED",
    "CHOICES",
    "FINDING",
    "INTRODUCTION",
    "KEPT",
    "OPTIONS",
    "SECONDS",
]

ABOUT = {
    "noisy-words": "30 % of the words of each response are replaced by words drawn from all "
    "responses. `oracle` trains on the same rows as they were.\n",
    "noisy-responses": "30 % of the responses belong to other rows. `oracle` trains on the rows "
    "that have their own.\n",
    "mixed": "Half of the rows are general instructions; the target is mathematics. `oracle` "
    "trains on the mathematics alone.\n",
    "clean": "Nothing is planted.\n",
    "code": "Python problems, nothing planted; 16 clean rows are of the same kind.\n",
    "pairs-train": "Pairs of answers, of which a judge prefers one; the target is DPO's loss.\n",
    "pairs-flipped": "A quarter of the pairs prefer the worse answer. `oracle` trains on the "
    "others.\n",
}

OPTIONS = """Each method beside the one that it adds an option to: differences of target and
retention loss, and the share of its time that goes into values.
"""

SECONDS = """Beside all tokens for 40 steps (`standard-longer`), which is about as long as the
dearest methods take. "Seconds" are multiples of plain training's; what comes before the first step
is in it: the 24 steps on the clean rows where a method starts from them or compares with them.
"""

CHOICES = """300 questions each of ARC-Challenge and HellaSwag, after training on `noisy-words`: the
share that is answered rightly, by the choice with the highest log-probability for each letter.
Differences are paired by question, in points of percent, with 95 % intervals.
"""

ANSWERED = """Problems that a model answers in its own words, word by word the likeliest: other ones
of GSM8K's test file, right where the number after `####` is. Trained on `clean`; one seed, 95 %
intervals over problems.
"""

FINDING = """Before any step: the chance that a planted token (`noisy-words`) or row
(`noisy-responses`) has a lower number than a real one; 0.5 is a coin, 95 % interval over rows. The
loss is turned round, and so is the length: a high one marks the planted.
"""

KEPT = """During the runs on `noisy-words` (first seed), quarter by quarter of the steps: the share
of planted words' tokens that is kept / the share of the others. A half that finds the dirt keeps
less of the first.
"""

AGREEMENT = """Values of one token against one half of the validation rows and against the other,
before any step: rank correlation over all tokens of 40 rows, 95 % interval over rows.
"""

INTRODUCTION = """# Does selection pay?

Written by `python -m benchmarks.selection report` from measured runs; do not edit by hand. The
figures are in [selection.json](selection.json).

![Target loss of each method minus that of training on all tokens, by task](selection.svg)

Mean and 95 % interval over rows and three seeds; blue where it leaves 0 outside.

## What was run

```
make models
export ALPHATOKEN_DATA=...                      # GSM8K, dolly, TinyStories
python -m benchmarks.selection run smollm2      # hours; started again it goes on
python -m benchmarks.selection run smollm2 --draw 1      # other rows and other dirt
python -m benchmarks.selection run code                  # MBPP; likewise pairs, gemma3
python -m benchmarks.selection find smollm2              # likewise kept
python -m benchmarks.selection report
```

`run` is `alphatoken-lab compare --config benchmarks/selection/GRID.yaml` on rows that it writes
first; what it measured is kept in benchmarks/selection/results, so that a grid goes on where it
was, also on another machine. A run takes 16 steps of AdamW, 4 rows (of at most 160 tokens) a
step, with 2 steps of warm-up and a linearly falling rate; arithmetic in bf16, weights in float32,
one thread. All parameters of SmolLM2-135M-Instruct are trained, Gemma 3 270M by LoRA; both
start from four-bit weights, read back as float32. `standard-longer` takes 40 steps;
`rows-of-two` and `rho-1-responses` draw 8 rows a step and train on half of them. Retention is not
part of a value unless the method says so.

There are 320 training rows, 16 clean *validation rows* of the target (what values and references
are made from), 16 *choosing rows* (each method tries the same three learning rates at the first
seed and the one with the lowest loss on them is taken at all seeds; `noisy-responses` and `clean`
take what was chosen on `mixed`, and methods without a rate in the tables have a fixed one), 40
*target* problems of the data's own test file, and for *retention* 20 general instructions and 8
stories. No two of these share a row. Values are taken against 8 of the validation rows, drawn anew
every second step.

Every method has the 16 validation rows. So the plain ways of using them stand beside the
selecting ones:

* `on-validation` trains on them alone, 16 steps;
* `after-validation` trains on them for 24 steps, then 16 steps on all tokens of the task's rows;
* the reference of `rho-1`, `rho-1-responses` and `token-cleaning` is the model after these 24;
* `validation-first`, a policy, does the same in one command;
* `after-validation-rho-1` starts from that reference and goes on by `rho-1`.

"Tokens" are response tokens with a weight, over all steps. "Time" is training, as a multiple of
that on all tokens; cells ran beside other work on several days, so that it is good to a third. What
share of it goes into values and their directions ("values") is measured within each run.
Differences are paired by row and seed: mean and 95 % interval in nats, negative is better, rows and
seeds both drawn anew; **bold** where three seeds leave 0 outside. With three seeds, intervals over
seeds are rough.
"""
