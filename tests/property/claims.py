"""The table of claims: what each property proves, of which equation, by which oracle.

One line a property: its name | method | oracle | kind. Which equations of the paper it proves is in
``EQUATIONS``. The claim itself is the first paragraph of the property's docstring; the mutants are
those of the catalogue that name it. Oracles are functions of ``alphatoken.oracle``, compared with
or the scale of a tolerance; in brackets stands another truth.

Kind is of the quantity, not of the check, which is always to rounding: ``exact``; ``unbiased`` (its
mean is exact); ``approximate`` (the method's own approximation, computed as it is defined).
"""

# ruff: noqa: E501  (one line a property)
from __future__ import annotations

from dataclasses import dataclass

KINDS = ("exact", "unbiased", "approximate")

_ALPHATOKEN = "test_alphatoken_is_direct_plus_propagation"
_BOUND = ("test_the_bound_holds_and_each_term_is_what_its_name_says",)
_JACOBIAN = "test_closed_form_is_the_autograd_jacobian"
_PARTS = "test_objective_and_part"
_RESIDUAL = "test_what_propagation_misses_in_the_last_layer_is_known_exactly"
_ROUTING = "test_the_papers_routing_counts_each_block_once_and_at_position_k"
_STEP = "test_the_trainer_is_the_reference"
_WORD_BY_WORD = "test_the_equation_word_by_word_is_label_value_plus_propagation"

