"""The scorer's results: one value a token with its components, and the certificate of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alphatoken.errors import ConfigError, InputError, counted
from alphatoken.support.coloured import ColouredRows, ShownToken
from alphatoken.support.token_texts import token_texts

_WHOLE = ("adaptation", "stability")
_SPLIT = ("adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal")


@dataclass(frozen=True, repr=False)
class TokenValues:
    """Values of response tokens, b rows of t tokens; index i is the value of predicting token i.

    Positive: training on the token lowers the composite validation objective, to first order.
    Unit: validation loss times training loss per squared weight unit; within one batch the scale is
    common. Of "walk" it is nats of training loss, and positive says that the loss falls along the
    walk. Tensors are float32 or wider, and 0 where ``mask`` is False. What the options leave
    out (a side by ``objective``, a part by ``part``) is zero. With ``components=False`` every
    component is None and ``balance`` empty.

    Attributes:
        total: (b, t) ``adaptation + lambda * stability``, up to rounding.
        mask: (b, t) True at response tokens.
        adaptation: (b, t) inner product with the validation gradient G; or None, see above.
        stability: (b, t) inner product with the retention term V, before lambda; likewise.
        adaptation_direct: (b, t) direct part; None also without a split (label, path).
        adaptation_causal: (b, t) causal part, likewise.
        stability_direct: (b, t) direct part, likewise.
        stability_causal: (b, t) causal part, likewise.
        unassigned: (b,) total of the columns that belong to no response token (prompt positions);
            ``total.sum() + unassigned.sum()`` is the inner product of the whole gradient with M,
            exactly so for path.
        estimator: the name of the estimator.
        stability_weight: lambda.
        balance: ``||lambda V|| / ||G||`` per parameter.
        parts: (b, t, h) what each of h validation batches gives to ``adaptation``, which is their
            sum; None unless the scorer was asked for ``standard_errors``.
        part_shares: (h,) share of the validation tokens (pairs) that each batch has.
        derivative: of ``label``, how the losses were differentiated: "forward_mode", "central" or
            "one_sided"; None of other estimators.
        error: of differences, the estimated relative error (norm over the tokens) of this batch's
            values along a side of M, the largest of the sides; 0 of what is exact up to rounding.
            What rounding adds to it is this batch's own; what truncation adds is measured on some
            batches, and on any whose values are of another size.
        error_age: batches since the truncation in ``error`` was measured; 0 on this one.
        losses: (b, t) losses of the response tokens in the forward that was valued, in nats,
            without token weights; of "walk" before the walk. None where M is 0, and no forward ran.
        input_ids: (b, t) tokens of the batch; None of an observed forward that took no ids.
    """

    total: Float[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]
    adaptation: Float[Tensor, "b t"] | None
    stability: Float[Tensor, "b t"] | None
    adaptation_direct: Float[Tensor, "b t"] | None
    adaptation_causal: Float[Tensor, "b t"] | None
    stability_direct: Float[Tensor, "b t"] | None
    stability_causal: Float[Tensor, "b t"] | None
    unassigned: Float[Tensor, " b"]
    estimator: str
    stability_weight: float
    balance: dict[str, float] = field(default_factory=dict, repr=False)
    parts: Float[Tensor, "b t h"] | None = field(default=None, repr=False)
    part_shares: Float[Tensor, " h"] | None = field(default=None, repr=False)
    derivative: str | None = None
    error: float = 0.0
    error_age: int = 0
    losses: Float[Tensor, "b t"] | None = field(default=None, repr=False)
    input_ids: Int[Tensor, "b t"] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Sizes and shares in one line; the numbers are in the attributes.

        >>> mask = torch.tensor([[False, True, True]])
        >>> total = torch.tensor([[0.0, 3.0, -1.0]])
        >>> none = dict.fromkeys(("adaptation_direct", "adaptation_causal"))
        >>> none |= dict.fromkeys(("stability", "stability_direct", "stability_causal"))
        >>> TokenValues(total, mask, total, **none, unassigned=total[:, 0], estimator="label",
        ...             stability_weight=1.5)
        TokenValues(2 tokens in 1 row, 'label': -1 to 3, mean 1, 50% below zero; adaptation 100%)
        >>> replace(_, derivative="central", error=4.2e-4)
        TokenValues(2 tokens in 1 row, 'label' by central differences, error 4e-04: -1 to 3, ...)
        """
        chosen = self.total[self.mask]
        tokens, rows = counted(len(chosen), "tokens"), counted(len(self.total), "rows")
        size = f"{tokens} in {rows}, {self.estimator!r}"
        if self.derivative is not None:
            size += f" by {derivative_text(self.derivative, self.error)}"
        if not len(chosen):
            return f"TokenValues({size})"
        least, most, mean = (float(x) for x in (chosen.min(), chosen.max(), chosen.mean()))
        numbers = f"{least:.3g} to {most:.3g}, mean {mean:.3g}, {(chosen < 0).float().mean():.0%}"
        parts = ", ".join(f"{k.replace('_', ' ')} {v:.0%}" for k, v in self.shares().items())
        return f"TokenValues({size}: {numbers} below zero{'; ' + parts if parts else ''})"

    def components(self) -> dict[str, Tensor]:
        """The components (b, t) of the total, lambda applied; empty without ``components``."""
        components = {name: getattr(self, name) for name in (*_SPLIT, *_WHOLE)}
        # Both sets sum to the total, so only one of them is returned: the finer where there is one.
        names = _WHOLE if all(components[name] is None for name in _SPLIT) else _SPLIT
        parts = {name: components[name] for name in names if components[name] is not None}
        weight = self.stability_weight
        return {k: v * weight if k.startswith("stability") else v for k, v in parts.items()}

    def by_batch(self) -> Tensor:
        """Adaptation (b, t, h) against each of the h validation batches alone.

            adaptation  =  sum_h share_h by_batch_h ,     share_h = n_h / n

        n_h being the tokens (pairs) of batch h: what a scorer of that batch alone gives, up to
        rounding, with the same P.

        Raises:
            ConfigError: the scorer's config has no ``standard_errors=True``.

        Oracle: scorers of one batch each.
        """
        parts, shares = self._parts()
        return parts / shares.to(parts)

    def _parts(self) -> tuple[Tensor, Tensor]:
        if self.parts is None or self.part_shares is None:
            raise ConfigError(
                "these values are not split by validation batch",
                why="standard errors and values against each batch are taken from the parts",
                remedy="ScorerConfig(standard_errors=True)",
            )
        return self.parts, self.part_shares

    def standard_error(self) -> Tensor:
        """Standard error (b, t) of ``total`` over the draw of the validation rows.

            se_k^2 = (h - 1) / h  sum_b (v_k(-b) - v_k)^2,     v_k(-b) = (v_k - c_kb) / (1 - w_b)

        the delete-one jackknife: ``v_k(-b)`` is the adaptation value against all validation batches
        but b, c_kb the part of batch b and w_b its share of the tokens. The batches must be drawn
        independently. The stability value is the same for every draw, and so is P, whose own error
        is left out.

        Raises:
            ConfigError: as ``by_batch``.

        Source: ours (the jackknife is Quenouille's and Tukey's). Oracle:
        ``alphatoken.oracle.gradients.standard_errors``.
        """
        return standard_error(*self._parts())

    def total_alone(self) -> TokenValues:
        """The same values without components, as ``components=False`` returns them."""
        left_out: dict[str, Any] = dict.fromkeys((*_WHOLE, *_SPLIT))
        return replace(self, balance={}, **left_out)

    def shares(self) -> dict[str, float]:
        """Each component's share of the summed magnitudes over the response tokens."""
        sizes = {k: float(v[self.mask].abs().sum()) for k, v in self.components().items()}
        whole = sum(sizes.values())
        return {k: v / whole if whole > 0 else 0.0 for k, v in sizes.items()}

    # --- to look at -------------------------------------------------------------------------------

    def show(self, tokenizer: Any, batch: Mapping[str, Any]) -> ColouredRows:
        """The batch as text in which each token has the colour of its value.

        Print it in a terminal; a notebook shows it in colours where it ends a cell. Blue is
        positive and orange negative, on one scale for all rows. Texts without values (prompts,
        templates) are dim and shortened, padding is left out, and special tokens and line breaks
        are visible. A character of several tokens stands at the last of them.

        Args:
            tokenizer: of the model.
            batch: the one that these are the values of.

        Raises:
            InputError: these are not values of this batch.
        """
        ids = self._ids_of(batch)
        real = _real(batch.get("attention_mask"), ids)
        values, mask = self.total.detach().cpu(), self.mask.cpu()
        losses = None if self.losses is None else self.losses.detach().cpu()
        rows = []
        for row, own in enumerate(ids.tolist()):
            at = [i for i in range(len(own)) if real[row, i] or mask[row, i]]
            texts = token_texts(tokenizer, [own[i] for i in at])
            rows.append(
                [
                    ShownToken(
                        text,
                        float(values[row, i]),
                        None if losses is None else float(losses[row, i]),
                    )
                    if mask[row, i]
                    else ShownToken(text)
                    for i, text in zip(at, texts, strict=True)
                ]
            )
        return ColouredRows(rows, unit_of(self.estimator))

    def _ids_of(self, batch: Mapping[str, Any]) -> Tensor:
        """Tokens (b, t) of the batch, on the host, once it is that of these values."""
        ids, labels = batch.get("input_ids"), batch.get("labels")
        remedy = "the batch that was valued: values = scorer.score(batch); values.show(t, batch)"
        if not isinstance(ids, Tensor) or ids.shape != self.mask.shape:
            got = f"{tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise InputError(
                "the batch has another form than the values",
                got=f"input_ids {got}, values {tuple(self.mask.shape)}",
                why="a value would stand at another token",
                remedy=remedy,
            )
        ids, other = ids.detach().cpu(), torch.zeros(ids.shape, dtype=torch.bool)
        if self.input_ids is not None:
            other = ids != self.input_ids.cpu()
        if isinstance(labels, Tensor) and labels.shape == ids.shape:
            other = other | (self.mask.cpu() & (labels.cpu() < 0))
        if other.any():
            row, index = other.nonzero()[0].tolist()
            raise InputError(
                "the batch is not the one that these are the values of",
                got=f"another token or no label at row {row}, token {index}",
                why="a value would stand at another token",
                remedy=remedy,
            )
        return ids

    def to_pandas(self, tokenizer: Any = None) -> Any:
        """A ``pandas.DataFrame`` of one line a response token, in the order of the batch.

        Columns: ``row`` and ``position`` (the indices into ``total``), ``token_id`` where it is
        known, ``token`` (its text, if there is a tokenizer), ``value``, a column for each of
        ``components()``, and ``loss`` where ``losses`` are known.

        Args:
            tokenizer: of the model; None leaves the texts out.

        Raises:
            ConfigError: pandas is not installed; or texts are wanted of values without tokens.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "a table of values needs pandas",
                remedy="pip install pandas, or take total, mask and components()",
            ) from None
        row, position = self.mask.cpu().nonzero(as_tuple=True)
        columns: dict[str, Any] = {"row": row.numpy(), "position": position.numpy()}
        if self.input_ids is not None:
            columns["token_id"] = self.input_ids.cpu()[row, position].numpy()
        if tokenizer is not None:
            columns["token"] = self._texts(tokenizer, row.tolist(), position.tolist())
        numbers = {"value": self.total, **self.components()}
        if self.losses is not None:
            numbers["loss"] = self.losses
        for name, values in numbers.items():
            columns[name] = values.detach().cpu()[row, position].numpy()
        return pandas.DataFrame(columns)

    def _texts(self, tokenizer: Any, rows: Sequence[int], positions: Sequence[int]) -> list[str]:
        if self.input_ids is None:
            raise ConfigError(
                "these values do not hold the tokens that they are of",
                got="to_pandas(tokenizer), of an observed forward that took no input_ids",
                remedy="to_pandas()",
            )
        texts = [token_texts(tokenizer, own) for own in self.input_ids.tolist()]
        return [texts[row][position] for row, position in zip(rows, positions, strict=True)]


def _real(attention: Any, ids: Tensor) -> Tensor:
    """(b, t) False at padding, where a mask of the tokens says so."""
    if isinstance(attention, Tensor) and attention.shape == ids.shape:
        return attention.detach().cpu() != 0
    return torch.ones_like(ids, dtype=torch.bool)


def unit_of(estimator: str) -> str:
    """A sentence on the unit of an estimator's values, and on their sign."""
    if estimator == "walk":
        return (
            "Unit: nats by which the loss of the token falls along the walk, which are steps on "
            "the validation rows; negative: it rises."
        )
    return (
        "Unit: validation loss per unit of step on this token alone; positive: a small step lowers "
        "it; negative: it raises it."
    )


