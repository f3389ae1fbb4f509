"""Errors in the trainers' steps, in what they promise beside them, and in what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tests.property import (
    test_own_weights,
    test_paper_gaps,
    test_policies,
    test_pool,
    test_rules,
    test_trainer_oracle,
)
from tests.property.mutation import Claim, claim, row
from tests.property.reference_step import RunConfig
from tests.property.test_trainer_oracle import PINNED

# --- steps: every claim is one pinned run beside the reference step ------------------------------


NEEDS = ("trl", "peft")
WEIGHED = claim(
    test_trainer_oracle.test_every_step_is_weighed, RunConfig(policy="random"), examples=1,
    needs=NEEDS, tested=True,
)  # fmt: skip
MASKS = claim(
    test_trainer_oracle.test_random_masks, RunConfig(policy="random"), examples=1, needs=NEEDS,
    tested=True,
)  # fmt: skip
DRAWS = claim(test_pool.test_draws_are_of_seed_step_micro_batch_and_process, tested=True)
APART = claim(test_pool.test_retention_rows_are_drawn_apart_from_validation_rows, tested=True)
UNCOUNTED, OWN_COUNT = (
    claim(
        test_pool.test_a_tokens_weight_in_a_step_is_its_part_of_the_mean_gradient,
        [[2, 1], [3, 5]], counted, examples=1,
    )
    for counted in test_pool.COUNTED[:2]
)  # fmt: skip
OWN_RULE = claim(
    test_policies.test_kept_tokens_are_the_sum_of_the_weights_or_unknown, "weights", "native",
    examples=1, tested=True,
)  # fmt: skip
OPTIONS = claim(test_policies.test_every_option_of_a_policy_is_compared, examples=1, tested=True)
OWN_SHARE = claim(
    test_policies.test_a_policy_reads_the_ratio_where_its_weights_follow_it,
    test_policies.OwnShare, "native", examples=1, tested=True,
)  # fmt: skip
SUM = claim(
    test_pool.test_a_sum_is_over_the_tokens_of_all_processes,
    [[2, 1], [3, 5]], test_pool.COUNTED[1], examples=1,
)  # fmt: skip
SMALL_POOL = {"size": 9, "batch_size": 2, "mode": "pool", "held_out_share": 0.0, "seed": 1}
WALK_ORDER = claim(
    test_pool.test_a_walk_takes_every_drawn_row_once, SMALL_POOL, 1, examples=1, tested=True
)
WALK_ROWS = claim(
    test_pool.test_a_walk_of_a_run_takes_no_row_again_before_all_are_taken,
    SMALL_POOL, 1, 2, 2, 2, True, examples=1, tested=True,
)  # fmt: skip


@cache
def run_of(name: str) -> Claim:
    """The claim about one pinned run."""
    check = test_trainer_oracle.test_the_trainer_is_the_reference
    return claim(check, PINNED[name][0], examples=1, needs=NEEDS, tested=True)


PAPER, PAIRS = "the paper's, SFT", "the paper's, DPO"
POOLED, OLD = "pool, micro-batches of validation", "direction for two steps"
FULL, FULL_SUM = "clipping, full preconditioner", "full preconditioner of a sum"
KEPT, GLOBAL = "kept normalisation", "kept normalisation over a global threshold"
MASKED = "masked logit"


TRAINERS = (
    row("omega-forgotten-in-the-trainers-values", run_of(PAIRS),
        "DPO's values without omega, which differs from pair to pair",
        ("train.dpo.PairLoss.value_weights",
         "-by_token(coefficients) *", "-by_token(coefficients).sign() *")),
    row("micro-batch-taken-for-the-step", run_of(FULL),
        "the full preconditioner at the gradient of one micro-batch of several",
        ("train.trainer_loss.TrainerLoss.step_scale",
         "return steps if num_items is not None else 1.0", "return 1.0")),
    row("clipping-forgotten", run_of(FULL),
        "the full preconditioner at the gradient before it is cut",
        ("train.valuation.Valuation._step_weights", " * self.clip_factor", "")),
    row("ledger-without-the-tokens-weight", run_of(PAPER),
        "the ledger's scale is the learning rate alone",
        ("train.records.RunRecords._write", "rate * batch.step_unit *", "rate *")),
    row("ledger-of-each-process-by-itself", UNCOUNTED,
        "the ledger takes a token's weight on its process for that in the step of all processes",
        ("train.trainer_loss.TrainerLoss.processes", "else self.ranks.world", "else 1")),
    row("a-count-of-each-process-taken-for-that-of-all", OWN_COUNT,
        "the ledger takes every count of tokens for one of all processes",
        ("train.trainer_loss.TrainerLoss.processes",
         " and self.args.average_tokens_across_devices", "")),
    row("validation-gradient-in-bf16", run_of(PAPER),
        "G is summed up from gradients rounded to bfloat16",
        ("direction.objective.objective_sums",
         "gradient.to(\n", "gradient.bfloat16().to(\n")),
    row("a-loss-of-ones-own-trained-on", WEIGHED,
        "a step is taken with a loss that no weigher made",
        ("train.weigher.StepGuard.on_pre_optimizer_step",
         "if self._reached >= due:", "if True:")),
    row("pairs-of-the-step-miscounted", run_of(PAIRS),
        "the ledger's scale of a pair forgets the other micro-batches of the step",
        ("train.dpo.PairLoss.unit", " * steps", "")),
    row("sign-of-the-rejected-forgotten", run_of(PAIRS),
        "rejected tokens are valued as if they were chosen",
        ("train.dpo.PairLoss.value_weights",
         "-by_token(coefficients) *", "by_token(coefficients).abs() *")),
    row("beta-twice", run_of(PAIRS),
        "values carry beta a second time",
        ("train.dpo.PairLoss.value_weights",
         "-by_token(coefficients) *", "-by_token(coefficients) * self._trainer.beta *")),
    row("beta-of-the-objective", run_of(PAIRS),
        "the validation pairs are compared at another beta than the trained ones",
        ("train.dpo.AlphaDPOTrainer.row_batch", ", beta=self.beta", "")),
    row("reference-of-the-other-branch", run_of(PAIRS),
        "validation pairs with the two reference log-probabilities exchanged",
        ("train.dpo.AlphaDPOTrainer.row_batch",
         "reference[0], reference[1]", "reference[1], reference[0]")),
    row("reference-in-float32", run_of(PAIRS),
        "the reference's sums are rounded to float32",
        ("train.dpo.AlphaDPOTrainer.row_batch", "dtype=torch.float64", "dtype=torch.float32")),
    row("one-threshold-for-both-branches", run_of(PAIRS),
        "chosen and rejected tokens are ranked together although they should not be",
        ("train.dpo.PairLoss.rank_groups", "if self.args.shared_threshold:", "if True:")),
    row("shared-threshold-ignored", run_of("full preconditioner, DPO, one threshold"),
        "branches keep thresholds of their own where one was asked for",
        ("train.dpo.PairLoss.rank_groups", "if self.args.shared_threshold:", "if False:")),
    row("pools-exchanged", run_of("retention by pairs"),
        "weights of the chosen go to the rejected, and the other way",
        ("train.policy.TokenPolicy.best", "kept[rows] = self.select(",
         "kept[batch.rank_groups[-1 if rows.start == 0 else 0]] = self.select(")),
    row("masked-logit-ignored", run_of(MASKED),
        "omega from the unmasked logit where the masked one was asked for",
        ("train.dpo.PairLoss.final_coefficients",
         "if not self.args.masked_logit:", "if True:")),
    row("masked-logit-of-divided-weights", run_of(MASKED),
        "what divides the loss enters the masked logit",
        ("train.weigher.Weigher.loss",
         "(proxy, coefficients, trained, inputs)",
         "(proxy, coefficients, trained * factor, inputs)")),
    row("kept-tokens-counted-by-micro-batch", run_of(KEPT),
        "each micro-batch is divided by its own kept tokens",
        ("train.trainer_loss.divisor_factor", "if kept_share is not None:", "if False:")),
    row("kept-tokens-of-all", run_of(KEPT),
        "kept normalisation divides by all response tokens",
        ("train.trainer_loss.divisor_factor", 'if kind != "kept":', "if True:")),
    row("a-rule-of-ones-own-counted-as-a-share", OWN_RULE,
        "a policy with weights of its own is divided by ceil(rho n) tokens",
        ("train.policy.rule_of", '(*first, *budget, "best")', "(*first, *budget)")),
    row("a-rule-of-ones-own-taken-for-a-budget", OWN_SHARE,
        "keep_ratio counts as read where the policy keeps a share of its own",
        ("train.policy.TokenPolicy.reads_ratio", "self.native_ratio is None and", "True or")),
    row("budget-over-both-branches", run_of("kept normalisation, DPO"),
        "the kept tokens are counted with one rounding for both branches",
        ("train.policy.TokenPolicy.kept_tokens", "in batch.rank_groups", "in [slice(None)]")),
    row("global-budget-by-micro-batch", run_of(GLOBAL),
        "the kept tokens of a global threshold are counted micro-batch by micro-batch",
        ("train.weigher.Weigher._count_kept", "if plan.weights is None", "if True")),
    row("sum-still-divided", run_of(FULL_SUM),
        "kept_normalization='sum' leaves the trainer's divisor in the loss",
        ("train.trainer_loss.undivided", 'if kind == "sum" else 1.0', "if False else 1.0")),
    row("sum-of-each-process-averaged", SUM,
        "kept_normalization='sum' undoes the process's divisor and leaves the processes' mean",
        ("train.trainer_loss.undivided", "batch.step_unit", "batch.unit")),
    row("ledger-of-a-sum-divided", run_of(FULL_SUM),
        "the ledger divides by the response tokens what the loss does not",
        ("train.records.RunRecords._write", " * float(factor)", "")),
    row("ledger-of-kept-tokens-divided-by-all", run_of(KEPT),
        "the ledger divides by the response tokens what the kept ones divide in the loss",
        ("train.weigher.Weigher.loss", "values, weights, factor,",
         "values, weights, 1.0 if self._divisor == 'kept' else factor,")),
    row("step-of-a-sum-divided", run_of(FULL_SUM),
        "the full preconditioner at the mean gradient where the sum is descended",
        ("train.valuation.Valuation._step_weights",
         " * undivided(batch, self._options.kept_normalization)", "")),
    row("clip-factor-inverted", run_of(FULL),
        "a long gradient is taken to be lengthened",
        ("train.valuation.Valuation.clip_factor", "min(1.0, self", "max(1.0, self")),
    row("ledger-at-the-first-learning-rate", run_of(PAPER),
        "the ledger uses the learning rate that the run began with",
        ("train.records.RunRecords.micro_batch",
         'self._trainer.optimizer.param_groups[0]["lr"]', "self._trainer.args.learning_rate")),
    row("draws-that-forget-the-micro-batch", MASKS,
        "every micro-batch of a step draws the same random numbers",
        ("train.trainer_loss.TrainerLoss.draw_seed", "        batch.plan.index,\n", "")),
    row("draws-that-forget-the-step", MASKS,
        "every step draws the same random numbers",
        ("train.trainer_loss.TrainerLoss.draw_seed", "        self.step,\n", "")),
    row("draws-that-forget-the-seed", MASKS,
        "runs of different seeds draw the same random numbers",
        ("train.trainer_loss.TrainerLoss.draw_seed", "        self.args.value_seed,\n", "")),
    row("draws-that-forget-the-process", DRAWS,
        "processes draw the same random numbers for different rows",
        ("train.trainer_loss.TrainerLoss.draw_seed",
         "        self.accelerator.process_index,\n", "")),
    row("retention-drawn-as-validation", APART,
        "retention rows are drawn in the order of the validation rows",
        ("train.valuation.Valuation.__init__",
         "seed=options.value_seed + 1,", "seed=options.value_seed,")),
    row("global-threshold-by-micro-batch", run_of("global threshold, DPO"),
        "a global threshold is taken micro-batch by micro-batch",
        ("train.weigher.Weigher.plan", 'trainer_loss.args.keep_scope == "global"', "False")),
    row("first-micro-batch-decides", run_of(GLOBAL),
        "every micro-batch gets the weights that were decided for the first one's tokens",
        ("train.distributed.global_selection", "start = places[step, ranks.rank]", "start = 0")),
    row("responses-ranked-by-token", run_of("whole responses, the worst"),
        "whole responses were asked for, and tokens are ranked",
        ("train.policies.builtin.TopRatioPolicy.scores", 'self.unit == "response"', "False")),
    row("dft-values-of-plain-losses", run_of("DFT"),
        "DFT's tokens are valued as if their losses were not weighted",
        ("train.trainer_loss.TrainerLoss.value_weights",
         'if getattr(self.args, "loss_type", "nll") == "nll":', "if True:")),
    row("metrics-counted-twice", run_of("packing, own forward"),
        "a scoring pass of its own moves the trainer's running metrics",
        ("train.trainer_loss.TrainerLoss.beside_training",
         "setattr(trainer, name, value)", "pass")),
    row("shared-error-of-other-positions", run_of(PAPER),
        "values and update take the head's errors of the first positions for those of the response",
        ("train.log_prob_proxy.shared_log_probs",
         "hidden[rows].to(node.compute_dtype)", "hidden[: len(rows)].to(node.compute_dtype)")),
    row("shared-log-probabilities-at-the-label-position", run_of(PAIRS),
        "what the head says of a token stands where that token is read",
        ("train.log_prob_proxy.shared_log_probs",
         "index_put((places,), -losses)",
         "index_put(((places + 1) % log_probs.numel(),), -losses)")),
    row("weights-shifted-by-one", run_of(PAPER),
        "a token's weight acts on the token before it",
        ("train.log_prob_proxy.LogProbProxy.surrogate", "weights[:, 1:]", "weights[:, :-1]")),
    row("coefficients-shifted-by-one", run_of(PAIRS),
        "log-probabilities are laid out as if the last token had none",
        ("train.log_prob_proxy.by_token", "(1, 0)", "(0, 1)")),
    row("validation-labels-shifted", run_of(PAPER),
        "validation labels are off by one token",
        ("train.sft.padded_batch", 'row["labels"]', '[*row["labels"][1:], -100]')),
    row("micro-batch-divided-by-itself", run_of("transformers' own trainer"),
        "transformers' own trainer divides each micro-batch by its own tokens",
        ("train.trainer.LogitsLoss.of", "if num_items is None else torch.as_tensor(num_items)",
         "if True else torch.as_tensor(num_items)")),
    row("direction-kept-a-step-too-long", run_of(PAPER),
        "G and V are used for one step more than was asked for",
        ("train.valuation.Valuation._due", "age >= lasts", "age > lasts")),
    row("direction-never-pinned", run_of(OLD),
        "G and V are built anew at every step although they should last for two",
        ("train.valuation.Valuation._due", "(lasts is not None and age >= lasts)", "True")),
    row("first-rows-for-ever", run_of(POOLED),
        "a pool gives the validation rows of the first step at every step",
        ("train.valuation.Valuation._enter", "self._draw(self.pool, rows.validation, step)",
         "self._draw(self.pool, rows.validation, 0)")),
    row("retention-rows-never-drawn-anew", run_of("retention by rows"),
        "retention rows are those of the first step at every step",
        ("train.valuation.Valuation._enter", "rows.retention, step)", "rows.retention, 0)")),
    row("validation-rows-dropped", run_of(POOLED),
        "of the validation rows only the first micro-batch is used",
        ("train.valuation.Valuation._batches", "for p in parts", "for p in parts[:1]")),
    row("validation-rows-of-the-step-before", run_of(POOLED),
        "the rows of one step's validation gradient stay for those that follow",
        ("train.valuation.Valuation._draw", "before[0] == chosen", "True")),
    row("gap-with-the-other-sign", run_of(PAPER),
        "the gap is the pool's loss minus the held-out one",
        ("train.valuation.Valuation.objective_gap", 'objectives["held_out"] - objectives["pool"]',
         'objectives["pool"] - objectives["held_out"]')),
    row("gap-at-the-first-rows", run_of(POOLED),
        "the gap is always looked at on the rows of the first step",
        ("train.valuation.Valuation.objective_gap", "self.pool.rows(step)", "self.pool.rows(0)")),
    row("gap-without-the-reference", run_of(PAIRS),
        "the preference loss that is logged leaves the reference model out",
        ("direction.objective.objective_value",
         "item.beta * margin", "item.beta * (losses[1].sum(-1) - losses[0].sum(-1))")),
    row("held-out-rows-drawn", run_of(PAPER),
        "rows that are set aside are drawn all the same",
        ("train.pool.ValidationPool.__post_init__", "drawn = order[held_count:]", "drawn = order")),
    row("held-out-share-of-the-drawn", run_of(PAPER),
        "one row too many is set aside",
        ("train.pool.held_out_count", "max(1, round(share * rows))",
         "max(1, round(share * rows)) + 1")),
    row("pool-overlaps", run_of(POOLED),
        "a step takes rows that the step before has taken",
        ("train.pool.ValidationPool.rows",
         "first = step * self.batch_size", "first = step * (self.batch_size - 1)")),
    row("walk-of-one-draw", WALK_ROWS,
        "a walk of a run takes all its steps on one draw of the trusted rows",
        ("train.valuation.Valuation._chosen", "if size is None:", "if True:")),
    row("walk-on-rows-of-one-process", WALK_ROWS,
        "of several processes each takes its steps on few of the trusted rows",
        ("train.valuation.Valuation._chosen", " * self._ranks.world]", "]")),
    row("walk-order-turned", WALK_ORDER,
        "a walk does not begin with the rows of its step",
        ("train.pool.ValidationPool.rows_from", "order[offset:] + order[:offset]", "order")),
    row("ledger-unscaled", run_of(PAPER),
        "visits add up values without the scale",
        ("train.ledger.ValueLedger.add", "+= scale * block", "+= block")),
    row("ledger-keeps-the-last-visit", run_of(PAPER),
        "a visit overwrites the ones before",
        ("train.ledger.ValueLedger.add", "sums[:, :-1] +=", "sums[:, :-1] =")),
    row("ledger-counts-dropped-tokens", run_of(PAPER),
        "every visited token counts as kept",
        ("train.ledger.ValueLedger.add",
         "sums[:, -1] += block[document.places, -1]", "sums[:, -1] += 1")),
    row("ledger-sides-exchanged", run_of("LoRA"),
        "adaptation and stability change places in the ledger",
        ("train.ledger._components",
         "parts, zero = values.components(), ",
         "parts, zero = {{'a': 'stability', 's': 'adaptation'}[k[0]]: v for k, v in "
         "values.components().items()}, ")),
)  # fmt: skip


# --- promises beside the steps, and refusals of rows and of a Fisher -----------------------------


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


def adapters(case: str) -> Claim:
    """Whether two models of the same weights are told apart by their adapters' settings."""
    check = test_rules.test_settings_of_adapters_tell_models_apart
    return claim(check, case, examples=1, needs=("peft",), tested=True)


