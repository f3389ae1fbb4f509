"""Errors in what trainers promise beside their steps, and in refusals of rows and of a Fisher."""

from __future__ import annotations

from tests.property import test_paper_gaps, test_policies, test_rules
from tests.property.mutation import Claim, Mutant, claim, mutant

NEEDS = ("trl", "peft")
DPO = "train.dpo.AlphaDPOTrainer"
LABELLED = "train.sft.LabelledRows"
APART = "train.identity.split_changes"
REFERENCE = "train.reference.check_tokens"
LENGTH = claim(
    test_rules.test_pools_begin_at_log_two, "by length", examples=1, needs=NEEDS, tested=True
)
MOVING = claim(test_rules.test_a_moving_reference_is_looked_at_anew, examples=1, needs=NEEDS)
COLLATED = claim(
    test_rules.test_a_collator_labels_every_batch, "sft", examples=1, needs=NEEDS, tested=True
)
ROUTED = claim(
    test_rules.test_the_routers_loss_is_trained, 0.5, examples=1, needs=NEEDS, tested=True
)
COUNTED = claim(
    test_rules.test_gradients_that_count_tokens_are_refused, "all", False, False, examples=1
)


def _rowless(what: str, adapted: bool = False) -> Claim:
    check = test_rules.test_tokens_without_a_row_are_refused
    return claim(check, what, adapted, examples=1, needs=NEEDS, tested=True)


def _resumed(name: str, sentence: str, old: str, new: str, case: str) -> Mutant:
    one = claim(
        test_rules.test_rounding_is_told_from_results, case, examples=1, needs=NEEDS, tested=True
    )
    return mutant(name, sentence, (APART, old, new), one)


def _reference(name: str, sentence: str, old: str, new: str, case: str) -> Mutant:
    one = claim(
        test_rules.test_a_reference_reads_the_policys_tokens,
        case,
        examples=1,
        needs=NEEDS,
        tested=True,
    )
    return mutant(name, sentence, (REFERENCE, old, new), one)


