"""Errors in the proofs that run on a user's model, and in the Fisher drift as an object.

A proof that is made vacuous lets the trap through that it is there for.
"""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property import test_direction, test_drift, test_proof_limits, test_proofs, test_sharded
from tests.property.mutants import SEVERAL, small
from tests.property.mutation import Claim, claim, row

SEEDS = st.integers(0, 2**16)


def trap(name: str) -> Claim:
    """One trap, which has to be refused."""
    return claim(test_proofs.test_a_trap_is_refused, name, examples=1, tested=True)


HIDDEN_USE = trap("hidden use")
MIXER = trap("hidden mixer")
UNEXPLAINED = claim(
    test_proofs.test_a_gradient_that_is_not_explained_is_named, st.sampled_from([1e-6, 1e-2]), True
)
DOCUMENTS = claim(test_proofs.test_documents_that_see_each_other_are_refused, SEEDS, examples=3)
AGAIN = claim(test_proofs.test_what_was_refused_is_refused_again, SEEDS, examples=2)
SLICED = claim(
    test_proofs.test_a_slice_shows_what_its_batch_shows,
    st.sampled_from(test_proofs.HIDDEN),
    st.sampled_from(list(test_proofs.LONG)),
    SEEDS,
    examples=12,
)
SLICED_DOCUMENTS = claim(
    test_proofs.test_a_slice_shows_which_documents_see_each_other, SEEDS, examples=2
)
CUT = claim(
    test_proofs.test_a_slice_is_a_part_of_its_batch,
    st.sampled_from([
        ("..pprr", "pprr..", "pr...."), ("pppprr", "rrpppp", "prprpr"), ("ppppr.", "ppp..."),
        ("pr|pprr", "pppp|pr"), ("pppprr", "pr|pprr"),
    ]),
    st.tuples(st.integers(1, 2), st.integers(3, 5)),
    st.sampled_from(test_proofs.FORMS),
    examples=40,
)  # fmt: skip
OWN_BACKWARD = claim(
    test_proofs.test_a_backward_of_its_own_is_refused, "a mask on a gradient", examples=1
)
FOLLOWED = claim(test_proofs.test_a_backward_that_is_followed, "padding row", examples=1)
AHEAD = claim(test_proofs.test_a_model_that_looks_ahead_is_refused, "path", examples=1)
ISOLATED = claim(test_proofs.test_isolation_is_claimed_only_where_it_was_shown, st.booleans())


SLICES = (
    row("slice-of-the-shortest-context", CUT,
        "the rows that are taken are those in which least can be shown",
        ("model.batch_slice._cut", "descending=True", "descending=False"),
        of_proofs=True),
    row("slice-of-the-first-response", CUT,
        "rows are taken as they come, and end at their first response token",
        ("model.batch_slice.around_responses",
         "offsets = torch.where(batch.mask, places - begun, -1)", "offsets = batch.mask.long()"),
        of_proofs=True),
    row("slice-that-ends-before-its-response", CUT,
        "the window ends one token too early",
        ("model.batch_slice.around_responses", "last + 1)", "last)"),
        of_proofs=True),
    row("slice-through-padding",
        claim(test_proofs.test_a_slice_is_a_part_of_its_batch, st.just(("....pr", "..pprr")),
            (1, 3), st.just("plain"), examples=1),
        "padding counts as context of the token after it",
        ("model.batch_slice.around_responses",
         "first = real & ~F.pad(real[:, :-1], (1, 0), value=False)", "first = places == 0"),
        of_proofs=True),
    row("slice-masked-as-the-first-row", CUT,
        "masks and positions of every row are those of the first",
        ("model.batch_slice._of_tokens",
         "return value[rows[:, None], columns]", "return value[rows[:1], columns]"),
        of_proofs=True),
    row("slice-with-pairs-exchanged", CUT,
        "a mask of pairs says who is seen where it should say who sees",
        ("model.batch_slice._of_tokens",
         "columns[:, :, None], columns[:, None, :]]", "columns[:, None, :], columns[:, :, None]]"),
        of_proofs=True),
    row("slice-with-a-value-for-its-first-token", CUT,
        "the token before the slice is taken to predict its first one",
        ("model.batch_slice._cut", "labels[:, 0], mask[:, 0] = IGNORE, False", "pass"),
        of_proofs=True),
    row("slice-of-one-document", CUT,
        "nothing of the document before the last one is left",
        ("model.batch_slice.around_documents", "last + LENGTH // 2", "last + LENGTH"),
        of_proofs=True),
    row("slice-of-rows-without-documents", CUT,
        "rows of one document are taken before rows of several",
        ("model.batch_slice.around_documents", "(last > 0).long()", "(last == 0).long()"),
        of_proofs=True),
)  # fmt: skip


