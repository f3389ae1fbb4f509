"""All mutants, file by file; ``mutants`` says what one is."""

from __future__ import annotations

from tests.lab import mutants_policies
from tests.property import (
    mutants,
    mutants_adapters,
    mutants_arithmetic,
    mutants_corpus,
    mutants_delta,
    mutants_differences,
    mutants_experts,
    mutants_influence,
    mutants_kernels,
    mutants_proofs,
    mutants_rules,
    mutants_run,
    mutants_train,
    mutants_walk,
    mutants_watch,
)

LISTED = mutants.LISTED
OF_LAB = {
    "Errors in the other methods": mutants_policies.MUTANTS,
}
ROOMS = {
    "Errors in further steps of the core": mutants.OWN,
    "Errors in proofs that run on the user's model, and in the Fisher drift": (
        mutants_proofs.MUTANTS
    ),
    "Errors in the adapter for transformers": mutants_adapters.MUTANTS,
    "Errors in the trainers": mutants_train.TRAINERS,
    "Errors in what trainers promise beside their steps, and in what is refused": (
        mutants_rules.MUTANTS
    ),
    "Errors in label values by finite differences": mutants_differences.MUTANTS,
    "Errors in influence directions": mutants_influence.MUTANTS,
    "Errors in values along a walk": mutants_walk.MUTANTS,
    "Errors in the oracle of whole runs": mutants_run.MUTANTS,
    **OF_LAB,
    "Errors in what reads and ranks corpora": mutants_corpus.MUTANTS,
    "Errors in how mixtures of experts are captured": mutants_experts.MUTANTS,
    "Errors in how fused attention kernels are understood": mutants_kernels.MUTANTS,
    "Errors in gated delta nets": mutants_delta.MUTANTS,
    "Errors in what a training run collects of Value-Propagation's pairs": mutants_watch.MUTANTS,
    "Errors in the diagnostic that compares arithmetics": mutants_arithmetic.MUTANTS,
}
"""Those that nobody demanded, by room."""
MUTANTS = (*LISTED, *(mutant for room in ROOMS.values() for mutant in room))
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
CLAIMS = tuple(dict.fromkeys(one for mutant in MUTANTS for one in mutant.claims))
"""Every claim that a mutant names, once: what a mutant that survives its own is tried on next."""
