"""Errors in label values by finite differences, and in how weights are moved and brought back."""

from __future__ import annotations

import signal
from functools import partial

from tests.property import test_differences as moved
from tests.property import test_sharded as sharded
from tests.property.mutants import small
from tests.property.mutation import claim, mutant
from tests.property.setups import Setup

CENTRAL, ONE_SIDED = (
    claim(moved.test_differences_are_the_label_values, setup=small(), form=form)
    for form in moved.FORMS
)
TIED = claim(
    moved.test_differences_are_the_label_values, setup=Setup(moved.TIED), form="central", examples=1
)
PADDED = claim(
    moved.test_differences_are_the_label_values,
    setup=Setup(moved.PADDED), form="central", examples=1,
)  # fmt: skip
SHIFTED = claim(moved.test_a_shift_is_what_it_says, examples=1)
STATED = claim(moved.test_in_float32_the_stated_error_bounds_the_true_one, examples=1)
KEPT = claim(moved.test_the_step_is_kept_until_m_changes_its_length, examples=1)
CAST = claim(moved.test_an_observed_forward_whose_scores_were_cast_is_no_base, examples=1)
BATCH = claim(moved.test_the_stated_error_is_that_of_its_batch, "central", examples=1)
SIDES = claim(moved.test_the_stated_error_is_that_of_the_worse_side, examples=1)
HARDLY = claim(
    moved.test_rows_that_m_hardly_reaches_are_taken_by_forward_mode_and_no_others, examples=1
)
JUMPS = claim(moved.test_one_small_jump_among_many_tokens_is_seen, examples=1)
ROUTED = claim(moved.test_auto_takes_forward_mode_through_a_mixture_of_experts, examples=1)
CHANCE = claim(moved.test_few_tokens_may_agree_by_chance, examples=1)
LOOKED = claim(moved.test_more_curved_rows_are_seen_in_the_stated_error, examples=1)
BASE = claim(moved.test_an_observed_forward_with_dropout_is_no_base, examples=1)
COARSE, COARSE_WITHOUT_GRAPH = (
    claim(moved.test_an_observed_forward_in_16_bits_is_no_base, graph, examples=1)
    for graph in (True, False)
)
DROWNED = claim(
    moved.test_a_shift_that_would_drown_is_refused_with_its_reason, made=moved.cast, examples=1
)
BACK = claim(
    moved.test_weights_come_back_after_an_exception_in_a_shifted_forward,
    fails="error",
    examples=1,
)
WAITS = claim(
    moved.test_what_a_signal_raises_while_weights_come_back_waits_for_the_last,
    number=signal.SIGINT,
    examples=1,
)
FRESH = claim(moved.test_a_refreshed_scorer_is_a_new_one, examples=1)

SHARDED = claim(sharded.test_sharded_label_values_are_the_oracles, setup=small(), parameters="all")

