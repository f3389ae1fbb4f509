"""Errors in values that move weights (differences, walks, whole runs), and in influence."""

from __future__ import annotations

import signal

from tests.property import test_differences as moved
from tests.property import test_estimators as estimators
from tests.property import test_influence_direction as influence
from tests.property import test_oracle_run as runs
from tests.property import test_sharded as sharded
from tests.property import test_walk as walks
from tests.property.mutants import small
from tests.property.mutation import claim, row
from tests.property.setups import Setup

# --- label values by finite differences ----------------------------------------------------------


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
LOSSES = claim(
    estimators.test_values_come_with_the_losses_of_their_tokens,
    setup=Setup(moved.PADDED), way="label, central", examples=1,
)  # fmt: skip
BUFFERS = claim(estimators.test_values_outlive_the_buffers_of_their_batch, way="walk", examples=1)
SHIFTED_LABELS = claim(
    estimators.test_labels_that_are_shifted_already_are_named, estimator="walk", examples=1
)
SHIFTED = claim(moved.test_a_shift_is_what_it_says, examples=1)
STATED = claim(moved.test_in_float32_the_stated_error_bounds_the_true_one, examples=1)
MOVED_KEPT = claim(moved.test_the_step_is_kept_until_m_changes_its_length, examples=1)
MOVED_CAST = claim(moved.test_an_observed_forward_whose_scores_were_cast_is_no_base, examples=1)
BATCH = claim(moved.test_the_stated_error_is_that_of_its_batch, "central", examples=1)
SIDES = claim(moved.test_the_stated_error_is_that_of_the_worse_side, examples=1)
HARDLY = claim(
    moved.test_rows_that_m_hardly_reaches_are_taken_by_forward_mode_and_no_others, examples=1
)
JUMPS = claim(moved.test_one_small_jump_among_many_tokens_is_seen, examples=1)
ROUTED = claim(moved.test_auto_takes_forward_mode_through_a_mixture_of_experts, examples=1)
FLOAT64 = claim(
    moved.test_auto_in_float64_is_exact_over_all_parameters, setup=Setup(moved.TIED), examples=1
)
CHANCE = claim(moved.test_few_tokens_may_agree_by_chance, examples=1)
PARTS_OF_ERROR = claim(
    moved.test_the_stated_error_of_a_step_has_truncation_and_rounding, examples=1
)
LOOKED = claim(moved.test_more_curved_rows_are_seen_in_the_stated_error, examples=1)
BASE = claim(moved.test_an_observed_forward_with_dropout_is_no_base, examples=1)
COARSE, COARSE_WITHOUT_GRAPH = (
    claim(moved.test_an_observed_forward_in_16_bits_is_no_base, graph, examples=1)
    for graph in (True, False)
)
DROWNED = claim(
    moved.test_a_shift_that_would_drown_is_refused_with_its_reason,
    build=moved.llama,
    context=moved.cast,
    reason="autocast to bfloat16",
    examples=1,
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


VALUES_BY_DIFFERENCES = (
    row("step-not-doubled-in-the-central-form", CENTRAL,
        "both sides move by h, and their difference is divided by h",
        ("estimate.differences._Quotients.values",
         "2 * length if self.form", "length if self.form")),
    row("shift-to-the-other-side", SHIFTED,
        "the weights move along -M",
        ("estimate.temporary_weights.ShiftedWeights.to", "alpha=step, out", "alpha=-step, out")),
    row("tied-weight-moved-once-a-name", claim(moved.test_a_tied_weight_moves_once, examples=1),
        "a weight that two names share moves twice",
        ("estimate.temporary_weights.TemporaryWeights.__init__",
         "once = {id(named[name]): name for name in names}",
         "once = {name: name for name in names}")),
    row("padding-row-moves-by-differences", PADDED,
        "the row that an embedding's backward leaves out moves as an input",
        ("estimate.temporary_weights._TrainedEmbedding._rows",
         "if row is None or padding_idx is None:", "if True:")),
    row("weights-brought-back-by-subtraction", BACK,
        "what was added is subtracted, and rounding stays",
        ("estimate.temporary_weights.TemporaryWeights._back",
         "_put(parameter, before)", "_put(parameter, (before + 0.1) - 0.1)")),
    row("weights-not-brought-back-after-an-exception", BACK,
        "they come back at the end of a forward that ended well",
        ("estimate.temporary_weights.TemporaryWeights.open",
         "    finally:", "    except ZeroDivisionError:\n        pass\n    else:")),
    row("interrupt-let-in-while-weights-come-back", WAITS,
        "some weights stay moved",
        ("estimate.temporary_weights.TemporaryWeights.open",
         "except BaseException as error:", "except ZeroDivisionError as error:")),
    row("base-with-dropout", BASE,
        "the observed losses are a side of the difference, whatever drew in them, and none looks",
        ("estimate.label.Label._based",
         "self._comparable(recording)", "recording.losses is not None"),
        ("estimate.differences.Differences._derivative",
         "step.is_due(size) or step.error(size) > TOLERANCE or self._chooses", "False")),
    row("losses-at-moved-weights", LOSSES,
        "the losses beside the values are those of one side of the difference",
        ("estimate.differences._Quotients.here", "(loss_plus + loss_minus) / 2", "loss_minus")),
    row("base-in-16-bits", (COARSE, COARSE_WITHOUT_GRAPH, MOVED_CAST),
        "losses that 16 bits rounded, or a cast of the scores, are a side of the difference",
        ("estimate.label.Label._based",
         "_coarsest(recording.products) <= _coarsest(weights)", "True")),
    row("products-of-our-own-forward", COARSE_WITHOUT_GRAPH,
        "what is read of the observed pass is read of a forward of ours along M's other side",
        ("estimate.label.Label._based",
         "recording.products", "getattr(recording.recorder, 'products', ())")),
    row("step-of-a-longer-m", MOVED_KEPT,
        "a step is kept when M changes its length",
        ("estimate.differences.Differences._step_for",
         "0.5 < norm / step.norm < 2.0", "norm > 0.0")),
    row("step-of-an-m-of-about-this-length", MOVED_KEPT,
        "a step is kept while M becomes 20 times as long or as short",
        ("estimate.differences.Differences._step_for",
         "0.5 < norm / step.norm < 2.0", "0.05 < norm / step.norm < 20.0")),
    row("error-of-the-slice-alone", (LOOKED, BATCH),
        "the batch itself is never looked at",
        ("estimate.differences.Step.error", "math.hypot(cut, self.rounding) / size", "0.0")),
    row("error-without-rounding", PARTS_OF_ERROR,
        "what the losses are rounded by is left out of a batch's stated error",
        ("estimate.differences.Step.error", "math.hypot(cut, self.rounding) / size", "cut / size")),
    row("error-relative-to-other-batches", BATCH,
        "truncation is carried over in parts of the values, however small these are",
        ("estimate.differences.Step.error",
         "return max(self.relative, math.hypot(cut, self.rounding) / size)",
         "return max(self.relative, cut / (most or size))")),
    row("error-of-the-batch-alone", CHANCE,
        "few tokens may agree by chance at h and 2 h, and the slice's error is not asked",
        ("estimate.differences.Step.error", "max(self.relative, ", "max(0.0, ")),
    row("last-error-of-any-batch", BATCH,
        "a batch states the error of the one that was looked at",
        ("estimate.differences.Differences._derivative", "error = step.error(size, truncation)",
         "error = self.__dict__.setdefault('last', step.error(size, truncation))")),
    row("jumps-taken-for-derivatives", JUMPS,
        "a token that another expert gets at moved weights has a value",
        ("estimate.differences.Differences._derivative",
         "self._chooses and quotients.jumps(step.length)", "False")),
    row("looks-put-off-for-good",
        claim(moved.test_a_batch_without_values_puts_no_look_off, examples=1),
        "a look that falls due on a batch without values is never made up",
        ("estimate.differences.Step.is_due", "self.left <= 0", "self.left == 0")),
    row("smaller-values-not-looked-at",
        claim(moved.test_a_batch_of_another_size_is_looked_at, examples=1),
        "a batch with far smaller values has the truncation of the others",
        ("estimate.differences.Step.is_due", "not least / _UNLIKE <= size <=", "not size <=")),
    row("truncation-of-larger-values-kept",
        claim(moved.test_a_truncation_grows_with_values_that_were_not_looked_at, examples=1),
        "larger values that were not looked at are cut off by no more",
        ("estimate.differences.Step.error", "* (max(1.0, size / most) if most else 1.0)", "* 1.0")),
    row("jumps-beside-the-batch-alone",
        claim(moved.test_curvature_of_one_large_token_is_no_jump, examples=1),
        "a large token's curvature counts beside the values of the batch",
        ("estimate.differences._Quotients.jumps",
         "torch.maximum(values.abs(), values.new_tensor(self.size(length)))",
         "values.new_tensor(self.size(length))")),
    row("one-side-checked",
        claim(moved.test_an_infinite_loss_on_either_side_is_named, -1, examples=1),
        "only the losses ahead are looked at for infinity",
        ("estimate.differences.Differences._derivative",
         "in quotients.sides(step.length):", "in quotients.sides(step.length)[:1]:")),
    row("error-of-the-first-side-alone", SIDES,
        "the stated error is that of the adaptation side",
        ("estimate.label.Label._values",
         "max(derivatives, key=lambda one: one.error)", "derivatives[0]")),
    row("one-batch-decides-for-all", HARDLY,
        "what is not exact enough on one batch is never tried again",
        ("estimate.label.Label._by_first_way", "if doubtful is None:", "if True:")),
    row("router-followed-by-differences", ROUTED,
        "a mixture of experts is valued by moving its weights",
        ("estimate.label.Label._ways",
         "self.scored.first is None and not self._chooses", "self.scored.first is None")),
    row("differences-in-float64", FLOAT64,
        "values of a float64 model have the error of differences",
        ("estimate.label.Label._ways", "not _in_float64(self.adapter.model)", "True")),
    row("error-by-chance-agreement", STATED,
        "values at h are compared with themselves, which leaves rounding alone",
        ("estimate.differences._Quotients.spread",
         "self.values(2 * length)", "self.values(length)")),
    row("autocast-overlooked", DROWNED,
        "a shift drowns in 16-bit products",
        ("estimate.differences.precision_obstacle",
         "kind in kinds and torch.is_autocast_enabled(kind)", "False")),
    row("steps-survive-a-refresh", FRESH,
        "values after a checkpoint are not those of the run that is resumed from it",
        ("estimate.label.Label.forget",
         "self._differences = Differences(self.adapter, self.scored.sharding)", "pass")),
    row("shard-moved-by-the-neighbours-m", SHARDED,
        "a process moves its part of the weights along another process's part of M",
        ("estimate.temporary_weights.TemporaryWeights._moving",
         "_direction(name, parameter, part)", "_direction(name, parameter, part.roll(1))")),
    row("sharded-gradient-of-the-first-module-alone",
        claim(sharded.test_sharded_label_values_are_the_oracles,
            setup=small(tied_linears=True, mlp="gated"), parameters="all"),
        "a weight in use in two places has the gradient of one of them",
        ("direction.objective.objective_sums",
         "watched = [(name, one) for name, one in in_use.values() if one.requires_grad]",
         "watched = [*dict(v for v in in_use.values() if v[1].requires_grad).items()]")),
)  # fmt: skip


# --- values along a walk, and when a walk is taken -----------------------------------------------


COPY = claim(
    walks.test_walk_values_are_those_of_a_trained_copy,
    setup=Setup(walks.CASE),
    steps=3,
    examples=1,
)
CENTRAL = claim(
    walks.test_central_walk_values_are_those_of_two_copies,
    setup=Setup(walks.CASE),
    steps=3,
    examples=1,
)
DROPPED = claim(walks.test_a_forward_with_dropout_is_run_again, examples=1)
WEIGHED = claim(walks.test_token_weights_scale_their_token, examples=1)
DUE = claim(walks.test_a_new_walk_is_taken_when_it_is_due, refresh=2, pinned=False, examples=1)
WALK_KEPT = claim(walks.test_a_changed_setting_keeps_the_walk, examples=1)
NEW = claim(walks.test_other_validation_rows_and_a_refresh_take_a_new_walk, examples=1)
NARROW = claim(walks.test_weights_in_16_bits_walk_in_float32, examples=1)
WALK_CAST = claim(walks.test_autocast_keeps_no_cast_of_weights_that_moved, examples=1)
WRITTEN_ROWS = claim(walks.test_rows_that_were_written_to_take_a_new_walk, examples=1)
OTHER_SETTING = claim(walks.test_another_setting_of_the_same_weights_takes_a_new_walk, examples=1)
OUTDATED = claim(walks.test_a_walk_that_began_at_other_weights_is_named, examples=1)
CLIMBS = claim(walks.test_a_walk_that_climbs_is_said, examples=1)
BY_HEART = claim(walks.test_a_walk_that_learns_its_rows_by_heart_is_said)


WALKS = (
    row("walk-value-of-the-other-sign", COPY,
        "what the loss rises by",
        ("estimate.walk.Walk._values",
         "here.to(dtype) - there.to(dtype)", "there.to(dtype) - here.to(dtype)")),
    row("central-walk-that-goes-back-nowhere", CENTRAL,
        "the weights behind a walk are those at its start",
        ("estimate.walk._behind",
         "(2 * p.to(wide(p.dtype)) - end[name].to(wide(p.dtype)))", "p")),
    row("central-walk-of-the-whole-difference", CENTRAL,
        "the difference between both ends is not halved",
        ("estimate.walk.Walk._values", "there.to(dtype)) / 2", "there.to(dtype))")),
    row("walk-value-of-a-dropped-pass", DROPPED,
        "the observed losses count, whatever drew in them",
        ("estimate.walk.Walk._losses", "draws(self.adapter.model)", "False")),
    row("walk-value-without-its-weight", WEIGHED,
        "token weights are left out",
        ("estimate.walk.Walk._values", "values = values * rec", "_ = values * rec")),
    row("walk-on-the-first-batch-alone", COPY,
        "every step sees one batch",
        ("direction.inputs.DirectionInputs.gradient_of_step", "number % max", "0 * max")),
    row("walk-that-does-not-follow-its-steps", COPY,
        "every gradient is taken at the start",
        ("estimate.walk.walk", "                moved.place(weights)\n", ""),
        ("estimate.temporary_weights.TemporaryWeights.walking",
         "t.to(wide(t.dtype))", "t.to(wide(t.dtype), copy=True)")),
    row("walk-with-weight-decay", COPY,
        "AdamW's own decay, which pulls the weights to 0",
        ("estimate.walk.end_of_walk", ", weight_decay=0.0", ", weight_decay=1.0")),
    row("walk-in-16-bits", NARROW,
        "steps smaller than a weight's rounding are lost",
        ("estimate.temporary_weights.TemporaryWeights.walking", "t.to(wide(t.dtype))", "t")),
    row("walk-anew-at-each-step", DUE,
        "a walk from the start moves on with the run",
        ("direction.cache.DirectionCache.current",
         "self._changes >= self._lasts", "self._changes >= 1")),
    row("walk-never-anew", DUE,
        "walk_refresh is not read",
        ("direction.cache.DirectionCache.current",
         "due = self._lasts and self._changes >= self._lasts", "due = False")),
    row("walk-lost-with-a-setting", WALK_KEPT,
        "a new walk from the weights as they are",
        ("direction.cache.DirectionCache.follow", "= former.kept,", "= None,")),
    row("walk-of-former-rows", NEW,
        "other validation rows change nothing",
        ("direction.cache.DirectionCache.invalidate", "self.kept = self._age = ", "self._age = ")),
    row("tokens-of-the-callers-buffer", BUFFERS,
        "values name the tokens of the batch that came into the buffer after theirs",
        ("estimate.estimator.Estimator.values", "ids.clone()", "ids")),
    row("shifted-labels-unsaid", SHIFTED_LABELS,
        "labels of the tokens after their places are valued without a word",
        ("model.batch.labels_are_shifted", "bool(follows &", "bool(~follows &")),
    row("other-labels-taken-for-shifted", SHIFTED_LABELS,
        "labels that are meant to be other tokens are said to be shifted",
        ("model.batch.labels_are_shifted", "bool(follows &", "bool(")),
    row("walk-of-rows-as-they-were", WRITTEN_ROWS,
        "what is written into validation tensors is not read",
        ("direction.cache.DirectionCache._of_other_inputs", "age[1:] != self._start[1:] or ", "")),
    row("walk-under-another-setting", OTHER_SETTING,
        "a scaling that changed where the weights did not is taken for training",
        ("direction.cache.DirectionCache._of_other_inputs",
         " or (self._other_setting and age[0] == self._start[0])", "")),
    row("walk-from-other-weights-unsaid", OUTDATED,
        "values are relative to an end that nobody trained towards",
        ("direction.cache.DirectionCache.outdated", "start[0] != last[0]", "False")),
    row("climbing-walk-unsaid", CLIMBS,
        "a rate that is too high is not noticed",
        ("estimate.walk.end_of_walk", "if after > before:", "if after > 2 * before:")),
    row("rows-by-heart-unsaid", BY_HEART,
        "rows that are nearly certain before the walk are said to be learned by it",
        ("estimate.walk.end_of_walk", "min(LEARNED, LEARNED_SHARE * before)", "LEARNED")),
    row("cast-of-weights-that-moved", WALK_CAST,
        "autocast goes on with the cast that it has",
        ("estimate.temporary_weights.TemporaryWeights._moved",
         "torch.clear_autocast_cache()", "pass")),
)  # fmt: skip


# --- the oracle of whole runs, which no other oracle stands behind -------------------------------


DIFFERENCES = claim(
    runs.test_values_are_differences_of_whole_runs, "adamw", 0.3, examples=1, tested=True
)
TORCH = claim(runs.test_a_run_is_that_of_torch, "adamw", examples=1, tested=True)
LEDGER = claim(runs.test_a_ledger_leaves_out_what_later_steps_do, examples=1)
RUN_KEPT = claim(runs.test_states_between_those_that_are_kept_change_no_bit, examples=1)


RUNS = (
    row("run-value-of-the-other-sign", DIFFERENCES,
        "what the validation loss rises by",
        ("oracle.run._Subject.back", "-part for part", "part for part")),
    row("later-steps-do-nothing", LEDGER,
        "every step has the adjoint of the last",
        ("oracle.run.run_values", "adjoint, values[number] =", "_, values[number] =")),
    row("ledger-of-the-first-gradient", LEDGER,
        "every step of the ledger has J's gradient where the run starts",
        ("oracle.run.ledger_values",
         "subject.adjoint(validation, state)", "subject.adjoint(validation, subject.start())")),
    row("moments-forgotten-on-the-way-back", DIFFERENCES,
        "a token's part in the moments of later steps is left out",
        ("oracle.run._Subject.back", "zip(after.flat(), adjoint.flat(), strict=True)",
         "zip(after.theta.values(), adjoint.theta.values(), strict=True)")),
    row("clipping-as-a-constant", DIFFERENCES,
        "the norm does not depend on the tokens",
        ("oracle.run.Run._clipped",
         "scale = self.clip / (norm + 1e-6)", "scale = (self.clip / (norm + 1e-6)).detach()")),
    row("decay-forgotten-on-the-way-back", DIFFERENCES,
        "weight decay shrinks the weights and not what earlier tokens did to them",
        ("oracle.run.Run.after", "(1 - rate * decay) * value - rate * u",
         "value - rate * decay * value.detach() - rate * u")),
    row("validation-where-the-run-starts", LEDGER,
        "J has its gradient before the first step",
        ("oracle.run.run_values",
         "subject.adjoint(validation, end)", "subject.adjoint(validation, kept[0])")),
    row("states-of-the-first-step-between-two-kept", RUN_KEPT,
        "every step on the way back is at the weights of the one that was kept",
        ("oracle.run.run_values", "states[number - first]", "states[0]")),
    row("step-divided-by-its-first-batch", TORCH,
        "accumulated batches do not count in N",
        ("oracle.run.Run.count", "in self.batches(number))", "in self.batches(number)[:1])")),
    row("bias-correction-of-the-next-step", TORCH,
        "Adam's moments are corrected for a step too many",
        ("oracle.run.Run.after", "AdamState(number,", "AdamState(number + 1,")),
    row("weight-decay-of-every-parameter", TORCH,
        "those that are named decay too",
        ("oracle.run.Run.after",
         "0.0 if name in self.undecayed else self.weight_decay", "self.weight_decay")),
)  # fmt: skip


# --- influence directions: the factors of K, its eigenvalues, the solve --------------------------


DENSE = claim(
    influence.test_influence_direction_is_the_dense_solve,
    setup=influence.SQUARE,
    damping=0.1,
    samples=3,
    examples=1,
)
VECTORS = claim(
    influence.test_eigenvectors_are_those_of_the_factors,
    setup=influence.SQUARE,
    seed=0,
    examples=1,
)
REDUCED = claim(influence.test_influence_of_reduced_gradients, examples=1)


INFLUENCE = (
    row("influence-factors-exchanged", DENSE,
        "rows are turned by the eigenvectors of the inputs",
        ("direction.influence.InfluenceFactors._solved",
         "(self.left, self.right,", "(self.right, self.left,")),
    row("influence-eigenvectors-transposed", DENSE,
        "Q G Q^T in place of Q^T G Q",
        ("direction.influence.InfluenceFactors._solved",
         "left.T @ matrix.to(dtype) @ right)", "left @ matrix.to(dtype) @ right.T)")),
    row("influence-damping-added-after-the-division", DENSE,
        "mu keeps no eigenvalue from zero",
        ("direction.influence.InfluenceFactors._solved",
         "/ (eigenvalues + mu)", "/ eigenvalues + mu")),
    row("influence-damping-without-a-unit", DENSE,
        "mu is no share of the eigenvalues",
        ("direction.influence.InfluenceFactors._solved",
         "damping * eigenvalues.mean()", "damping")),
    row("influence-damping-of-another-linear", DENSE,
        "the first linear's mean for all",
        ("direction.influence.InfluenceFactors._solved",
         "damping * eigenvalues.mean()", "damping * next(iter(self.eigenvalues.values())).mean()")),
    row("influence-eigenvalues-not-corrected", DENSE,
        "an outer product of both sides' sums, as the factors have it",
        ("direction.moments.CorrectedMoments.add", "gradient.square()",
         "torch.outer(*(gradient.square().sum(d) for d in (1, 0))) / gradient.square().sum()")),
    row("influence-gradient-of-the-last-use",
        claim(influence.test_influence_direction_is_the_dense_solve, setup=influence.TURNED,
            damping=0.1, samples=2, examples=1),
        "uses of a weight are not summed before they are squared",
        ("direction.moments.CorrectedMoments.add",
         "gradients[key] + part if key in gradients else part", "part")),
    row("influence-eigenvectors-in-rows", VECTORS,
        "the transposed eigenvectors are kept",
        ("direction.moments.CorrectedMoments.turn", ".eigenvectors)", ".eigenvectors.mT)")),
    row("influence-labels-drawn-anew", DENSE,
        "the second pass has other samples than the first",
        ("direction.fisher._Fit.run", "self._add(index % samples)", "self._add(index)")),
    row("influence-tokens-of-both-passes", DENSE,
        "eigenvalues half as large",
        ("direction.fisher._Fit._add", "if self.done < self.settings.samples:", "if True:")),
    row("influence-before-the-reduction", REDUCED,
        "each process solves with its own gradient alone",
        ("direction.inputs.DirectionInputs._mean",
         "(self.arguments.reduce or mean_gradient)", "mean_gradient")),
)  # fmt: skip
