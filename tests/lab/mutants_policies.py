"""Errors in the other methods' rules: each against the numbers of a test that was worked by hand.

Their tests import TRL and PEFT, so a claim names its test and imports it when it is tried.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings

from tests.property.mutation import Claim, claim, mutant

FOLDER = object()
"""An argument that stands for an empty folder of the test's own."""


@contextmanager
def few_examples(test: Any) -> Iterator[Any]:
    """A drawn test as it is, but for how many examples it draws, and that it does not shrink."""
    drawn = getattr(test, "_hypothesis_internal_use_settings", None)
    if drawn is None:
        yield test
        return
    phases = (Phase.explicit, Phase.generate)
    test._hypothesis_internal_use_settings = settings(
        drawn, max_examples=8, phases=phases, database=None
    )
    try:
        yield test
    finally:
        test._hypothesis_internal_use_settings = drawn


def by(test: str, *values: Any) -> Claim:
    """A claim by "file::test", with the values of its parameters; a drawn test draws by itself."""
    file, _, name = test.partition("::")
    here = Path(__file__).parent
    late = f"tests.{'lab' if (here / f'{file}.py').is_file() else 'property'}.{file}"

    def check() -> None:
        module = importlib.import_module(late)
        with tempfile.TemporaryDirectory() as folder:
            given = [Path(folder) if value is FOLDER else value for value in values]
            given = [getattr(module, v[1:]) if str(v).startswith("@") else v for v in given]
            with few_examples(getattr(module, name)) as test:
                test(*given)

    check.__module__, check.__name__ = late, name
    return replace(claim(check, examples=1, needs=("trl", "peft")), late=late)


_policy = partial(mutant, room="methods.")
_own = partial(mutant, room="train.policies.")


STM_BY_HAND = by("test_policies_static::test_stm_by_hand")
STM_ORDER = by("test_policies_static::test_stm_takes_easy_tokens_first")
XTF_CLASS = by("test_policies_static::test_the_second_lowest_class_is_dropped")
XTF_KNOWN = by("test_policies_static::test_known_tokens_by_hand")
XTF_TASK = by("test_policies_static::test_task_relevance_by_hand")
OTSU = by("test_policies_static::test_otsu_by_hand")
RECEIVED = by(
    "test_policies_static::test_attention_received_against_the_eager_matrices",
    "@right_padded", "mean", "mean", "all",
)  # fmt: skip
CLEANING = by("test_policies_static::test_token_cleaning_by_hand")
ADAM = by("test_policies_static::test_adam_update_by_hand")
FILLING = by("test_policies_static::test_filling_by_tokens")
LESS = by("test_policies_static::test_less_against_autograd_by_hand", FOLDER, "mean_of_cosines")
RHO_1 = by("test_methods::test_rho_1_by_hand")
OWN_REFERENCE = by("test_policies_reference::test_rho_1_trains_its_reference", FOLDER)
TRAINED_ONCE = by("test_policies_reference::test_a_reference_is_trained_once", FOLDER)
FIRST = by("test_policies_validation_first::test_validation_rows_come_first", FOLDER)
SCHEDULE = "test_policies_validation_first::test_the_first_training_has_a_schedule_of_its_own"
TALR = by("test_methods::test_talr_by_hand")
DFT = by("test_methods::test_dft_by_hand")
EAFT = by("test_methods::test_eaft_by_hand")
CFT = by(
    "test_policies_cft::test_critical_tokens_are_those_of_one_continuation_at_a_time", FOLDER, 2, 7
)
CFT_MASK = by("test_policies_cft::test_the_mask_is_kept_and_found_in_any_batch", FOLDER)
CFT_ANSWER = by("test_policies_cft::test_the_last_answer_counts", "3 + 4 = 7", r"\d", "7")
SSTOKEN = by("test_methods::test_sstoken_by_hand")
HEADS = by("test_methods::test_prompt_attention_averages_heads")
FLOW = by("test_methods::test_flow_by_hand", FOLDER, False)
FLOW_BY_TOKEN = by("test_methods::test_flow_by_token_and_temperature", FOLDER)
CONFPO = by("test_policies_preference::test_confpo_by_hand")
CONFPO_DRAWN = by("test_policies_preference::test_confpo_keeps_what_is_below_the_mean_probability")
SEPO = by("test_policies_preference::test_sepo_by_hand")
IMPORTANCE = by("test_policies_preference::test_importance_weights_by_hand")
ATTRIBUTION = by("test_policies_preference::test_attribution_is_finite_differences")
DIVERGENCE = by("test_policies_preference::test_sequence_divergence_is_the_loop")
TRIPLETS = by("test_policies_preference::test_triplet_losses_are_the_loop")
PAIR_LOSSES = by("test_policies_preference::test_hand_computed_losses")
MERGE = by("test_merge::test_by_hand")

