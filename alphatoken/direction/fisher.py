"""Monte-Carlo Fisher of a model on its own responses: ``fit_fisher``.

    F  =  E_x E_{y ~ p_ref(. | x)} [ (d log p_ref(y | x) / d theta)^2 ]

per sequence: the gradient of the summed log-likelihood of one response is squared, then averaged.
Labels come from the model itself, never from data, and the square is never that of a batch's
gradient. :mod:`alphatoken.direction.sampling` draws, :mod:`alphatoken.direction.moments` sums, and
:mod:`alphatoken.direction.drift` holds the result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.direction.drift import FisherDrift, base_projections, library_version
from alphatoken.direction.moments import CorrectedMoments, DiagonalMoments, KroneckerMoments
from alphatoken.direction.objective import scoring_forward
from alphatoken.direction.sampling import (
    LabelledSequence,
    Prompts,
    draw_tokens,
    read_sequences,
    sample_generator,
    sample_responses,
    uniform_numbers,
)
from alphatoken.direction.scored import require_derivatives
from alphatoken.errors import (
    ConfigError,
    FisherError,
    InputError,
    NumericalError,
    require_choice,
)
from alphatoken.model.batch import require_rows
from alphatoken.model.choice import ParameterChoice
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.model.scope import Scope, find_scope, used_outside
from alphatoken.support.precision import wide
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.support.resume import (
    changed_settings,
    refuse_changes,
    tensor_digest,
    weights_digest,
)
from alphatoken.support.storage import read_tensors, write_tensors

_KIND = "alphatoken Fisher checkpoint"
_FORMAT = "1"


def fit_fisher(
    model: nn.Module,
    prompts: Prompts,
    *,
    samples: int = 1000,
    layers: int | str | Sequence[int] = 3,
    structure: str = "diagonal",
    labels: str = "sequence",
    max_new_tokens: int = 256,
    parameters: str = "linears",
    seed: int = 0,
    batch_size: int = 8,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 50,
    progress: bool | ProgressSink | None = None,
    adapter: DecoderAdapter | None = None,
    responses: dict[int, Tensor] | None = None,
) -> FisherDrift:
    """Fit the Fisher of ``model`` as it is now, and keep its weights as the reference.

    Diagonal: F = mean over samples of (d log p(y | x) / d theta)^2; unbiased, with a standard
    error that falls as 1 / sqrt(samples). Kronecker: A_F = mean over tokens of x x^T (all
    positions that the model reads: the whole sequence but its last token), S_F = mean over
    samples of the sum over positions of delta delta^T. F is in units of (loss per sequence)^2
    per unit of weight^2. Sums are kept in float32 (float64 for float64 weights).

    The model is left as it was: modes, gradients, hooks, global random state, also when an
    exception passes through. Samples run in eval mode (no dropout), and the layers below the
    first scored one without a graph.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes))
        >>> fit_fisher(model, [[1, 5, 6]], samples=2, layers=1, max_new_tokens=4, progress=False)
        FisherDrift(diagonal, 7 parameters, layers=[1], samples=2)

    Args:
        model: the reference: the pre-trained model for SFT, the warm-started one for DPO.
        prompts: held-out prompts: a list of 1-D id tensors (or lists of ints), or a batch
            (``input_ids``, ``attention_mask``, ``labels``: the prompt is what comes before the
            first label). Padding on either side is stripped.
        samples: number of sequences. Sample i uses prompt ``i % len(prompts)``: more samples
            than prompts go round again with new responses, fewer use the first ones in order.
        layers: the last K decoder layers, "all", or indices.
        structure: "diagonal" or "kronecker".
        labels: "sequence": y is sampled freely after the prompt (the paper). "token": on each
            given sequence, a label is sampled at every response position from p(. | given
            prefix), in one forward; without labels every token but the first is a response
            token. The summed gradient is squared in both.
        max_new_tokens: longest response; cut to what the model's limit leaves after the prompt
            (``metadata["responses_cut"]`` counts such samples). Responses end with the model's
            end token, which is part of them. Not used by ``labels="token"``.
        parameters: "linears" (trainable linears of attention and MLP in ``layers``), "all" (every
            trainable parameter of the model), or parts such as "linears,*norm*" (see
            ``alphatoken.model.choice``); Kronecker factors are of linears only.
        seed: sample i is a function of (seed, i), the model and its prompt.
        batch_size: responses generated at a time (gradients are always taken one by one).
        checkpoint: file for running sums. An interrupted fit that is started again with the same
            arguments goes on from there and gives the same bits. The file stays: whoever has saved
            the result removes it.
        checkpoint_every: samples between two writes; so many are lost at most.
        progress: None prints to stderr if that is a terminal, True always, False never; a
            function gets the :class:`alphatoken.support.progress.Tracker` after every sample.
        adapter: how the model is read; found by itself for transformers and PEFT models.
        responses: ids of responses by the sample's number. Those that are there are not drawn
            again, which is nearly all of a fit's time; those that are drawn are put there.

    Raises:
        ConfigError: an option without meaning, K larger than the model, nothing trainable in it.
        InputError: no prompts, an empty one, not integer ids, none of the model's, or too long.
        NumericalError: NaN or Inf among weights, logits or gradients; names the module or sample.
        CoverageError: (Kronecker) a weight is used outside the captured linears.
        FisherError: the checkpoint is unreadable or of another fit, or cannot be written.
        UnsupportedError: an embedding in scope divides its gradient by its tokens' counts.

    Source: the paper's Monte-Carlo Fisher. Oracle: alphatoken.oracle.enumeration.exact_fisher.
    """
    settings = Settings(samples, structure, labels, max_new_tokens, parameters, seed, batch_size)
    with fitting(
        model, prompts, settings, layers, checkpoint, checkpoint_every, progress, adapter, responses
    ) as fit:
        # Copies: what stays in memory must not follow the weights when they are trained.
        return fit.result({n: w.detach().clone() for n, w in fit.trained.items()})


@contextmanager
def fitting(
    model: nn.Module,
    prompts: Prompts,
    settings: Settings,
    layers: int | str | Sequence[int],
    checkpoint: str | os.PathLike[str] | None,
    checkpoint_every: int,
    progress: bool | ProgressSink | None,
    adapter: DecoderAdapter | None,
    responses: dict[int, Tensor] | None = None,
    *,
    corrected: bool = False,
) -> Iterator[_Fit]:
    """A fit whose passes are done, with the model undisturbed; arguments as of ``fit_fisher``.

    ``corrected`` asks for the second pass of ``CorrectedMoments``.
    """
    if isinstance(checkpoint_every, bool) or checkpoint_every < 1:
        raise ConfigError("checkpoint_every must be 1 or more", got=repr(checkpoint_every))
    adapter = find_adapter(model) if adapter is None else adapter
    scope = find_scope(adapter, layers, ParameterChoice.read(settings.parameters))
    sequences = read_sequences(prompts, labels=settings.labels)[: settings.samples]
    # Prompts and their lengths are checked before the first sample: a fit can take hours.
    budgets = _budgets(sequences, settings, adapter)
    with _undisturbed(adapter):
        trained = _trained(scope, settings)
        require_derivatives(adapter.model, trained)
        drawn = {} if responses is None else responses
        fit = _Fit(adapter, scope, settings, sequences, budgets, trained, drawn, corrected)
        tracker = Tracker("Fisher", fit.total, progress)
        store = None if checkpoint is None else _Checkpoint(Path(checkpoint), fit, checkpoint_every)
        fit.run(tracker, store)
        yield fit


@dataclass(frozen=True)
class Settings:
    """The options that the result depends on; model, layers and prompts come beside them."""

    samples: int
    structure: str
    labels: str
    max_new_tokens: int
    parameters: str
    seed: int
    batch_size: int

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of 1 or more", got=repr(value))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError("seed must be an integer", got=repr(self.seed))
        require_choice("structure", self.structure, ("diagonal", "kronecker"))
        require_choice("labels", self.labels, ("sequence", "token"))
        choice = ParameterChoice.read(self.parameters)
        if self.structure == "kronecker" and not choice.only_linears:
            raise ConfigError(
                "Kronecker factors exist for linear maps only",
                got=f"structure='kronecker', parameters={self.parameters!r}",
                remedy="parameters='linears', or structure='diagonal'",
            )


@dataclass
class _Fit:
    """One fit under way: what is fixed, the running sums, and how far it is."""

    adapter: DecoderAdapter
    scope: Scope
    settings: Settings
    sequences: list[LabelledSequence]
    budgets: list[int]
    trained: dict[str, Tensor]
    drawn: dict[int, Tensor]
    corrected: bool = False
    done: int = 0
    response_tokens: int = 0
    moments: DiagonalMoments | KroneckerMoments = field(init=False)
    prompts_given: int = field(init=False)
    first: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.prompts_given = len(self.sequences)
        # A weight tied to the embeddings has a part of its gradient below the first scored layer.
        outside = used_outside(self.adapter, self.scope.first, self.trained.values())
        self.first = None if outside else self.scope.first
        if self.settings.structure == "diagonal":
            self.moments = DiagonalMoments(self.trained)
        elif self.corrected:
            self.moments = CorrectedMoments(self.adapter, self.scope)
        else:
            self.moments = KroneckerMoments(self.adapter, self.scope)

    @property
    def total(self) -> int:
        """Samples of all passes."""
        return self.settings.samples * (2 if self.corrected else 1)

    def run(self, tracker: Tracker, store: _Checkpoint | None) -> None:
        """Go through the samples that are left, in batches aligned to multiples of batch_size.

        A resumed fit draws its first batch again as a whole: the model computes a row of a batch
        with that batch's rounding, and the bits must not depend on the interruption.
        """
        size, samples = self.settings.batch_size, self.settings.samples
        if store is not None:
            store.resume(tracker)
        notes = []
        if samples > self.prompts_given:
            notes.append(f"{samples} samples go round {self.prompts_given} prompts")
        if cut := self.responses_cut:
            notes.append(f"{cut} responses are cut to the model's limit")
        tracker.note("; ".join(notes))
        with self.moments.observing():
            for start in range(self.done // size * size, self.total, size):
                batch = range(start, min(start + size, self.total))
                self._draw(batch)
                # Drawing is fast in batches. Gradients are taken sequence by sequence, because the
                # Fisher squares the gradient of one sequence and never that of a batch.
                for index in batch:
                    if index < self.done:
                        continue
                    if isinstance(self.moments, CorrectedMoments) and index >= samples:
                        self.moments.turn()
                    # A second pass draws the labels of the first one again.
                    self._add(index % samples)
                    self.done += 1
                    if store is not None:
                        store.write_when_due()
                    tracker.report(self.done)

    @property
    def responses_cut(self) -> int:
        """Samples whose response the model's limit keeps below max_new_tokens."""
        if self.settings.labels == "token":
            return 0
        short = [budget < self.settings.max_new_tokens for budget in self.budgets]
        return sum(short[i % self.prompts_given] for i in range(self.settings.samples))

    def _draw(self, batch: range) -> None:
        """Draw the responses of a batch of samples, unless they are there."""
        if self.settings.labels == "token" or all(index in self.drawn for index in batch):
            return
        # Prompts go round; the generator depends on the sample, so a second round draws anew.
        which = [index % self.prompts_given for index in batch]
        drawn = sample_responses(
            self.adapter,
            [self.sequences[i].prompt for i in which],
            [sample_generator(self.settings.seed, index) for index in batch],
            [self.budgets[i] for i in which],
            [f"sample {index} (prompt {i})" for index, i in zip(batch, which, strict=True)],
        )
        self.drawn.update(zip(batch, drawn, strict=True))

    def _add(self, index: int) -> None:
        """Add one sequence to the moments: a forward, its sampled labels, their log-likelihood."""
        i = index % self.prompts_given
        sequence = self.sequences[i]
        response = None if self.settings.labels == "token" else self.drawn[index]
        if response is None:
            ids, positions = sequence.ids, sequence.predicted.nonzero().flatten() - 1
        else:
            prompt = sequence.prompt
            ids = torch.cat([prompt, response])
            positions = torch.arange(len(prompt), len(ids)) - 1
        device = next(self.adapter.model.parameters()).device
        read = ids[:-1].unsqueeze(0).to(device)  # the last token is predicted, never read
        with scoring_forward(self.adapter, self.first):
            logits = self.adapter.forward(
                {"input_ids": read, "attention_mask": torch.ones_like(read)}
            )[0, positions.to(device)]
            # labels="token": the labels are drawn from the very logits whose gradient is taken.
            if response is None:
                uniform = uniform_numbers(
                    len(positions), sample_generator(self.settings.seed, index)
                )
                response = draw_tokens(logits, uniform, [f"sample {index} (sequence {i})"])
            # The sum over the response is differentiated and then squared; squares of single tokens
            # would leave out the products between positions.
            log_probs = F.log_softmax(logits.to(wide(logits.dtype)), dim=-1)
            chosen = log_probs.gather(-1, response.to(log_probs.device).unsqueeze(-1))
            self.moments.add(chosen.sum())
        if self.done < self.settings.samples:
            self.response_tokens += len(response)

    @property
    def metadata(self) -> dict[str, Any]:
        """Description of the fit."""
        return {
            **asdict(self.settings),
            "library_version": library_version(),
            "model": self.adapter.identity(),
            "base": base_projections(self.adapter.model),
            "layers": list(self.scope.layers),
            "prompts": self.prompts_given,
            "response_tokens": self.response_tokens,
            "responses_cut": self.responses_cut,
        }

    def result(self, reference: dict[str, Tensor]) -> FisherDrift:
        """The fitted Fisher with these weights as its reference; the running sums are used up."""
        metadata = self.metadata
        if isinstance(self.moments, DiagonalMoments):
            diagonal = self.moments.means(self.done)
            return FisherDrift(diagonal, reference, metadata)
        factors = self.moments.factors(self.done)
        return FisherDrift({}, reference, metadata, factors)


