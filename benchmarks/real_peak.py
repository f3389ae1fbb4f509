"""Peak memory on a real language model: one piece of work in a fresh process, printed as JSON.

    python -m benchmarks.real_peak smollm2 label 4 160

``step`` is a plain training step, an estimator the same with observed values at K = 3, G built in
it, ``label_all`` label values over all parameters, scored by themselves, ``central`` the same by
differences, ``one_sided`` a step with them observed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from alphatoken import Scorer, ScorerConfig
from alphatoken.estimate.names import ESTIMATORS, FORMS
from benchmarks.measure import Run
from benchmarks.peak import LAYERS, fresh_mib, observed_step, plain_step, print_peak
from benchmarks.real import MODELS, QUICK, SIZES, Real
from benchmarks.real_rows import source


def real_memory(run: Run) -> Iterator[dict[str, Any]]:
    """Peak memory of fresh processes on real models: steps with values at K = 3, and without."""
    for real in MODELS.values():
        if not real.here():
            continue
        for index, size in enumerate(QUICK if run.quick else SIZES):
            few = ("alphatoken", "label")
            estimators = few if index or run.quick else real.estimators
            plain = _peak(real, "step", size, run.device)
            for what in (*estimators, "label_all"):
                ours = _peak(real, what, size, run.device)
                said = (
                    "label over all parameters, scored"
                    if what == "label_all"
                    else (f"{what}, K={LAYERS}, observed")
                )
                yield {
                    "name": f"{real.key}_peak_memory",
                    "size": f"{said}; {size[0]} x {size[1]} tokens of {source()}",
                    "ours": ours,
                    "other": plain,
                    "ratio": ours / plain,
                    "floor": 1.0,
                    "unit": "MiB",
                    "note": "MiB of the whole process, G built in it, against a plain step's",
                }
            copy = _weights_mib(real)
            for form in FORMS:
                ours = _peak(real, form, size, run.device)
                yield {
                    "name": f"{real.key}_differences_peak",
                    "size": f"label over all parameters, {form}; {size[0]} x {size[1]} tokens of "
                    f"{source()}",
                    "ours": ours,
                    "other": plain,
                    "ratio": ours / plain,
                    "floor": 1.0,
                    "target": (plain + copy) / plain,
                    "unit": "MiB",
                    "note": f"MiB, as the others; a copy of the weights is {copy:.0f}",
                }


def _weights_mib(real: Real) -> float:
    """Of one float32 copy of all parameters, a tied one once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(real.folder))
    return sum(4 * p.numel() for p in model.parameters()) / 2**20


def _peak(real: Real, what: str, size: tuple[int, int], device: torch.device) -> float:
    """MiB of a fresh process."""
    words = (real.key, what, *map(str, size))
    return fresh_mib("benchmarks.real_peak", *words, device=device)


def work(real: Real, what: str, size: tuple[int, int], device: torch.device) -> None:
    """Run ``what`` once."""
    model = real.load(device)
    batch, validation = real.batches(*size, device)
    if what == "step":
        plain_step(model, batch)
    elif what == "label_all":
        config = ScorerConfig("label", layers="all", parameters="all", derivative="forward_mode")
        Scorer(model, validation, None, config).score(batch)
    elif what in FORMS:
        config = ScorerConfig("label", layers="all", parameters="all", derivative=what)
        scorer = Scorer(model, validation, None, config)
        if what == "central":
            scorer.score(batch)
        else:
            observed_step(scorer, model, batch, components=True)
    else:
        scorer = Scorer(model, validation, None, ScorerConfig(estimator=what, layers=LAYERS))
        observed_step(scorer, model, batch, components=True)


def main() -> None:
    """Do one thing and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("what", choices=["step", *ESTIMATORS, "label_all", *FORMS])
    parser.add_argument("rows", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    real, size = MODELS[options.model], (options.rows, options.length)
    work(real, options.what, size, options.device)
    print_peak(options.device)


if __name__ == "__main__":
    main()
