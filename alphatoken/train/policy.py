"""The interface of a policy: token weights, from what the trainer knows of a batch.

A policy says what it needs, and gets it; its scores say which tokens go first (higher = keep);
its weights act on the update of supervised fine-tuning, or enter the loss of a preference pair.
The methods that people compare with are in ``alphatoken-lab``, and one's own takes ten lines:

    class Surprising(TokenPolicy):
        name = "surprising"

        def scores(self, batch):
            return -batch.log_probs

Everything is (b, t) with index i for token i, as all over the library, and 0 off the response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ClassVar, Protocol, final

import numpy as np
import torch
from torch import Tensor

from alphatoken.errors import ConfigError, require_choice
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.batch import IGNORE
from alphatoken.select.masks import keep_count, select_top
from alphatoken.support.precision import refuse_first

MODES = ("native", "budget")


@dataclass(frozen=True)
class Needs:
    """Data that a policy asks of the trainer, beside the batch and its log-probabilities.

    Attributes:
        columns: names of what ``prepare`` leaves of every training token, looked up for each batch.
        reference: token log-probabilities of the trainer's reference model (preference trainers).
        attention: the last layer's attention in the training forward.
        entropy: how open the next token was in the training forward.
        model: the model itself, for a pass of the policy's own.
        validation: the validation rows, in ``prepare``.
        values: the value of each response token, by the run's estimator and options.
        row_weights: the weight that the row brings for each token, 1 where it brings none.
    """

    columns: tuple[str, ...] = ()
    reference: bool = False
    attention: bool = False
    entropy: bool = False
    model: bool = False
    validation: bool = False
    values: bool = False
    row_weights: bool = False


@dataclass(frozen=True)
class PolicySettings:
    """Settings by which scores become weights, the same for all policies.

    Attributes:
        mode: "native": the published rule, whose share of tokens is an outcome; "budget": the
            same score, the best ``keep_ratio`` of the tokens.
        keep_ratio: rho, the budget.
        seed: of random choices.
    """

    mode: str = "native"
    keep_ratio: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each once."""
        require_choice("policy_mode", self.mode, MODES)
        if not isinstance(self.keep_ratio, (int, float)) or not 0 < self.keep_ratio <= 1:
            raise ConfigError(
                "keep_ratio must lie in (0, 1]",
                got=repr(self.keep_ratio),
                why="0 would keep nothing, more than 1 has no meaning",
                remedy="the share of the tokens to keep, as 0.8 for 80 %",
            )


@dataclass(frozen=True)
class PolicyBatch:
    """One micro-batch as a policy sees it; nothing carries a gradient.

    Attributes:
        inputs: the trainer's batch.
        labels: (b, t), unshifted, -100 off the response.
        mask: (b, t) response tokens.
        log_probs: (b, t) of the current model, in the training forward.
        rank_groups: rows that are ranked together; chosen, then rejected, in a preference trainer.
        columns: (b, t) by name, from ``prepare``.
        reference: (b, t) log-probabilities under the reference model.
        reference_logits: inputs of a forward -> (b, t, vocabulary) logits of the reference model,
            without a graph; where a policy needs both ``reference`` and ``model``.
        attention: of the last layer, without a T x T matrix.
        entropy: k -> (b, t) entropy, in nats, of the k likeliest next tokens of the training
            forward among themselves; where a policy needs it.
        model: the model.
        values: (b, t), total value of each response token; where a policy needs it.
        row_weights: (b, t) float32, by the rows; where a policy needs it.
        step: optimizer step.
        generator: seeded by run, step, micro-batch and process.
    """

    inputs: Mapping[str, Any]
    labels: Tensor
    mask: Tensor
    log_probs: Tensor
    rank_groups: Sequence[slice]
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    reference: Tensor | None = None
    reference_logits: Callable[[Mapping[str, Any]], Tensor] | None = None
    attention: AttentionStatistics | None = None
    entropy: Callable[[int], Tensor] | None = None
    model: Any = None
    values: Tensor | None = None
    row_weights: Tensor | None = None
    step: int = 0
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class PolicyStage:
    """Data that a static pass may use before training.

    Attributes:
        model: as it is before training.
        rows: tokenised training rows: {input_ids, labels}, or {prompt_ids, chosen_ids,
            rejected_ids}.
        validation: tokenised validation rows, {input_ids, labels}; empty if none were given.
        row_batch: rows to one padded batch on the model's device.
        folder: where caches go.
        batch_size: rows of one forward.
        progress: as for ``alphatoken.support.progress``; None for automatic.
        train: (rows, options) -> a copy of the model trained on them with this trainer, for
            methods that train a reference first; None where the trainer cannot. See
            ``alphatoken.train.policy_stage`` for more arguments.
        tokenizer: of the model.
        run: options of the trainer that the result of ``train`` depends on, as JSON values.
        autocast: the run's precision, for a pass that values rows as the run would.
        rows_of_step: training rows of an optimizer step, over all micro-batches and processes; None
            where it is not known, as of packed rows.
        steps: optimizer steps of the run; None where it is not known.
    """

    model: Any
    rows: Sequence[Mapping[str, Any]]
    validation: Sequence[Mapping[str, Any]]
    row_batch: Callable[[Sequence[Mapping[str, Any]]], Any]
    folder: Path
    batch_size: int = 8
    progress: bool | None = None
    train: Callable[..., Any] | None = None
    tokenizer: Any = None
    run: Mapping[str, Any] = field(default_factory=dict)
    # A default in the class would have the documentation list it twice.
    autocast: Callable[[], AbstractContextManager[Any]] = field(default_factory=lambda: nullcontext)
    rows_of_step: int | None = None
    steps: int | None = None


