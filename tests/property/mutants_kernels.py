"""Errors in how the calls of fused attention kernels are understood."""

from __future__ import annotations

from tests.property import test_attention, test_kernels
from tests.property.mutants import calls
from tests.property.mutation import Claim, Edit, Mutant, claim


def weights(mask: str) -> Claim:
    """Weights and log-sum-exps of calls whose kernel is told ``mask``."""
    cases = calls(mask=mask, b=2, chunk=2)
    return claim(test_attention.test_log_sum_exp_and_weights, cases, examples=60)


def understood(name: str, how: str) -> Claim:
    """A call of one architecture behind transformers' flash wrapper."""
    check = test_kernels.test_a_flash_call_is_what_the_model_computes
    return claim(check, name, how, 1, examples=1)


def _kernel(name: str, sentence: str, target: str, old: str, new: str, *found: Claim) -> Mutant:
    return Mutant(name, sentence, (Edit(f"model.{target}", old, new),), found, listed=False)


_BLOCK = "causal.CausalStructure.block"

MUTANTS = (
    _kernel(
        "documents-see-each-other",
        "documents that a kernel keeps apart see each other in the recomputed weights",
        _BLOCK, "(own == other)", "(own == own)", weights("documents"),
    ),
    _kernel(
        "padding-is-a-document",
        "padding attends to padding, where the kernel leaves it out",
        _BLOCK, "(own >= 0)", "(own >= -1)", weights("holes"),
    ),
    _kernel(
        "kernel-window-one-wider",
        "a window of w positions reaches w positions back beside the query's own",
        _BLOCK, "k - t < self.window", "k - t <= self.window", weights("sliding"),
    ),
    _kernel(
        "document-window-one-wider",
        "a window reaches one token further back, where documents are given",
        _BLOCK, "places[:, None, columns] < self.window", "places[:, None, columns] <= self.window",
        weights("sliding documents"),
    ),
    _kernel(
        "window-counts-padding",
        "padding inside a document counts in the distance that a window allows",
        "causal.CausalStructure._tokens_before",
        "(self.documents >= 0).long().cumsum(-1)", "(self.documents >= -1).long().cumsum(-1)",
        weights("sliding holes"),
    ),
    _kernel(
        "padding-ends-a-document",
        "keys before padding inside their own document are left out of a block",
        "causal.CausalStructure._document_begins",
        "torch.where(token, places, -1)", "torch.where(token, places, places)", weights("holes"),
    ),
    _kernel(
        "first-key-one-late",
        "the first key of a block with a window is left out",
        "causal.CausalStructure.first_key",
        "rows.start - self.window + 1", "rows.start - self.window + 2", weights("sliding"),
    ),
    _kernel(
        "flash-padding-attended",
        "the padding mask of a flash kernel is not read",
        "dispatch._documents", "return mask.long() - 1", "return mask.long() * 0",
        understood("llama", "mask"),
    ),
    _kernel(
        "flash-bounds-one-late",
        "the first token of a document belongs to the document before it",
        "batch.documents_in_rows", "right=True", "right=False", understood("llama", "bounds"),
    ),
    _kernel(
        "flash-positions-not-read",
        "documents that only their positions tell apart see each other",
        "dispatch._documents",
        "if bool((steps == positions).all()):", "if True:", understood("llama", "positions"),
    ),
    _kernel(
        "flash-window-not-read",
        "the sliding window of a flash kernel is left out",
        "dispatch._translated", 'window = named.get("sliding_window")', "window = None",
        understood("mistral", "bounds"),
    ),
)  # fmt: skip
