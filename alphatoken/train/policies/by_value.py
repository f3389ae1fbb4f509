"""The library's own values as policies: entries for the list, carried out by the trainers."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from alphatoken.errors import ConfigError, require_choice
from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.train.policy import Needs, PolicyBatch, TokenPolicy

__all__ = ["AlphaToken", "Label"]

_ORDERS = ("top", "bottom", "random")
_VARIANTS = (
    "objective", "part", "window", "stability_weight",
    "score_layers", "keep_scope", "kept_normalization", "retention",
    "interaction_weight", "preconditioner", "shared_threshold", "masked_logit", "value_unit",
)  # fmt: skip


class AlphaToken(TokenPolicy):
    """Tokens by the value of training on them for the validation rows: the library's method.

        v_t = adaptation_t + lambda stability_t;  keep the best ceil(rho n) of a batch

    In a recipe ``policy: alphatoken`` is ``policy: top`` with ``estimator: alphatoken``; all
    options of token values apply. Own arguments, as ``policy_options``:

        order: "top", "bottom" (control) or "random" (control of equal budget)
        estimator: another one of the same family: "direct", "same_layer_hop", "path", "label",
            "paper_literal"
        any of objective, path, window, stability_weight,
            score_layers, keep_scope, kept_normalization, retention,
            interaction_weight, preconditioner, shared_threshold, masked_logit, value_unit:
            ablation variants

    Needs a validation dataset, and a Fisher for stability. At ``keep_ratio`` always: the rule is a
    budget.

    Source: the AlphaToken paper; docs/estimators.md.
    """

    name: ClassVar[str] = "alphatoken"
    family: ClassVar[str] = "both"
    published_loss: ClassVar[str] = "cross_entropy"
    needs: ClassVar[Needs] = Needs(model=True, validation=True)
    direction: ClassVar[str] = "valuable tokens first"
    source: ClassVar[str] = "AlphaToken"
    estimator: ClassVar[str] = "alphatoken"
    only_by_name: ClassVar[bool] = True

    @classmethod
    def trainer_fields(cls, order: str = "top", **variants: Any) -> dict[str, Any]:
        """Options that the name stands for.

        Raises:
            ConfigError: an unknown order or variant.
        """
        require_choice("order", order, _ORDERS)
        estimator = variants.pop("estimator", cls.estimator)
        require_choice("estimator", estimator, ESTIMATORS)
        unknown = [name for name in variants if name not in _VARIANTS]
        if unknown:
            raise ConfigError(
                f"policy '{cls.name}' has no such variant",
                got=", ".join(unknown),
                remedy=f"order, estimator, {', '.join(_VARIANTS)}",
            )
        return {"policy": order, "estimator": estimator, **variants}

    def scores(self, batch: PolicyBatch) -> Tensor:
        """Made by the trainers only.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"policy '{self.name}' is the trainers' own",
            why="values need errors of the training forward and a validation gradient",
            remedy=f"policy='{self.name}' in the options, or alphatoken.Scorer",
        )


class Label(AlphaToken):
    """Tokens by label value: exact for what a mask acts on.

        v_t = <G, d loss_t / d theta>;  keep the best ceil(rho n) of a batch

    In a recipe ``policy: label`` is ``policy: top`` with ``estimator: label``, with the same own
    arguments as ``alphatoken``.

    Source: docs/estimators.md.
    """

    name: ClassVar[str] = "label"
    estimator: ClassVar[str] = "label"
