"""The Monte-Carlo Fisher: whose gradient is squared, at what scale, and what the file keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.fisher import fit_fisher
from alphatoken.direction.sampling import sample_generator, sample_responses
from alphatoken.errors import ConfigError, CoverageError, FisherError, InputError, NumericalError
from alphatoken.oracle.enumeration import (
    enumerate_responses,
    enumerated_log_probabilities,
    exact_fisher,
)
from alphatoken.oracle.gradients import unflatten
from alphatoken.support.progress import Tracker
from tests.property.decoder import DecoderConfig, ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.strategies import configs
from tests.property.tolerance import close

PROMPTS = [torch.tensor([1]), torch.tensor([0, 2, 1]), torch.tensor([2, 2])]
DEEP = DecoderConfig(vocabulary=5, layers=3, hidden=4, head_dim=2, mlp_width=3, end_token=None)


def gradient_of_drawn_labels(
    model: ReferenceDecoder, ids: Tensor, index: int, seed: int, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    log_probs = model(ids[:-1].unsqueeze(0))[0, 1:].log_softmax(-1)
    uniform = torch.rand(
        len(log_probs), generator=sample_generator(seed, index), dtype=torch.float64
    )
    total = log_probs.new_zeros(())
    for row, u in zip(log_probs, uniform, strict=True):
        below = (row.detach().exp().cumsum(-1) <= u).sum().clamp(max=len(row) - 1)
        total = total + row[below]
    return dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))


@given(config=configs(), seed=st.integers(0, 2**16), samples=st.integers(1, 4))
@budget(0.2)
def test_token_fisher_squares_labels_of_the_model(
    config: DecoderConfig, seed: int, samples: int
) -> None:
    """labels="token": labels drawn from p(. | given prefix), never the given ones; their summed
    gradient is squared, sample by sample, and averaged.

    Proves: token fisher squares labels of the model (unbiased), against autograd, label by label.
    """
    model = ReferenceDecoder(config, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocabulary, (2, 5), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    found = fit_fisher(
        model, {"input_ids": ids, "labels": labels}, samples=samples, layers="all",
        labels="token", seed=seed,
    )  # fmt: skip
    named = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: named[name] for name in found.names}
    squares = {name: torch.zeros_like(w) for name, w in weights.items()}
    largest = 0.0
    for index in range(samples):
        gradient = gradient_of_drawn_labels(model, ids[index % 2], index, seed, weights)
        for name, g in gradient.items():
            squares[name] += g.square() / samples
            largest = max(largest, float(g.abs().max()))
    for name, expected in squares.items():
        # A gradient that cancels is off by rounding of its terms, which are of order 1 here.
        scale = expected.max() + 1e-4 * largest + 1e-18
        close(found.fisher[name], expected, scale, 1e-10, name="token Fisher")


def parameters_of(model: nn.Module, names: tuple[str, ...]) -> dict[str, Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: named[name] for name in names}


def log_likelihood(model: ReferenceDecoder, ids: Tensor, places: list[int]) -> Tensor:
    """Sum of log p of the tokens at ``places``, on one whole graph."""
    log_probs = model(ids.unsqueeze(0))[0].log_softmax(-1)
    return torch.stack([log_probs[i - 1, ids[i]] for i in places]).sum()


def slow_gradient(
    model: ReferenceDecoder, ids: Tensor, places: list[int], names: tuple[str, ...]
) -> dict[str, Tensor]:
    weights = parameters_of(model, names)
    gradients = torch.autograd.grad(log_likelihood(model, ids, places), list(weights.values()))
    return dict(zip(names, gradients, strict=True))


def sampled(
    model: ReferenceDecoder, prompts: list[Tensor], samples: int, longest: int, seed: int
) -> list[tuple[Tensor, list[int]]]:
    """(ids, response places) of the samples that a fit draws."""
    chosen = [prompts[i % len(prompts)] for i in range(samples)]
    responses = sample_responses(
        ReferenceAdapter(model),
        chosen,
        [sample_generator(seed, i) for i in range(samples)],
        [longest] * samples,
        ["row"] * samples,
    )
    pairs = zip(chosen, responses, strict=True)
    return [
        (torch.cat([x, y]), list(range(len(x), len(x) + len(y)))) for x, y in pairs
    ]  # fmt: skip


@given(
    # Gradients divided by counts of tokens are refused where an embedding is in scope: see below.
    config=configs(),
    layers=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    samples=st.integers(1, 4),
    size=st.integers(1, 3),
    parameters=st.sampled_from(["linears", "all", "*mlp*,head.weight", "linears,embedding.*"]),
)
@example(
    config=DecoderConfig(mlp="plain", tied_linears=True),
    layers=1, seed=0, samples=2, size=2, parameters="linears",
)  # fmt: skip
@example(
    config=DecoderConfig(tied_linears=True, repeated_block=True, repeated_linear=True),
    layers=1, seed=0, samples=2, size=1, parameters="linears",
)  # fmt: skip
@budget(0.3)
def test_the_diagonal_is_the_mean_of_squared_sequence_gradients(
    config: DecoderConfig, layers: int, seed: int, samples: int, size: int, parameters: str
) -> None:
    """Proves: eq. mc_fisher (unbiased), against autograd, response by response."""
    model = ReferenceDecoder(config, seed)
    prompts = [prompt % config.vocabulary for prompt in PROMPTS[:2]]
    fisher = fit_fisher(
        model, prompts, samples=samples, layers=min(layers, config.layers), seed=seed,
        max_new_tokens=3, batch_size=size, parameters=parameters,
    )  # fmt: skip
    gradients = [
        slow_gradient(model, *pair, fisher.names)
        for pair in sampled(model, prompts, samples, 3, seed)
    ]
    if parameters == "all":
        assert set(fisher.names) == {name for name, _ in model.named_parameters()}
    elif parameters == "*mlp*,head.weight":
        chosen = {name for name, _ in model.named_parameters() if "mlp" in name}
        head = "embedding.weight" if config.tied_embeddings else "head.weight"
        assert set(fisher.names) == chosen | {head}
    else:
        assert ("embedding.weight" in fisher.names) == ("embedding" in parameters)
        assert not any(n.endswith(".bias") for n in fisher.names)
    for name in fisher.names:
        squares = torch.stack([g[name] ** 2 for g in gradients])
        # A gradient that cancels is off by 1e-14 of its terms, which are of order 1 here.
        scale = squares.max() + 1e-4 * squares.max().sqrt() + 1e-18
        close(fisher.fisher[name], squares.mean(0), scale, 1e-10, name="diagonal")
        assert torch.equal(fisher.reference[name], parameters_of(model, (name,))[name])


@given(config=configs(), seed=st.integers(0, 2**16), samples=st.integers(1, 3))
@budget(0.1)
def test_kronecker_factors_are_sums_over_positions_of_inputs_and_errors(
    config: DecoderConfig, seed: int, samples: int
) -> None:
    """Proves: kronecker factors are sums over positions of inputs and errors (approximate),
    against loops over positions.
    """
    model = ReferenceDecoder(config, seed)
    prompts = [prompt % config.vocabulary for prompt in PROMPTS[:2]]
    fisher = fit_fisher(
        model, prompts, samples=samples, layers="all", structure="kronecker", max_new_tokens=3,
        seed=seed,
    )  # fmt: skip
    linears = ReferenceAdapter(model).scored_linears(range(config.layers))
    assert fisher.names == tuple(linear.weight_name for linear in linears)
    moved = {n: w + 1 for n, w in parameters_of(model, fisher.names).items()}
    V = fisher.direction(moved)
    for linear in linears:
        S, A = slow_factors(model, linear.module, sampled(model, prompts, samples, 3, seed))
        ones = torch.ones(len(S), len(A), dtype=torch.float64)
        expected = torch.einsum("op,pi,ij->oj", S, ones, A)
        scale = S.abs().max() * A.abs().max() * ones.numel() + 1e-16  # errors may cancel to 0
        found = V[linear.weight_name].mT if linear.transposed else V[linear.weight_name]
        close(found, expected, scale, 1e-9, name="S (W - W_ref) A")


def slow_factors(
    model: ReferenceDecoder, module: nn.Module, pairs: list[tuple[Tensor, list[int]]]
) -> tuple[Tensor, Tensor]:
    """S_F and A_F of one module, from the definition, one position at a time."""
    S, A, uses = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for ids, places in pairs:
        seen: list[tuple[Tensor, Tensor]] = []
        hook = module.register_forward_hook(
            lambda m, args, out, seen=seen: seen.append((args[0], out))
        )
        total = log_likelihood(model, ids, places)
        hook.remove()
        errors = torch.autograd.grad(total, [out for _, out in seen])
        for (x, _), delta in zip(seen, errors, strict=True):
            for t in range(len(ids) - 1):  # the last token is predicted, never read
                S = S + torch.outer(delta[0, t], delta[0, t])
                A = A + torch.outer(x[0, t], x[0, t])
                uses += 1
    return S / len(pairs), A / uses


@given(
    config=configs(vocabulary=3, layers=st.integers(1, 2)),
    end=st.sampled_from([None, 0]),
    seed=st.integers(0, 2**16),
    length=st.integers(1, 2),
)
@budget(0.2)
def test_the_fit_expects_the_exact_fisher(
    config: DecoderConfig, end: int | None, seed: int, length: int
) -> None:
    """Over all responses, each fitted by itself and taken with its own chance: to rounding.

    That draws have these chances is a property of the sampler (test_sampling.py).

    Proves: eq. mc_fisher (unbiased), against ``exact_fisher``.
    """
    model, vocabulary = ReferenceDecoder(replace(config, end_token=end), seed), config.vocabulary

    def forward(batch: dict[str, Tensor]) -> Tensor:
        return model(batch["input_ids"], batch.get("attention_mask"))

    responses = enumerate_responses(length, vocabulary, end)
    found: dict[str, Tensor] = {}
    for x in PROMPTS[:2]:
        log_p = enumerated_log_probabilities(forward, x, length, vocabulary, eos=end).detach()
        # The oracle lists responses by length; sorting is stable.
        for y, p in zip(sorted(responses, key=len), log_p.exp(), strict=True):
            fisher = fit_fisher(
                model, [x], samples=1, layers=1, max_new_tokens=length,
                responses={0: torch.tensor(y)},
            ).fisher  # fmt: skip
            for name, square in fisher.items():
                found[name] = found.get(name, 0.0) + 0.5 * p * square
    weights = parameters_of(model, tuple(found))
    exact = exact_fisher(model, forward, PROMPTS[:2], length, weights, vocabulary, eos=end)
    for name, expected in unflatten(exact.diagonal(), weights).items():
        close(found[name], expected, expected.max() + 1e-18, 1e-10, name="expected Fisher")


def test_direction_is_computed_in_float32_at_least_and_has_no_graph() -> None:
    W_ref = torch.full((2, 2), 1.0, dtype=torch.bfloat16)
    W = nn.Parameter(W_ref + 2**-7)
    drift = FisherDrift({"m.weight": torch.full((2, 2), 1 + 2**-20)}, {"m.weight": W_ref})
    V = drift.direction({"m.weight": W})["m.weight"]
    assert V.dtype == torch.float32
    assert V.grad_fn is None
    assert torch.equal(V, torch.full((2, 2), (1 + 2**-20) * 2**-7))
    assert drift.direction({"m.weight": W.double()})["m.weight"].dtype == torch.float64


def pairs_of(**factors: Tensor) -> FisherDrift:
    return FisherDrift({}, {"m": torch.ones(3, 2)}, factors={"m": (factors["S"], factors["A"])})


ONE = torch.ones(1)
BAD_DRIFTS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: FisherDrift({}, {}), "exactly one"),
    "no reference": (lambda: FisherDrift({"m": ONE}, {}), "no reference weight for 'm'"),
    "no Fisher": (lambda: FisherDrift({"m": ONE}, {"m": ONE, "n": ONE}), "no Fisher for 'n'"),
    "shape of S": (lambda: pairs_of(S=torch.eye(2), A=torch.eye(2)), "left .* of 'm'"),
    "shape of A": (lambda: pairs_of(S=torch.eye(3), A=torch.eye(3)), "right .* of 'm'"),
    "metadata": (lambda: FisherDrift({"m": ONE}, {"m": ONE}, {"x": ONE}), "JSON"),
}
"""What a file can hold, a NaN or another shape, is refused as it is read (test_drift)."""


@pytest.mark.parametrize("name", BAD_DRIFTS)
def test_a_drift_that_makes_no_sense_is_refused_when_it_is_built(name: str) -> None:
    build, message = BAD_DRIFTS[name]
    with pytest.raises(FisherError, match=message):
        build()


def fitted(model: nn.Module, **options: Any) -> FisherDrift:
    chosen = {"samples": 2, "layers": 2, "max_new_tokens": 2, **options}
    return fit_fisher(model, PROMPTS, **chosen)


def test_check_accepts_its_model_also_when_it_has_moved_a_little() -> None:
    model = ReferenceDecoder(DEEP, 0)
    fisher = fitted(model)
    fisher.check(model, fisher.names)
    with torch.no_grad():
        for weight in parameters_of(model, fisher.names).values():
            weight *= 1.1
    fisher.check(ReferenceAdapter(model), fisher.names[:3])
    drifts = fisher.drift(parameters_of(model, fisher.names))
    assert all(abs(drift - 0.1) < 1e-6 for drift in drifts.values())


def test_a_zero_reference_is_never_divided_by() -> None:
    zero, one = torch.zeros(2, 2), torch.ones(2, 2)
    fisher = FisherDrift({"a.weight": one, "b.weight": one}, {"a.weight": zero, "b.weight": one})
    assert fisher.drift({"a.weight": one, "b.weight": one * 3}) == {"b.weight": 2.0}


def test_names_that_end_in_neither_weight_nor_bias_survive(tmp_path: Path) -> None:
    config = DecoderConfig(vocabulary=5, loose_parameter=True)
    fisher = fitted(ReferenceDecoder(config, 0), parameters="all")
    assert "layers.1.mlp.loose" in fisher.names
    fisher.save(tmp_path / "fisher")
    assert FisherDrift.load(tmp_path / "fisher").to("cpu").names == fisher.names


ARGUMENTS: dict[str, Any] = {
    "samples": 11, "layers": 1, "max_new_tokens": 3, "batch_size": 4, "seed": 5,
}  # fmt: skip


class Interrupt(BaseException):
    """What a user's Ctrl-C, or anything else, raises."""