def _trained(scope: Scope, settings: Settings) -> dict[str, Tensor]:
    """The parameters in scope, by name; every one finite."""
    trained = scope.parameters()
    if not trained:
        raise ConfigError(
            "nothing trainable is in scope",
            got=f"layers {list(scope.layers)}, parameters={settings.parameters!r}"
            + "".join(f"; {name}: {why}" for name, why in list(scope.uncovered.items())[:3]),
            why="a Fisher is about gradients of trainable weights",
            remedy="unfreeze them (requires_grad_), attach adapters, choose other layers, or "
            "parameters='all'",
        )
    for name, parameter in trained.items():
        if not bool(torch.isfinite(parameter.detach()).all()):
            raise NumericalError(
                f"the weight '{name}' holds a NaN or an infinity",
                why="it cannot be the reference of a retention term",
                remedy="load the model again, or find the step that broke it",
            )
    return trained


def _budgets(
    sequences: list[LabelledSequence], settings: Settings, adapter: DecoderAdapter
) -> list[int]:
    """Longest response per prompt: max_new_tokens, or what the model's limit leaves."""
    limit = adapter.max_positions()
    budgets = []
    for i, one in enumerate(sequences):
        require_rows(one.ids, adapter.model, f"prompt {i}")
        # A prompt must leave room for one token at least; a given sequence must fit as it is.
        if settings.labels == "sequence":
            room = settings.max_new_tokens if limit is None else limit - len(one.prompt)
            too_long, length = room < 1, len(one.prompt)
        else:
            room, length = settings.max_new_tokens, len(one.ids)
            too_long = limit is not None and length > limit
        if too_long:
            raise InputError(
                f"prompt {i} is longer than the model allows",
                got=f"{length} tokens, the model's limit is {limit}"
                + (" and a response needs at least one" if settings.labels == "sequence" else ""),
                why="positions beyond the limit were never trained, or do not exist",
                remedy="drop it or shorten it",
            )
        budgets.append(min(settings.max_new_tokens, room))
    return budgets