MUTANTS = (
    _policy(
        "stm-keeps-the-perplexed",
        "STM keeps the tokens above the threshold",
        ("stm.STM.native_keep", "<= self.threshold", "> self.threshold"),
        STM_BY_HAND,
    ),
    _policy(
        "stm-budget-of-the-perplexed",
        "STM fills a budget with the hardest tokens",
        ("stm.STM.static_scores", '-table.columns["loss"]', 'table.columns["loss"]'),
        STM_ORDER,
    ),
    _policy(
        "xtf-keeps-one-class-only",
        "XTF keeps the Otsu class that it should drop",
        ("xtf.XTF._cluster", "== self.cluster", "!= self.cluster"),
        XTF_CLASS,
    ),
    _policy(
        "xtf-drops-the-unknown",
        "XTF drops what the base model does not know",
        ("xtf.XTF.dropped", "< self.known_below", "> self.known_below"),
        XTF_KNOWN,
    ),
    _policy(
        "xtf-relevance-upside-down",
        "tokens far from the task count as relevant",
        ("xtf.task_relevance", "1 - normal[tokens]", "normal[tokens]"),
        XTF_TASK,
    ),
    _policy(
        "xtf-centre-of-the-vocabulary",
        "V is the mean over token kinds, not over tokens",
        (
            "xtf.task_relevance",
            "weights[i : i + _ROWS] @",
            "(weights[i : i + _ROWS] > 0).double() @",
        ),
        XTF_TASK,
    ),
    _policy(
        "otsu-without-the-mass",
        "classes are parted by their moments, whatever their mass",
        (
            "otsu.multi_otsu",
            "np.divide((moment[None, :] - moment[:, None]) ** 2, inside,",
            "np.divide((moment[None, :] - moment[:, None]) ** 2, inside ** 2,",
        ),
        OTSU,
    ),
    _policy(
        "attention-received-from-padding",
        "queries at padding count",
        (
            "attention_received._Received.__call__",
            "real = self.real.to(found)",
            "real = torch.ones_like(found)",
        ),
        RECEIVED,
    ),
    _policy(
        "sstoken-with-rho-1s-sign",
        "ssToken keeps what has become worse",
        ("sstoken.SsToken.scores", "+ batch.log_probs", "- batch.log_probs"),
        SSTOKEN,
    ),
    _policy(
        "sstoken-sums-its-heads",
        "attention to the prompt is summed over the heads",
        ("sstoken.prompt_attention", ".sum(-1).mean((1, 2))", ".sum(-1).sum((1, 2))"),
        HEADS,
    ),
    _policy(
        "sstoken-prompt-is-everything",
        "attention to the response counts as attention to the prompt",
        ("sstoken.prompt_tokens", "real & ~batch.mask", "real"),
        SSTOKEN,
    ),
    _policy(
        "rho-1-with-sstokens-sign",
        "Rho-1 keeps what the reference has not learned",
        ("rho_1.Rho1.scores", "-batch.log_probs - batch", "-batch.log_probs + batch"),
        RHO_1,
    ),
    _own(
        "a-reference-of-other-options",
        "a reference is read that was trained with other options",
        ("trained_weights.trained_copy", "{**stage.run, **options}", "dict(stage.run)"),
        TRAINED_ONCE,
    ),
    _own(
        "a-reference-of-the-runs-options",
        "the options of the run go before those of the reference's own training",
        ("trained_weights.trained_copy", "{**stage.run, **options}", "{**options, **stage.run}"),
        TRAINED_ONCE,
    ),
    _own(
        "validation-first-not-at-all",
        "the model that was trained on the validation rows is not the one that is trained on",
        (
            "validation_first.ValidationFirst.prepare",
            "copy_weights(trainable(trained), trainable(stage.model))",
            "copy_weights(trainable(stage.model), trainable(trained))",
        ),
        FIRST,
    ),
    _own(
        "training-rows-first",
        "it is the training rows that come first",
        (
            "validation_first.ValidationFirst.prepare",
            "stage, stage.validation",
            "stage, stage.rows",
        ),
        FIRST,
    ),
    _own(
        "validation-first-at-the-runs-rate",
        "the learning rate of the first training is not read",
        (
            "trained_weights.validation_schedule",
            "if learning_rate is None",
            "if learning_rate is not None",
        ),
        FIRST,
    ),
    _own(
        "validation-first-by-the-runs-schedule",
        "the rate of the first training falls as the run's does",
        ("trained_weights.validation_schedule", '"lr_scheduler_type": "constant",', ""),
        by(SCHEDULE, FOLDER, {"lr_scheduler_type": "cosine", "max_steps": 2}),
    ),
    _own(
        "validation-first-accumulates",
        "the first training takes a step for as many micro-batches as the run does",
        ("trained_weights.validation_schedule", '"gradient_accumulation_steps": 1,', ""),
        by(SCHEDULE, FOLDER, {"gradient_accumulation_steps": 16}),
    ),
    _policy(
        "rho-1-responses-by-their-tokens",
        "whole responses are asked for, and single tokens are ranked",
        ("rho_1.Rho1.scores", 'self.unit == "response"', 'self.unit == "row"'),
        by("test_methods::test_rho_1_by_response"),
    ),
    _policy(
        "rho-1-reference-of-the-training-rows",
        "Rho-1's reference learns the rows that are to be cleaned",
        ("rho_1.Rho1._reference", "stage.validation", "stage.rows"),
        OWN_REFERENCE,
    ),
    _policy(
        "rho-1-reference-at-the-runs-rate",
        "the reference's own learning rate is not read",
        ("rho_1.Rho1._reference", "self.reference_learning_rate)", "None)"),
        OWN_REFERENCE,
    ),
    _own(
        "rho-1-reference-as-long-as-the-run",
        "the reference is trained for the run's steps",
        ("trained_weights.validation_schedule", '"max_steps": -1,', ""),
        OWN_REFERENCE,
    ),
    _policy(
        "flow-by-the-mean",
        "FLOW's temperature is a mean, not a median",
        ("flow.Flow.prepare", "np.median(means)", "np.mean(means)"),
        FLOW,
    ),
    _policy(
        "flow-weighs-the-hard",
        "the exponent's sign",
        ("flow.Flow.prepare", "np.exp(-means / tau)", "np.exp(means / tau)"),
        FLOW_BY_TOKEN,
    ),
    _policy(
        "talr-without-its-floor",
        "unlikely tokens weigh nothing",
        ("talr.TALR.native_weights", "found.clamp(min=self.w_min)", "found"),
        TALR,
    ),
    _policy(
        "talr-temperature-over-padding",
        "a row's mean loss is taken over the width of the batch",
        ("talr.median_of_sequences", "/ counts[counts > 0]", "/ mask.shape[1]"),
        TALR,
    ),
    _policy(
        "dft-of-the-unlikely",
        "the less likely a token, the more it weighs",
        ("dft.DFT.native_weights", "batch.log_probs.exp()", "1 - batch.log_probs.exp()"),
        DFT,
    ),
    _policy(
        "cft-of-any",
        "a token is critical where one of its replacements fails",
        ("cft.CFT.native_keep", "== 1", "> 0"),
        CFT_MASK,
    ),
    _policy(
        "cft-replaced-by-itself",
        "a token is among its own replacements",
        ("cft._others", "[likeliest != token]", ""),
        CFT,
    ),
    _policy(
        "cft-one-position-late",
        "replacements are those that the token itself predicts",
        ("cft._Reading._wrong", "top[t - 1]", "top[t]"),
        CFT,
    ),
    _policy(
        "cft-first-answer",
        "the first number of a response is its answer",
        ("cft.final_answer", "found[-1]", "found[0]"),
        CFT_ANSWER,
    ),
    _policy(
        "eaft-in-nats",
        "entropies are not divided by the largest that there is",
        ("eaft.EAFT.native_weights", " / math.log(self.k)", ""),
        EAFT,
    ),
    _policy(
        "eaft-of-the-sure",
        "tokens of which the model was sure of another one weigh most",
        (
            "eaft.EAFT.native_weights",
            "self.scores(batch) / math.log(self.k)",
            "1 - self.scores(batch) / math.log(self.k)",
        ),
        EAFT,
    ),
    _policy(
        "token-cleaning-of-the-unlearned",
        "tokens that the reference finds harder go first",
        (
            "token_cleaning.TokenCleaning.static_scores",
            'table.columns["base"] - table.columns["reference"]',
            'table.columns["reference"] - table.columns["base"]',
        ),
        CLEANING,
    ),
    _policy(
        "less-with-an-unsquared-moment",
        "Adam's second moment of the gradient itself",
        ("less.adam_update", "gradient.square()", "gradient"),
        ADAM,
    ),
    _policy(
        "less-by-length",
        "updates are not normalised: long gradients go first",
        ("less._Influence.scored", "(_normal(updates) @", "(updates @"),
        LESS,
    ),
    _policy(
        "less-one-row-too-many",
        "a budget that is met exactly takes one more row",
        (
            "less.fill_tokens",
            'np.searchsorted(filled, budget, side="left")',
            'np.searchsorted(filled, budget, side="right")',
        ),
        FILLING,
    ),
    _policy(
        "confpo-of-the-sure",
        "ConfPO learns on the likely tokens",
        ("confpo.below_mean_probability", "p < mean * (1 - _TIE)", "p > mean * (1 + _TIE)"),
        CONFPO,
    ),
    _policy(
        "confpo-mean-over-the-width",
        "the mean probability counts padding",
        ("confpo.below_mean_probability", "mask.sum(-1, keepdim=True)", "mask.shape[-1] + 0 * p"),
        CONFPO_DRAWN,
    ),
    _policy(
        "sepo-one-sign-for-both",
        "rejected tokens are ranked as chosen ones are",
        ("sepo.SePO.scores", "[chosen, -rejected]", "[chosen, rejected]"),
        SEPO,
    ),
    _policy(
        "sepo-oracle-for-reference",
        "the log-ratio upside down",
        (
            "sepo.SePO.scores",
            "batch.columns[_REFERENCE] - batch.columns[_ORACLE]",
            "batch.columns[_ORACLE] - batch.columns[_REFERENCE]",
        ),
        SEPO,
    ),
    _policy(
        "ti-dpo-prior-off-the-middle",
        "the bell stands half a token too far right",
        ("ti_dpo.importance_weights", "(count - 1) / 2", "count / 2"),
        IMPORTANCE,
    ),
    _policy(
        "ti-dpo-second-norm",
        "importance by the squared gradient",
        (
            "attribution.gradient_attribution",
            "gradient.to(wide(gradient.dtype)).abs().sum(-1)",
            "gradient.to(wide(gradient.dtype)).square().sum(-1)",
        ),
        ATTRIBUTION,
    ),
    _policy(
        "ti-dpo-divergence-the-other-way",
        "KL(pi || pi_ref) for KL(pi_ref || pi)",
        (
            "ti_dpo_terms.sequence_kl",
            "p = theirs.exp()",
            "p, ours, theirs = ours.exp(), theirs, ours",
        ),
        DIVERGENCE,
    ),
    _policy(
        "ti-dpo-triplet-upside-down",
        "the anchor is drawn to the rejected response",
        ("ti_dpo_terms.triplet_losses", "near - far", "far - near"),
        TRIPLETS,
    ),
    _policy(
        "simpo-mean-over-the-width",
        "SimPO's reward is divided by the width of the batch",
        (
            "preference.weighted_simpo_losses",
            "torch.where(total == 0, 1.0, total)",
            "weights.shape[-1]",
        ),
        PAIR_LOSSES,
    ),
    _policy(
        "dpo-with-unweighted-ratios",
        "token weights do not enter DPO's margin",
        (
            "preference._products",
            "(fixed * values.to(dtype)).masked_fill",
            "(values.to(dtype)).masked_fill",
        ),
        PAIR_LOSSES,
    ),
    _policy(
        "wise-ft-from-the-wrong-end",
        "alpha weighs the model before training",
        (
            "merge.interpolate",
            "((1 - alpha) * left + alpha * right)",
            "(alpha * left + (1 - alpha) * right)",
        ),
        MERGE,
    ),
)