def derivative_text(derivative: str, error: float) -> str:
    """Words for ``derivative`` and ``error`` of :class:`TokenValues`.

    >>> derivative_text("central", 4.2e-4), derivative_text("forward_mode", 0.0)
    ('central differences, error 4e-04', 'forward mode')
    """
    if derivative == "forward_mode":
        return "forward mode"
    return f"{derivative.replace('_', '-')} differences, error {error:.0e}"


def derivative_notes(errors: Mapping[str, float]) -> list[str]:
    """A sentence for each way in which label values of a run were differentiated.

    ``errors`` has the largest error of each way.
    """
    return [
        f"Label values were taken by {derivative_text(way, error)}"
        f"{'' if way == 'forward_mode' else ' (estimated, relative to their norm over a batch)'}."
        for way, error in errors.items()
    ]


def standard_error(parts: Tensor, shares: Tensor) -> Tensor:
    """Standard error as in ``TokenValues.standard_error``, of parts (..., h) with shares (h,)."""
    value = parts.sum(-1, keepdim=True)
    count = parts.shape[-1]
    # v(-b) - v, written so that equal batches give 0.
    moved = (shares.to(parts) * value - parts) / (1 - shares.to(parts))
    error: Tensor = torch.sqrt(moved.square().sum(-1) * ((count - 1) / count))
    return error


