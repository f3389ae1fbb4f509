"""TI-DPO: weight the log-ratio of each token by its influence on the model's last prediction."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.direction.sampling import sample_generator, sample_responses
from alphatoken.errors import ConfigError, InputError, UnsupportedError, require_choice
from alphatoken.model.batch import IGNORE, label_mask, token_losses
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.support.precision import refuse_first, wide
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings
from alphatoken_lab.methods.preference import PreferencePolicy, weighted_dpo_losses

SPANS = ("response", "sequence")

_FORWARD = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


def importance_weights(
    importance: Float[Tensor, "b t"],
    span: Bool[Tensor, "b t"],
    *,
    mix: float = 0.7,
    sigma_divisor: float = 4.0,
    normalize_prior: bool = True,
    mean_one: bool = True,
) -> Float[Tensor, "b t"]:
    """``W = mix I / sum I + (1 - mix) B``, ``B(j) = exp(-((j - (T - 1) / 2) / sigma)^2 / 2)``.

    ``j`` counts the T tokens of the span from 0, ``sigma = T / sigma_divisor``.

    Args:
        importance: I, not negative.
        span: tokens that share the weight.
        mix: lambda, in [0, 1].
        sigma_divisor: 4 in the paper.
        normalize_prior: P divided by its sum, like I (the code); False leaves it (the paper).
        mean_one: W times T / sum W, so that uniform weights are 1 (the code); False leaves it.

    Returns:
        (b, t), 0 off the span. Where all importance is 0 the prior stands for it.
    """
    inside = span.to(importance.dtype)
    count = inside.sum(-1, keepdim=True)
    steps = (inside.cumsum(-1) - 1 - (count - 1) / 2) / (count.clamp(min=1) / sigma_divisor)
    bell = torch.exp(-steps.square() / 2) * inside
    whole = bell / _or_one(bell.sum(-1, keepdim=True))
    total = (importance * inside).sum(-1, keepdim=True)
    share = torch.where(total > 0, importance * inside / _or_one(total), whole)
    mixed = mix * share + (1 - mix) * (whole if normalize_prior else bell)
    return mixed * count / _or_one(mixed.sum(-1, keepdim=True)) if mean_one else mixed


def _or_one(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1.0, total)


class TIDPO(PreferencePolicy):
    """Token-importance DPO: gradient attribution, a Gaussian prior, and a triplet loss.

        I_i = || d max logit(last position) / d e_i ||_1
        W   = lambda I / sum I + (1 - lambda) B          over the response, then mean 1
        L   = -log sigma(beta (sum W D - sum W D' - alpha (KL' - sg KL))) + gamma L_triplet

    ``D`` are log-ratios of the chosen response, ``D'`` of the rejected one; W carries no
    gradient. The triplet loss is part of the published loss, and on; TDPO's divergence is in the
    code alone, and off. The name in records says which of them a run leaves out. Both run forwards
    of their own, through which the loss is differentiable as well.

    At a budget: the ``keep_ratio`` of each response with the largest W, weight 1 (our reading).

    Args:
        settings: see ``PolicySettings``.
        mix: lambda. [0 to 1; lower it to trust the prior more; the paper's 0.7; the code has 0.2]
        sigma_divisor: sigma is T over this. [above 0; raise it for a narrower prior; the paper's 4;
            the code has 8]
        span: "response", or "sequence": importance and prior over the prompt too (the code).
            ["response" or "sequence"; "sequence" to follow the code; the paper]
        normalize_prior: see ``importance_weights``. [true or false; false to follow the paper to
            the letter; the code]
        mean_one: see ``importance_weights``. [true or false; false to follow the paper to the
            letter; the code]
        tdpo_alpha: factor of the full-vocabulary divergence; the code has 0.5, the paper's
            equations none. [from 0; 0.5 to follow the code; the paper has none in its equations]
        triplet_gamma: factor of the triplet loss, the paper's 0.1; 0 leaves it out, and with it the
            sampling of an anchor for each pair. [from 0; 0 to save the sampling; the paper's 0.1;
            the code has 0.001]
        triplet_margin: margin of its hinge; not in the paper, 0.001 in the code. [from 0; only to
            compare; the code]
        anchor_tokens: longest sampled anchor. [from 1; lower it to save time; the code's 64]
        **base: see ``PreferencePolicy``.

    Raises:
        ConfigError: a number out of range, an unknown span.

    Source: ICLR 2026 paper, eqs. of W, L_DPO-w, L_triplet; code of the first commits of
    bowenzhaosh/Saliency-Guided-TI-DPO (3e792f9).
    """

    name: ClassVar[str] = "ti-dpo"
    published_loss: ClassVar[str] = "dpo"
    losses: ClassVar[Mapping[str, tuple[float, float]]] = {"dpo": (0.1, 0.0)}
    needs: ClassVar[Needs] = Needs(model=True, reference=True)
    scope: ClassVar[str] = "sequence"
    source: ClassVar[str] = "ICLR 2026; bowenzhaosh/Saliency-Guided-TI-DPO"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        mix: float = 0.7,
        sigma_divisor: float = 4.0,
        span: str = "response",
        normalize_prior: bool = True,
        mean_one: bool = True,
        tdpo_alpha: float = 0.0,
        triplet_gamma: float = 0.1,
        triplet_margin: float = 0.001,
        anchor_tokens: int = 64,
        **base: Any,
    ) -> None:
        super().__init__(settings, **base)
        require_choice("span", span, SPANS)
        if not 0 <= mix <= 1:
            raise ConfigError("mix must lie in [0, 1]", got=repr(mix))
        if not sigma_divisor > 0 or anchor_tokens < 1:
            raise ConfigError(
                "sigma_divisor must be greater than 0, anchor_tokens at least 1",
                got=f"{sigma_divisor!r}, {anchor_tokens!r}",
            )
        if min(tdpo_alpha, triplet_gamma, triplet_margin) < 0:
            raise ConfigError(
                "tdpo_alpha, triplet_gamma and triplet_margin must not be negative",
                got=f"{tdpo_alpha!r}, {triplet_gamma!r}, {triplet_margin!r}",
            )
        self.mix, self.sigma_divisor, self.span = mix, sigma_divisor, span
        self.normalize_prior, self.mean_one = normalize_prior, mean_one
        self.tdpo_alpha, self.triplet_gamma = tdpo_alpha, triplet_gamma
        self.triplet_margin, self.anchor_tokens = triplet_margin, anchor_tokens

    @property
    def variant(self) -> str:
        """Name in records: the terms that are left out are named."""
        left = [] if self.triplet_gamma else ["no triplet"]
        left += [] if self.tdpo_alpha else ["no KL"]
        return f"{self.name} ({', '.join(left)})" if left else self.name

    def scores(self, batch: PolicyBatch) -> Tensor:
        """Scores equal to the weights W."""
        inside = batch.mask
        if self.span == "sequence":
            real = batch.inputs.get("attention_mask")
            inside = torch.ones_like(inside) if real is None else real != 0
        weights = importance_weights(
            gradient_attribution(batch.model, batch.inputs),
            inside,
            mix=self.mix,
            sigma_divisor=self.sigma_divisor,
            normalize_prior=self.normalize_prior,
            mean_one=self.mean_one,
        )
        return weights.masked_fill(~batch.mask, 0.0)

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """Weights equal to W."""
        return self.scores(batch)

    def loss(self, batch: PolicyBatch, log_probs: Tensor, weights: Tensor) -> Tensor:
        """Mean over pairs; differentiable in ``log_probs``, and in the model's own parameters.

        Raises:
            ConfigError: a term that needs the reference model's logits, without them.
            InputError: a pair to which no anchor can be sampled.
        """
        reference = self.reference_of(batch)
        offset = self._divergence(batch) if self.tdpo_alpha else None
        losses = weighted_dpo_losses(log_probs, reference, weights, beta=self.beta, offset=offset)
        if self.triplet_gamma:
            losses = losses + self.triplet_gamma * self._triplet(batch, log_probs - reference)
        return losses.mean()

    def _divergence(self, batch: PolicyBatch) -> Tensor:
        """``alpha (KL of the rejected - sg KL of the chosen)`` of each pair."""
        inputs = forward_inputs(batch.inputs)
        logits = find_adapter(batch.model).forward(inputs)
        reference = self._reference_logits(batch)(inputs)
        chosen, rejected = sequence_kl(logits, reference, batch.mask).chunk(2)
        return self.tdpo_alpha * (rejected - chosen.detach())

    def _triplet(self, batch: PolicyBatch, ratios: Tensor) -> Tensor:
        """(n,) triplet losses beside anchors sampled from the model as it is."""
        half = len(ratios) // 2
        chosen, rejected = (
            packed(ratios[rows], batch.mask[rows]) for rows in (slice(half), slice(half, None))
        )
        adapter = find_adapter(batch.model)
        prompts = prompts_of({k: v[:half] for k, v in forward_inputs(batch.inputs).items()},
                             batch.mask[:half])  # fmt: skip
        with evaluation_mode(adapter.model):
            anchors = sample_anchors(
                adapter, prompts, most=self.anchor_tokens, seed=self._seed(batch)
            )
        labels = anchors.pop("labels")
        ours = -token_losses(adapter.forward(anchors), labels)
        theirs = -token_losses(self._reference_logits(batch)(anchors), labels)
        anchor = packed(ours - theirs.detach(), label_mask(labels))
        return triplet_losses(anchor, chosen, rejected, margin=self.triplet_margin)

    def _seed(self, batch: PolicyBatch) -> int:
        if batch.generator is None:
            raise InputError(
                "sampled anchors need a generator", remedy="PolicyBatch(generator=...)"
            )
        return int(torch.randint(2**31 - 1, (1,), generator=batch.generator))

    def _reference_logits(self, batch: PolicyBatch) -> Callable[[Mapping[str, Any]], Tensor]:
        reference_logits = batch.reference_logits
        if reference_logits is None:
            raise ConfigError(
                "this term of TI-DPO needs a plain forward of the reference model",
                got=f"tdpo_alpha={self.tdpo_alpha}, triplet_gamma={self.triplet_gamma}",
                why="log-probabilities of the responses do not hold the whole distribution",
                remedy="a trainer that keeps its reference model, or both factors 0",
            )
        return reference_logits


# --- two further terms ----------------------------------------------------------------------------


def sequence_kl(
    logits: Float[Tensor, "b t vocabulary"],
    reference: Float[Tensor, "b t vocabulary"],
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, " b"]:
    """``sum_t KL(pi_ref(. | x, y_<t) || pi(. | x, y_<t))`` over the response tokens of each row.

    Over the whole vocabulary, in float32 or wider; differentiable in ``logits``.

    Args:
        logits: of the trained model; position i - 1 predicts token i.
        reference: of the reference model, a constant.
        mask: response tokens, never index 0.
    """
    rows, tokens = mask.nonzero(as_tuple=True)
    dtype = wide(logits.dtype, reference.dtype)
    ours = logits[rows, tokens - 1].to(dtype).log_softmax(-1)
    theirs = reference[rows, tokens - 1].detach().to(dtype).log_softmax(-1)
    p = theirs.exp()
    each = (p * torch.where(p > 0, theirs - ours, 0.0)).sum(-1)
    return each.new_zeros(len(mask)).index_add(0, rows, each)


def packed(
    values: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b length"], Bool[Tensor, "b length"]]:
    """The response tokens of each row, moved to its front; 0 after the last. Differentiable."""
    length = int(mask.sum(-1).max()) if mask.numel() else 0
    order = torch.sort((~mask).long(), dim=-1, stable=True).indices[:, :length]
    there = mask.gather(-1, order)
    return values.gather(-1, order).masked_fill(~there, 0.0), there


def triplet_losses(
    anchor: tuple[Tensor, Tensor],
    chosen: tuple[Tensor, Tensor],
    rejected: tuple[Tensor, Tensor],
    *,
    margin: float,
) -> Float[Tensor, " n"]:
    """``relu(||d_a - d_w||^2 - ||d_a - d_l||^2 + margin)`` of each pair.

    ``d`` are log-ratios by index in the response. Each distance is over the indices that both
    responses have, as in the published code; the paper does not say.

    Args:
        anchor: (log-ratios (n, length), mask), from ``packed``.
        chosen: the same.
        rejected: the same.
        margin: of the hinge.
    """
    near, far = _distance(anchor, chosen), _distance(anchor, rejected)
    return F.relu(near - far + margin)


def _distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    length = min(one[0].shape[1], other[0].shape[1])
    (a, in_a), (b, in_b) = ((d[:, :length], m[:, :length]) for d, m in (one, other))
    return (a - b).square().masked_fill(~(in_a & in_b), 0.0).sum(-1)


def prompts_of(inputs: Mapping[str, Any], mask: Bool[Tensor, "b t"]) -> list[Tensor]:
    """The real tokens before the first response token of each row, on the CPU.

    Raises:
        InputError: a row without a prompt or without a response.
    """
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask")
    real = torch.ones_like(ids) if real is None else real
    before = (real != 0) & (mask.cumsum(-1) == 0)
    prompts = [row[here].cpu() for row, here in zip(ids, before, strict=True)]
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0 or not bool(mask[row].any()):
            raise InputError(
                "a pair has no prompt or no chosen response to sample an anchor beside",
                got=f"row {row}",
                remedy="triplet_gamma=0, or drop the pair",
            )
    return prompts


def sample_anchors(
    adapter: DecoderAdapter, prompts: Sequence[Tensor], *, most: int, seed: int
) -> dict[str, Tensor]:
    """One response to each prompt, drawn from the model, as a padded batch with labels.

    From the full distribution at temperature 1, with a generator for each row; the caller sets
    evaluation mode.

    Args:
        adapter: of the model.
        prompts: token ids, on the CPU.
        most: tokens of a response at most.
        seed: of the draws.
    """
    limit = adapter.max_positions()
    room = [most if limit is None else max(1, min(most, limit - len(p))) for p in prompts]
    generators = [sample_generator(seed, i) for i in range(len(prompts))]
    names = [f"the anchor of pair {i}" for i in range(len(prompts))]
    responses = sample_responses(adapter, prompts, generators, room, names)
    rows = [torch.cat(parts) for parts in zip(prompts, responses, strict=True)]
    width = max(len(row) for row in rows)
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row in rows])
    real = torch.stack([F.pad(torch.ones_like(row), (0, width - len(row))) for row in rows])
    labels = ids.masked_fill(real == 0, IGNORE)
    for row, prompt in enumerate(prompts):
        labels[row, : len(prompt)] = IGNORE
    device = next(adapter.model.parameters()).device
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


# --- importance of a token ------------------------------------------------------------------------


def forward_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a plain forward from a trainer's batch, without masks of the loss."""
    return {name: inputs[name] for name in _FORWARD if name in inputs}


def last_positions(inputs: Mapping[str, Any]) -> Int[Tensor, " b"]:
    """Index of the last real token of each row, padded on whichever side."""
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask")
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return (index if real is None else index * (real != 0)).amax(-1)


def gradient_attribution(model: Any, inputs: Mapping[str, Any]) -> Float[Tensor, "b t"]:
    """``I_i = || d (max logit at the last real position) / d e_i ||_1`` of every token.

    ``e_i`` is what the input embedding gives for token i. One forward and one backward in
    evaluation mode; no parameter receives a gradient, and the model is left as it was. 0 on
    padding.

    Args:
        model: a decoder that an adapter knows, or one that a trainer wrapped.
        inputs: of its forward; more than that is left out.

    Returns:
        (b, t) in float32 or wider.

    Raises:
        UnsupportedError: the embedding runs more than once, or not at all.
        NumericalError: a gradient that is not finite, naming row and token.

    Source: TI-DPO, eq. of the importance I_i. Oracle: finite differences, in the tests.
    """
    adapter = find_adapter(model)
    bare: Any = adapter.model
    arguments = adapter.arguments(forward_inputs(inputs))
    last = last_positions(arguments)
    # The head is the wide part of a forward: only the positions that are asked for.
    positions, place = last.unique(return_inverse=True)
    if _selects_logits(bare):
        arguments["logits_to_keep"] = positions
    else:
        place = last
    leaves: list[Tensor] = []

    def enter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = bare.get_input_embeddings().register_forward_hook(enter)
    try:
        with evaluation_mode(bare), torch.enable_grad():
            logits = adapter.logits_of(bare(**arguments))
            if len(leaves) != 1:
                raise UnsupportedError(
                    "attribution needs one pass through the input embedding",
                    got=f"{len(leaves)} passes",
                    remedy="another policy; this model embeds its tokens more than once",
                )
            target = logits[torch.arange(len(place), device=place.device), place].amax(-1).sum()
            (gradient,) = torch.autograd.grad(target, leaves)
    finally:
        handle.remove()
    return _finite(gradient.to(wide(gradient.dtype)).abs().sum(-1), arguments)


def _selects_logits(model: Any) -> bool:
    base = getattr(model, "get_base_model", lambda: model)()
    return "logits_to_keep" in inspect.signature(base.forward).parameters


def _finite(importance: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    real = arguments.get("attention_mask")
    if real is not None:
        importance = importance.masked_fill(real == 0, 0.0)
    refuse_first(
        ~torch.isfinite(importance),
        importance,
        "the gradient at an embedding is not finite",
        why="its importance would be arbitrary",
        remedy="check the weights, or a wider precision",
    )
    return importance