def resumed(case: str) -> Claim:
    """Whether a run goes on where one fact has changed."""
    check = test_rules.test_rounding_is_told_from_results
    return claim(check, case, examples=1, needs=NEEDS, tested=True)


def reference(case: str) -> Claim:
    """Whether a reference of preference pairs is refused."""
    check = test_rules.test_a_reference_reads_the_policys_tokens
    return claim(check, case, examples=1, needs=NEEDS, tested=True)


def unread(check: Callable[..., None], *example: Any) -> Claim:
    """Of what a run does not read, or does not learn of."""
    return claim(check, *example, examples=1, needs=NEEDS, tested=True)


OF_VALUES = unread(test_rules.test_options_of_values_are_refused_where_there_are_none, "estimator")
KEPT_ROWS = test_rules.test_retention_rows_are_refused_where_nothing_reads_them
LEARNS = unread(test_rules.test_a_row_of_weights_learns_by_those_on_its_labels, [4, -100, -100, 6])
NO_STEP = test_rules.test_a_step_learns_nothing_where_no_process_has_a_weight
WARMED = unread(test_rules.test_a_kept_training_is_of_the_optimizer_and_collator_handed_over)
TABLES = unread(test_rules.test_a_policys_tables_are_part_of_what_it_is)

RULES = (
    row("options-of-values-without-values", OF_VALUES,
        "options of values are taken, and not read, beside a policy that values nothing",
        ("train.policies._unread_of_values",
         "chosen.needs.values or type(chosen) in _CONTROLS", "True")),
    row("controls-without-the-options-of-their-run", OF_VALUES,
        "a control is refused with the options of the run that it is compared with",
        ("train.policies._unread_of_values", " or type(chosen) in _CONTROLS", "")),
    row("retention-rows-that-nothing-reads", unread(KEPT_ROWS, "none", "both"),
        "retention rows are handed over, and no term of the values reads them",
        ("train.refusals.refused_datasets", "and not args.reads_retention", "and False")),
    row("arms-with-retention-rows-of-others", unread(KEPT_ROWS, "data", "adaptation"),
        "an arm of a race is refused for the retention rows of another one",
        ("race.runner.datasets_of", ', "retention": args.reads_retention', "")),
    row("a-sum-only-where-values-are-exported",
        unread(test_rules.test_a_sum_is_weighed_whatever_is_exported),
        "whether values are written decides whether the loss of every token is a sum",
        ("train.options.AlphaOptions.weighs", ' or self.kept_normalization == "sum"', "")),
    row("weights-off-the-labels-count", LEARNS,
        "rows whose weights all lie on their prompts are trained on",
        ("train.row_weights._learns", " and label != IGNORE", "")),
    row("first-tokens-count", LEARNS,
        "a weight on the first token, which nothing predicts, is taken for one that is learned of",
        ("train.row_weights._learns", "zip(weights[1:], labels[1:]", "zip(weights, labels")),
    row("empty-steps-of-one-process", unread(NO_STEP, 2),
        "a step that one process learns nothing of is said to be empty",
        ("train.records.TrainMonitor._warn_of_empty",
         "[a + b for a, b in zip(before, counts, strict=True)]", "counts")),
    row("empty-steps-without-a-response", unread(NO_STEP, 1),
        "a step without a response token is said to have lost them",
        ("train.records.TrainMonitor._warn_of_empty",
         "if response and not kept", "if not kept")),
    row("warm-up-of-another-optimizer", WARMED,
        "a model that was trained first by another optimizer is taken from the cache",
        ("train.policy_stage.handed_over",
         "(optimizer := _optimizer_of(trainer, {})) is not None", "False")),
    row("warm-up-of-another-collator", WARMED,
        "a model that was trained first with another collator is taken from the cache",
        ("train.policy_stage.handed_over",
         '(collator, getattr(collator, "__dict__", {}))', "collator")),
    row("policies-of-other-tables", TABLES,
        "a run goes on with a policy whose tables are others",
        ("train.policy._plain", ", Tensor, np.ndarray)", ")")),
    row("private-options-not-compared", OPTIONS,
        "a run goes on with a policy that was made with another option, kept under a private name",
        ("train.policy.TokenPolicy.arguments", "**self._options, ", "")),
    row("validation-pairs-by-the-trained-losss-lengths", LENGTH,
        "the reference's side of validation pairs is discounted by ld_alpha, the policy's is not",
        ("train.dpo.AlphaDPOTrainer._plain_sums",
         "= self.ld_alpha, None", "= self.ld_alpha, self.ld_alpha")),
    row("first-reference-for-ever", MOVING,
        "validation pairs keep the first reference, though it follows the policy",
        ("train.dpo.AlphaDPOTrainer.prepare_pool", "if self.args.sync_ref_model:", "if False:"),
        ("train.dpo.AlphaDPOTrainer.row_batch", "if self._follows_reference:", "if False:")),
    row("validation-rows-without-the-users-collator", COLLATED,
        "validation rows are padded by the library where the user's collator labels training rows",
        ("train.sft.LabelledRows.row_batch", "if self.own_collator is None:", "if True:")),
    row("fisher-rows-without-the-users-collator", COLLATED,
        "a Fisher's prompts and sequences take the labels of rows, not those of the collator",
        ("train.sft.LabelledRows.labels_of", "if self.own_collator is None:", "if True:")),
    row("routers-loss-left-out", ROUTED,
        "the routers' loss of a mixture of experts is not part of the loss",
        ("train.trainer.LogitsLoss.of", "if proxy.aux_loss is not None:", "if False:")),
    row("routers-loss-unweighted", ROUTED,
        "the routers' loss is added without the model's coefficient",
        ("train.trainer.LogitsLoss.of", "self._router_share * proxy.aux_loss", "proxy.aux_loss")),
    row("routers-loss-without-its-gradient", ROUTED,
        "the routers' loss is reported and not trained",
        ("train.log_prob_proxy.LogProbProxy.surrogate",
         "loss if self.aux_loss is not None else", "")),
    row("one-token-too-many-for-the-embedding", _rowless("rows"),
        "the first id past the embedding is looked up",
        ("model.batch._outside", "(ids >= rows)", "(ids > rows)")),
    row("negative-ids-looked-up", _rowless("rows"),
        "a placeholder's negative id is looked up",
        ("model.batch._outside", "(ids < 0) | ", "")),
    row("last-token-refused", _rowless("rows"),
        "the embedding's last row is taken for none",
        ("model.batch._outside", "(ids >= rows)", "(ids >= rows - 1)")),
    row("adapted-embedding-not-counted", _rowless("rows", adapted=True),
        "the rows of an embedding under an adapter are not known",
        ("model.batch.embedding_rows",
         'getattr(embedding, "base_layer", embedding)', "embedding")),
    row("ids-of-batches-not-looked-at", _rowless("rows"),
        "ids of batches go to the embedding as they come",
        ("model.batch._read_numbers", '_outside(batch["input_ids"], rows)', "None")),
    row("ids-of-prompts-not-looked-at", _rowless("prompts"),
        "ids of a Fisher's prompts go to the embedding as they come",
        ("direction.fisher._budgets",
         'require_rows(one.ids, adapter.model, f"prompt {i}")', "pass")),
    row("fisher-of-counted-tokens", COUNTED,
        "a Fisher is made of gradients that are divided by counts of the batch",
        ("direction.scored.require_derivatives", "if name is not None:", "if False:")),
    row("counted-tokens-refused-out-of-scope", COUNTED,
        "a Fisher that leaves the embedding out is refused for it",
        ("direction.scored.require_derivatives", "if name is not None:", "if counting:")),
    row("rounding-taken-for-another-result", resumed("checkpointing"),
        "a run is refused for what changes rounding alone",
        ("train.manifest.split_changes", "(*_ROUNDING, *_LIBRARIES)", "_LIBRARIES")),
    row("any-option-taken-for-rounding", resumed("learning rate"),
        "a run goes on with another learning rate",
        ("train.manifest.split_changes", "(*_ROUNDING, *_LIBRARIES)", "list(changes)")),
    row("processes-that-may-differ", resumed("two processes, on purpose"),
        "a run goes on with another number of processes",
        ("train.manifest.split_changes", ' or name == "processes"', "")),
    row("adapters-in-no-digest", adapters("alpha"),
        "what was fitted under another scale of a LoRA is taken from the cache",
        ("support.resume.weights_digest", "metadata=adapter_settings(model) or None",
         "metadata=None")),
    row("adapters-in-every-digest", adapters("alpha"),
        "models without adapters have other digests than their weights",
        ("support.resume.weights_digest", "adapter_settings(model) or None",
         "adapter_settings(model)")),
    row("adapters-by-where-they-are-from", adapters("from elsewhere"),
        "a run is refused since its model was copied to another folder",
        ("support.resume.adapter_settings", "if name not in _NO_FUNCTION:", "if True:")),
    row("adapters-inside-a-model-not-seen", adapters("alpha"),
        "adapters of a model inside another module are no fact",
        ("support.resume.adapter_settings", "model.modules()", "[model]")),
    row("sets-as-they-come", adapters("a set in another order"),
        "a run is refused since a set has another order in its process",
        ("support.resume.plain_values", "sorted(value, key=str) if unordered else value",
         "value")),
    row("reference-without-the-policys-rows", reference("a row too few"),
        "a reference is asked about tokens that it has no row for",
        ("train.reference.check_tokens", "if rows < count:", "if False:")),
    row("reference-held-to-tokens-without-a-row", reference("as small as the policy"),
        "a reference is refused for tokens that the policy has no row for either",
        ("train.reference.check_tokens", "min(len(own), tokens or len(own))", "len(own)")),
    row("reference-held-to-the-policys-padding", reference("beside a padded policy"),
        "a reference is refused for rows of the policy that are no tokens",
        ("train.reference.check_tokens",
         "min(len(own), tokens or len(own))", "tokens or len(own)")),
    row("reference-of-other-tokens", reference("two tokens exchanged"),
        "a reference reads the policy's ids as other tokens",
        ("train.reference.check_tokens", "ids.get(text, number) != number", "False")),
    row("unnamed-tokens-taken-for-others", reference("the last tokens not named"),
        "a reference is refused for tokens that its tokenizer leaves out",
        ("train.reference.check_tokens", "ids.get(text, number)", "ids.get(text)")),
    row("standard-with-a-budget", claim(test_policies.test_standard_keeps_all, examples=1),
        "training on everything leaves tokens out",
        ("train.policies.builtin.Standard.budget_weights",
         "return batch.mask.to(batch.log_probs.dtype)",
         "return self.best(batch, self.settings.keep_ratio)")),
    row("prompt-loses-its-end",
        claim(test_paper_gaps.test_prompt_and_response_are_cut_apart, examples=1, needs=NEEDS,
            tested=True),
        "a long prompt keeps its beginning, and the question goes",
        ("train.python_rows.cut_pair", "[-max_prompt:]", "[:max_prompt]")),
)  # fmt: skip


