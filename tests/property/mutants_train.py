"""Errors in the trainers: a few words of ``alphatoken.train`` each, seen by a real trainer's run.

Every claim is one pinned run beside the reference step. The first five are the errors that a review
planted and the tests of that time did not see.
"""

from __future__ import annotations

from functools import cache

from tests.property import test_pool, test_trainer_oracle
from tests.property.mutation import Claim, Mutant, Words, claim, mutant
from tests.property.reference_step import Asked
from tests.property.test_trainer_oracle import PINNED

NEEDS = ("trl", "peft")
LOSS = "train.trainer_loss.TrainerLoss"
PAIR_LOSS = "train.pair_loss.PairLoss"
WEIGHER = "train.weigher.Weigher"
VALUES = "train.valuation.Valuation"
RECORDS = "train.records.RunRecords.micro_batch"
DPO = "train.dpo.AlphaDPOTrainer"
LEDGER = "train.ledger.ValueLedger"
POOL = "train.pool.ValidationPool"
WEIGHED = claim(
    test_trainer_oracle.test_every_step_is_weighed, Asked(policy="random"), examples=1, needs=NEEDS,
    tested=True,
)  # fmt: skip
MASKS = claim(
    test_trainer_oracle.test_random_masks, Asked(policy="random"), examples=1, needs=NEEDS,
    tested=True,
)  # fmt: skip

DRAWS = claim(test_pool.test_draws_are_of_seed_step_micro_batch_and_process, tested=True)
APART = claim(test_pool.test_retention_rows_are_drawn_apart_from_validation_rows, tested=True)


@cache
def run_of(name: str) -> Claim:
    """The claim about one pinned run."""
    check = test_trainer_oracle.test_the_trainer_is_the_reference
    return claim(check, PINNED[name][0], examples=1, needs=NEEDS, tested=True)


def _of(name: str, sentence: str, edit: Words, *claims: str | Claim) -> Mutant:
    found = (run_of(one) if isinstance(one, str) else one for one in claims)
    return mutant(name, sentence, edit, *found)


PAPER, PAIRS = "the paper's, SFT", "the paper's, DPO"
POOLED, OLD = "pool, micro-batches of validation", "direction for two steps"
FULL, FULL_SUM = "clipping, full preconditioner", "full preconditioner of a sum"
KEPT, GLOBAL = "kept normalisation", "kept normalisation over a global threshold"
MASKED = "masked logit"