def stop_at(done: int) -> Callable[[Tracker], None]:
    def callback(progress: Tracker) -> None:
        if progress.done == done:
            raise Interrupt

    return callback


def same(first: FisherDrift, second: FisherDrift) -> bool:
    pairs = [(first.fisher[n], second.fisher[n]) for n in first.fisher]
    for n in first.factors:
        pairs += zip(first.factors[n], second.factors[n], strict=True)
    return first.metadata == second.metadata and all(torch.equal(a, b) for a, b in pairs)


@given(
    stop=st.integers(1, 10),
    again=st.integers(1, 10),
    every=st.integers(1, 6),
    labels=st.sampled_from(["sequence", "token"]),
    structure=st.sampled_from(["diagonal", "kronecker"]),
)
@budget(0.08)
def test_an_interrupted_fit_goes_on_to_the_same_bits(
    stop: int, again: int, every: int, labels: str, structure: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("resume") / "sums.safetensors"
    model = ReferenceDecoder(DEEP, 0)
    prompts = PROMPTS[1:]
    arguments = {**ARGUMENTS, "labels": labels, "structure": structure}
    whole = fit_fisher(model, prompts, **arguments)
    arguments |= {"checkpoint": path, "checkpoint_every": every}
    reported: list[int] = []
    for moment in (stop, again):
        try:
            fit_fisher(model, prompts, progress=stop_at(moment), **arguments)
        except Interrupt:
            assert path.exists() or every > moment
    resumed = fit_fisher(model, prompts, progress=lambda p: reported.append(p.done), **arguments)
    assert same(whole, resumed)
    assert reported == list(range(reported[0], 12))
    assert set(os.listdir(path.parent)) <= {path.name}


OTHERS: dict[str, Any] = {
    "samples": 12, "layers": 2, "max_new_tokens": 4, "batch_size": 5, "seed": 6,
    "labels": "token", "structure": "kronecker", "parameters": "all",
}  # fmt: skip


@pytest.mark.parametrize(
    "change", [*OTHERS, "weights", "frozen weights", "prompts", "architecture"]
)
def test_a_checkpoint_of_another_fit_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "sums.safetensors"
    model, prompts = ReferenceDecoder(DEEP, 0), PROMPTS[1:]
    arguments = {**ARGUMENTS, "checkpoint": path, "checkpoint_every": 1}
    with pytest.raises(Interrupt):
        fit_fisher(model, prompts, progress=stop_at(3), **arguments)
    before = path.read_bytes()
    if change in OTHERS:
        arguments[change] = OTHERS[change]
    elif change == "prompts":
        prompts = [PROMPTS[1], torch.tensor([2, 1])]
    elif change == "architecture":
        model = ReferenceDecoder(DecoderConfig(vocabulary=5, layers=3, end_token=None), 0)
    else:
        name = "layers.2.mlp.up_proj" if change == "weights" else "layers.0.mlp.up_proj"
        with torch.no_grad():
            model.get_submodule(name).weight[1, 0] += 1e-12
    with pytest.raises(FisherError, match=r"sums.safetensors' is of another fit"):
        fit_fisher(model, prompts, **arguments)
    assert path.read_bytes() == before


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    with pytest.raises(FisherError, match=path.name):
        fit_fisher(ReferenceDecoder(DEEP, 0), PROMPTS, **ARGUMENTS, checkpoint=path)


def test_it_runs_without_dropout_inside_no_grad_and_in_inference_mode() -> None:
    config = DecoderConfig(vocabulary=5, layers=3, end_token=None, residual_dropout=0.5)
    model = ReferenceDecoder(config, 0)
    expected = fitted(model.eval())
    with torch.no_grad():
        assert same(fitted(model.train()), expected)
    with torch.inference_mode():
        inside = fitted(model)
    assert same(inside, expected)
    assert not inside.fisher[inside.names[0]].is_inference()


def test_responses_are_cut_to_the_models_limit_and_this_is_counted() -> None:
    config = DecoderConfig(vocabulary=5, positions="learned", max_positions=5, end_token=None)
    model = ReferenceDecoder(config, 0)
    fisher = fitted(model, samples=3, max_new_tokens=3)
    assert fisher.metadata["responses_cut"] == 1  # the prompt of 3 tokens has room for 2
    assert fisher.metadata["response_tokens"] == 3 + 2 + 3
    with pytest.raises(InputError, match=r"prompt 1 is longer.*5 tokens, the model's limit is 5"):
        fit_fisher(model, [[1], [1] * 5], samples=2, layers=1)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no samples": ({"samples": 0}, "samples must be"),
    "bool samples": ({"samples": True}, "samples must be"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens must be"),
    "no batch": ({"batch_size": -1}, "batch_size must be"),
    "structure": ({"structure": "full"}, "one of diagonal, kronecker"),
    "labels": ({"labels": "observed"}, "one of sequence, token"),
    "parameters": ({"parameters": "heads"}, "there are names such as head.weight"),
    "parameters, empty": ({"parameters": "linears,"}, "cannot be read"),
    "all and more": ({"parameters": "all,*norm*"}, "'all' stands alone"),
    "kronecker of all": ({"structure": "kronecker", "parameters": "all"}, "linear maps only"),
    "kronecker of norms": (
        {"structure": "kronecker", "parameters": "linears,*norm*"},
        "linear maps only",
    ),
    "K too large": ({"layers": 4}, "layer"),
    "no layers": ({"layers": []}, "layer"),
    "checkpoint_every": ({"checkpoint_every": 0}, "checkpoint_every"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_have_one_clear_error(name: str) -> None:
    options, message = BAD_OPTIONS[name]
    with pytest.raises(ConfigError, match=message):
        fitted(ReferenceDecoder(DEEP, 0), **options)


def test_nothing_trainable_is_a_config_error() -> None:
    model = ReferenceDecoder(DEEP, 0).requires_grad_(False)
    for parameters in ("linears", "all"):
        with pytest.raises(ConfigError, match="trainable"):
            fitted(model, parameters=parameters)


def test_only_trainable_weights_are_fitted() -> None:
    model = ReferenceDecoder(DEEP, 0)
    model.layers[2].attention.requires_grad_(False)
    assert fitted(model, layers=1).names == tuple(
        f"layers.2.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(bad: float) -> None:
    model = ReferenceDecoder(DEEP, 0)
    with torch.no_grad():
        model.layers[2].mlp.up_proj.weight[0, 0] = bad
    with pytest.raises(NumericalError, match=r"'layers.2.mlp.up_proj.weight'"):
        fitted(model)
    with pytest.raises(NumericalError, match=r"logits for sample 0 \(prompt 0\)"):
        fitted(model, layers=[0])


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_a_gradient_that_is_not_finite_is_named(structure: str) -> None:
    """Finite logits, infinite slope: the square root of zero."""

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.zeros_like(x).copy_(x * 0).abs().sqrt()

    model = ReferenceDecoder(DEEP, 0)
    model.final_norm = Root()
    with pytest.raises(NumericalError, match=r"of 'layers.2.\S+.weight' holds a NaN"):
        fitted(model, layers=1, structure=structure)


def test_kronecker_refuses_a_weight_that_is_used_outside_its_module() -> None:
    model = ReferenceDecoder(DecoderConfig(vocabulary=5, hidden_use=True), 0)
    with pytest.raises(CoverageError, match=r"up_proj.weight.*structure='diagonal'"):
        fitted(model, structure="kronecker")
    fitted(model)


def tiny_llama(dtype: torch.dtype = torch.float32) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        eos_token_id=2, bos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_a_transformers_model_in_training_with_checkpointing(structure: str) -> None:
    model = tiny_llama()
    expected = fitted(model, structure=structure, samples=3)
    model.train()
    model.activation_checkpointing_enable()
    assert same(fitted(model, structure=structure, samples=3), expected)
    assert model.training
    assert model.is_activation_checkpointing


def test_bfloat16_weights_have_a_float32_fisher() -> None:
    fisher = fitted(tiny_llama(torch.bfloat16))
    assert {F.dtype for F in fisher.fisher.values()} == {torch.float32}
    assert {W.dtype for W in fisher.reference.values()} == {torch.bfloat16}