@contextmanager
def _undisturbed(adapter: DecoderAdapter) -> Iterator[None]:
    """Run a fit in eval mode, without checkpointing or inference mode; put all back afterwards."""
    devices = {p.device.index for p in adapter.model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        # Inference mode first: nothing made inside it could ever be part of a graph.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=sorted(d or 0 for d in devices)))
        stack.enter_context(evaluation_mode(adapter.model))
        stack.enter_context(adapter.pause_checkpointing(adapter.layers()))
        yield


class _Checkpoint:
    """Running sums on disk, bound to one model, its weights, the prompts and the settings."""

    def __init__(self, path: Path, fit: _Fit, every: int) -> None:
        self._path, self._fit, self._every = path, fit, every
        # All that the sums depend on. A file in which anything differs is refused, since sums of
        # two models would look like sums of one.
        self._settings = {
            "kind": _KIND,
            "format_version": _FORMAT,
            "settings": asdict(fit.settings),
            "layers": fit.scope.layers,
            "model": fit.adapter.identity(),
            "weights": weights_digest(fit.adapter.model),
            "trained": list(fit.trained),
            "prompts": tensor_digest(_prompt_tensors(fit.sequences)),
        }

    def write_when_due(self) -> None:
        """Write if enough samples have passed since the last time."""
        fit = self._fit
        # Not after the last sample: the result itself is about to be made.
        if fit.done % self._every or fit.done >= fit.total:
            return
        metadata = {
            "run": json.dumps(self._settings),
            "done": str(fit.done),
            "response_tokens": str(fit.response_tokens),
        }
        write_tensors(self._path, fit.moments.sums, metadata, error=FisherError)

    def resume(self, tracker: Tracker) -> None:
        """Go on from the sums in the file, if there is one.

        Raises:
            FisherError: it is unreadable, or of a fit with other arguments.
        """
        if not self._path.exists():
            return
        fit = self._fit
        sums, description = read_tensors(self._path, error=FisherError)
        earlier = json.loads(description.get("run", "{}"))
        refuse_changes(
            changed_settings(
                {**earlier, "sums": _shapes(sums)},
                {**self._settings, "sums": _shapes(fit.moments.sums)},
            ),
            what=f"the checkpoint '{self._path}' is of another fit",
            why="its sums would be mixed with those of this fit",
            remedy="repeat the arguments of the interrupted fit, or remove the file to start again",
            error=FisherError,
        )
        # Into the tensors that are there, which lie on the weights' devices.
        for name, total in fit.moments.sums.items():
            total.copy_(sums[name])
        fit.done = int(description["done"])
        fit.response_tokens = int(description["response_tokens"])
        tracker.resume(fit.done)


def _prompt_tensors(sequences: list[LabelledSequence]) -> Iterator[tuple[str, Tensor]]:
    for number, sequence in enumerate(sequences):
        yield f"ids {number}", sequence.ids
        yield f"predicted {number}", sequence.predicted


def _shapes(sums: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tuple(total.shape)} {total.dtype}" for name, total in sums.items()}
