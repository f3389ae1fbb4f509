"""Fields that trainers' configurations gain: default, meaning, range.

They stand apart from what they mean together (``alphatoken.train.options``) because nothing here
imports torch: the command line's help is made of them in a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from typing import Any

from alphatoken.errors import ConfigError, require_choice
from alphatoken.support import options

__all__ = ["AlphaFields", "PairFields", "check_fields", "within_of"]


# Not in the fields' metadata: TrlParser and HfArgumentParser hand all of those to argparse.
_WITHIN: dict[Field[Any], str] = {}
_LIMITS: dict[Field[Any], tuple[Sequence[str | None], float | None, float | None]] = {}


def option(
    default: Any,
    help: str,
    *,
    within: str = "",
    choices: Sequence[str | None] = (),
    least: float | None = None,
    below: float | None = None,
) -> Any:
    """A field with its help in its metadata; its limits stand beside it.

    ``within`` says in words what it may be, where choices or the least number do not.
    """
    made = options.option(default, help)
    _LIMITS[made] = choices, least, below
    if isinstance(default, bool):
        within = "true or false"
    elif choices:
        names = ["null" if one is None else f"'{one}'" for one in choices]
        within = f"{', '.join(names[:-1])} or {names[-1]}"
    elif least is not None:
        within = (
            "null, or " * (default is None) + f"from {least}" + f", below {below}" * bool(below)
        )
    _WITHIN[made] = within
    return made


def check_fields(given: Any, kind: type) -> None:
    """Check that each field of ``kind`` is within its limits.

    Raises:
        ConfigError: names the first that is not, and what it may be.
    """
    for one in fields(kind):
        (choices, least, below), value = _LIMITS[one], getattr(given, one.name)
        if choices:
            require_choice(one.name, value, choices)
        if least is None or (value is None and one.default is None):
            continue
        if not value >= least or (below is not None and not value < below):
            lies = f"be at least {least}" if below is None else f"lie in [{least}, {below})"
            raise ConfigError(f"{one.name} must {lies}", got=repr(value), remedy=_WITHIN[one])


def within_of(one: Field[Any]) -> str:
    """Values that a field of the classes below may have, in words."""
    return _WITHIN[one]


@dataclass
class AlphaFields:
    """Fields that the trainers' configurations add. The defaults are the paper's but one.

    ``retention`` is "none", because the paper's Fisher takes hours of silence on a laptop; the
    paper's recipes set it. The fixed validation batch is the paper's, against which the
    documentation warns: the share of the rows that is only watched (``held_out_share``) shows when
    the batch is being learnt by heart. The packaged laptop recipes draw from a pool.

    Each field's metadata hold its ``help``, which ``alphatoken sft --help`` shows; its values are
    in :func:`within_of`. ``docs/options.md`` shows all as tables, ``docs/paper-gaps.md`` their
    places in the paper.
    """

    policy: str = option(
        "top",
        "Rule that chooses the response tokens to train on: 'top' by value, 'random' or 'bottom' "
        "(controls of equal budget), 'all' (TRL's own loss), a method by its name "
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

    estimator: str = option(
        "alphatoken",
        "Estimator of values: 'alphatoken' (the paper), 'direct', 'path', 'label' (exact for a "
        "loss mask), 'paper_literal', or 'walk' (the decrease of a token's loss along some steps "
        "on the validation rows).",
        within="six names",
    )
    walk_steps: int = option(
        24,
        "Number of AdamW steps of a walk, each on the next validation batch (estimator='walk').",
        least=1,
    )
    walk_learning_rate: float | None = option(
        None, "Constant learning rate of a walk; null takes the run's.", within="null, or above 0"
    )
    walk_refresh: int = option(
        0,
        "Number of optimizer steps after which a new walk starts from the current weights, on rows "
        "drawn anew; 0 takes one walk at the start. `direction_steps` has no effect on walks.",
        least=0,
    )
    objective: str = option(
        "both",
        "Parts of the value: 'both', 'adaptation' or 'stability'.",
        choices=("both", "adaptation", "stability"),
    )
    part: str = option(
        "both",
        "Paths of the value: 'both', 'direct' or 'causal'.",
        choices=("both", "direct", "causal"),
    )
    score_layers: str = option(
        "3", "K for the last K layers, 'all', or indices such as 0,4.", within="1 to all layers"
    )
    value_parameters: str = option(
        "linears",
        "'linears' of the scored layers, 'linears,experts' with the matrices of their mixtures of "
        "experts; with estimator='label' also 'all' trainable parameters, "
        "or parts joined by commas, 'linears' and patterns of names such as 'linears,*norm*'.",
        within="'linears', 'linears,experts', 'all', or patterns",
    )
    window: int | None = option(
        32, "Window W of Value-Propagation in tokens; null for none.", within="null, or from 0"
    )
    stability_weight: float = option(
        1.5,
        "Weight lambda of stability; it has no natural unit: see the logged balance.",
        within="any number; 0 switches the term off",
    )
    uncovered: str = option(
        "error", "'error', or 'skip' matrices that no estimator covers.", choices=("error", "skip")
    )
    preconditioner: str | None = option(
        None,
        "null, 'frozen' or 'full': values of the optimizer's step instead of the gradient's.",
        choices=(None, "frozen", "full"),
    )
    precondition_after: int = option(
        30, "Number of optimizer steps before which P = 1.", within="from 1"
    )

    validation_mode: str = option(
        "fixed",
        "'fixed': one validation batch for the whole run (the paper); 'pool': a new one each "
        "step, drawn from all validation rows.",
        choices=("fixed", "pool"),
    )
    validation_batch_size: int = option(
        32, "Validation rows (pairs) a step, over all ranks.", least=1
    )
    validation_micro_batch_size: int | None = option(
        None,
        "Rows of one validation forward; null takes the number of a training forward.",
        least=1,
    )
    held_out_share: float = option(
        0.2,
        "Share of the validation rows to hold out; alpha/validation_gap is measured on them.",
        least=0,
        below=1,
    )
    held_out_steps: int = option(
        50,
        "Steps between two looks at the held-out part; 0 never looks and holds nothing out.",
        least=0,
    )
    direction_steps: int = option(
        1,
        "Optimizer steps for which the direction M (G, V) is used before it is built anew.",
        least=1,
    )

    retention: str = option(
        "none",
        "'none', or a stability term: 'diagonal' or 'kronecker' Fisher drift, fitted before "
        "training, or 'data' (gradient of the loss on the retention rows: oracle retention).",
        choices=("none", "diagonal", "kronecker", "data"),
    )
    retention_batch_size: int = option(32, "Retention rows a step for retention='data'.", least=1)
    fisher_samples: int = option(1000, "Number of Monte-Carlo samples of the Fisher.", least=1)
    fisher_max_new_tokens: int = option(
        256, "Maximum number of tokens of a sampled response.", least=1
    )
    fisher_batch_size: int = option(8, "Number of responses to sample at a time.", least=1)
    fisher_cache: str | None = option(
        None,
        "Folder for fitted Fishers; null for 'fisher' in output_dir's parent run folder.",
        within="null or a folder",
    )
    max_relative_drift: float | None = option(
        1.0, "Limit of ScorerConfig on the drift; null checks nothing.", within="null, or above 0"
    )

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
        least=1,
    )
    max_response_length: int | None = option(
        None,
        "Longest response in tokens: a longer one keeps its start. null sets no limit beside "
        "max_length.",
        least=1,
    )
