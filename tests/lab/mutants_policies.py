"""Errors in the other methods' rules: each against the numbers of a test that was worked by hand.

Their tests import TRL and PEFT, so a claim names its test and imports it when it is tried.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings

from tests.property.mutation import Claim, claim, row

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
GCE = by("test_methods::test_gce_is_the_gradient_of_its_loss")
TRUNCATION = by("test_methods::test_loss_truncation_is_a_sort")
TRUNCATED = by("test_methods::test_loss_truncation_is_of_the_step", FOLDER, 2, "token", "sft")
PRIFT = by("test_methods::test_prift_by_hand", FOLDER)
EAFT = by("test_methods::test_eaft_by_hand")
MIX = "test_policies_validation_mix::"
ONCE_AN_EPOCH = by(MIX + "test_each_validation_row_comes_once_an_epoch")
SHARED_ROWS = by(MIX + "test_micro_batches_and_processes_share_the_rows_of_a_step")
IN_PLACE = by(MIX + "test_a_run_is_trls_on_rows_put_in_place", FOLDER, "one row")
COUNTED = by(MIX + "test_a_step_is_the_plain_loops", FOLDER, "one row for two micro-batches")
AS_MANY = by(MIX + "test_the_control_has_as_many_response_tokens")
DOCUMENTS = by(MIX + "test_the_control_draws_documents_of_packed_rows")
OWN_ROWS = by(MIX + "test_its_rows_are_part_of_what_it_is")
ROW_MEANS = by("test_policies_walk_rows::test_row_values_are_the_means_along_a_walk")
BEST_ROWS = by("test_policies_walk_rows::test_the_best_rows_are_kept")
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
EVALUATED = by(
    "test_preference_policies::test_evaluation_is_by_the_loss_of_the_policy", "simpo", FOLDER
)
SEPO = by("test_policies_preference::test_sepo_by_hand")
IMPORTANCE = by("test_policies_preference::test_importance_weights_by_hand")
ATTRIBUTION = by("test_policies_preference::test_attribution_is_finite_differences")
DIVERGENCE = by("test_policies_preference::test_sequence_divergence_is_the_loop")
TRIPLETS = by("test_policies_preference::test_triplet_losses_are_the_loop")
PAIR_LOSSES = by("test_policies_preference::test_hand_computed_losses")
MERGE = by("test_merge::test_by_hand")


METHODS = (
    row("stm-keeps-the-perplexed", STM_BY_HAND,
        "STM keeps the tokens above the threshold",
        ("methods.stm.STM.native_keep", "<= self.threshold", "> self.threshold")),
    row("stm-budget-of-the-perplexed", STM_ORDER,
        "STM fills a budget with the hardest tokens",
        ("methods.stm.STM.static_scores", '-table.columns["loss"]', 'table.columns["loss"]')),
    row("xtf-keeps-one-class-only", XTF_CLASS,
        "XTF keeps the Otsu class that it should drop",
        ("methods.xtf.XTF._cluster", "== self.cluster", "!= self.cluster")),
    row("xtf-drops-the-unknown", XTF_KNOWN,
        "XTF drops what the base model does not know",
        ("methods.xtf.XTF.dropped", "< self.known_below", "> self.known_below")),
    row("xtf-relevance-upside-down", XTF_TASK,
        "tokens far from the task count as relevant",
        ("methods.xtf.task_relevance", "1 - normal[tokens]", "normal[tokens]")),
    row("xtf-centre-of-the-vocabulary", XTF_TASK,
        "V is the mean over token kinds, not over tokens",
        ("methods.xtf.task_relevance",
         "weights[i : i + _ROWS] @", "(weights[i : i + _ROWS] > 0).double() @")),
    row("otsu-without-the-mass", OTSU,
        "classes are parted by their moments, whatever their mass",
        ("methods.xtf.multi_otsu", "np.divide((moment[None, :] - moment[:, None]) ** 2, inside,",
         "np.divide((moment[None, :] - moment[:, None]) ** 2, inside ** 2,")),
    row("attention-received-from-padding", RECEIVED,
        "queries at padding count",
        ("methods.xtf._received",
         "real = real.to(received)", "real = torch.ones_like(received)")),
    row("sstoken-with-rho-1s-sign", SSTOKEN,
        "ssToken keeps what has become worse",
        ("methods.sstoken.SsToken.scores", "+ batch.log_probs", "- batch.log_probs")),
    row("sstoken-sums-its-heads", HEADS,
        "attention to the prompt is summed over the heads",
        ("methods.sstoken.prompt_attention", ".sum(-1).mean((1, 2))", ".sum(-1).sum((1, 2))")),
    row("sstoken-prompt-is-everything", SSTOKEN,
        "attention to the response counts as attention to the prompt",
        ("methods.sstoken.prompt_tokens", "real & ~batch.mask", "real")),
    row("rho-1-with-sstokens-sign", RHO_1,
        "Rho-1 keeps what the reference has not learned",
        ("methods.rho_1.Rho1.scores", "-batch.log_probs - batch", "-batch.log_probs + batch")),
    row("a-reference-of-other-options", TRAINED_ONCE,
        "a reference is read that was trained with other options",
        ("train.policies.trained_weights.trained_copy",
         "{**stage.run, **options}", "dict(stage.run)")),
    row("a-reference-of-the-runs-options", TRAINED_ONCE,
        "the options of the run go before those of the reference's own training",
        ("train.policies.trained_weights.trained_copy",
         "{**stage.run, **options}", "{**options, **stage.run}")),
    row("validation-first-not-at-all", FIRST,
        "the model that was trained on the validation rows is not the one that is trained on",
        ("train.policies.builtin.ValidationFirst.prepare",
         "copy_weights(trainable(trained), trainable(stage.model))",
         "copy_weights(trainable(stage.model), trainable(trained))")),
    row("training-rows-first", FIRST,
        "it is the training rows that come first",
        ("train.policies.builtin.ValidationFirst.prepare",
         "stage, stage.validation", "stage, stage.rows")),
    row("validation-first-at-the-runs-rate", FIRST,
        "the learning rate of the first training is not read",
        ("train.policies.trained_weights.validation_schedule",
         "if learning_rate is None", "if learning_rate is not None")),
    row("validation-first-by-the-runs-schedule",
        by(SCHEDULE, FOLDER, {"lr_scheduler_type": "cosine", "max_steps": 2}),
        "the rate of the first training falls as the run's does",
        ("train.policies.trained_weights.validation_schedule",
         '"lr_scheduler_type": "constant",', "")),
    row("validation-first-accumulates", by(SCHEDULE, FOLDER, {"gradient_accumulation_steps": 16}),
        "the first training takes a step for as many micro-batches as the run does",
        ("train.policies.trained_weights.validation_schedule",
         '"gradient_accumulation_steps": 1,', "")),
    row("mixed-rows-of-the-first-step", ONCE_AN_EPOCH,
        "every step has the validation rows of the first",
        ("train.policies.validation_mix.ValidationMix.step_rows",
         "self._pool.rows(step)", "self._pool.rows(0)")),
    row("mixed-rows-one-beside-three", by(MIX + "test_one_row_is_added_beside_every_two"),
        "one validation row stands beside every three training rows",
        ("train.policies.validation_mix.ValidationMix.prepare",
         "(stage.rows_of_step or 0) // 2", "(stage.rows_of_step or 0) // 3")),
    row("mixed-rows-in-one-order", by(MIX + "test_another_seed_is_another_order"),
        "runs of other seeds draw the same validation rows",
        ("train.policies.validation_mix.ValidationMix.prepare",
         "seed=self.settings.seed", "seed=0")),
    row("mixed-rows-in-every-micro-batch", SHARED_ROWS,
        "each micro-batch has all rows that are added to the step",
        ("train.step_rows.StepRows.joined",
         "rows[number * ranks.world + ranks.rank :: count * ranks.world]", "list(rows)")),
    row("mixed-rows-of-the-first-process", SHARED_ROWS,
        "every process has the rows of the first",
        ("train.step_rows.StepRows.joined", "ranks.world + ranks.rank ::", "ranks.world ::")),
    row("mixed-rows-of-the-step-before", COUNTED,
        "a step has the validation rows of the one before it",
        ("train.step_rows.StepRows.joined",
         "int(self._trainer.state.global_step)", "int(self._trainer.state.global_step) // 2")),
    row("mixed-rows-first", IN_PLACE,
        "validation rows stand before the training rows",
        ("train.step_rows.StepRows._collated",
         "[*own, *(self._in_form(row, own[0]) for row in rows)]",
         "[*(self._in_form(row, own[0]) for row in rows), *own]")),
    row("mixed-rows-with-their-prompts", COUNTED,
        "prompts of the validation rows are trained on",
        ("train.step_rows.StepRows._in_form",
         "return whole", 'return {**whole, "labels": whole["input_ids"]}')),
    row("control-of-whole-rows", AS_MANY,
        "the last row of the control is not cut",
        ("train.policies.validation_mix._cut",
         "stop = end if len(response) <= tokens", "stop = end if True")),
    row("control-with-the-documents-before", DOCUMENTS,
        "a document of a packed row comes with those before it",
        ("train.policies.validation_mix._cut", "value[start:stop]", "value[:stop]")),
    row("mix-resumed-on-other-rows", OWN_ROWS,
        "a run goes on with other validation rows",
        ("train.policies.validation_mix.ValidationMix.prepare",
         "rows, rows_fingerprint(rows)", 'rows, ""')),
    row("walk-rows-by-their-sums", ROW_MEANS,
        "long rows go first",
        ("train.policies.walk_rows._means",
         "yield total / count if count", "yield total if count")),
    row("walk-rows-at-the-runs-rate", ROW_MEANS,
        "the walk's own learning rate is not read",
        ("train.policies.walk_rows.WalkRows._rate", "if rate is None else rate", "")),
    row("walk-rows-in-another-order", ROW_MEANS,
        "values stand with the rows in the order of their lengths",
        ("train.policies.walk_rows._values", "means[row] = mean", "means[first] = mean")),
    row("walk-rows-upside-down", BEST_ROWS,
        "the rows that a walk unlearns are trained on",
        ("train.policies.walk_rows.WalkRows.choose_rows",
         "np.argsort(-values", "np.argsort(values")),
    row("walk-rows-without-a-response", BEST_ROWS,
        "rows that teach nothing are chosen",
        ("train.policies.walk_rows.WalkRows.choose_rows",
         "order = order[np.isfinite(values[order])]", "order = order[::1]")),
    row("gce-of-the-unlikely", GCE,
        "the exponent's sign",
        ("methods.gce.GCE.native_weights", "self.q * batch", "-self.q * batch")),
    row("gce-divided-by-its-exponent", GCE,
        "weights are those of another scale",
        ("methods.gce.GCE.native_weights", ".exp()", ".exp() / self.q")),
    row("loss-truncation-of-the-likely", TRUNCATION,
        "the tokens of lowest loss are left out",
        ("methods.loss_truncation.LossTruncation.scores",
         "return batch.log_probs", "return -batch.log_probs")),
    row("loss-truncation-keeps-what-it-drops", TRUNCATION,
        "the share that is left out is the share that is kept",
        ("methods.loss_truncation.LossTruncation.__init__", "= 1 - drop", "= drop")),
    row("loss-truncation-of-the-micro-batch", TRUNCATED,
        "tokens are left out by the losses of their micro-batch, so that accumulation changes them",
        ("train.weigher.Weigher.plan", 'several and self.policy.scope == "step"', "False")),
    row("prift-of-the-current-model", PRIFT,
        "weights follow the model that is trained",
        ("methods.prift.PriFT.scores", "-batch.columns[_COLUMN]", "batch.log_probs")),
    row("rho-1-responses-by-their-tokens", by("test_methods::test_rho_1_by_response"),
        "whole responses are asked for, and single tokens are ranked",
        ("methods.rho_1.Rho1.scores", 'self.unit == "response"', 'self.unit == "row"')),
    row("rho-1-reference-of-the-training-rows", OWN_REFERENCE,
        "Rho-1's reference learns the rows that are to be cleaned",
        ("methods.rho_1.Rho1._reference", "stage.validation", "stage.rows")),
    row("rho-1-reference-at-the-runs-rate", OWN_REFERENCE,
        "the reference's own learning rate is not read",
        ("methods.rho_1.Rho1._reference", "self.reference_learning_rate)", "None)")),
    row("rho-1-reference-as-long-as-the-run", OWN_REFERENCE,
        "the reference is trained for the run's steps",
        ("train.policies.trained_weights.validation_schedule", '"max_steps": -1,', "")),
    row("flow-by-the-mean", FLOW,
        "FLOW's temperature is a mean, not a median",
        ("methods.flow.Flow.prepare", "np.median(means)", "np.mean(means)")),
    row("flow-weighs-the-hard", FLOW_BY_TOKEN,
        "the exponent's sign",
        ("methods.flow.Flow.prepare", "np.exp(-means / tau)", "np.exp(means / tau)")),
    row("talr-without-its-floor", TALR,
        "unlikely tokens weigh nothing",
        ("methods.talr.TALR.native_weights", "weights.clamp(min=self.w_min)", "weights")),
    row("talr-temperature-over-padding", TALR,
        "a row's mean loss is taken over the width of the batch",
        ("methods.talr.median_of_sequences", "/ counts[counts > 0]", "/ mask.shape[1]")),
    row("dft-of-the-unlikely", DFT,
        "the less likely a token, the more it weighs",
        ("methods.dft.DFT.native_weights", "batch.log_probs.exp()", "1 - batch.log_probs.exp()")),
    row("cft-of-any", CFT_MASK,
        "a token is critical where one of its replacements fails",
        ("methods.cft.CFT.native_keep", "== 1", "> 0")),
    row("cft-replaced-by-itself", CFT,
        "a token is among its own replacements",
        ("methods.cft.CFT._wrong", "[top[t - 1] != ids[t]]", "")),
    row("cft-one-position-late", CFT,
        "replacements are those that the token itself predicts",
        ("methods.cft.CFT._wrong", "in top[t - 1][top[t - 1]", "in top[t][top[t]")),
    row("cft-first-answer", CFT_ANSWER,
        "the first number of a response is its answer",
        ("methods.cft.final_answer", "matches[-1]", "matches[0]")),
    row("eaft-in-nats", EAFT,
        "entropies are not divided by the largest that there is",
        ("methods.eaft.EAFT.native_weights", " / math.log(self.k)", "")),
    row("eaft-of-the-sure", EAFT,
        "tokens of which the model was sure of another one weigh most",
        ("methods.eaft.EAFT.native_weights",
         "self.scores(batch) / math.log(self.k)", "1 - self.scores(batch) / math.log(self.k)")),
    row("token-cleaning-of-the-unlearned", CLEANING,
        "tokens that the reference finds harder go first",
        ("methods.token_cleaning.TokenCleaning.static_scores",
         'table.columns["base"] - table.columns["reference"]',
         'table.columns["reference"] - table.columns["base"]')),
    row("less-with-an-unsquared-moment", ADAM,
        "Adam's second moment of the gradient itself",
        ("methods.less.adam_update", "gradient.square()", "gradient")),
    row("less-by-length", LESS,
        "updates are not normalised: long gradients go first",
        ("methods.less._Gradients.scored", "(_normal(updates) @", "(updates @")),
    row("less-one-row-too-many", FILLING,
        "a budget that is met exactly takes one more row",
        ("select.masks.fill_tokens", 'np.searchsorted(filled, budget, side="left")',
         'np.searchsorted(filled, budget, side="right")')),
    row("confpo-of-the-sure", CONFPO,
        "ConfPO learns on the likely tokens",
        ("methods.confpo.below_mean_probability",
         "p < mean * (1 - _TIE)", "p > mean * (1 + _TIE)")),
    row("confpo-mean-over-the-width", CONFPO_DRAWN,
        "the mean probability counts padding",
        ("methods.confpo.below_mean_probability",
         "mask.sum(-1, keepdim=True)", "mask.shape[-1] + 0 * p")),
    row("sepo-one-sign-for-both", SEPO,
        "rejected tokens are ranked as chosen ones are",
        ("methods.sepo.SePO.scores", "[chosen, -rejected]", "[chosen, rejected]")),
    row("sepo-oracle-for-reference", SEPO,
        "the log-ratio upside down",
        ("methods.sepo.SePO.scores", "batch.columns[_REFERENCE] - batch.columns[_ORACLE]",
         "batch.columns[_ORACLE] - batch.columns[_REFERENCE]")),
    row("ti-dpo-prior-off-the-middle", IMPORTANCE,
        "the bell stands half a token too far right",
        ("methods.ti_dpo.importance_weights", "(count - 1) / 2", "count / 2")),
    row("ti-dpo-second-norm", ATTRIBUTION,
        "importance by the squared gradient",
        ("methods.ti_dpo.gradient_attribution",
         "gradient.to(wide(gradient.dtype)).abs().sum(-1)",
         "gradient.to(wide(gradient.dtype)).square().sum(-1)")),
    row("ti-dpo-divergence-the-other-way", DIVERGENCE,
        "KL(pi || pi_ref) for KL(pi_ref || pi)",
        ("methods.ti_dpo.sequence_kl",
         "p = theirs.exp()", "p, ours, theirs = ours.exp(), theirs, ours")),
    row("ti-dpo-triplet-upside-down", TRIPLETS,
        "the anchor is drawn to the rejected response",
        ("methods.ti_dpo.triplet_losses", "near - far", "far - near")),
    row("evaluation-by-another-loss", EVALUATED,
        "a run by a loss of the policy's own is evaluated by plain DPO",
        ("train.weigher.Weigher.evaluation_loss", "return own_loss", "return loss")),
    row("rewards-of-long-responses", EVALUATED,
        "the rewards that are logged of SimPO grow with the length of a response",
        ("methods.preference.PreferencePolicy.rewards",
         " / batch.mask.sum(-1).clamp(min=1)", "")),
    row("simpo-mean-over-the-width", PAIR_LOSSES,
        "SimPO's reward is divided by the width of the batch",
        ("methods.preference.weighted_simpo_losses",
         "torch.where(total == 0, 1.0, total)", "weights.shape[-1]")),
    row("dpo-with-unweighted-ratios", PAIR_LOSSES,
        "token weights do not enter DPO's margin",
        ("methods.preference._products",
         "(fixed * values.to(dtype)).masked_fill", "(values.to(dtype)).masked_fill")),
    row("wise-ft-from-the-wrong-end", MERGE,
        "alpha weighs the model before training",
        ("methods.merge.interpolate",
         "((1 - alpha) * left + alpha * right)", "(alpha * left + (1 - alpha) * right)")),
)  # fmt: skip