TRAINERS = (
    _of(
        "omega-forgotten-in-the-trainers-values",
        "DPO's values without omega, which differs from pair to pair",
        (
            f"{PAIR_LOSS}.value_weights",
            "-by_token(coefficients) *",
            "-by_token(coefficients).sign() *",
        ),
        PAIRS,
    ),
    _of(
        "micro-batch-taken-for-the-step",
        "the full preconditioner at the gradient of one micro-batch of several",
        (
            f"{LOSS}.step_scale",
            "return steps if num_items is not None else 1.0",
            "return 1.0",
        ),
        FULL,
    ),
    _of(
        "clipping-forgotten",
        "the full preconditioner at the gradient before it is cut",
        (f"{VALUES}._step_weights", " * self.clip_factor", ""),
        FULL,
    ),
    _of(
        "ledger-without-the-tokens-weight",
        "the ledger's scale is the learning rate alone",
        (RECORDS, "* batch.unit\n", "\n"),
        PAPER,
    ),
    _of(
        "validation-gradient-in-bf16",
        "G is summed up from gradients rounded to bfloat16",
        (
            "direction.objective.objective_sums",
            "gradient.to(total[name].dtype)",
            "gradient.bfloat16().to(total[name].dtype)",
        ),
        PAPER,
    ),
    _of(
        "a-loss-of-ones-own-trained-on",
        "a step is taken with a loss that no weigher made",
        (
            "train.step_guard.StepGuard.on_pre_optimizer_step",
            "if self._reached >= due:",
            "if True:",
        ),
        WEIGHED,
    ),
    _of(
        "pairs-of-the-step-miscounted",
        "the ledger's scale of a pair forgets the other micro-batches of the step",
        (f"{PAIR_LOSS}.unit", " * steps", ""),
        PAIRS,
    ),
    _of(
        "sign-of-the-rejected-forgotten",
        "rejected tokens are valued as if they were chosen",
        (
            f"{PAIR_LOSS}.value_weights",
            "-by_token(coefficients) *",
            "by_token(coefficients).abs() *",
        ),
        PAIRS,
    ),
    _of(
        "beta-twice",
        "values carry beta a second time",
        (
            f"{PAIR_LOSS}.value_weights",
            "-by_token(coefficients) *",
            "-by_token(coefficients) * self._trainer.beta *",
        ),
        PAIRS,
    ),
    _of(
        "beta-of-the-objective",
        "the validation pairs are compared at another beta than the trained ones",
        (f"{DPO}.row_batch", ", beta=self.beta", ""),
        PAIRS,
    ),
    _of(
        "reference-of-the-other-branch",
        "validation pairs with the two reference log-probabilities exchanged",
        (f"{DPO}.row_batch", "reference[0], reference[1]", "reference[1], reference[0]"),
        PAIRS,
    ),
    _of(
        "reference-in-float32",
        "the reference's sums are rounded to float32",
        (f"{DPO}.row_batch", "dtype=torch.float64", "dtype=torch.float32"),
        PAIRS,
    ),
    _of(
        "one-threshold-for-both-branches",
        "chosen and rejected tokens are ranked together although they should not be",
        (f"{PAIR_LOSS}.rank_groups", "if self.args.shared_threshold:", "if True:"),
        PAIRS,
    ),
    _of(
        "shared-threshold-ignored",
        "branches keep thresholds of their own where one was asked for",
        (f"{PAIR_LOSS}.rank_groups", "if self.args.shared_threshold:", "if False:"),
        "full preconditioner, DPO, one threshold",
    ),
    _of(
        "pools-exchanged",
        "weights of the chosen go to the rejected, and the other way",
        (
            "train.policy.TokenPolicy.best",
            "kept[rows] = self.select(",
            "kept[batch.rank_groups[-1 if rows.start == 0 else 0]] = self.select(",
        ),
        "retention by pairs",
    ),
    _of(
        "masked-logit-ignored",
        "omega from the unmasked logit where the masked one was asked for",
        (f"{PAIR_LOSS}.final_coefficients", "if not self.args.masked_logit:", "if True:"),
        MASKED,
    ),
    _of(
        "masked-logit-of-divided-weights",
        "what divides the loss enters the masked logit",
        (
            f"{WEIGHER}.loss",
            "(proxy, coefficients, weights, inputs)",
            "(proxy, coefficients, divided, inputs)",
        ),
        MASKED,
    ),
    _of(
        "kept-tokens-counted-by-micro-batch",
        "each micro-batch is divided by its own kept tokens",
        ("train.micro_batch.normalised", "if kept_share is not None:", "if False:"),
        KEPT,
    ),
    _of(
        "kept-tokens-of-all",
        "kept normalisation divides by all response tokens",
        ("train.micro_batch.normalised", 'if kind != "kept":', "if True:"),
        KEPT,
    ),
    _of(
        "budget-over-both-branches",
        "the kept tokens are counted with one rounding for both branches",
        ("train.policy.TokenPolicy.kept_tokens", "in batch.rank_groups", "in [slice(None)]"),
        "kept normalisation, DPO",
    ),
    _of(
        "global-budget-by-micro-batch",
        "the kept tokens of a global threshold are counted micro-batch by micro-batch",
        (f"{WEIGHER}._count_kept", "if plan.weights is None", "if True"),
        GLOBAL,
    ),
    _of(
        "sum-still-divided",
        "kept_normalization='sum' leaves the trainer's divisor in the loss",
        ("train.micro_batch.undivided", 'if kind == "sum" else 1.0', "if False else 1.0"),
        FULL_SUM,
    ),
    _of(
        "ledger-of-a-sum-divided",
        "the ledger divides by the response tokens what the loss does not",
        (RECORDS, "* undivided(batch, self._trainer.args.kept_normalization)", ""),
        FULL_SUM,
    ),
    _of(
        "step-of-a-sum-divided",
        "the full preconditioner at the mean gradient where the sum is descended",
        (f"{VALUES}._step_weights", " * undivided(batch, self._options.kept_normalization)", ""),
        FULL_SUM,
    ),
    _of(
        "clip-factor-inverted",
        "a long gradient is taken to be lengthened",
        (f"{VALUES}.clip_factor", "min(1.0, self", "max(1.0, self"),
        FULL,
    ),
    _of(
        "ledger-at-the-first-learning-rate",
        "the ledger uses the learning rate that the run began with",
        (
            RECORDS,
            'self._trainer.optimizer.param_groups[0]["lr"]',
            "self._trainer.args.learning_rate",
        ),
        PAPER,
    ),
    _of(
        "draws-that-forget-the-micro-batch",
        "every micro-batch of a step draws the same random numbers",
        (f"{LOSS}.draw_seed", "        batch.plan.index,\n", ""),
        MASKS,
    ),
    _of(
        "draws-that-forget-the-step",
        "every step draws the same random numbers",
        (f"{LOSS}.draw_seed", "        self.step,\n", ""),
        MASKS,
    ),
    _of(
        "draws-that-forget-the-seed",
        "runs of different seeds draw the same random numbers",
        (f"{LOSS}.draw_seed", "        self.args.value_seed,\n", ""),
        MASKS,
    ),
    _of(
        "draws-that-forget-the-process",
        "processes draw the same random numbers for different rows",
        (f"{LOSS}.draw_seed", "        self.accelerator.process_index,\n", ""),
        DRAWS,
    ),
    _of(
        "retention-drawn-as-validation",
        "retention rows are drawn in the order of the validation rows",
        (f"{VALUES}.__init__", "seed=options.value_seed + 1,", "seed=options.value_seed,"),
        APART,
    ),
    _of(
        "global-threshold-by-micro-batch",
        "a global threshold is taken micro-batch by micro-batch",
        (f"{WEIGHER}.plan", 'trainer_loss.args.keep_scope == "global"', "False"),
        "global threshold, DPO",
    ),
    _of(
        "first-micro-batch-decides",
        "every micro-batch gets the weights that were decided for the first one's tokens",
        ("train.distributed.global_selection", "start = places[step, ranks.rank]", "start = 0"),
        GLOBAL,
    ),
    _of(
        "responses-ranked-by-token",
        "whole responses were asked for, and tokens are ranked",
        ("train.policies.ratio.TopRatioPolicy.scores", 'self.unit == "response"', "False"),
        "whole responses, the worst",
    ),
    _of(
        "dft-values-of-plain-losses",
        "DFT's tokens are valued as if their losses were not weighted",
        (
            f"{LOSS}.value_weights",
            'if getattr(self.args, "loss_type", "nll") == "nll":',
            "if True:",
        ),
        "DFT",
    ),
    _of(
        "metrics-counted-twice",
        "a scoring pass of its own moves the trainer's running metrics",
        (f"{LOSS}.beside_training", "setattr(trainer, name, value)", "pass"),
        "packing, own forward",
    ),
    _of(
        "shared-error-of-other-positions",
        "values and update take the head's errors of the first positions for those of the response",
        (
            "train.fused_head.shared_log_probs",
            "hidden[rows].to(node.compute_dtype)",
            "hidden[: len(rows)].to(node.compute_dtype)",
        ),
        PAPER,
    ),
    _of(
        "shared-log-probabilities-at-the-label-position",
        "what the head says of a token stands where that token is read",
        (
            "train.fused_head.shared_log_probs",
            "index_put((places,), -losses)",
            "index_put(((places + 1) % asked.numel(),), -losses)",
        ),
        PAIRS,
    ),
    _of(
        "weights-shifted-by-one",
        "a token's weight acts on the token before it",
        (
            "train.log_prob_proxy.LogProbProxy.surrogate",
            "weights[:, 1:]",
            "weights[:, :-1]",
        ),
        PAPER,
    ),
    _of(
        "coefficients-shifted-by-one",
        "log-probabilities are laid out as if the last token had none",
        ("train.log_prob_proxy.by_token", "(1, 0)", "(0, 1)"),
        PAIRS,
    ),
    _of(
        "validation-labels-shifted",
        "validation labels are off by one token",
        ("train.sft.padded_batch", 'row["labels"]', '[*row["labels"][1:], -100]'),
        PAPER,
    ),
    _of(
        "micro-batch-divided-by-itself",
        "transformers' own trainer divides each micro-batch by its own tokens",
        (
            "train.trainer.LogitsLoss.of",
            "if num_items is None else torch.as_tensor(num_items)",
            "if True else torch.as_tensor(num_items)",
        ),
        "transformers' own trainer",
    ),
    _of(
        "direction-kept-a-step-too-long",
        "G and V are used for one step more than was asked for",
        (
            f"{VALUES}._enter",
            "age < lasts",
            "age <= lasts",
        ),
        PAPER,
    ),
    _of(
        "direction-never-pinned",
        "G and V are built anew at every step although they should last for two",
        (
            f"{VALUES}._enter",
            "(lasts is None or age < lasts)",
            "False",
        ),
        OLD,
    ),
    _of(
        "first-rows-for-ever",
        "a pool gives the validation rows of the first step at every step",
        (
            f"{VALUES}._enter",
            "self._draw(self.pool, rows.validation, step)",
            "self._draw(self.pool, rows.validation, 0)",
        ),
        POOLED,
    ),
    _of(
        "retention-rows-never-drawn-anew",
        "retention rows are those of the first step at every step",
        (
            f"{VALUES}._enter",
            "rows.retention, step)",
            "rows.retention, 0)",
        ),
        "retention by rows",
    ),
    _of(
        "validation-rows-dropped",
        "of the validation rows only the first micro-batch is used",
        (f"{VALUES}._batches", "range(0, len(own), size)", "range(0, size, size)"),
        POOLED,
    ),
    _of(
        "gap-with-the-other-sign",
        "the gap is the pool's loss minus the held-out one",
        (
            f"{VALUES}.objective_gap",
            'objectives["held_out"] - objectives["pool"]',
            'objectives["pool"] - objectives["held_out"]',
        ),
        PAPER,
    ),
    _of(
        "gap-at-the-first-rows",
        "the gap is always looked at on the rows of the first step",
        (f"{VALUES}.objective_gap", "self.pool.rows(step)", "self.pool.rows(0)"),
        POOLED,
    ),
    _of(
        "gap-without-the-reference",
        "the preference loss that is logged leaves the reference model out",
        (
            "direction.objective.objective_value",
            "item.beta * margin",
            "item.beta * (losses[1].sum(-1) - losses[0].sum(-1))",
        ),
        PAIRS,
    ),
    _of(
        "held-out-rows-drawn",
        "rows that are set aside are drawn all the same",
        (f"{POOL}.__post_init__", "drawn = order[held:]", "drawn = order"),
        PAPER,
    ),
    _of(
        "held-out-share-of-the-drawn",
        "one row too many is set aside",
        (
            f"{POOL}.__post_init__",
            "max(1, round(self.held_out_share * self.size))",
            "max(1, round(self.held_out_share * self.size)) + 1",
        ),
        PAPER,
    ),
    _of(
        "pool-overlaps",
        "a step takes rows that the step before has taken",
        (f"{POOL}.rows", "first = step * self.batch_size", "first = step * (self.batch_size - 1)"),
        POOLED,
    ),
    _of(
        "ledger-unscaled",
        "visits add up values without the scale",
        (f"{LEDGER}.add", "+= scale * block", "+= block"),
        PAPER,
    ),
    _of(
        "ledger-keeps-the-last-visit",
        "a visit overwrites the ones before",
        (f"{LEDGER}.add", "sums[:, :-1] +=", "sums[:, :-1] ="),
        PAPER,
    ),
    _of(
        "ledger-counts-dropped-tokens",
        "every visited token counts as kept",
        (f"{LEDGER}.add", "sums[:, -1] += block[document.places, -1]", "sums[:, -1] += 1"),
        PAPER,
    ),
    _of(
        "ledger-sides-exchanged",
        "adaptation and stability change places in the ledger",
        (
            "train.ledger._components",
            "parts, zero = values.components(), ",
            "parts, zero = {{'a': 'stability', 's': 'adaptation'}[k[0]]: v for k, v in "
            "values.components().items()}, ",
        ),
        "LoRA",
    ),
)
