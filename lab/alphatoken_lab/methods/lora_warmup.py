"""A short LoRA training whose checkpoints keep Adam's moments: what LESS takes gradients at.

The adapters sit on the given model while the work lasts and are gone afterwards, with every flag as
it was. A model that has adapters already trains those, and gets their weights back. Each epoch ends
with a file, so a training that was killed goes on with the epoch that was not finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.errors import ConfigError, DataError, NumericalError
from alphatoken.model.batch import label_mask
from alphatoken.model.forward import evaluation_mode, response_losses
from alphatoken.model.protocol import find_adapter
from alphatoken.support.progress import Tracker
from alphatoken.support.storage import read_tensors, write_tensors
from alphatoken.train.policies.trained_weights import copy_weights, trainable
from alphatoken.train.policy import PolicyStage
from alphatoken_lab.methods.static import device_of, row_inputs


@dataclass(frozen=True)
class LoraWarmup:
    """Settings of the training; defaults are LESS's.

    Attributes:
        share: of the rows that it trains on, drawn with ``seed``.
        epochs: each ends with a checkpoint.
        learning_rate: highest; linear, after a rise over ``warmup_ratio`` of the steps.
        warmup_ratio: see there.
        batch_size: rows of one step.
        rank, alpha, dropout, target_modules: of LoRA.
        betas, eps: of Adam; no weight decay.
        seed: of rows, order, adapters and dropout.
    """

    share: float = 0.05
    epochs: int = 4
    learning_rate: float = 2e-5
    warmup_ratio: float = 0.03
    batch_size: int = 32
    rank: int = 128
    alpha: float = 512.0
    dropout: float = 0.1
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each once."""
        tests = {
            "share": 0 < self.share <= 1,
            "epochs": self.epochs >= 1,
            "learning_rate": 0 < self.learning_rate < math.inf,
            "warmup_ratio": 0 <= self.warmup_ratio < 1,
            "batch_size": self.batch_size >= 1,
            "rank": self.rank >= 1,
            "alpha": 0 < self.alpha < math.inf,
            "dropout": 0 <= self.dropout < 1,
            "target_modules": bool(self.target_modules),
        }
        for name, ok in tests.items():
            if not ok:
                raise ConfigError(
                    f"{name} of the LoRA warm-up is out of range", got=repr(getattr(self, name))
                )


@dataclass(frozen=True)
class AdamCheckpoint:
    """Adapters and optimizer at the end of an epoch; tensors by the parameter's name.

    Attributes:
        weights: the trainable parameters.
        first, second: Adam's moments.
        steps: optimizer steps so far.
        rate: mean learning rate of the epoch.
    """

    weights: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]
    steps: int
    rate: float

    def save(self, path: Path, header: str) -> None:
        """Write it, whole or not at all."""
        parts = {"weights": self.weights, "first": self.first, "second": self.second}
        tensors = {f"{kind}/{n}": t for kind, part in parts.items() for n, t in part.items()}
        facts = {"header": header, "steps": str(self.steps), "rate": repr(self.rate)}
        write_tensors(path, tensors, facts)

    @classmethod
    def load(cls, path: Path, header: str) -> AdamCheckpoint:
        """Read the checkpoint from files.

        Raises:
            DataError: unreadable, or of another run.
        """
        tensors, facts = read_tensors(path)
        if facts.get("header") != header:
            raise DataError(
                f"the checkpoint '{path}' is of another warm-up",
                got=facts.get("header", "no header")[:80],
                remedy="remove the file",
            )
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "first": {}, "second": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            parts[kind][name] = tensor
        return cls(**parts, steps=int(facts["steps"]), rate=float(facts["rate"]))


def mean_loss(model: Any, inputs: Mapping[str, Tensor], labels: Tensor) -> tuple[Tensor, int]:
    """(summed loss of the response tokens, their number) of one forward, with a graph."""
    losses = response_losses(find_adapter(model), inputs, labels)
    return losses.sum(), int(label_mask(labels).sum())