EQUATIONS: dict[str, tuple[str, ...] | str] = {
    "composite_val": ("test_direction_algebra",),
    "grad_alignment": (
        "test_label_is_the_row_sums_along",
        "test_label_over_all_parameters",
        "test_label_over_named_parameters",
        "test_a_backward_that_is_followed",
        "test_differences_are_the_label_values",
        "test_observed_label_values",
        "test_label_values_are_directional_derivatives_of_each_loss",
        "test_rows_of_the_oracle_are_label_values",
    ),
    "causal_decomp": (_WORD_BY_WORD,),
    "retention_taylor": "an approximation that leaves the first-order term out; `app_taylor`, with "
    "this term, is proved",
    "fisher_proxy": ("test_diagonal_drift",),
    "mc_fisher": (
        "test_the_diagonal_is_the_mean_of_squared_sequence_gradients",
        "test_the_fit_expects_the_exact_fisher",
        "test_monte_carlo_fisher_is_unbiased",
    ),
    "gproxy": ("test_diagonal_drift", "test_v_is_the_definition"),
    "phi_proxy": (_ALPHATOKEN, _PARTS),
    "phi_tgt_dir": ("test_direct_is_the_diagonal", "test_gram_is_projected"),
    "phi_tgt_causal": (_ALPHATOKEN,),
    "V_layer": ("test_diagonal_drift", "test_v_is_the_definition"),
    "ap_gdp": ("test_projected_is_the_loop",),
    "phi_total": (_ALPHATOKEN, "test_lambda", _PARTS, _STEP),
    "sft_masked_loss": ("test_sft_loss", _STEP),
    "dpo_masked_loss": ("test_masked_dpo_gradient", "test_dpo_coefficient", _STEP),
    "val_objective": "the best mask of a whole training is never computed",
    "train_objective": "the best mask of a whole training is never computed",
    "global_utility_def": "the utility of a whole training is never computed; that of one step, "
    "`local_utility_def`, is",
    "masked_update": ("test_leave_one_out_is_the_last_marginal_of_the_game",),
    "local_utility_def": (
        "test_leave_one_out_is_the_last_marginal_of_the_game",
        "test_utility_is_first_order_the_label_value",
    ),
    "first_order_delta": ("test_utility_is_first_order_the_label_value",),
    "shapley_closed_form_step": ("test_shapley_of_a_step_tends_to_the_label_values",),
    "composite_val_obj": ("test_direction_algebra",),
    "decomposition": ("test_lambda", _PARTS),
    "app_causal_decomp": (_WORD_BY_WORD, _ROUTING),
    "app_two_paths": (_JACOBIAN,),
    "app_score_path": (_JACOBIAN, _RESIDUAL),
    "app_exact_jacobian": (_JACOBIAN,),
    "app_via_t": (_ROUTING, "test_the_papers_routing_does_not_add_up_to_the_gradient"),
    "app_dpo_unroll": "the sum that it rearranges is not the gradient "
    "(`test_the_papers_routing_does_not_add_up_to_the_gradient`; row 1 of the gaps)",
    "app_rank1": "false as written: the loss of one token uses a weight at every position before "
    "it (row 2 of the gaps); the sum over positions is `test_outer_sum_is_the_weight_gradient`",
    "app_rank1_factor": ("test_gram_is_the_loop",),
    "app_aa_direct": ("test_gram_is_the_loop", "test_gram_is_projected"),
    "app_causal_rank1": (_ALPHATOKEN,),
    "app_aa_causal": ("test_propagation_is_exact_for_the_last_value_projection",),
    "app_ap_gdp": ("test_projected_is_the_loop",),
    "app_score_residual": ("test_residual_norm_is_exact_and_bounded", _RESIDUAL),
    "app_value_path_bound": (
        "test_residual_norm_is_exact_and_bounded",
        "test_both_bounds_hold_after_the_output_projection",
    ),
    "app_taylor": _BOUND,
    "app_proxy_bound": _BOUND,
    "app_F_ret_dagger": _BOUND,
    "app_gap_decomp": _BOUND,
    "app_wasser": ("test_transfer_is_below_lipschitz_times_wasserstein",),
    "app_final_bound": "its parts are (`app_proxy_bound`, `app_gap_decomp`, `app_wasser`); the "
    "one inequality that joins them is not evaluated",
}
"""Every numbered equation of the paper, by its label: the rows that prove it, or why none does."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    labels: tuple[str, ...]
    oracles: tuple[str, ...]
    kind: str


_TABLE = """
# readouts of the influence matrix
test_label_is_the_row_sums | | row_sums, exact_influence | exact
test_path_is_the_column_sums | | column_sums, exact_influence | exact
test_direct_is_the_diagonal | | diagonal | exact
test_label_is_linear_in_m | | (values along M) | exact
test_label_is_the_row_sums_along | | label_values, validation_gradient | exact
test_label_over_all_parameters | | label_values, per_token_gradients, response_tokens | exact
test_label_over_named_parameters | | label_values, per_token_gradients, response_tokens | exact
test_weighted_losses | | row_sums, column_sums, diagonal | exact
test_observed_label_values | | label_values | exact
test_tangents_at_other_hidden_states | | label_values | exact
test_label_starts_at_the_observed_hidden_states | | (a pass of its own) | exact
test_the_four_readouts_are_what_their_names_say | | row_sums, column_sums, diagonal, causal | exact
test_terms_and_scale_agree_with_the_matrix | | exact_influence | exact
test_every_entry_is_the_effect_of_moving_one_use | | exact_influence, (finite differences) | exact
test_gap_1_the_total_needs_the_prompt_positions | | unassigned, label_values | exact
test_token_losses_are_cross_entropies_at_the_index_of_the_predicted_token | | token_losses | exact
test_label_values_are_directional_derivatives_of_each_loss | | label_values, (finite differences) | exact
test_token_index_is_one_past_the_label_position | | to_token_index | exact
# label values by differences
test_sharded_label_values_are_the_oracles | | label_values, validation_gradient, per_token_gradients, response_tokens | exact
test_a_refreshed_scorer_is_a_new_one | | (a new scorer) | exact
test_a_shift_is_what_it_says | | (the weights before) | exact
test_a_shift_that_would_drown_is_refused_with_its_reason | | (dtypes) | exact
test_a_tied_weight_moves_once | | (the weights before) | exact
test_what_a_signal_raises_while_weights_come_back_waits_for_the_last | | (the weights before) | exact
test_an_observed_forward_with_dropout_is_no_base | | (forward mode) | exact
test_an_observed_forward_in_16_bits_is_no_base | | (forward mode in float64) | approximate
test_differences_are_the_label_values | | label_values, validation_gradient, per_token_gradients, response_tokens | exact
test_an_observed_forward_whose_scores_were_cast_is_no_base | | label_values | approximate
test_the_stated_error_is_that_of_its_batch | | (forward mode in float64) | approximate
test_rows_that_m_hardly_reaches_are_taken_by_forward_mode_and_no_others | | (forward mode) | approximate
test_few_tokens_may_agree_by_chance | | (forward mode in float64) | approximate
test_the_stated_error_is_that_of_the_worse_side | | (errors that were stated) | exact
test_values_of_a_mixture_are_derivatives | | label_values | exact
test_differences_of_a_mixture_are_looked_at_token_by_token | | label_values | approximate
test_one_small_jump_among_many_tokens_is_seen | | (a jump that was put there) | exact
test_curvature_of_one_large_token_is_no_jump | | (quotients by hand) | exact
test_a_batch_without_values_puts_no_look_off | | (ages that were stated) | exact
test_a_batch_of_another_size_is_looked_at | | (ages that were stated) | exact
test_a_truncation_grows_with_values_that_were_not_looked_at | | (errors by hand) | exact
test_an_infinite_loss_on_either_side_is_named | | (a loss that was put there) | exact
test_auto_takes_forward_mode_through_a_mixture_of_experts | | (which way is taken) | exact
test_in_float32_the_stated_error_bounds_the_true_one | | (forward mode in float64) | approximate
test_more_curved_rows_are_seen_in_the_stated_error | | (forward mode) | approximate
test_the_step_is_kept_until_m_changes_its_length | | label_values, validation_gradient | exact
test_weights_come_back_after_an_exception_in_a_shifted_forward | | (the weights before) | exact
# values along a walk
test_walk_values_are_those_of_a_trained_copy | | walked, walk_values | exact
test_a_forward_with_dropout_is_run_again | | walked, walk_values | exact
test_token_weights_scale_their_token | | (values without weights) | exact
test_values_are_differences_of_whole_runs | | run_values, run_end, run_loss, (differences of whole runs) | exact
test_values_of_every_decoder_are_differences | | run_values, run_end, run_loss, (differences of whole runs) | exact
test_a_run_is_that_of_torch | | run_end, (torch's optimizers) | exact
test_one_step_of_sgd_gives_label_values | | run_values, run_end, label_values, validation_gradient | exact
test_the_last_step_of_adamw_is_the_full_preconditioner | | run_values, run_end, label_values, validation_gradient | exact
test_one_weight_for_all_steps_has_the_sum | | run_values, run_end, run_loss, (differences of whole runs) | exact
test_a_ledger_leaves_out_what_later_steps_do | | run_values, ledger_values, run_end, label_values, validation_gradient, hessian | exact
test_states_between_those_that_are_kept_change_no_bit | | run_values, (all states kept) | exact
test_one_short_step_is_the_label_value | | label_values, validation_gradient | exact
test_a_walk_on_a_quadratic_is_the_filtered_newton_step | | (closed form) | exact
test_a_walk_value_is_the_mean_label_value_along_the_way | | label_values_along | exact
test_first_order_is_off_by_the_curvature_along_the_way | | curvature_along, label_values | exact
test_values_of_a_chain_of_walks_add_up | | walked | exact
test_a_new_walk_is_taken_when_it_is_due | | walked, walk_values | exact
test_other_validation_rows_and_a_refresh_take_a_new_walk | | walked, walk_values | exact
test_a_changed_setting_keeps_the_walk | | walked, walk_values | exact
test_a_walk_on_pairs_lowers_the_preference_loss | | walk_values, (steps on the preference objective) | exact
test_sharded_walk_values_are_those_of_a_trained_copy | | walked, walk_values | exact
test_weights_in_16_bits_walk_in_float32 | | (the walk in float32) | exact
test_autocast_keeps_no_cast_of_weights_that_moved | | (values without autocast) | approximate
test_a_walk_that_climbs_is_said | | (the validation loss) | exact
# Value-Propagation and hops
test_alphatoken_is_direct_plus_propagation | | value_propagation, head_output_errors | approximate
test_paper_literal | | value_propagation | approximate
test_no_window_no_causal_part | | (direct, bit by bit) | exact
test_a_window_as_long_as_the_row_is_no_window | | value_propagation | approximate
test_propagation_is_exact_for_the_last_value_projection | | exact_influence, value_propagation | exact
test_same_layer_hop_is_one_hop_within_the_layer | | one_hop | approximate
test_value_propagation | | (explicit attention) | approximate
test_one_head_makes_both_reductions_equal | | (explicit attention) | exact
test_the_equation_word_by_word_is_label_value_plus_propagation | | equation_causal_decomp | approximate
test_the_papers_routing_counts_each_block_once_and_at_position_k | | via_t | approximate
test_the_papers_routing_does_not_add_up_to_the_gradient | | via_t, label_values | exact
test_what_propagation_misses_in_the_last_layer_is_known_exactly | | value_propagation_error, value_propagation_pairs | exact
test_weights_and_deviations_of_pairs | | attend | exact
test_counts_of_pairs | | (counting one by one) | exact
test_shares_above_powers_of_ten | | (counting one by one) | exact
# the diagnostic that compares arithmetics
test_each_arithmetic_has_the_scorers_values | | (a scorer under autocast, a model loaded in 16 bits) | exact
test_a_model_that_has_not_moved_drifts_in_no_arithmetic | | (values without retention) | exact
test_the_four_numbers_by_hand | | (loops) | exact
test_what_other_rows_change_is_counted_draw_by_draw | | (loops over draws) | exact
test_planted_rounding_turns_the_verdict | | (planted rounding) | exact
# attention: the switched backward and the forward mode
test_self_backward_is_the_diagonal | | (explicit attention) | exact
test_ordinary_backward_is_the_kernels | | (the model's kernel, bit by bit) | exact
test_the_mode_is_read_at_backward_time | | (a forward for each mode) | exact
test_log_sum_exp_and_weights | | (explicit softmax) | exact
test_a_flash_call_is_what_the_model_computes | | (explicit attention) | exact
test_flash_values_are_eager_ones | | (values on eager attention) | exact
test_forward_mode_is_the_jvp | | (explicit attention) | exact
test_no_square_of_the_length | | (shapes of every tensor) | exact
test_closed_form_is_the_autograd_jacobian | | cross_position_jacobian, jacobian_by_autograd | exact
test_residual_norm_is_exact_and_bounded | | score_residual_norm, value_path_bound | exact
test_both_bounds_hold_after_the_output_projection | | residual_after_output, output_bounds | exact
test_the_layer_is_the_textbook_one | | attend | exact
# gated delta nets
test_the_self_backward_holds_the_incoming_state | | delta_rule | exact
test_the_ordinary_backward_is_the_kernels | | (the kernel's own, bit by bit) | exact
test_one_forward_of_the_rule_serves_both_backwards | | (a forward for each mode) | exact
test_the_convolution_alone | | convolve | exact
test_carried_errors_are_the_coefficients | | coefficients | exact
test_propagation_goes_through_the_taps | | propagated_parts | approximate
test_what_is_left_out_is_bounded | | net_jacobian, value_path, left_out_bound | exact
test_direct_is_the_diagonal_of_a_hybrid | | exact_influence, diagonal, column_sums | exact
test_propagation_is_exact_for_the_value_rows | | exact_influence, causal | exact
test_the_certificate_of_a_hybrid | | (every value from autograd alone) | exact
test_one_forward_of_a_hybrid_serves_both | | (the plain model, bit by bit) | exact
test_overrides_of_delta_nets_leave_nothing_behind | | (the modeling file before) | exact
test_a_cached_pass_is_refused | | (traps) | exact
test_a_state_to_begin_with_is_told | | (a pass without a cache) | exact
test_a_cache_that_begins_changes_no_value | | (a pass without a cache) | exact
# mixtures of experts
test_values_over_linears_and_experts | | expert_influence, exact_influence | exact
test_weights_are_explained | | (autograd) | exact
test_rows_make_the_models_own_output | | (transformers' own code) | exact
test_contraction_is_the_loop | | (loops over rows) | exact
test_one_forward_serves_both | | (an untouched model) | exact
test_rows_of_the_oracle_are_label_values | | expert_influence, label_values | exact
test_every_entry_is_the_effect_of_moving_one_copy | | expert_influence, (finite differences) | exact
# contraction
test_projected_is_the_loop | | (loops over rank-1 matrices) | exact
test_gram_is_the_loop | | (loops over pairs of tokens) | exact
test_gram_is_projected | | (the other route) | exact
test_outer_sum_is_the_weight_gradient | | (autograd) | exact
test_narrow_inputs_are_widened | | (float32 copies, bit by bit) | exact
test_errors_streamed_are_the_errors_kept | | (errors kept, bit by bit) | exact
# objective and direction
test_validation_gradient | | validation_gradient | exact
test_preference_validation | | preference_objective | exact
test_lambda | | (lambda = 1) | exact
test_direction_algebra | | (entry by entry) | exact
test_objective_and_part | | exact_influence, value_propagation | exact
test_total_alone | | (values with parts) | exact
test_replaced_sides_equal_a_fresh_scorer | | (a fresh scorer) | exact
test_pinned_direction | | (a scorer at the pinned weights) | exact
test_direction_is_never_stale | | (a fresh scorer, bit by bit) | exact
test_reduced_gradient | | (one process with all batches) | exact
test_sharded_values_equal_whole_ones | | exact_influence, (whole weights) | exact
test_a_sharded_direction_is_never_stale | | (a fresh scorer, bit by bit) | exact
test_sharded_preconditioners | | (whole weights) | exact
# retention
test_diagonal_drift | | (entry by entry) | exact
test_retention_by_data | | validation_gradient, exact_influence | exact
test_v_is_the_definition | | (loops) | exact
test_files_give_the_same_drift | | (the drift that was saved, bit by bit) | exact
test_drift_is_the_relative_distance | | (norms) | exact
test_a_fisher_of_something_else_is_refused | | (refusals) | exact
test_token_fisher_squares_labels_of_the_model | | (autograd, label by label) | unbiased
test_the_diagonal_is_the_mean_of_squared_sequence_gradients | | (autograd, response by response) | unbiased
test_kronecker_factors_are_sums_over_positions_of_inputs_and_errors | | (loops over positions) | approximate
test_the_fit_expects_the_exact_fisher | | exact_fisher | unbiased
test_monte_carlo_fisher_is_unbiased | | monte_carlo_fisher, exact_fisher | unbiased
test_full_fisher_is_the_hessian_of_the_divergence | | exact_fisher, kl_hessian | exact
test_token_fisher_is_the_hessian_on_given_prefixes | | exact_token_fisher, hessian | exact
test_hessian_and_third_derivative_agree_with_differences | | hessian, retention_loss, retention_gradient | exact
test_the_bound_holds_and_each_term_is_what_its_name_says | | proxy_bound, expected_retention_loss | exact
test_transfer_is_below_lipschitz_times_wasserstein | | transfer_bound, lipschitz_constant, prompt_fishers | exact
test_wasserstein_equals_the_linear_programme | | wasserstein, (linear programme) | exact
# preconditioner and optimizers
test_full_preconditioner | | adam_step_derivative | exact
test_frozen_preconditioner | | adam_preconditioner | approximate
test_floor_bounds_the_preconditioners | | (the bound itself) | exact
test_adam_preconditioner | | adam_preconditioner, exact_influence | approximate
test_given_preconditioner | | exact_influence | exact
test_influence_direction_is_the_dense_solve | | corrected_fisher, damped_solve | exact
test_eigenvectors_are_those_of_the_factors | | (the factors in their eigenvectors) | exact
test_identity_factors_and_large_damping | | (G itself) | exact
test_values_along_influence_directions | | exact_influence, (a retention term that is M) | exact
test_influence_of_reduced_gradients | | (one process with all batches) | exact
test_full_is_the_derivative_of_a_real_step | | (the optimizer's own step) | exact
test_adam_of_torch_is_the_oracles | | adam_step_derivative | exact
test_full_values_are_the_steps_derivative | | adam_step_derivative | exact
test_full_scales_the_direction_of_captured_estimators | | adam_preconditioner, exact_influence | exact
test_full_preconditioner_is_the_derivative_of_the_update | | adam_step, adam_step_derivative | exact
# utility
test_utility_is_first_order_the_label_value | | leave_one_out_utility, sgd_step | approximate
test_leave_one_out_is_the_last_marginal_of_the_game | | leave_one_out_utility, one_step_utility | exact
test_shapley_of_a_step_tends_to_the_label_values | | exact_shapley, one_step_utility | approximate
# losses
test_token_losses | | (loops) | exact
test_head_losses | | (loops) | exact
test_head_tangents | | (autograd through loops) | exact
test_own_forward | | (logits of a whole forward) | exact
test_logits_changed_in_place | | (the logits as they were left) | exact
test_scores_of_another_forward | | (a refusal) | exact
test_losses_that_autocast_rounded | | (a refusal) | exact
test_losses_that_16_bits_rounded_somewhere | | label_values, validation_gradient | approximate
test_losses_asked_twice | | (cross-entropy of the logits) | exact
test_gradient_and_tangent_of_token_losses | | (autograd through loops) | exact
test_sft_loss | | (loops) | exact
test_full_mask_is_cross_entropy | | (transformers' loss) | exact
test_unmasked_dpo_gradient | | dpo_loss | exact
test_masked_dpo_gradient | | dpo_token_errors | exact
test_dpo_coefficient | | dpo_omega, dpo_margin | exact
test_masked_logit_is_the_ablation | | masked_dpo_omega | exact
test_masked_logit_at_the_reference | | masked_dpo_omega | exact
test_surrogate_with_all_masks_one_has_the_gradient_of_dpo | | masked_dpo_gradient, dpo_gradient | exact
# selection and weights
test_keep_count | | (decimal fractions) | exact
test_selection | | (a sort of tuples) | exact
test_response_values | | (loops) | exact
test_means_of_responses_are_summed_wider_than_their_values | | (by hand) | exact
test_standard_errors | | standard_errors, (values against all batches but one) | exact
test_values_by_batch | | (scorers of each batch alone) | exact
test_errors_are_unbiased | | (variance over draws) | approximate
test_harmless | | (loops, quantile by bisection) | exact
test_top_mask | | (select_top) | exact
test_best_rows | | (a loop over the rows) | exact
test_rows_from_any_place | | (the lines themselves) | exact
test_corpus | | (split_pools on the whole list) | exact
test_each_query_has_the_values_that_it_has_alone | | label_values, validation_gradient | exact
test_marked_turns | | (the marks themselves) | exact
test_padding_never_ranks | | (the same without padding) | exact
# layouts, models, proofs
test_layout_does_not_matter | | (the document alone) | exact
test_padding_holds_nothing | | (other padding, bit by bit) | exact
test_observed_equals_scored | | (score, and a fresh run) | exact
test_model_is_left_alone | | (a snapshot) | exact
test_frozen_linears_are_out_of_scope | | row_sums, column_sums | exact
test_a_trap_is_refused | | (traps) | exact
test_three_times_the_stated_error_is_allowed_and_no_more | | (derivatives that are off by so much) | exact
test_errors_of_two_signs_are_seen | | (derivatives that are off by so much) | exact
test_a_detached_branch_is_refused_whatever_its_numbers | | (a branch without gradients) | exact
test_differences_are_proved_where_m_begins_as_zero | | label_values | exact
test_a_branch_behind_a_gate_that_opens_is_refused | | (a branch without gradients) | exact
test_a_sum_that_cancels_is_measured_by_the_others | | (forward mode) | exact
test_probabilities_near_one_are_rounded_and_no_fault | | (forward mode in float64) | approximate
test_a_backward_of_its_own_is_refused | | (hooks, clipped errors, a branch without gradients) | exact
test_a_backward_that_is_followed | | label_values, validation_gradient | exact
test_a_model_that_looks_ahead_is_refused | | (a model that does) | exact
test_a_thousandth_of_the_next_token_is_seen | | (a model that does) | exact
test_what_arguments_say_of_who_sees_whom | | (arguments by hand) | exact
test_isolation_is_claimed_only_where_it_was_shown | | (long and short rows) | exact
test_a_gradient_that_is_not_explained_is_named | | (parts left out) | exact
test_documents_that_see_each_other_are_refused | | (a model that leaks) | exact
test_what_was_refused_is_refused_again | | (a model that leaks) | exact
test_masks_of_flags_hide_labels | | (a mask of numbers) | exact
test_autocast_outlives_an_error | | (autocast as it was) | exact
test_a_pass_leaves_nothing_to_the_next | | (a pass by itself) | exact
test_a_slice_is_a_part_of_its_batch | | (entry by entry) | exact
test_a_slice_shows_what_its_batch_shows | | (the whole batch) | exact
test_a_slice_shows_which_documents_see_each_other | | (the whole batch) | exact
test_scored_linears_are_the_linears_of_these_layers | | (the modules' own outputs) | exact
test_what_is_not_scored_is_named | | (the blocks' parameters) | exact
test_a_call_is_what_the_model_computes | | (attention written out) | exact
test_overrides_leave_nothing_behind | | (the models without overrides) | exact
test_rows_beyond_the_limit_are_refused | | (the configuration) | exact
test_layers_without_softmax_are_named | | (LFM2's layers, Qwen-3.5's) | exact
test_decoding_is_the_forward | | (one forward) | exact
# certificate, trainers and other methods
test_right_code_agrees | | (every component anew) | exact
test_a_mutant_does_not_agree | | (mutants of the core) | exact
test_the_trainer_is_the_reference | | (reference_step.py) | exact
test_random_masks | | (masks of two runs) | exact
test_draws_are_of_seed_step_micro_batch_and_process | | (seeds of all keys) | exact
test_retention_rows_are_drawn_apart_from_validation_rows | | (the other pool) | exact
test_every_step_is_weighed | | (a run without outputs) | exact
test_pools_begin_at_log_two | | (log 2) | exact
test_a_moving_reference_is_looked_at_anew | | (log 2) | exact
test_a_collator_labels_every_batch | | (the collator's labels) | exact
test_the_routers_loss_is_trained | | (transformers' own trainer) | exact
test_rounding_is_told_from_results | | (by hand) | exact
test_a_reference_reads_the_policys_tokens | | (by hand) | exact
test_tokens_without_a_row_are_refused | | (the vocabulary) | exact
test_gradients_that_count_tokens_are_refused | | (the scope) | exact
test_stm_by_hand | STM | (by hand) | exact
test_stm_takes_easy_tokens_first | STM | (by hand) | exact
test_known_tokens_by_hand | XTF | (by hand) | exact
test_task_relevance_by_hand | XTF | (by hand) | exact
test_the_second_lowest_class_is_dropped | XTF | (by hand) | exact
test_otsu_by_hand | XTF | (by hand) | exact
test_attention_received_against_the_eager_matrices | XTF | (eager attention matrices) | exact
test_rho_1_by_hand | Rho-1 | (by hand) | exact
test_validation_rows_come_first | Validation rows first | (TRL on the same rows) | exact
test_the_first_training_has_a_schedule_of_its_own | Validation rows first | (the same training in a run of another schedule) | exact
test_rho_1_by_response | Rho-1 | (by hand) | exact
test_rho_1_trains_its_reference | Rho-1 | (TRL on the same rows) | exact
test_a_reference_is_trained_once | Rho-1 | (TRL on the same rows) | exact
test_talr_by_hand | TALR | (by hand) | exact
test_dft_by_hand | DFT | (by hand) | exact
test_eaft_by_hand | EAFT | (by hand) | exact
test_prompt_and_response_are_cut_apart | | (slices by hand) | exact
test_critical_tokens_are_those_of_one_continuation_at_a_time | CFT | (transformers' generation) | exact
test_the_mask_is_kept_and_found_in_any_batch | CFT | (by hand) | exact
test_the_last_answer_counts | CFT | (by hand) | exact
test_sstoken_by_hand | ssToken | (by hand) | exact
test_prompt_attention_averages_heads | ssToken | (dense softmax) | exact
test_flow_by_hand | FLOW | (by hand) | exact
test_flow_by_token_and_temperature | FLOW | (by hand) | exact
test_token_cleaning_by_hand | Token Cleaning | (by hand) | exact
test_less_against_autograd_by_hand | LESS | (autograd, row by row) | exact
test_filling_by_tokens | LESS | (fractions) | exact
test_adam_update_by_hand | LESS | (by hand) | exact
test_standard_keeps_all | standard | (ones) | exact
test_confpo_by_hand | ConfPO | (by hand) | exact
test_confpo_keeps_what_is_below_the_mean_probability | ConfPO | (loops) | exact
test_sepo_by_hand | SePO | (by hand) | exact
test_importance_weights_by_hand | TI-DPO | (by hand) | exact
test_attribution_is_finite_differences | TI-DPO | (finite differences) | exact
test_sequence_divergence_is_the_loop | TI-DPO | (loops) | exact
test_triplet_losses_are_the_loop | TI-DPO | (loops) | exact
test_hand_computed_losses | DPO, SimPO | (by hand) | exact
test_by_hand_with_and_without_fisher | WiSE-FT | (by hand) | exact
# how models are compared
"""


def _parts(cell: str) -> tuple[str, ...]:
    """The names in a cell; commas inside brackets do not part."""
    found, depth, word = [], 0, ""
    for letter in cell:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            found.append(word.strip())
            word = ""
        else:
            word += letter
    return tuple(part for part in (*found, word.strip()) if part)


def _rows() -> tuple[Row, ...]:
    rows = []
    for line in _TABLE.strip().splitlines():
        if not line.startswith("#"):
            name, labels, oracles, kind = (cell.strip() for cell in line.split("|"))
            proved = [
                label for label, by in EQUATIONS.items() if not isinstance(by, str) and name in by
            ]
            rows.append(Row(name, (*proved, *_parts(labels)), _parts(oracles), kind))
    return tuple(rows)


ROWS = _rows()