ATTRIBUTES = {
    "family": ("sft", "preference", "both"),
    "published_loss": ("cross_entropy", "dpo", "simpo"),
    "scope": ("dataset", "batch", "sequence", "step"),
    "rounding": ("floor", "ceil"),
    "denominator": ("response", "kept"),
    "divisor_scope": ("trainer", "step"),
}
"""Attributes of a policy's class that have one of a few values."""


LARGEST_WEIGHT = 1e15
"""Its square is 1e30, which leaves eight digits of float32 for squares and sums of gradients."""


class Columns(Protocol):
    """Numbers of every response token of the training rows, found again in any batch."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """Names of the columns, and their numbers."""
        ...

    def columns_of(
        self, inputs: Mapping[str, Any], mask: Tensor, names: Sequence[str]
    ) -> Mapping[str, Tensor]:
        """Columns of a batch's response tokens: name -> (b, t), 0 off the response."""
        ...


class TokenPolicy:
    """Base of all policies; a subclass gives ``scores`` or ``native_weights``.

    Own arguments are keywords of the constructor, after ``settings``; recipes give them as
    ``policy_options``. A policy keeps no state over steps: what it needs later it asks for, so that
    a resumed run goes on to the same bits.

    Attributes:
        name: by which recipes and the command line call it.
        family: "sft", "preference", or "both".
        published_loss: "cross_entropy", "dpo" or "simpo".
        needs: see ``Needs``.
        scope: tokens ranked together: "dataset" (static scores), "batch", "sequence"; or "step",
            all of the optimizer step on all processes, by scores of the log-probabilities alone
            and no rule of its own. A step of several micro-batches takes them of a forward ahead
            of its own.
        rounding: of rho N, "floor" or "ceil".
        native_ratio: the published budget, where the rule is one; None for other rules.
        static: weights follow from columns, labels and mask alone, so that they are known before
            the forward.
        denominator: what the published loss is divided by: "response" or "kept" tokens.
        divisor_scope: where kept tokens that divide the loss are counted: "trainer", as it counts
            the tokens of its loss (a preference trainer counts none, and each micro-batch is
            divided by its own); or "step", all micro-batches on all processes.
        signed: weights may be negative, which trains away from a token.
        by_confidence: published weights that follow how sure the model is of a token, for
            cross-entropy: a loss that weighs by it as well would do so twice.
        source: paper, and code if there is some.
    """

    name: ClassVar[str]
    family: ClassVar[str] = "sft"
    published_loss: ClassVar[str] = "cross_entropy"
    needs: ClassVar[Needs] = Needs()
    scope: ClassVar[str] = "batch"
    rounding: ClassVar[str] = "ceil"
    native_ratio: float | None = None
    static: bool = False
    denominator: ClassVar[str] = "response"
    divisor_scope: ClassVar[str] = "trainer"
    signed: bool = False
    by_confidence: ClassVar[bool] = False
    source: ClassVar[str] = ""

    _settings: PolicySettings | None = None
    _options: Mapping[str, Any] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Have a constructor of its own note its options."""
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls):
            cls.__init__ = _noting_options(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._settings = settings

    @property
    def settings(self) -> PolicySettings:
        """Its own settings; else the trainer's, or the defaults."""
        return self._settings or PolicySettings()

    def bind(self, settings: PolicySettings) -> None:
        """Take the trainer's settings, unless the policy was made with its own."""
        self._settings = self._settings or settings

    def arguments(self) -> dict[str, Any]:
        """Class, options and attributes that are data, and settings; a resumed run has the same."""
        public = {k: v for k, v in vars(self).items() if k[0] != "_"}
        # An option may be kept under another name, a private one too.
        own = {**self._options, **_plain(public)}
        kind = type(self).__qualname__
        return {"class": kind, "own": own, "settings": asdict(self.settings)}

    @property
    def replaces_loss(self) -> bool:
        """True if the policy has a loss of its own, in place of the trainer's."""
        return type(self).loss is not TokenPolicy.loss

    @property
    def evaluates(self) -> bool:
        """True if its own loss measures evaluation rows too.

        Of one that reads values, columns, attention or weights of rows it does not: those are of
        training rows alone, and evaluation is by the trainer's own loss.
        """
        needs = self.needs
        of_training = needs.values or needs.columns or needs.attention or needs.row_weights
        return self.replaces_loss and not of_training

    @property
    def by_response(self) -> bool:
        """True if it takes a row of a batch for one response: ranks it alone, or scores it as one.

        The run then refuses rows that hold several.
        """
        return self.scope == "sequence"

    @property
    def ratio(self) -> float:
        """The share of the tokens to keep: published, where there is such a one, or the budget."""
        native = self.native_ratio if self.settings.mode == "native" else None
        return self.settings.keep_ratio if native is None else native

    @property
    def reads_ratio(self) -> bool:
        """True if ``keep_ratio`` says how many tokens are kept, and not a rule of its own.

        One whose ``native_weights`` read it has a property of its own.
        """
        if self.settings.mode == "budget":
            return True
        return self.native_ratio is None and not own_methods(self, "native_weights")

    # --- before training --------------------------------------------------------------------------

    @property
    def variant(self) -> str:
        """Name in records: what was run, where options make it another thing than published."""
        return self.name

    @property
    def summary(self) -> Mapping[str, float]:
        """Findings of the static pass, by name: shares dropped or kept; filled by ``prepare``."""
        return {}

    def prepare(self, stage: PolicyStage) -> Columns | None:
        """Static pass over the training rows: columns of every response token, or None."""
        return None

    def choose_rows(self, stage: PolicyStage) -> Sequence[int] | None:
        """Rows to train on, for methods that choose samples; None for all."""
        return None

    # --- at an optimizer step ---------------------------------------------------------------------

    def step_rows(self, step: int) -> Sequence[Mapping[str, Any]]:
        """Tokenised rows that a step trains on beside its own, over all processes.

        A function of the step alone, the same on every process. See ``train.step_rows``.
        """
        return ()

    # --- at a micro-batch -------------------------------------------------------------------------

    def scores(self, batch: PolicyBatch) -> Tensor:
        """(b, t), higher = keep."""
        raise NotImplementedError

    def _by_token(self, numbers: Any, batch: PolicyBatch, method: str) -> Tensor:
        """What ``method`` gave, without a graph.

        Raises:
            ConfigError: it is no tensor of one number for each token.
        """
        shape, is_tensor = tuple(batch.mask.shape), isinstance(numbers, Tensor)
        if is_tensor and numbers.shape == shape:
            result: Tensor = numbers.detach()
            return result
        raise ConfigError(
            f"{method} of policy '{self.name}' must give a number for each token of the batch",
            got=f"shape {tuple(numbers.shape)}" if is_tensor else type(numbers).__name__,
            why=f"the batch has {shape[0]} rows of {shape[1]} tokens, and index i of a row is "
            "token i",
            remedy="a tensor of the shape of batch.log_probs",
        )

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """(b, t), by the published rule: the best ``native_ratio``, or the budget's."""
        if self.native_ratio is None:
            return self.budget_weights(batch)
        return self.best(batch, self.ratio)

    def budget_weights(self, batch: PolicyBatch) -> Tensor:
        """(b, t), 1 for the best ``keep_ratio`` of the tokens that are ranked together."""
        # A scope of "dataset" is a matter of the static pass, which knows all tokens.
        return self.best(batch, self.settings.keep_ratio)

    def best(self, batch: PolicyBatch, ratio: float) -> Tensor:
        """(b, t), 1 for the share ``ratio`` with the highest scores, in scope and rounding.

        Raises:
            ConfigError: scores of another shape. NumericalError: a score that is not finite.
        """
        scores = self._by_token(self.scores(batch), batch, "scores")
        refuse_first(
            ~torch.isfinite(scores) & batch.mask,
            scores,
            f"policy '{self.name}' gives a score that is not finite",
            why="a NaN has no rank; which tokens are kept would be arbitrary",
            remedy="look at its scores, and at the loss of that token",
        )
        kept = torch.zeros_like(batch.mask)
        for rows in batch.rank_groups:
            # As it is where it is whole: the places in it are known.
            whole = rows == slice(0, len(batch.mask))
            mask = batch.mask if whole else batch.mask[rows]
            kept[rows] = self.select(scores[rows], mask, ratio, batch.generator)
        return kept.to(batch.log_probs.dtype)

    def select(
        self, scores: Tensor, mask: Tensor, ratio: float, generator: torch.Generator | None
    ) -> Tensor:
        """Boolean mask of the share ``ratio`` that is kept of tokens ranked together.

        Args:
            scores: (b, t), higher = keep.
            mask: (b, t) response tokens.
            ratio: in (0, 1].
            generator: of random choices, if any.
        """
        return select_top(scores, mask, ratio, scope=self._ranked, rounding=self.rounding)

    def keeps_all(self, full: bool) -> bool:
        """True if a micro-batch is trained as the trainer below trains it.

        It then has the tokens without a value too, which only padding predicts.

        Args:
            full: whether each of its response tokens has weight 1.
        """
        return full

    @property
    def _ranked(self) -> str:
        return "sequence" if self.scope == "sequence" else "batch"

    @final
    def weights(self, batch: PolicyBatch) -> Tensor:
        """(b, t), in the mode that was asked for, checked; 0 off the response.

        Raises:
            ConfigError: weights of another shape, or a rule that writes into the batch's mask.
            NumericalError: a weight of a response token that is not finite or of a size above
                ``LARGEST_WEIGHT``, or negative where weights are not ``signed``.
        """
        method = "native_weights" if self.settings.mode == "native" else "budget_weights"
        version = batch.mask._version  # a number that is no launch, as a copy would be
        weights = self._by_token(getattr(self, method)(batch), batch, method)
        if batch.mask._version != version:
            raise ConfigError(
                f"policy '{self.name}' writes into batch.mask",
                got=f"{method}() changed it in place",
                why="loss and records read the same mask",
                remedy="mask = batch.mask.clone(), and write into that",
            )
        # ``where`` and not a product: what stands off the response may be NaN, and 0 NaN is NaN.
        weights = torch.where(batch.mask, weights, torch.zeros_like(weights))
        allowed = weights.abs() <= LARGEST_WEIGHT  # a NaN is not
        refuse_first(
            ~(allowed if self.signed else allowed & (weights >= 0)),
            weights,
            f"policy '{self.name}' gives a weight that is no weight",
            why="a NaN or a negative weight would train the model away from the token, and a "
            f"gradient of one above {LARGEST_WEIGHT:g} has no norm in float32",
            remedy="look at its scores, and at the loss of that token",
        )
        return weights

    def kept_tokens(self, batch: PolicyBatch) -> Tensor | None:
        """Summed weights of a micro-batch before its forward; None where they are not known yet.

        With it the published denominator "kept" is that of the whole accumulated step on all
        processes. Without it each micro-batch is divided by its own, and weighs as its response.

        Args:
            batch: without log-probabilities (they are 0), reference, attention and model.
        """
        if self.static:
            return self.weights(batch).sum()
        # What a rule of its own keeps is an outcome of the forward; a share of n tokens is known.
        if own_methods(self, *rule_of(self)):
            return None
        counts = [batch.mask[rows].sum(-1).tolist() for rows in batch.rank_groups]
        if self._ranked == "batch":
            counts = [[sum(rows)] for rows in counts]
        total = sum(
            keep_count(self.ratio, n, rounding=self.rounding) for rows in counts for n in rows
        )
        return torch.tensor(float(total))

    def loss(self, batch: PolicyBatch, log_probs: Tensor, weights: Tensor) -> Tensor | None:
        """Loss of pairs, differentiable in ``log_probs`` (2n, t); None for the trainer's own.

        It may reach the model through forwards of its own as well; the trainer keeps that graph.

        Args:
            batch: chosen rows, then rejected ones.
            log_probs: of the current model, at token indices.
            weights: what ``weights`` gave; in evaluation (``evaluates``) 1 for every response
                token.
        """
        return None

    def rewards(self, batch: PolicyBatch) -> Tensor | None:
        """(2n,) rewards that a loss of its own compares, for the log.

        None for the trainer's: ``beta log p`` without the reference, where the policy needs none.

        Args:
            batch: chosen rows, then rejected ones.
        """
        return None