# --- weights that rows bring ----------------------------------------------------------------------


TRAVEL = claim(
    test_own_weights.test_label_and_weight_travel_as_one,
    test_own_weights.TOKENS,
    st.integers(0, 12),
)
TURNS = claim(
    test_own_weights.test_a_turn_weighs_its_own_tokens,
    st.sampled_from(["none", *test_own_weights.TEMPLATES]),
    test_own_weights.CHATS,
    test_own_weights.WEIGHT,
    st.booleans(),
    examples=100,
)
NOT_STATIC = claim(
    test_own_weights.test_weights_that_the_forward_decides_are_not_static, needs=NEEDS, tested=True
)
SUMS = claim(
    test_own_weights.test_a_sum_that_is_not_positive_divides_nothing, [1.0, -1.0], examples=1,
    needs=NEEDS,
)  # fmt: skip


def own_step(layout: str, divisor: str) -> Claim:
    """The claim about one step by own weights, in one layout of the rows."""
    check = test_own_weights.test_a_step_is_the_weighted_sum_of_token_gradients
    return claim(check, layout, divisor, examples=1, needs=NEEDS, tested=True)


def own_pairs(divisor: str, kept: str) -> Claim:
    """The same of preference pairs, cut or whole."""
    check = test_own_weights.test_a_step_of_pairs_is_the_weighted_sum
    return claim(check, divisor, kept, examples=1, needs=NEEDS, tested=True)