NEVER_STALE = claim(test_direction.test_direction_is_never_stale, small(), "path")
PROOFS = (
    row("isolation-never-fails", MIXER,
        "errors at other positions are looked at, and forgiven",
        ("estimate.proofs.prove_isolation", "if bool((elsewhere != 0).any()):", "if False:"),
        of_proofs=True),
    row("isolation-of-the-first-token", MIXER,
        "the token that is sent back has no other position to leak to",
        ("estimate.proofs.prove_isolation",
         "torch.arange(mask.shape[1], device=mask.device)).argmax(-1)[rows]",
         "torch.arange(mask.shape[1], device=mask.device)).argmax(-1)[rows].clamp(max=1)"),
        of_proofs=True),
    row("isolation-of-the-ordinary-backward", ISOLATED,
        "the backward that is proved is not the one that is used",
        ("estimate.proofs.prove_isolation",
         'recorder.outputs, "self")', 'recorder.outputs, "ordinary")'),
        of_proofs=True),
    row("isolation-said-without-proof", ISOLATED,
        "the report calls a model isolated when no token could show it",
        ("estimate.proofs.prove_isolation", "return False", "return True"),
        of_proofs=True),
    row("coverage-never-fails", SLICED,
        "any relative error is accepted",
        ("direction.gradients.compare_gradients",
         "if not relative <= ", "if False and not relative <= "),
        of_proofs=True),
    row("coverage-as-loose-as-half-precision", UNEXPLAINED,
        "one tolerance for all dtypes: a part of 1e-3 may be missing in float64",
        ("direction.gradients.compare_gradients",
         "_COVERAGE_TOLERANCE.get(dtype, _COVERAGE_TOLERANCE_HALF)", "_COVERAGE_TOLERANCE_HALF"),
        of_proofs=True),
    row("coverage-of-what-was-seen", UNEXPLAINED,
        "a weight of which no use was captured is passed over",
        ("direction.gradients.compare_gradients", "if not parts:", "if len(parts) < 2:"),
        of_proofs=True),
    row("coverage-against-the-gradient-alone", UNEXPLAINED,
        "a gradient that cancels is a false alarm",
        ("direction.gradients.compare_gradients",
         "scale = max(scale, 0.0 if target is None else float(target.double().norm()))",
         "scale = 0.0 if target is None else float(target.double().norm())"),
        of_proofs=True),
    row("coverage-not-asked-for", HIDDEN_USE,
        "nothing is proved on the first forward",
        ("estimate.proofs.CaptureCheck.see",
         "if self.pending and self._scored.sharding is None:", "if False:"),
        of_proofs=True),
    row("documents-left-as-they-are", SLICED_DOCUMENTS,
        "the documents before the last one are not changed",
        ("estimate.batch_proofs.prove_documents", '"input_ids": other}', '"input_ids": ids}'),
        of_proofs=True),
    row("refused-documents-taken-for-proved", AGAIN,
        "a packed batch that was refused once is taken the second time",
        ("estimate.proofs.CaptureCheck._see_documents", "or arguments not in self._documents:",
         "or (arguments not in self._documents and not self._documents.add(arguments)):"),
        of_proofs=True),
    row("documents-of-another-forward", AGAIN,
        "packed rows of an observed forward are proved on one of the scorer's own",
        ("estimate.proofs.CaptureCheck._see_documents",
         "running=as_observed if observed else", "running="),
        of_proofs=True),
    row("flags-hide-no-label",
        claim(test_proofs.test_masks_of_flags_hide_labels, SEEDS, examples=2),
        "boolean attention masks hide no label",
        ("model.batch._off_padding", "attention_mask.shape != labels.shape:",
         "attention_mask.shape != labels.shape or attention_mask.dtype == torch.bool:")),
    row("autocast-off-after-an-error",
        claim(test_proofs.test_autocast_outlives_an_error, "cpu", examples=1),
        "autocast stays off after an error in full precision",
        ("support.precision.full_precision",
         "finally:", "except OSError:\n            raise\n        else:")),
    row("attentions-of-an-earlier-pass",
        claim(test_proofs.test_a_pass_leaves_nothing_to_the_next, SEEDS, examples=2),
        "attentions of an earlier observed pass stay",
        ("model.capture.Recorder._keep", "self.attentions.clear()", "pass")),
    row("documents-watched-in-the-wrong-place", DOCUMENTS,
        "the first document's logits are compared, which nothing comes before",
        ("estimate.batch_proofs.prove_documents",
         "watched = (places >= last)", "watched = (places == 0)"),
        of_proofs=True),
    row("padding-row-moves-the-input", FOLLOWED,
        "forward mode moves the row that an embedding's backward leaves out",
        ("estimate.forward_mode._embedding", "if padding_idx is not None:", "if False:")),
    row("any-backward-accepted", OWN_BACKWARD,
        "forward mode is not compared with autograd",
        ("estimate.derivatives.DerivativeProof.compare", "if _excess(worst) > 1.0:", "if False:"),
        of_proofs=True),
    row("another-parameter-blamed", OWN_BACKWARD,
        "the half that explains the difference less is searched",
        ("estimate.derivatives.DerivativeProof._part", "away[1] > away[0]", "away[1] <= away[0]"),
        of_proofs=True),
    row("thirty-times-the-stated-error",
        claim(test_proof_limits.test_three_times_the_stated_error_is_allowed_and_no_more, 8e-3,
            True, examples=1),
        "a derivative may be off by thirty times what it states",
        ("estimate.derivatives.DerivativeProof._compared",
         "3 * stated * reach", "30 * stated * reach"),
        of_proofs=True),
    row("one-sum-over-all-tokens",
        claim(test_proof_limits.test_errors_of_two_signs_are_seen, examples=1),
        "losses are compared in one sum, in which errors of two signs cancel",
        ("estimate.derivatives._signs", "* 2 - 1", "* 0 + 1"),
        of_proofs=True),
    row("differences-proved-where-m-is-0",
        claim(test_proof_limits.test_differences_are_proved_where_m_begins_as_zero, examples=1),
        "a proof along no M counts for those that come",
        ("estimate.label.Label.prove", "pending=not m", "pending=False"),
        of_proofs=True),
    row("proofs-at-first-use-alone",
        claim(test_proof_limits.test_a_branch_behind_a_gate_that_opens_is_refused, examples=1),
        "what weights had no part in at first is never looked at again",
        ("estimate.proofs.CaptureCheck.see_version", "self._versions > 1 and", "False and"),
        of_proofs=True),
    row("differences-after-a-disproof",
        claim(test_proof_limits.test_a_detached_branch_is_refused_whatever_its_numbers, 0, "auto",
            examples=1),
        "what forward mode disproves is left to differences",
        ("estimate.label.Label._prove_derivative", "raise refusal\n    if", "pass\n    if"),
        of_proofs=True),
    row("one-look-ahead-accepted", AHEAD,
        "a prediction may see its own token",
        ("estimate.batch_proofs.prove_causality",
         "places >= first[:, None]", "places > first[:, None]"),
        of_proofs=True),
    row("small-look-ahead-accepted",
        claim(test_proof_limits.test_a_thousandth_of_the_next_token_is_seen, 1e-3, examples=1),
        "a prediction may see a tenth of the next token",
        ("estimate.batch_proofs.prove_causality", "later > 1e-4 *", "later > 0.1 *"),
        of_proofs=True),
    row("flags-say-nothing",
        claim(test_proof_limits.test_what_arguments_say_of_who_sees_whom, "a flag", examples=1),
        "a pass with is_causal=False is taken for one that was proved",
        ("estimate.batch_proofs.argument_kinds", 'kinds.add(f"{name}={value}")', "pass"),
        of_proofs=True),
    row("next-token-in-a-mask-unread",
        claim(test_proof_limits.test_what_arguments_say_of_who_sees_whom, "one pair ahead",
            examples=1),
        "a mask of pairs that lets a token see the next one is taken for causal",
        ("estimate.batch_proofs.argument_kinds", "triu(1)", "triu(2)"),
        of_proofs=True),
    row("mixers-taken-for-attention", trap("named mixer"),
        "a layer without softmax attention is given a direct value",
        ("estimate.proofs.require_self_rule", "if scope.mixers:", "if False:"),
        of_proofs=True),
    row("dropout-scored-as-if-it-were-off", trap("attention dropout"),
        "the recomputed attention weights do not contain the pass's dropout mask",
        ("estimate.proofs.require_self_rule", "if dropped:", "if False:"),
        of_proofs=True),
)  # fmt: skip
STRUCTURE = st.sampled_from(["diagonal", "kronecker"])
V = claim(test_drift.test_v_is_the_definition, SEEDS, "diagonal", examples=4)
V_KRONECKER = claim(test_drift.test_v_is_the_definition, SEEDS, "kronecker", examples=4)
FILES = claim(test_drift.test_files_give_the_same_drift, SEEDS, "kronecker", examples=3)
FILES_DIAGONAL = claim(test_drift.test_files_give_the_same_drift, SEEDS, "diagonal", examples=3)
DISTANCE = claim(
    test_drift.test_drift_is_the_relative_distance, SEEDS, st.sampled_from([0.01, 0.5]), examples=6
)
ROUNDED = claim(test_drift.test_a_drift_that_is_rounding_is_said, "bfloat16", "float32", examples=1)
FOREIGN = claim(test_drift.test_a_fisher_of_something_else_is_refused, SEEDS, STRUCTURE, examples=4)


