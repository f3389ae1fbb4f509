"""What docs/paper.md says in words; the numbers come from what is kept."""

from __future__ import annotations

__all__ = ["CARRIES", "FIGURES", "INTRODUCTION", "LAST"]

INTRODUCTION = """\
# The paper, table by table

Written by `python -m benchmarks.paper page`. `alphatoken-lab paper --list` names every table and
figure of the paper with what it needs and costs; `alphatoken-lab paper NAME` makes it as the paper
has it, `--scale laptop` the same in small. Below stand the paper's numbers beside those of the
small scale:

- **SmolLM2-135M-Instruct with four-bit weights**, all parameters trained, one thread, bf16
  arithmetic.
- **8 steps of 4 rows** of at most 160 tokens, in place of three epochs. Rows say how many of the
  three seeds are there; a dash is a cell that was not run yet, and the command goes on with it.
- Rows: Python problems (MBPP) in place of Magicoder; preferences of alpaca_eval after a warm-up on
  general instructions (dolly) in place of UltraFeedback after UltraChat. Measured on 24 held-out
  rows or pairs; retention on general instructions and stories, 16 rows.
- **Losses in place of benchmarks**: a model of this size solves next to nothing of HumanEval, GSM8K
  or MMLU, so that scores would be noise.
- ρ = 0.5, λ = 1.5, W = 32, K = 3, a fixed validation batch of 32, as in the paper; a Fisher of 16
  (preferences: 8) samples in place of 1,000; a direction taken anew every fourth (sixth) step.

So small a run shows that each method runs and where a difference is large; it cannot confirm a
ranking whose steps are fractions of a point.
"""

CARRIES: dict[str, str] = {
    "tab:main_rq1_sft": """\
What carries over: adapters move less than whole weights on both columns. What does not: standard
fine-tuning forgets nothing in 32 rows, its retention loss falls with its target loss, so that the
paper's trade between the two does not show; and where every row is clean, all tokens, or the rows
that LESS chooses, serve the target better than any half of the tokens. STM, which keeps what the
model finds likely, ends far above the start. ([docs/selection.md](selection.md) has rows with dirt
in them, and rates tuned for each method.)
""",
    "tab:main_rq1_dpo": """\
Nothing here can be said to carry over or not: after 8 steps every loss of held-out pairs is within
0.015 of the start's, and all methods order half of 24 pairs rightly, give or take one. Plain DPO
has the lowest loss and forgets least; AlphaToken forgets most, and its loss lies with the others'.
""",
    "tab:ablation_rq3": """\
What carries over: of the two paths the direct one is what the full value follows. What does not:
the retention part changes next to nothing, since the weights have hardly left their reference
after 8 steps and lambda has no natural unit; and the two variants whose choice has least to do with
the gradient on the validation rows, stability alone and the causal path alone, serve the target
better than the full value, which chance does as well (the next table).
""",
    "fig:intervention_rq2": """\
What carries over: the better half is far above the worse one, on both losses, so that the sign of a
value is right. What does not: a random half is better than the better half. On clean rows it takes
nothing away; the better half leaves out what is easy and frequent, and a step on it unlearns that.
""",
    "tab:runtime_sft": """\
What carries over: a static pass over the rows is a large part of an epoch's time. What does not:
hours of a shared CPU say nothing of an A100's, and an epoch is of 95 rows.
""",
    "fig:fisher_proxy_fidelity": """\
This does not carry over: proxy and oracle rank tokens in opposite ways, and the proxy keeps less in
common with the oracle than a random choice does. The reason is on the page: in these 8 steps the
retention loss falls, so that the oracle asks to go on and the proxy, which knows only how far the
weights went, asks to go back. What the drift changed of the oracle, which is what the proxy models,
it ranks almost perfectly. With a diagonal, a Kronecker or no Fisher at all the ranking is the same.
""",
    "fig:app:vp_fidelity": """\
How many pairs are of low risk depends on where low ends, and the paper does not say where. From the
first step to the last 2 % have a risk of 0.1 or more, a fifth of 0.01 or more, and six in ten of
0.001 or more. The 2 % carry more than a third of what Value-Propagation leaves out, and of the
exact causal value it sees about a half.
""",
    "fig:app:representation_stability": """\
This does not carry over: both models move the probes by about a twentieth of their length, in one
direction, AlphaToken's a little further, and both keep the geometry; on both the loss of the probes
falls. Forgetting would have to happen before a method could hold it back.
""",
}
"""Label -> what carries over from the paper to this scale, and what does not."""

FIGURES = (
    "fig:fisher_proxy_fidelity",
    "fig:app:vp_fidelity",
    "fig:app:representation_stability",
)

LAST = """\
## Running it in full

Four GPUs, the backbones and the data sets (by their names on the hub, which `--dry_run` lists), and
a folder `paper-evaluation` (`--evaluation_dir`) with

| file | what |
|---|---|
| `alpaca_eval.jsonl`, `arena_hard.jsonl` | questions (`instruction` or `prompt`) |
| `alpaca_eval_answers.jsonl`, `arena_hard_answers.jsonl` | stored answers of the opponents |
| `arc_challenge.jsonl`, `mmlu.jsonl`, `gsm8k.jsonl` | 8 rows each, for the Fisher's figure |
| `hellaswag.jsonl` | likewise; 1,000 rows for the stability figure |

a judge's endpoint (`--judge_url`, `--judge_model`), and for HumanEval an image in which lm-eval
executes what the model writes ([evaluate.md](evaluate.md) has it in four lines). Then

    alphatoken-lab paper tab:main_rq1_sft --devices 0,1,2,3 --devices_per_cell 4 \\
        --code_container code-eval

What is not here is named before anything runs, and so are tasks that lm-eval does not know
(`--dry_run` does that much). Cells are processes of their own and are resumed; tables share cells.
The layout (FSDP2, or ZeRO-2 for label values) and the paper's global batches come from the recipes
of each backbone.
"""