def _plain(named: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are data; sets in an order of their own, which is another in each process."""
    plain = (bool, int, float, str, tuple, list, dict, type(None), Tensor, np.ndarray)
    sets = {k: sorted(v, key=str) for k, v in named.items() if isinstance(v, (set, frozenset))}
    return {k: sets.get(k, v) for k, v in named.items() if k in sets or isinstance(v, plain)}


def _noting_options(constructor: Callable[..., None]) -> Callable[..., None]:
    """The constructor, after which the policy knows the options that it was made with."""
    parameters = signature(constructor)

    @wraps(constructor)
    def made(self: TokenPolicy, *args: Any, **options: Any) -> None:
        constructor(self, *args, **options)
        bound = parameters.bind(self, *args, **options)
        bound.apply_defaults()
        _, *others = bound.arguments.items()
        noted: dict[str, Any] = {}
        for name, value in others:
            further = parameters.parameters[name].kind is Parameter.VAR_KEYWORD
            noted.update(value if further else {name: value})
        noted.pop("settings", None)  # compared as those that it goes by
        # In place of what the base's constructor noted, which followed from these.
        self._options = _plain(noted)

    return made


def response_tokens(row: Mapping[str, Any]) -> int:
    """Response tokens of a tokenised row, as trainers count them: nothing predicts its first."""
    return sum(label != IGNORE for label in row.get("labels", row["input_ids"])[1:])


def rule_of(policy: TokenPolicy) -> tuple[str, ...]:
    """Methods that turn its scores into weights, in the mode that was asked for."""
    native = policy.settings.mode == "native"
    first = ("native_weights",) if native else ()
    budget = ("budget_weights",) if not native or policy.native_ratio is None else ()
    return (*first, *budget, "best")


def own_methods(policy: TokenPolicy, *names: str) -> list[str]:
    """Those of these methods that the policy has in place of the base's."""
    kind = type(policy)
    return [name for name in names if getattr(kind, name) is not getattr(TokenPolicy, name)]


def chooses_rows(policy: TokenPolicy) -> bool:
    """True if it trains on some of the rows only."""
    return type(policy).choose_rows is not TokenPolicy.choose_rows


def adds_rows(policy: TokenPolicy) -> bool:
    """True if its steps train on rows beside their own."""
    return type(policy).step_rows is not TokenPolicy.step_rows


def has_pass(policy: TokenPolicy) -> bool:
    """True if it looks at all rows before training."""
    return chooses_rows(policy) or type(policy).prepare is not TokenPolicy.prepare


def row_weights(policy: TokenPolicy | None) -> str:
    """How weights of the rows are read: "refused" where it reads none, else "read" or "signed"."""
    if policy is None or not policy.needs.row_weights:
        return "refused"
    return "signed" if policy.signed else "read"