def sharded(retention: str) -> Claim:
    """V from parts of the weights."""
    check = test_sharded.test_sharded_values_equal_whole_ones
    return claim(check, small(validations=SEVERAL), "path", retention, examples=4)


DRIFT = (
    row("fisher-squared-again", V,
        "V = F^2 o (W - W_ref)",
        ("direction.drift.FisherDrift._V",
         "diagonal_drift(self.fisher[name].to(weight.device), weight, reference)",
         "diagonal_drift(self.fisher[name].to(weight.device) ** 2, weight, reference)")),
    row("reference-not-subtracted", V,
        "V = F o W",
        ("direction.drift.FisherDrift._V", "reference = self.reference[name].to(weight.device)",
         "reference = 0 * self.reference[name].to(weight.device)")),
    row("kronecker-sides-exchanged", V_KRONECKER,
        "V = A_F (W - W_ref) S_F",
        ("direction.drift.FisherDrift._V", "return kronecker_drift(left, right, weight, reference)",
         "return kronecker_drift(right, left, weight, reference)")),
    row("rounding-taken-for-drift", ROUNDED,
        "a Fisher of rounded weights is taken without a word",
        ("direction.drift.FisherDrift.lost_in", "left < apart / 4", "left > apart")),
    row("drift-taken-for-rounding", ROUNDED,
        "what training did between two dtypes is said to be rounding",
        ("direction.drift.FisherDrift.lost_in", "left < apart / 4", "left < 100 * apart")),
    row("fisher-of-another-parameter", V,
        "every weight is multiplied with the first one's Fisher",
        ("direction.drift.FisherDrift._V", "self.fisher[name].to(weight.device), weight",
         "self.fisher[self.names[0] if weight.dim() == 2 else name].to(weight.device), weight")),
    row("change-seen-by-its-version-only", NEVER_STALE,
        "a weight that is written to through .data is taken for the one of before",
        ("model.fingerprint.numbers_of",
         "by_kind.setdefault((words.device, words.dtype), []).append(words)",
         "digests.append((id(tensor), tensor._version))")),
    row("change-seen-by-a-sum", NEVER_STALE,
        "numbers that change places are taken for those of before",
        ("model.fingerprint._digest",
         "(rest * factors[: len(rest)]).sum(0, keepdim=True)", "rest.long().sum(0, keepdim=True)")),
    row("change-seen-in-the-last-weight-alone", NEVER_STALE,
        "of the weights that are read together all but the last are lost",
        ("model.fingerprint._joined", "some.append(one)", "some[:] = [one]")),
    row("scope-of-what-trained", NEVER_STALE,
        "a scorer goes on with the parameters that trained when it was made",
        ("scorer.Scorer._follow", "same = trained_of(model) == self._trained", "same = True")),
    row("half-precision-reference", V,
        "the reference weights are rounded to half precision",
        ("direction.drift.FisherDrift._V",
         "self.reference[name].to(weight.device)", "self.reference[name].half().to(weight)")),
    row("factors-exchanged-in-the-file", FILES,
        "left is written where right is read",
        ("direction.drift.FisherDrift.save", 'f"left/{name}": left, f"right/{name}": right',
         'f"left/{name}": right, f"right/{name}": left')),
    row("reference-read-for-the-fisher", FILES_DIAGONAL,
        "a file gives its reference weights for its Fisher",
        ("direction.drift.FisherDrift.load",
         'tensors[f"fisher/{n}"]', 'tensors[f"reference/{n}"].abs()')),
    row("any-distance-accepted", DISTANCE,
        "a Fisher of unrelated weights is used",
        ("direction.drift.check_distance", "if not middle <= most:", "if False:")),
    row("distance-of-the-reference-from-zero", DISTANCE,
        "the relative drift is 1 whatever has moved",
        ("direction.drift.FisherDrift.drift", "(weight.to(torch.float32) - reference).norm()",
         "(0 * weight.to(torch.float32) - reference).norm()")),
    row("any-architecture-accepted", FOREIGN,
        "a Fisher of another model of equal shapes is used",
        ("direction.drift.FisherDrift.check_identity", "if differing:", "if False:")),
    row("any-shape-accepted", FOREIGN,
        "a Fisher of other shapes is broadcast",
        ("direction.drift.FisherDrift.require", "if tuple(shape) != tuple(self.shapes[name]):",
         "if len(shape) != len(self.shapes[name]):")),
    row("part-of-the-fisher-forgotten", sharded("diagonal"),
        "where weights are sharded, V = W - W_ref",
        ("direction.drift.ShardedDrift.direction",
         "diagonal_drift(self._fisher[name], self._part(name), self._reference[name])",
         "diagonal_drift(1 + 0 * self._fisher[name], self._part(name), self._reference[name])")),
    row("kronecker-v-of-the-reference", sharded("kronecker"),
        "where weights are sharded, the Kronecker V is that of weights twice as far away",
        ("direction.drift.ShardedDrift.direction", "self._drift.direction({name: whole})[name]",
         "self._drift.direction({name: 2 * whole - self._drift.reference[name]})[name]")),
)  # fmt: skip