OWN_WEIGHTS = (
    row("weight-moved-into-the-label", TRAVEL,
        "a weight stands one bit too low beside its label",
        ("data.weights.joined", "<< 32", "<< 31")),
    row("all-turns-by-the-last-weight", TURNS,
        "every answer gets the weight that was laid last",
        ("data.weights._of_answers", "learned=_of_turn(turn) == weight", "learned=True")),
    row("row-weight-forgotten-beside-turns", TURNS,
        "a row whose turns have weights loses its own",
        ("data.weights.turn_weights", "own * (other", "1.0 * (other")),
    row("unlearned-turn-by-its-weight", TURNS,
        "a turn that is not to be learned keeps its weight",
        ("data.weights._of_turn", " if turn.learned else 0.0", "")),
    row("marked-turn-learned-in-a-whole-row", TURNS,
        "all of a row is learned, turns that are marked as not to be learned too",
        ("data.weights.whole_labels", "if mark else", "if True else")),
    row("mark-of-a-question-unread", TURNS,
        "turns of the user are learned against their mark",
        ("data.weights._of_others", "map(_of_turn, others)",
         "_factor(turn.weight) for turn in others")),
    row("sign-of-a-weight-forgotten", own_step("unequal micro-batches", "response"),
        "a negative weight trains towards its token",
        ("train.policies.own_weights.OwnWeights.scores",
         "row_weights.to(", "row_weights.abs().to(")),
    row("kept-tokens-for-the-sum-of-weights", own_step("unequal micro-batches", "kept"),
        "the loss is divided by the number of tokens with a weight",
        ("train.policies.own_weights.OwnWeights.kept_tokens",
         "self.weights(batch).cpu()", "(self.weights(batch) != 0).cpu()")),
    row("weights-of-a-batch-by-micro-batch", own_step("unequal micro-batches", "kept"),
        "the sum of the weights is that of a micro-batch",
        ("train.weigher.Weigher.loss", "self._divisor, plan.kept_share)", "self._divisor)")),
    row("weights-before-labels-are-cut", own_step("cut at the start", "kept"),
        "labels are cut at their start, and weights at their end",
        ("train.row_weights._with_parted",
         "return {", "weights = weights[1:] + weights[:1]\n    return {")),
    row("pair-weights-cut-at-the-other-end", own_pairs("response", "end"),
        "weights of a pair that is cut at its start are cut at their end",
        ("train.row_weights.PairWeightsCollator.__call__",
         "torch.as_tensor(weights, dtype=torch.float32)[cut]",
         "torch.as_tensor(weights, dtype=torch.float32)[:count]")),
    row("weights-of-the-chosen-for-both", own_pairs("kept", "whole"),
        "tokens of the rejected response weigh 1",
        ("train.row_weights.PairWeightsCollator.__call__",
         "batch[ROW_WEIGHTS_KEY] = laid",
         "laid[len(rows):] = 1\n    batch[ROW_WEIGHTS_KEY] = laid")),
    row("static-policy-not-held-to-it", NOT_STATIC,
        "the loss is divided by the sum of other weights than it has",
        ("train.weigher.Weigher._refuse_other_weights",
         "(own.sum() - before).abs()", "(before - before)")),
    row("negative-sum-divides", SUMS,
        "a step whose weights sum to 0 or less divides by them",
        ("train.weigher.Weigher._kept_share", "if self.policy.signed:", "if False:"),
        ("train.weigher.Weigher.loss",
         "policy.signed and self._divisor", "False and self._divisor")),
)  # fmt: skip