@dataclass(frozen=True)
class Check:
    """The worst entry of one component.

    Attributes:
        component: a field of ``TokenValues``; or "scope", "mask", "direction", "attention" and
            the like.
        error: difference from the oracle relative to the entry's absolute terms; inf for
            something that is missing, or not zero where it must be.
        tolerance: what the model's arithmetic allows.
        where: the token or row, in words.
        parameter: the linear map or parameter that the difference comes from, where it is known.
        actual: what the scorer returned.
        expected: what the oracle says.
    """

    component: str
    error: float
    tolerance: float
    where: str = ""
    parameter: str | None = None
    actual: float = math.nan
    expected: float = math.nan

    @property
    def passed(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.where, self.parameter or "") if part)
        numbers = ""
        if not math.isnan(self.expected):
            numbers = f": {self.actual:.6g} where the oracle has {self.expected:.6g}"
        return (
            f"{self.component}{' at ' if place else ''}{place}{numbers}; off by "
            f"{self.error:.1e} of the absolute terms (tolerance {self.tolerance:.0e})"
        )


@dataclass(frozen=True)
class Certificate:
    """The result of ``Scorer.verify``.

    Attributes:
        estimator: its name.
        checks: the worst entry of each component that was compared.
        tokens: response tokens sent through the oracle one by one; none of a walk, where a copy's
            two losses give the value of every token.
        compared: response tokens of which every component was compared.
        batch_tokens: response tokens of the batch.
        arithmetic: row of the table of tolerances.
        seconds: that everything took.
        dtype: of the model's weights.
        derivative: as in ``TokenValues``.
        stated_error: of values by differences, as in ``TokenValues``, the largest of all ways;
            three times as much is allowed beside the tolerance.
        rounding: of a walk, in nats: by how much the values of a copy differ at most whose weights
            are off by four roundings in each step's forward; ten times as much is allowed.
        remedy: what to look at where something is off; empty unless the adapter is the user's own.
    """

    estimator: str
    checks: tuple[Check, ...]
    tokens: int
    compared: int
    batch_tokens: int
    arithmetic: str
    seconds: float
    dtype: str
    derivative: str | None = None
    stated_error: float = 0.0
    rounding: float = 0.0
    remedy: str = ""

    @property
    def passed(self) -> bool:
        """True if every component agrees with the oracle within the tolerance."""
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The components that are off."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def error(self) -> float:
        """The worst error of all components."""
        errors = [check.error for check in self.checks]
        return math.nan if any(math.isnan(e) for e in errors) else max(errors)

    @property
    def tolerance(self) -> float:
        """The relative error that the model's arithmetic allows."""
        return self.checks[0].tolerance

    def __str__(self) -> str:
        """A short table that ends in the verdict."""
        lines = [
            f"Certificate for estimator '{self.estimator}' ({self.arithmetic}): {self.compared} of "
            f"{self.batch_tokens} tokens compared, "
            + (f"{self.tokens} of them by a backward pass of their own; " if self.tokens else "")
            + f"{self.seconds:.0f} s"
        ]
        for check in self.checks:
            off = "" if check.passed else "  <- off"
            lines.append(f"  {check.component:<22} {check.error:8.1e}{off}")
        if self.stated_error:
            lines.append(
                f"  label values by differences ({self.derivative}): estimated relative error "
                f"{self.stated_error:.1e}, three times as much is allowed"
            )
        if self.rounding:
            lines.append(
                f"  with weights off by four roundings in each step, values differ by up to "
                f"{self.rounding:.1e} nats; ten times as much is allowed"
            )
        oracle = "the per-token oracle" if self.tokens else "a copy that plain PyTorch trained"
        if self.passed:
            worst = max(self.checks, key=lambda check: check.error)
            lines.append(
                f"  every component agrees with {oracle}: error {worst.error:.1e} of "
                f"the absolute terms of its entry (tolerance {worst.tolerance:.1e})"
            )
        else:
            lines += [f"  {check}" for check in self.failures]
            lines += [f"  {self.remedy}"] if self.remedy else []
            names = ", ".join(check.component for check in self.failures)
            lines.append(f"  DOES NOT AGREE with {oracle}: {names} does not agree")
        return "\n".join(lines)
