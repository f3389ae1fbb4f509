"""All tables of mutants; ``mutation.row`` says what one row is."""

from __future__ import annotations

from tests.lab import mutants_policies
from tests.property import (
    mutants,
    mutants_data,
    mutants_models,
    mutants_proofs,
    mutants_race,
    mutants_train,
    mutants_values,
)

LISTED = mutants.DEMANDED
OF_LAB = {
    "Errors in the other methods": mutants_policies.METHODS,
}
ROOMS = {
    "Errors in further steps of the core": mutants.CORE,
    "Errors in proofs that run on the user's model, and in the Fisher drift": (
        *mutants_proofs.PROOFS,
        *mutants_proofs.SLICES,
        *mutants_proofs.DRIFT,
    ),
    "Errors in the adapter for transformers": mutants_models.ADAPTERS,
    "Errors in the trainers": mutants_train.TRAINERS,
    "Errors in what trainers promise beside their steps, and in what is refused": (
        mutants_train.RULES
    ),
    "Errors in weights that rows bring": mutants_train.OWN_WEIGHTS,
    "Errors in races of short runs": mutants_race.RACES,
    "Errors in label values by finite differences": mutants_values.VALUES_BY_DIFFERENCES,
    "Errors in influence directions": mutants_values.INFLUENCE,
    "Errors in values along a walk": mutants_values.WALKS,
    "Errors in the oracle of whole runs": mutants_values.RUNS,
    **OF_LAB,
    "Errors in what reads and ranks corpora": mutants_data.CORPORA,
    "Errors in how mixtures of experts are captured": mutants_models.EXPERTS,
    "Errors in how fused attention kernels are understood": mutants_models.KERNELS,
    "Errors in gated delta nets": mutants_models.DELTA_NETS,
    "Errors in what a training run collects of Value-Propagation's pairs": (
        mutants_data.COLLECTED_PAIRS
    ),
    "Errors in the diagnostic that compares arithmetics": mutants_data.ARITHMETICS,
    "Errors in the verdict on rows": mutants_data.VERDICTS,
    "Errors in which of the three ways to value is in force": mutants_data.PRESETS,
    "Errors in which tokens are shown as trained on": mutants_data.SHOWN,
}
"""Those that nobody demanded, by room."""
MUTANTS = (*LISTED, *(mutant for room in ROOMS.values() for mutant in room))
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
CLAIMS = tuple(dict.fromkeys(one for mutant in MUTANTS for one in mutant.claims))
"""Every claim that a mutant names, once: what a mutant that survives its own is tried on next."""