_error = partial(mutant, room="estimate.differences.")
_moved = partial(mutant, room="estimate.shift.")
MUTANTS = (
    _error(
        "step-not-doubled-in-the-central-form",
        "both sides move by h, and their difference is divided by h",
        ("_Quotients.values", "2 * length if self.form", "length if self.form"),
        CENTRAL,
    ),
    _moved(
        "shift-to-the-other-side",
        "the weights move along -M",
        ("Shift.to", "alpha=step", "alpha=-step"),
        SHIFTED,

    ),
    _moved(
        "tied-weight-moved-once-a-name",
        "a weight that two names share moves twice",
        (
            "Moved.__init__",
            "once = {id(named[name]): name for name in names}",
            "once = {name: name for name in names}",
        ),
        claim(moved.test_a_tied_weight_moves_once, examples=1),
    ),
    _moved(
        "padding-row-moves-by-differences",
        "the row that an embedding's backward leaves out moves as an input",
        ("_TrainedEmbedding._rows", "if row is None or padding_idx is None:", "if True:"),
        PADDED,
    ),
    _moved(
        "weights-brought-back-by-subtraction",
        "what was added is subtracted, and rounding stays",
        (
            "Moved._back",
            "_put(parameter, before)",
            "_put(parameter, (before + 0.1) - 0.1)",
        ),
        BACK,

    ),
    _moved(
        "weights-not-brought-back-after-an-exception",
        "they come back at the end of a forward that ended well",
        (
            "Moved.open",
            "    finally:",
            "    except ZeroDivisionError:\n        pass\n    else:",
        ),
        BACK,
    ),
    _moved(
        "interrupt-let-in-while-weights-come-back",
        "some weights stay moved",
        ("Moved.open", "except BaseException as error:", "except ZeroDivisionError as error:"),
        WAITS,
    ),
    mutant(
        "base-with-dropout",
        "the observed losses are a side of the difference, whatever drew in them, and none looks",
        [
            (
                "scoring.label.Label._based",
                "self._comparable(recording)",
                "recording.losses is not None",
            ),
            (
                "estimate.differences.Differences._derivative",
                "step.is_due(size) or step.error(size) > TOLERANCE or self._chooses",
                "False",
            ),
        ],
        BASE,
    ),
    mutant(
        "base-in-16-bits",
        "losses that 16 bits rounded, or a cast of the scores, are a side of the difference",
        (
            "scoring.label.Label._based",
            "_coarsest(recording.products) <= _coarsest(weights)",
            "True",
        ),
        COARSE,
        COARSE_WITHOUT_GRAPH,
        CAST,
    ),
    mutant(
        "products-of-our-own-forward",
        "what is read of the observed pass is read of a forward of ours along M's other side",
        (
            "scoring.label.Label._based",
            "recording.products",
            "getattr(recording.recorder, 'products', ())",
        ),
        COARSE_WITHOUT_GRAPH,
    ),
    _error(
        "step-of-a-longer-m",
        "a step is kept when M changes its length",
        ("Differences._step_for", "0.5 < norm / step.norm < 2.0", "norm > 0.0"),
        KEPT,
    ),
    _error(
        "step-of-an-m-of-about-this-length",
        "a step is kept while M becomes 20 times as long or as short",
        ("Differences._step_for", "0.5 < norm / step.norm < 2.0", "0.05 < norm / step.norm < 20.0"),
        KEPT,
    ),
    _error(
        "error-of-the-slice-alone",
        "the batch itself is never looked at",
        ("Step.error", "math.hypot(cut, self.rounding) / size", "0.0"),
        LOOKED,
        BATCH,
    ),
    _error(
        "error-without-rounding",
        "what the losses are rounded by is left out of a batch's stated error",
        ("Step.error", "math.hypot(cut, self.rounding) / size", "cut / size"),
        CHANCE,
    ),
    _error(
        "error-relative-to-other-batches",
        "truncation is carried over in parts of the values, however small these are",
        (
            "Step.error",
            "return max(self.relative, math.hypot(cut, self.rounding) / size)",
            "return max(self.relative, cut / (most or size))",
        ),
        BATCH,
    ),
    _error(
        "error-of-the-batch-alone",
        "few tokens may agree by chance at h and 2 h, and the slice's error is not asked",
        ("Step.error", "max(self.relative, ", "max(0.0, "),
        CHANCE,
    ),
    _error(
        "last-error-of-any-batch",
        "a batch states the error of the one that was looked at",
        (
            "Differences._derivative",
            "error = step.error(size, truncation)",
            "error = self.__dict__.setdefault('last', step.error(size, truncation))",
        ),
        BATCH,
    ),
    _error(
        "jumps-taken-for-derivatives",
        "a token that another expert gets at moved weights has a value",
        ("Differences._derivative", "self._chooses and quotients.jumps(step.length)", "False"),
        JUMPS,
    ),
    mutant(
        "looks-put-off-for-good",
        "a look that falls due on a batch without values is never made up",
        ("estimate.differences.Step.is_due", "self.left <= 0", "self.left == 0"),
        claim(moved.test_a_batch_without_values_puts_no_look_off, examples=1),
    ),
    mutant(
        "smaller-values-not-looked-at",
        "a batch with far smaller values has the truncation of the others",
        ("estimate.differences.Step.is_due", "not least / _UNLIKE <= size <=", "not size <="),
        claim(moved.test_a_batch_of_another_size_is_looked_at, examples=1),
    ),
    mutant(
        "truncation-of-larger-values-kept",
        "larger values that were not looked at are cut off by no more",
        ("estimate.differences.Step.error", "* (max(1.0, size / most) if most else 1.0)", "* 1.0"),
        claim(moved.test_a_truncation_grows_with_values_that_were_not_looked_at,
              examples=1),
    ),
    mutant(
        "jumps-beside-the-batch-alone",
        "a large token's curvature counts beside the values of the batch",
        (
            "estimate.differences._Quotients.jumps",
            "torch.maximum(values.abs(), values.new_tensor(self.size(length)))",
            "values.new_tensor(self.size(length))",
        ),
        claim(moved.test_curvature_of_one_large_token_is_no_jump, examples=1),
    ),
    mutant(
        "one-side-checked",
        "only the losses ahead are looked at for infinity",
        (
            "estimate.differences.Differences._derivative",
            "in quotients.sides(step.length):",
            "in quotients.sides(step.length)[:1]:",
        ),
        claim(moved.test_an_infinite_loss_on_either_side_is_named, -1, examples=1),
    ),
    mutant(
        "error-of-the-first-side-alone",
        "the stated error is that of the adaptation side",
        (
            "scoring.label.Label.values",
            "max(derivatives, key=lambda one: one.error)",
            "derivatives[0]",
        ),
        SIDES,
    ),
    mutant(
        "one-batch-decides-for-all",
        "what is not exact enough on one batch is never tried again",
        (
            "scoring.label.Label._by_first_way",
            "if doubtful is None:",
            "if True:",
        ),
        HARDLY,
    ),
    mutant(
        "router-followed-by-differences",
        "a mixture of experts is valued by moving its weights",
        (
            "scoring.label.Label._ways",
            "self._first is None and not self._chooses",
            "self._first is None",
        ),
        ROUTED,
    ),
    _error(
        "error-by-chance-agreement",
        "values at h are compared with themselves, which leaves rounding alone",
        ("_Quotients.spread", "self.values(2 * length)", "self.values(length)"),
        STATED,
    ),
    _error(
        "autocast-overlooked",
        "a shift drowns in 16-bit products",
        ("drowned", "kind in kinds and torch.is_autocast_enabled(kind)", "False"),
        DROWNED,
    ),
    mutant(
        "steps-survive-a-refresh",
        "values after a checkpoint are not those of the run that is resumed from it",
        (
            "scoring.label.Label.forget",
            "self._differences = Differences(self.adapter, self._sharding)",
            "pass",
        ),
        FRESH,
    ),
    _moved(
        "shard-moved-by-the-neighbours-m",
        "a process moves its part of the weights along another process's part of M",
        ("Moved._moving", "moving(name, parameter, part)", "moving(name, parameter, part.roll(1))"),
        SHARDED,
    ),
    mutant(
        "sharded-gradient-of-the-first-module-alone",
        "a weight in use in two places has the gradient of one of them",
        (
            "direction.objective.objective_sums",
            "watched = [(name, one) for name, one in in_use.values() if one.requires_grad]",
            "watched = [*dict(v for v in in_use.values() if v[1].requires_grad).items()]",
        ),
        claim(
            sharded.test_sharded_label_values_are_the_oracles,
            setup=small(tied_linears=True, mlp="gated"),
            parameters="all",
        ),
    ),
)  # fmt: skip