MUTANTS = (
    mutant(
        "validation-pairs-by-the-trained-losss-lengths",
        "the reference's side of validation pairs is discounted by ld_alpha, the policy's is not",
        (f"{DPO}._plain_sums", "= self.ld_alpha, None", "= self.ld_alpha, self.ld_alpha"),
        LENGTH,
    ),
    mutant(
        "first-reference-for-ever",
        "validation pairs keep the first reference, though it follows the policy",
        [
            (f"{DPO}.prepare_pool", "if self.args.sync_ref_model:", "if False:"),
            (f"{DPO}.row_batch", "if self._follows_reference:", "if False:"),
        ],
        MOVING,
    ),
    mutant(
        "validation-rows-without-the-users-collator",
        "validation rows are padded by the library where the user's collator labels training rows",
        (f"{LABELLED}.row_batch", "if self.own_collator is None:", "if True:"),
        COLLATED,
    ),
    mutant(
        "fisher-rows-without-the-users-collator",
        "a Fisher's prompts and sequences take the labels of rows, not those of the collator",
        (f"{LABELLED}.labels_of", "if self.own_collator is None:", "if True:"),
        COLLATED,
    ),
    mutant(
        "routers-loss-left-out",
        "the routers' loss of a mixture of experts is not part of the loss",
        ("train.trainer.LogitsLoss.of", "if proxy.aux_loss is not None:", "if False:"),
        ROUTED,
    ),
    mutant(
        "routers-loss-unweighted",
        "the routers' loss is added without the model's coefficient",
        (
            "train.trainer.LogitsLoss.of",
            "self._router_share * proxy.aux_loss",
            "proxy.aux_loss",
        ),
        ROUTED,
    ),
    mutant(
        "routers-loss-without-its-gradient",
        "the routers' loss is reported and not trained",
        (
            "train.log_prob_proxy.LogProbProxy.surrogate",
            "loss if self.aux_loss is not None else",
            "",
        ),
        ROUTED,
    ),
    mutant(
        "one-token-too-many-for-the-embedding",
        "the first id past the embedding is looked up",
        ("model.token_ids.require_rows", "(ids >= rows)", "(ids > rows)"),
        _rowless("rows"),
    ),
    mutant(
        "negative-ids-looked-up",
        "a placeholder's negative id is looked up",
        ("model.token_ids.require_rows", "(ids < 0) | ", ""),
        _rowless("rows"),
    ),
    mutant(
        "last-token-refused",
        "the embedding's last row is taken for none",
        ("model.token_ids.require_rows", "(ids >= rows)", "(ids >= rows - 1)"),
        _rowless("rows"),
    ),
    mutant(
        "adapted-embedding-not-counted",
        "the rows of an embedding under an adapter are not known",
        (
            "model.token_ids.embedding_rows",
            'getattr(embedding, "base_layer", embedding)',
            "embedding",
        ),
        _rowless("rows", adapted=True),
    ),
    mutant(
        "ids-of-batches-not-looked-at",
        "ids of batches go to the embedding as they come",
        ("model.batch.read_batch", "if model is not None:", "if False:"),
        _rowless("rows"),
    ),
    mutant(
        "ids-of-prompts-not-looked-at",
        "ids of a Fisher's prompts go to the embedding as they come",
        (
            "direction.fisher._budgets",
            'require_rows(one.ids, adapter.model, f"prompt {i}")',
            "pass",
        ),
        _rowless("prompts"),
    ),
    mutant(
        "fisher-of-counted-tokens",
        "a Fisher is made of gradients that are divided by counts of the batch",
        ("direction.scored.require_derivatives", "if name is not None:", "if False:"),
        COUNTED,
    ),
    mutant(
        "counted-tokens-refused-out-of-scope",
        "a Fisher that leaves the embedding out is refused for it",
        ("direction.scored.require_derivatives", "if name is not None:", "if counting:"),
        COUNTED,
    ),
    _resumed(
        "rounding-taken-for-another-result",
        "a run is refused for what changes rounding alone",
        "(*_ROUNDING, *_LIBRARIES)",
        "_LIBRARIES",
        "checkpointing",
    ),
    _resumed(
        "any-option-taken-for-rounding",
        "a run goes on with another learning rate",
        "(*_ROUNDING, *_LIBRARIES)",
        "list(changes)",
        "learning rate",
    ),
    _resumed(
        "processes-that-may-differ",
        "a run goes on with another number of processes",
        ' or name == "processes"',
        "",
        "two processes, on purpose",
    ),
    _reference(
        "reference-without-the-policys-rows",
        "a reference is asked about tokens that it has no row for",
        "if rows < count:",
        "if False:",
        "a row too few",
    ),
    _reference(
        "reference-held-to-tokens-without-a-row",
        "a reference is refused for tokens that the policy has no row for either",
        "min(len(own), tokens or len(own))",
        "len(own)",
        "as small as the policy",
    ),
    _reference(
        "reference-held-to-the-policys-padding",
        "a reference is refused for rows of the policy that are no tokens",
        "min(len(own), tokens or len(own))",
        "tokens or len(own)",
        "beside a padded policy",
    ),
    _reference(
        "reference-of-other-tokens",
        "a reference reads the policy's ids as other tokens",
        "ids.get(text, number) != number",
        "False",
        "two tokens exchanged",
    ),
    _reference(
        "unnamed-tokens-taken-for-others",
        "a reference is refused for tokens that its tokenizer leaves out",
        "ids.get(text, number)",
        "ids.get(text)",
        "the last tokens not named",
    ),
    mutant(
        "standard-with-a-budget",
        "training on everything leaves tokens out",
        (
            "train.policies.standard.Standard.budget_weights",
            "return batch.mask.to(batch.log_probs.dtype)",
            "return self.best(batch, self.settings.keep_ratio)",
        ),
        claim(test_policies.test_standard_keeps_all, examples=1),
    ),
    mutant(
        "prompt-loses-its-end",
        "a long prompt keeps its beginning, and the question goes",
        ("train.datasets.cut_pair", "[-max_prompt:]", "[:max_prompt]"),
        claim(
            test_paper_gaps.test_prompt_and_response_are_cut_apart,
            examples=1,
            needs=NEEDS,
            tested=True,
        ),
    ),
)