@contextmanager
def adapted(model: Any, settings: LoraWarmup) -> Iterator[Any]:
    """The model with LoRA adapters that alone are trainable; as it was afterwards.

    A PEFT model keeps its own adapters, and their weights are put back.

    Raises:
        ConfigError: no module has one of the target names; a PEFT model with nothing to train, or
            settings of LoRA beside it.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    kind = _lora if getattr(model, "peft_config", None) is None else _own_adapters
    with evaluation_mode(model), torch.random.fork_rng(devices), _gradients_back(model):
        torch.manual_seed(settings.seed)
        with kind(model, settings) as adapted_model:
            yield adapted_model


@contextmanager
def _gradients_back(model: nn.Module) -> Iterator[None]:
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag, gradient in before:
            parameter.requires_grad_(flag)
            parameter.grad = gradient


@contextmanager
def _own_adapters(model: Any, settings: LoraWarmup) -> Iterator[Any]:
    parameters = trainable(model)
    if not parameters:
        raise ConfigError("the PEFT model has no trainable adapter", got="0 parameters")
    for name in ("rank", "alpha", "dropout", "target_modules"):
        if (setting := getattr(settings, name)) != getattr(LoraWarmup, name):
            raise ConfigError(
                "the model has adapters of its own, which the warm-up trains as they are",
                got=f"{name}={setting!r}",
                why="that is a setting of new ones, and nothing would read it",
                remedy=f"leave {name} out, or hand over the model without adapters",
            )
    before = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        yield model
    finally:
        copy_weights(before, parameters)


@contextmanager
def _lora(model: Any, settings: LoraWarmup) -> Iterator[Any]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
    )
    try:
        peft_model = get_peft_model(model, config)
    except ValueError as problem:
        raise ConfigError(
            "LoRA finds no module to sit on",
            got=f"target_modules={list(settings.target_modules)}: {problem}",
            remedy="name linears of this model, such as c_attn for GPT-2",
        ) from problem
    finally:
        vars(model).pop("peft_config", None)  # PEFT leaves it there, also when it fails
    try:
        yield peft_model.eval()  # new adapters come in training mode, their dropout with them
    finally:
        peft_model.unload()
        vars(model).pop("peft_config", None)


def warm_up(
    stage: PolicyStage, model: Any, settings: LoraWarmup, folder: Path, header: str
) -> list[AdamCheckpoint]:
    """Train the adapters, a checkpoint an epoch; finished epochs are read from ``folder``.

    A step minimises the mean loss over the response tokens of its rows. Order and dropout of an
    epoch depend on the seed and the epoch alone.

    Args:
        stage: rows and batches.
        model: from ``adapted``.
        settings: of the training.
        folder: of the checkpoints; there.
        header: what it all depends on; a checkpoint with another one is refused.

    Raises:
        NumericalError: the loss is not finite.
        DataError: a checkpoint of another run, or no response token.
    """
    rows = _drawn(stage.rows, settings)
    steps = -(-len(rows) // settings.batch_size)
    parameters = trainable(model)
    optimizer = torch.optim.AdamW(
        list(parameters.values()), betas=settings.betas, eps=settings.eps, weight_decay=0.0
    )
    label = "LoRA warm-up"
    tracker = Tracker(label, settings.epochs * steps, stage.progress)
    checkpoints: list[AdamCheckpoint] = []
    for epoch in range(settings.epochs):
        file = folder / f"epoch-{epoch}.safetensors"
        if file.exists():
            checkpoints.append(AdamCheckpoint.load(file, header))
            tracker.resume((epoch + 1) * steps)
            continue
        if checkpoints:
            _restore(checkpoints[-1], parameters, optimizer)
        torch.manual_seed(settings.seed * 1_000_003 + epoch)
        order = torch.randperm(len(rows)).tolist()
        rates = []
        model.train()
        for step in range(steps):
            chosen = [rows[i] for i in order[step * settings.batch_size :][: settings.batch_size]]
            rates.append(_rate(epoch * steps + step, settings.epochs * steps, settings))
            _step(stage, model, optimizer, chosen, rates[-1])
            tracker.report(epoch * steps + step + 1)
        model.eval()
        checkpoint = _snapshot(parameters, optimizer, (epoch + 1) * steps, sum(rates) / steps)
        checkpoint.save(file, header)
        checkpoints.append(checkpoint)
    optimizer.zero_grad(set_to_none=True)
    return checkpoints


def _drawn(rows: Sequence[Mapping[str, Any]], settings: LoraWarmup) -> list[Mapping[str, Any]]:
    """A share of the rows that have a response, drawn without replacement."""
    count = max(1, math.floor(settings.share * len(rows)))
    generator = torch.Generator().manual_seed(settings.seed)
    drawn_rows: list[Mapping[str, Any]] = []
    for i in torch.randperm(len(rows), generator=generator).tolist():
        if any(label != -100 for label in rows[i]["labels"][1:]):
            drawn_rows.append(rows[i])
        if len(drawn_rows) == count:
            break
    if not drawn_rows:
        raise DataError("no training row has a response token", got=f"{len(rows)} rows")
    return drawn_rows


def _rate(step: int, total: int, settings: LoraWarmup) -> float:
    # Linear rise, then linear fall; never 0, so that no step is wasted.
    rise = math.ceil(settings.warmup_ratio * total)
    if step < rise:
        return settings.learning_rate * (step + 1) / rise
    return settings.learning_rate * (total - step) / max(1, total - rise)


def _step(
    stage: PolicyStage,
    model: Any,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Mapping[str, Any]],
    rate: float,
) -> None:
    optimizer.zero_grad(set_to_none=True)
    total = sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)
    for first in range(0, len(rows), stage.batch_size):
        part = rows[first : first + stage.batch_size]
        inputs, labels = row_inputs(stage, part, device_of(model))
        loss = mean_loss(model, inputs, labels)[0] / total
        if not bool(torch.isfinite(loss)):
            raise NumericalError(
                "the loss of the LoRA warm-up is not finite",
                got=str(float(loss)),
                remedy="lower warmup_learning_rate, or check the model",
            )
        loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def _snapshot(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, steps: int, rate: float
) -> AdamCheckpoint:
    def copies(key: str) -> dict[str, Tensor]:
        return {n: optimizer.state[p][key].detach().cpu().clone() for n, p in parameters.items()}

    weights = {name: p.detach().cpu().clone() for name, p in parameters.items()}
    return AdamCheckpoint(weights, copies("exp_avg"), copies("exp_avg_sq"), steps, rate)


def _restore(
    checkpoint: AdamCheckpoint, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    copy_weights(checkpoint.weights, parameters)
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(checkpoint.steps)),
            "exp_avg": checkpoint.first[name].to(parameter).clone(),
            "exp_avg_sq": checkpoint.second[name].to(parameter).clone(),
        }
