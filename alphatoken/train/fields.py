"""Fields that trainers' configurations gain: default, meaning, range.

They stand apart from what they mean together (``alphatoken.train.options``) because nothing here
imports torch: the command line's help is made of them in a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alphatoken.config import ScorerConfig, ValueOptions
from alphatoken.support.options import option, same_option, with_options_in_docstring


@with_options_in_docstring
@dataclass
class AlphaFields(ValueOptions):
    """Fields that the trainers' configurations add. The defaults are the paper's but one.

    ``retention`` is "none", because the paper's Fisher takes hours of silence on a laptop; the
    paper's recipes set it. The fixed validation batch is the paper's, against which the
    documentation warns: the share of the rows that is only watched (``held_out_share``) shows when
    the batch is being learnt by heart. The packaged laptop recipes draw from a pool.

    The options of the values are those of ``ScorerConfig``. ``docs/paper-gaps.md`` has their places
    in the paper.
    """

    policy: str = option(
        "top",
        "Rule that chooses the response tokens to train on: 'top' by value, 'random' or 'bottom' "
        "(controls of equal budget), 'all' (TRL's own loss), 'weights' (those that the rows "
        "bring), a method by its name "
        "(`alphatoken-lab policies` lists them), or module:Class for your own.",
        within="a name of `alphatoken-lab policies`, or module:Class",
    )
    policy_mode: str = option(
        "native",
        "Mode of a named method: 'native' is its published rule, 'budget' keeps the best "
        "keep_ratio by the same score.",
        within="'native' or 'budget'",
    )
    policy_options: dict[str, Any] | str | None = option(
        None,
        "The method's own arguments, as a mapping or JSON text.",
        within="fields of the method's class",
    )
    policy_cache: str | None = option(
        None,
        "Folder for results of passes before training; null for 'policies' beside output_dir.",
        within="null or a folder",
    )
    keep_ratio: float = option(
        0.5, "rho: share of the response tokens to keep, in (0, 1].", within="above 0, to 1"
    )
    keep_scope: str = option(
        "batch",
        "Set of tokens to rank together: 'batch' (a micro-batch of one rank), or 'global' "
        "(all micro-batches of an optimizer step on all ranks, scored in a pass first).",
        choices=("batch", "global"),
    )
    value_unit: str = option(
        "token",
        "Unit to rank: 'token', or 'response', by its mean value, so that responses are kept or "
        "dropped whole, except one at the edge of the budget.",
        choices=("token", "response"),
    )
    kept_normalization: str = option(
        "response",
        "Divisor of the loss: 'response' is all response tokens, 'kept' the kept ones, 'sum' none "
        "(the paper). For DPO 'response' is the mean over pairs.",
        choices=("response", "kept", "sum"),
    )
    shared_threshold: bool = option(
        False, "DPO ablation: rank chosen and rejected tokens in one pool."
    )
    masked_logit: bool = option(
        False, "DPO ablation: take the coefficient from the masked preference logit."
    )

    objective: str = same_option(ScorerConfig, "objective")
    part: str = same_option(ScorerConfig, "part")
    uncovered: str = same_option(ScorerConfig, "uncovered")
    preconditioner: str | None = same_option(
        ScorerConfig, "preconditioner", choices=(None, "frozen", "full"), within=""
    )
    precondition_after: int = same_option(ScorerConfig, "precondition_after")
    walk_refresh: int = same_option(ScorerConfig, "walk_refresh")

    validation_mode: str = option(
        "fixed",
        "'fixed': one validation batch for the whole run (the paper); 'pool': a new one each "
        "step, drawn from all validation rows, and for a walk all that its steps reach.",
        choices=("fixed", "pool"),
    )
    validation_batch_size: int = option(
        32, "Validation rows (pairs) a step, over all ranks.", at_least=1
    )
    validation_micro_batch_size: int | None = option(
        None,
        "Rows of one validation forward; null takes those of a training forward, or as many more "
        "as fit where the gradients will lie.",
        at_least=1,
    )
    held_out_share: float = option(
        0.2,
        "Share of the validation rows to hold out; alpha/validation_gap is measured on them.",
        at_least=0,
        below=1,
    )
    held_out_steps: int = option(
        50,
        "Steps between two looks at the held-out part; 0 never looks and holds nothing out.",
        at_least=0,
    )
    direction_steps: int = option(
        1,
        "Optimizer steps for which the direction M (G, V) is used before it is built anew.",
        at_least=1,
    )

    retention: str = option(
        "none",
        "'none', or a stability term: 'diagonal' or 'kronecker' Fisher drift, fitted before "
        "training, or 'data' (gradient of the loss on the retention rows: oracle retention).",
        choices=("none", "diagonal", "kronecker", "data"),
    )
    retention_batch_size: int = option(
        32, "Retention rows a step for retention='data'.", at_least=1
    )
    fisher_samples: int = option(1000, "Number of Monte-Carlo samples of the Fisher.", at_least=1)
    fisher_max_new_tokens: int = option(
        256, "Maximum number of tokens of a sampled response.", at_least=1
    )
    fisher_batch_size: int = option(8, "Number of responses to sample at a time.", at_least=1)
    fisher_cache: str | None = option(
        None,
        "Folder for fitted Fishers; null for 'fisher' in output_dir's parent run folder.",
        within="null or a folder",
    )
    max_relative_drift: float | None = same_option(ScorerConfig, "max_relative_drift")

    scoring_forward: str = option(
        "auto",
        "'auto': one forward serves scoring and training wherever the layout allows it; 'own': "
        "scoring runs its own forward (slower, about a third of a step).",
        choices=("auto", "own"),
    )
    on_empty: str = option(
        "skip",
        "Rows without a response, pairs with an empty response or two equal ones, on the command "
        "line prompts too long as well: 'skip' leaves them out and counts them, 'error' stops.",
        choices=("skip", "error"),
    )
    export_values: bool = option(
        True,
        "Write accumulated values per training token at the end, into output_dir/_alphatoken. "
        "They quote the training rows; push_to_hub leaves them out.",
    )
    value_seed: int = option(
        0, "Seed of the pool's order and of the random policy.", within="any whole number"
    )


@dataclass
class PairFields:
    """Fields that only preference pairs have."""

    max_prompt_length: int | None = option(
        None,
        "Longest prompt in tokens: a longer one keeps its end. null sets no limit beside "
        "max_length. On the command line see long_prompts as well.",
        at_least=1,
    )
    max_response_length: int | None = option(
        None,
        "Longest response in tokens: a longer one keeps its start. null sets no limit beside "
        "max_length.",
        at_least=1,
    )
