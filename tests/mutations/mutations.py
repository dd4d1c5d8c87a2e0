"""Mistakes that would break the promise of privacy, each with the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path("src") / "equipoise"


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        name: what is wrong in the mutated source.
        file: path inside the package.
        edits: (old text, new text) pairs; every old text occurs exactly once in the file.
        tests: pytest arguments; at least one of these tests must fail.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        """The mutated text.

        Raises:
            ValueError: if an old text is not there exactly once.
        """
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(
                    f"mutation {self.name!r}: its old text occurs {text.count(old)} times in {self.file}, "
                    f"not once; bring the mutation up to date with the source:\n{old}"
                )
            if old == new:
                raise ValueError(f"mutation {self.name!r} changes nothing")
            text = text.replace(old, new)
        return text


KILLED = (
    "tests/training/test_killed_noise.py::test_no_noise_is_reused_in_a_run_killed_at_ten_random_moments",
)

MUTATIONS = (
    Mutation(
        "noise off",
        "privacy/mechanisms/gaussian.py",
        (("self.standard_deviation(name, bounded.add_remove))", "0.0)"),),
        ("tests/privacy/test_noise.py::test_noise_passes_kolmogorov_smirnov_at_its_scale_only",),
    ),
    Mutation(
        "noise 10% too small",
        "privacy/mechanisms/gaussian.py",
        (
            (
                "self.standard_deviation(name, bounded.add_remove))",
                "0.9 * self.standard_deviation(name, bounded.add_remove))",
            ),
        ),
        ("tests/privacy/test_noise.py::test_noise_passes_kolmogorov_smirnov_at_its_scale_only",),
    ),
    Mutation(
        "noise through the square of its scale, which underflows",
        "privacy/noise/streams.py",
        (("mul_(-2.0).sqrt_().mul_(std)", "mul_(-2.0 * std * std).sqrt_()"),),
        ("tests/privacy/test_noise.py::test_noise_keeps_its_scale_over_the_whole_range",),
    ),
    Mutation(
        "two devices make the same numbers of one stream",
        "privacy/noise/streams.py",
        (
            (
                "if std != 0:\n            self._bytes +=",
                "if std != 0 and torch.device('cpu') in ranges:\n            self._bytes +=",
            ),
        ),
        ("tests/privacy/test_noise.py::test_a_stream_has_one_place_for_all_devices",),
    ),
    Mutation(
        "ChaCha20 of half its rounds",
        "privacy/noise/chacha20.py",
        (("range(10)", "range(5)"),),
        ("tests/privacy/test_noise.py::test_the_key_stream_is_chacha20",),
    ),
    Mutation(
        "epochs counted as if draws left no gaps",
        "privacy/ledger/run_record.py",
        (("self.plan.event(self.used, self.epochs)", "self.plan.event(self.used)"),),
        ("tests/statements/test_verify_run.py::test_epochs_are_charged_by_the_draws_that_lie_in_them",),
    ),
    Mutation(
        "what a model keeps while its memory is measured stays",
        "training/setup/memory_use.py",
        (("evaluate_loss(model, loss, batch, None)", "loss(model, batch)"),),
        ("tests/training/test_neighbours.py::test_nothing_is_kept_while_memory_is_measured",),
    ),
    Mutation(
        "a resumed run's statement speaks for its last process",
        "training/setup/training_setup.py",
        (("before = [] if resumed is None else resumed.found", "before: list[Assumption] = []"),),
        ("tests/training/test_resume.py::test_a_statement_names_what_any_process_of_its_run_assumed",),
    ),
    Mutation(
        "what a loss keeps stays",
        "gradients/engine_inputs.py",
        (("attributes_kept(model, loss)", "attributes_kept(model)"),),
        ("tests/gradients/test_attributes.py::test_a_loss_forgets",),
    ),
    Mutation(
        "containers inside others keep what a forward put there",
        "gradients/capture/attributes.py",
        (("self._waiting += values", "pass"),),
        ("tests/training/test_neighbours.py::test_what_a_model_keeps_at_the_start_moves_nobody",),
    ),
    Mutation(
        "classes that code names keep what a forward put there",
        "gradients/capture/attributes.py",
        (("    type: _State._note_class,", "    type: _State._note_unchanging,"),),
        ("tests/gradients/test_attributes.py::test_what_is_kept_in_farther_places_is_forgotten",),
    ),
    Mutation(
        "fields of objects, texts and tuples of one's own stay",
        "gradients/capture/attributes.py",
        (("        notes.append(_State._note_fields)", "        pass"),),
        ("tests/gradients/test_attributes.py::test_what_is_kept_in_farther_places_is_forgotten",),
    ),
    Mutation(
        "slots of a base class are no unseen state",
        "gradients/capture/attributes.py",
        (("    if _hides(kind, base):", "    if False:"),),
        ("tests/gradients/test_attributes.py::test_what_nobody_looks_into_is_known",),
    ),
    Mutation(
        "a large container is followed, record by record",
        "gradients/capture/attributes.py",
        (("if base.__len__(value) > _LARGEST_CONTAINER:", "if False:"),),
        ("tests/gradients/test_attributes.py::test_what_nobody_looks_into_is_known",),
    ),
    Mutation(
        "the lock of a run is its process'",
        "training/folder/run_folder.py",
        (("fcntl.flock(self._lock", "fcntl.lockf(self._lock"),),
        ("tests/training/test_resume.py::test_a_run_belongs_to_one_training_at_a_time",),
    ),
    Mutation(
        "a step that is repeated after a kill gets fresh noise",
        "privacy/ledger/ledger.py",
        (
            (
                "return self.secrets.streams(draw.index, *question)",
                "return self.secrets.streams(draw.index, *question, os.urandom(8).hex())",
            ),
        ),
        KILLED,
    ),
    Mutation(
        "all steps have the same noise",
        "privacy/ledger/ledger.py",
        (("return self.secrets.streams(draw.index, *question)", "return self.secrets.streams(0)"),),
        KILLED,
    ),
    Mutation(
        "a step that comes out differently after a kill gets the noise that it had",
        "privacy/ledger/ledger.py",
        (
            (
                "if booked is None or (booked.bounds, booked.answer, booked.joint) "
                "!= (bounds, answer, joint):",
                "if booked is None:",
            ),
            (
                "streams = self._streams(draw, draw.parameters, bounds, answer, joint)",
                "streams = self._streams(draw, draw.parameters, bounds, joint)",
            ),
        ),
        KILLED,
    ),
    Mutation(
        "a step that is repeated after a kill is charged again",
        "privacy/ledger/ledger.py",
        (
            (
                "while index in draws and (draws[index].void or draws[index].booked.digest != key):",
                "while index in draws:",
            ),
        ),
        KILLED,
    ),
    Mutation(
        "a ledger goes on though another one books entries of its run",
        "privacy/ledger/ledger.py",
        (
            (
                "            self._catch_up()\n            records, draw",
                "            records, draw",
            ),
        ),
        (
            "tests/privacy/test_ledger.py"
            "::test_of_two_ledgers_of_one_run_the_one_that_is_behind_releases_nothing",
        ),
    ),
    Mutation(
        "a clip rule may hold a private number",
        "privacy/bounds/requirements.py",
        (("answer.by_record and answer.draw is None):", "True):"),),
        ("tests/privacy/test_bounded.py::test_a_rule_looks_at_public_numbers_and_its_norm_alone",),
    ),
    Mutation(
        "a clip rule may answer the same question in two ways",
        "privacy/bounds/requirements.py",
        (("if _PURE.get(id(rule)) is not rule:", "if False:"),),
        ("tests/privacy/test_bounded.py::test_a_rule_that_answers_the_same_question_in_two_ways_is_refused",),
    ),
    Mutation(
        "the gates of an LSTM change places",
        "gradients/capture/compositions.py",
        (("i, f, g, o = (u + v)", "f, i, g, o = (u + v)"),),
        ("tests/gradients/test_layers.py::test_recurrent_layer",),
    ),
    Mutation(
        "a recurrent layer's second bias is left out",
        "gradients/capture/compositions.py",
        (("u_all, b_hh = u_all + b_hh, None", "b_hh = None"),),
        ("tests/gradients/test_layers.py::test_recurrent_layer",),
    ),
    Mutation(
        "the way back of a recurrent layer goes forwards",
        "gradients/capture/compositions.py",
        (("reversed(steps) if backwards else steps", "steps"),),
        ("tests/gradients/test_layers.py::test_recurrent_layer",),
    ),
    Mutation(
        "many uses of a weight lose one",
        "gradients/factors/base.py",
        (
            (
                "[use.a for use in uses], 1), torch.cat([use.b for use in uses], 1)",
                "[use.a for use in uses[1:]], 1), torch.cat([use.b for use in uses[1:]], 1)",
            ),
        ),
        ("tests/gradients/test_layers.py::test_recurrent_layer",),
    ),
    Mutation(
        "a clip rule may follow the number of records",
        "privacy/bounds/requirements.py",
        (("block.new_ones(BLOCK - len(block))", "block.new_ones(0)"),),
        ("tests/privacy/test_bounded.py::test_a_rule_cannot_count_records",),
    ),
    Mutation(
        "noise that vanishes among the denormals is let out",
        "privacy/ledger/ledger.py",
        (("mechanism.check_sums({name: sums[name] for name in members})\n", "pass\n"),),
        ("tests/privacy/test_noise.py::test_noise_that_the_type_cannot_carry_is_refused_and_free",),
    ),
    Mutation(
        "noise over steps goes on after a gap between draws",
        "privacy/mechanisms/base.py",
        (("or earlier != ordinal - 1 - len(found):", "or False:"),),
        (
            "tests/privacy/test_mechanisms.py::test_a_voided_step_starts_the_noise_afresh_and_its_z_is_not_used_again",
            "tests/privacy/test_mechanisms.py::test_a_draw_that_is_not_released_starts_the_noise_afresh",
        ),
    ),
    Mutation(
        "old noise is mixed in two ways after its history was lost",
        "privacy/mechanisms/base.py",
        (
            (
                "        if not self.memory:\n            return self.made_for",
                "        if True:\n            return self.made_for",
            ),
        ),
        (
            "tests/privacy/test_mechanisms.py::test_a_ledger_without_its_history_does_not_mix_the_old_noise_in_another_way",
        ),
    ),
    Mutation(
        "noise over steps is not kept",
        "privacy/ledger/ledger.py",
        (
            (
                "                self._state.history.add(members[0], draw.ordinal, left, mechanism.memory)",
                "                pass",
            ),
        ),
        (
            "tests/privacy/test_banded_gaussian.py::test_the_noise_has_the_covariance_of_its_strategy_and_no_other",
        ),
    ),
    Mutation(
        "a forward for losses that may leave the plan",
        "gradients/engine.py",
        (
            (
                "if plan.ruled:\n            capture.check_followed()\n        return losses.detach()",
                "return losses.detach()",
            ),
        ),
        ("tests/methods/test_dp_zo.py::test_a_record_that_runs_other_operations_runs_by_itself",),
    ),
    Mutation(
        "losses without a rule of all records at once",
        "gradients/forward_only.py",
        (
            (
                "        if plan.ruled:\n            return self._losses_only(",
                "        if True:\n            return self._losses_only(",
            ),
        ),
        ("tests/methods/test_dp_zo.py::test_without_rules_each_record_is_asked_for_by_itself",),
    ),
    Mutation(
        "losses of single records under one stream of random numbers",
        "gradients/checks/oracle.py",
        (
            (
                "with random_numbers_from(_start(stand, i), *devices), torch.enable_grad():",
                "with torch.enable_grad():",
            ),
        ),
        ("tests/methods/test_dp_zo.py::test_without_rules_each_record_is_asked_for_by_itself",),
    ),
    Mutation(
        "losses of the public rows of a forward counted",
        "gradients/forward_only.py",
        (("LossesOnly(self.losses[index], self.shapes)", "LossesOnly(self.losses, self.shapes)"),),
        (
            "tests/methods/test_dp_zo.py::test_it_is_what_ten_lines_write",
            "tests/methods/test_dp_zo.py::test_one_record_moves_the_sum_by_its_bound_and_nothing_else_moves",
        ),
    ),
    Mutation(
        "a zeroth-order step whose bound is not the one that was planned",
        "methods/zeroth_order.py",
        (
            (
                'Release("gradient", self.clip_norm, Gaussian(scale))',
                'Release("gradient", 0.5 * self.clip_norm, Gaussian(scale))',
            ),
        ),
        ("tests/methods/test_dp_zo.py::test_its_noise_is_one_number_per_step",),
    ),
    Mutation(
        "losses that mix at the size of a forward",
        "training/setup/training_setup.py",
        (("trials.refuse_mixing(full, most=2)", "pass"),),
        ("tests/methods/test_dp_zo.py::test_losses_that_mix_at_the_size_of_a_forward_are_refused",),
    ),
    Mutation(
        "the coefficients of noise over steps in reverse order",
        "privacy/mechanisms/banded_gaussian.py",
        (("in zip(self.coefficients[1:], past, strict=False)", "in zip(self.coefficients[:0:-1], past)"),),
        (
            "tests/privacy/test_banded_gaussian.py::test_the_noise_has_the_covariance_of_its_strategy_and_no_other",
        ),
    ),
    Mutation(
        "noise over steps without a look at the separation",
        "privacy/plan.py",
        (
            (
                "return mechanism.memory >= self.sampling_of(self[members[0]].draw).min_separation",
                "return False",
            ),
        ),
        (
            "tests/privacy/test_banded_gaussian.py::test_draws_that_overlap_cost_one_gaussian_of_their_sensitivity",
            "tests/privacy/test_banded_gaussian.py::test_a_run_with_gaps_costs_no_less_than_its_matrix",
        ),
    ),
    Mutation(
        "the same record twice within the separation",
        "privacy/ledger/ledger.py",
        (("if bool(((since > 0) & (since < sampling.min_separation)).any()):", "if False:"),),
        (
            "tests/privacy/test_banded_gaussian.py::"
            "test_the_ledger_refuses_the_same_record_twice_within_the_separation",
        ),
    ),
    Mutation(
        "groups dealt anew in every draw",
        "privacy/sampling.py",
        (
            (
                'secrets.stream_key(0, f"groups {draw.name}")',
                'secrets.stream_key(draw.index, f"groups {draw.name}")',
            ),
        ),
        ("tests/privacy/test_sampling.py::test_groups_in_turn_have_the_law_of_their_event",),
    ),
    Mutation(
        "groups in turn at the rate of all records",
        "privacy/sampling.py",
        (
            (
                "PoissonSampledDpEvent(self.turn_rate, gaussian)",
                "PoissonSampledDpEvent(self.sampling_rate, gaussian)",
            ),
        ),
        ("tests/privacy/test_sampling.py::test_the_event_of_groups_in_turn",),
    ),
    Mutation(
        "a run with gaps as one without",
        "privacy/plan.py",
        (("length = min(times * sampling.draws_per_epoch, self.count(self[members[0]]))", "pass"),),
        ("tests/privacy/test_banded_gaussian.py::test_a_run_with_gaps_costs_no_less_than_its_matrix",),
    ),
    Mutation(
        "the same noise at every index",
        "privacy/noise/secrets.py",
        (
            (
                "return bytes(self._hash(purpose, index).digest(32))",
                "return bytes(self._hash(purpose, 0).digest(32))",
            ),
        ),
        ("tests/privacy/test_noise.py::test_streams_differ_by_key_purpose_and_index",),
    ),
    Mutation(
        "noise follows the draw's index whatever is asked",
        "privacy/noise/secrets.py",
        (("if self.is_private and any(question) else purpose", "if False else purpose"),),
        (
            "tests/privacy/test_restored_journal.py::test_another_question_at_an_index_that_comes_again_has_noise_of_its_own",
        ),
    ),
    Mutation(
        "divisor is the realised batch size",
        "methods/dp_sgd.py",
        (
            (
                'mean_of(released["gradient"], context.sampling.expected_size)',
                'mean_of(released["gradient"], max(1, sum(len(ids) for _, ids in draw._parts)))',
            ),
        ),
        ("tests/training/test_loop.py::test_the_divisor_is_the_expected_batch_size_whatever_is_drawn",),
    ),
    Mutation(
        "norms without the bias terms",
        "gradients/operator.py",
        (
            (
                "norms = self._norms(self.names)",
                'norms = self._norms([n for n in self.names if "bias" not in n])',
            ),
        ),
        ("tests/methods/test_sensitivity.py::test_random_neighbours",),
    ),
    Mutation(
        "a rule that forgets one parameter",
        "gradients/rules/products.py",
        (
            (
                "bias = bias if op.tracks(bias) else None\n"
                "    if bias is not None and bias.shape != op.out.shape[-1:]:",
                "bias = None\n    if bias is not None and bias.shape != op.out.shape[-1:]:",
            ),
        ),
        ("tests/gradients/test_layers.py::test_layer[linear 2d-float64]",),
    ),
    Mutation(
        "old noise for another query after a resume",
        "privacy/ledger/ledger.py",
        (
            (
                "while index in draws and (draws[index].void or draws[index].booked.digest != key):",
                "while False:",
            ),
        ),
        ("tests/privacy/test_ledger.py::test_other_hash_takes_the_next_index_and_is_charged",),
    ),
    Mutation(
        "changed data are answered with old noise",
        "privacy/ledger/ledger.py",
        (("name, text, self.data_fingerprint, self.kernels]", "name, text, self.kernels]"),),
        ("tests/privacy/test_ledger.py::test_other_hash_takes_the_next_index_and_is_charged",),
    ),
    Mutation(
        "old noise for a release with another bound or other sums",
        "privacy/ledger/ledger.py",
        (
            (
                "if booked is None or (booked.bounds, booked.answer, booked.joint) "
                "!= (bounds, answer, joint):",
                "if False:",
            ),
        ),
        (
            "tests/privacy/test_ledger.py::test_same_hash_with_another_bound_is_refused",
            "tests/privacy/test_ledger.py::test_the_same_hash_with_other_sums_is_void_and_charged_anew",
        ),
    ),
    Mutation(
        "old noise for another unproven release",
        "privacy/ledger/ledger.py",
        (("        elif booked.question != entry.question:", "        elif False:"),),
        ("tests/privacy/test_ledger.py::test_an_unproven_release_never_gives_its_noise_to_another_value",),
    ),
    Mutation(
        "the last micro-batch of a draw keeps its own shape",
        "training/forwards.py",
        (("filled(records, public, places)\n        if", "records\n        if"),),
        ("tests/training/test_neighbours.py::test_one_record_more_does_not_round_the_others",),
    ),
    Mutation(
        "collate and augmentation draw from the process's own generators",
        "training/forwards.py",
        (
            ('with random_numbers_from(joining("records"), self.prepare.device):', "if True:"),
            ('with random_numbers_from(randomness("augmented"), self.prepare.device):', "if True:"),
        ),
        ("tests/training/test_neighbours.py::test_what_joins_and_augments_draws_secret_numbers",),
    ),
    Mutation(
        "records joined without one that fails have the random numbers of their half",
        "training/forwards.py",
        (
            (
                "            part = part.without(failed)\n",
                "            part = part.without(failed)\n"
                "            for half in torch.arange(len(part.ids)).chunk(4):\n"
                "                yield from self.of(part.of(half))\n"
                "            return\n",
            ),
        ),
        (
            "tests/training/test_neighbours.py::test_a_record_that_cannot_be_read_gives_no_two_others_one_random_number",
        ),
    ),
    Mutation(
        "records that share no forward come last in the numbers of a whole draw",
        "training/context.py",
        (("torch.cat(places).argsort()", "torch.arange(sum(map(len, places)))"),),
        ("tests/training/test_neighbours.py::test_records_that_run_what_was_planned_share_one_forward",),
    ),
    Mutation(
        "who ran alone before is counted first",
        "training/forwards.py",
        (("for place in sorted(apart):", "for place in apart:"),),
        ("tests/training/test_neighbours.py::test_who_ran_alone_before_changes_no_bit",),
    ),
    Mutation(
        "records without a plan have the random numbers of the first place",
        "training/forwards.py",
        (('randomness(f"{kind} of {place}")', "randomness(kind)"),),
        (
            "tests/training/test_neighbours.py::test_records_that_run_other_operations_have_random_numbers_of_their_own",
        ),
    ),
    Mutation(
        "a full micro-batch holds no public records",
        "training/forwards.py",
        (("PUBLIC_ROWS = 2\n", "PUBLIC_ROWS = 0\n"),),
        ("tests/training/test_neighbours.py::test_a_branch_is_open_whether_a_record_opens_it_or_not",),
    ),
    Mutation(
        "an optimizer of the user's moves the parameters",
        "training/step.py",
        (("        if now != left:", "        if False:"),),
        ("tests/training/test_loop.py::test_nothing_else_moves_the_parameters",),
    ),
    Mutation(
        "dropout masks follow the public seed",
        "training/forwards.py",
        (
            (
                "return secret_randomness(self.draw, self.rank, self.number)",
                "return public_randomness(0, self.draw.ordinal, self.draw.name, self.number)",
            ),
        ),
        ("tests/training/test_loop.py::test_masks_of_private_records_follow_the_secret_key",),
    ),
    Mutation(
        "a raw threshold passes as public",
        "privacy/bounds/requirements.py",
        (
            (
                "    if isinstance(value, Private):\n        raise PrivateError(",
                "    value = unwrap(value)\n    if value is None:\n        raise PrivateError(",
            ),
        ),
        ("tests/privacy/test_bounded.py::test_refusals",),
    ),
    Mutation(
        "float() of a private tensor works",
        "privacy/private.py",
        (
            (
                '__float__ = forbidden("float() or item()")',
                "__float__ = lambda self: float(self._held)",
            ),
        ),
        ("tests/privacy/test_private.py::test_value_does_not_leave",),
    ),
    Mutation(
        "sums doubled after clipping",
        "privacy/bounds/clipping.py",
        (
            (
                "value = kept.weighted_sums(weights)\n        counts",
                "value = kept.weighted_sums(2 * weights)\n        counts",
            ),
        ),
        ("tests/privacy/test_bounded.py::test_adversarial_neighbours",),
    ),
    Mutation(
        "a clip rule is taken at its word",
        "privacy/bounds/clipping.py",
        (("return torch.maximum(torch.minimum(weights, limit), -limit)", "return weights"),),
        ("tests/methods/test_sensitivity.py::test_a_rule_that_breaks_its_promise_is_cut",),
    ),
    Mutation(
        "a record that is not finite keeps its row",
        "privacy/bounds/clipping.py",
        (
            (
                "finite = torch.isfinite(norms)\n    return without_bad",
                "finite = norms > -1\n    return without_bad",
            ),
        ),
        ("tests/privacy/test_bounded.py::test_bad_records_get_weight_zero",),
    ),
    Mutation(
        "a joint sum is bounded on the grid alone",
        "privacy/bounds/joint.py",
        (("lengths * noise.shrinkage(lengths)[:, None]", "lengths"),),
        (
            "tests/privacy/test_correlated.py::test_a_record_between_the_points_of_the_grid_keeps_to_the_noise",
        ),
    ),
    Mutation(
        "batches of fixed size accounted as Poisson",
        "privacy/sampling.py",
        (
            (
                "return drawn[drawn < count]",
                "return torch.randperm(count)[: round(rate * count)].sort().values",
            ),
        ),
        ("tests/privacy/test_sampling.py::test_poisson_frequencies_and_pairs",),
    ),
    Mutation(
        "subsets follow the remainders of torch",
        "privacy/noise/uniform.py",
        (
            (
                "dtype=torch.int64).random_(generator=generator)\n        found",
                "dtype=torch.int64).random_(0, bound, generator=generator)\n        found",
            ),
        ),
        ("tests/privacy/test_sampling.py::test_low_numbers_are_drawn_no_more_often",),
    ),
    Mutation(
        "numbers beyond the last full multiple count",
        "privacy/noise/uniform.py",
        (("numbers[numbers <= last] % bound", "numbers % bound"),),
        ("tests/privacy/test_sampling.py::test_low_numbers_are_drawn_no_more_often",),
    ),
    Mutation(
        "sampling rate from the records present",
        "privacy/sampling.py",
        (
            (
                "return _drawn_by_themselves(self.sampling_rate, generator,",
                "return _drawn_by_themselves(self.expected_batch_size / num_records, generator,",
            ),
        ),
        ("tests/privacy/test_sampling.py::test_rate_comes_from_the_public_population_alone",),
    ),
    Mutation(
        "journal written after the noise has left",
        "privacy/ledger/ledger.py",
        (
            (
                "            self._book(entry)\n        self._state",
                "            record.add(entry)\n        self._state",
            ),
            (
                "        return {name: out[name] for name in sums}\n",
                "        if not draw.replayed:\n            self.journal.append(entry)\n"
                "        return {name: out[name] for name in sums}\n",
            ),
        ),
        ("tests/privacy/test_ledger.py::test_line_is_written_before_anything_leaves",),
    ),
    Mutation(
        "a draw may be released twice",
        "privacy/ledger/ledger.py",
        (("        if not self._state.unreleased[draw]:\n", "        if False:\n"),),
        ("tests/privacy/test_ledger.py::test_draws_are_checked",),
    ),
    Mutation(
        "a disclosure leaves the guarantee that an unproven release has",
        "privacy/ledger/run_record.py",
        (("self.holes.setdefault((kind, reason), Hole(", "self.holes.setdefault(reason, Hole("),),
        (
            "tests/statements/test_verify_run.py::test_a_disclosure_with_the_sentence_of_an_unproven_release_leaves_no_guarantee",
        ),
    ),
    Mutation(
        "a run goes on in a journal that releases after its end",
        "privacy/ledger/run_record.py",
        (("if self.closed and isinstance(entry,", "if False and isinstance(entry,"),),
        ("tests/statements/test_verify_run.py::test_lines_that_no_ledger_writes_are_caught",),
    ),
    Mutation(
        "workers read items under other random numbers",
        "training/record_source.py",
        (
            ("from itertools import repeat", "from functools import partial\nfrom itertools import repeat"),
            (
                "self._workers.read(parts, randomness)",
                "self._workers.read(parts, partial(randomness.func, *randomness.args[:1], (1,)))",
            ),
        ),
        ("tests/training/test_workers.py::test_any_number_of_workers_gives_the_same_bits",),
    ),
    Mutation(
        "answers that an error left lying reach the next step",
        "training/reading.py",
        (("        if self._waiting:\n            self.close()\n", ""),),
        ("tests/training/test_workers.py::test_answers_that_nobody_took_are_not_those_of_the_next_pass",),
    ),
    Mutation(
        "a mapped file is looked at as a whole",
        "training/record_source.py",
        (
            (
                "self._is_scanned = not (self.is_elsewhere or any(map(_is_mapped, leaves(self._nest))))",
                "self._is_scanned = True",
            ),
        ),
        ("tests/training/test_mapped_data.py::test_a_mapped_file_is_read_where_it_is_drawn",),
    ),
    Mutation(
        "a snapshot is believed by whoever verifies",
        "privacy/ledger/journal_records.py",
        (("if line.runs != [record.state() for record in self.runs.values()]:", "if False:"),),
        ("tests/privacy/test_long_journal.py::test_whoever_verifies_finds_what_was_edited",),
    ),
    Mutation(
        "a draw that was forgotten is taken for a new one",
        "privacy/ledger/run_record.py",
        (("if booked.index < self._first_index or", "if False and"),),
        ("tests/privacy/test_long_journal.py::test_a_forgotten_draw_is_no_new_one",),
    ),
    Mutation(
        "the plan of a journal may be edited",
        "privacy/ledger/journal.py",
        (('if row["fingerprint"] != fingerprint:', 'if not row["fingerprint"]:'),),
        ("tests/statements/test_verify_run.py::test_an_edited_journal_is_caught",),
    ),
    Mutation(
        "a plan above the budget may start",
        "privacy/ledger/run_record.py",
        (("if total > budget.epsilon * (1 + 1e-9):", "if False:"),),
        ("tests/privacy/test_ledger.py::test_plan_over_budget_is_refused_before_anything",),
    ),
    Mutation(
        "replace-one accounted as add-or-remove",
        "privacy/plan.py",
        (
            ("return epsilon(self.event(), delta, self.relation)", "return epsilon(self.event(), delta)"),
            ('if self.relation == "replace_one":', "if False:"),
        ),
        ("tests/privacy/test_accounting.py::test_replace_ratio",),
    ),
    Mutation(
        "epsilon halved",
        "privacy/accounting/epsilon.py",
        (("    return min(found)\n", "    return min(found)[0] / 2, 0.0\n"),),
        ("tests/privacy/test_accounting.py::test_worked_numbers",),
    ),
    Mutation(
        "one direction of add-or-remove alone",
        "privacy/accounting/epsilon.py",
        (('(1.0, ("remove", "add"))', '(1.0, ("add",))'),),
        ("tests/privacy/test_accounting.py::test_worked_numbers",),
    ),
    Mutation(
        "losses that are cut off do not count",
        "privacy/accounting/loss_distribution.py",
        (("float(gamma[-1]), part.count)", "0.0, part.count)"), ("_CUT = 1e-5", "_CUT = 1e-1")),
        ("tests/privacy/test_losses.py::test_a_discrete_law_dominates_and_touches",),
    ),
    Mutation(
        "the window of the transform is cut where the law still has mass",
        "privacy/accounting/loss_distribution.py",
        (("_OUTSIDE = 1e-9", "_OUTSIDE = 0.3"),),
        ("tests/privacy/test_losses.py::test_compositions_are_those_of_the_library",),
    ),
    Mutation(
        "between two points a loss law interpolates in epsilon from below",
        "privacy/accounting/loss_distribution.py",
        (
            (
                "left = np.insert(steps / -np.expm1(-gaps), 0, gamma[0])",
                "left = np.insert(steps / gaps, 0, gamma[0])",
            ),
        ),
        ("tests/privacy/test_losses.py::test_a_discrete_law_dominates_and_touches",),
    ),
    Mutation(
        "joint releases accounted as one",
        "privacy/plan.py",
        (
            (
                "total += self._square(mechanism, members, 1, 1, mechanism.memory + 1)",
                "total = max(total, self._square(mechanism, members, 1, 1, mechanism.memory + 1))",
            ),
        ),
        ("tests/privacy/test_accounting.py::test_joint_releases_are_one_event",),
    ),
    Mutation(
        "cross terms of tied parameters dropped",
        "gradients/operator.py",
        (("squares.add_(inner(factor, opposite), alpha=2)", "pass"),),
        ("tests/gradients/test_engine.py::test_tied_parameters_stay_tied_at_other_values",),
    ),
    Mutation(
        "difference norm by the expanded form",
        "gradients/operator.py",
        (
            (
                "return norms if self._operands is None else norms.add_(self.norm_guard(groups))",
                "x, w = self._operands or (None, None)\n"
                "            if x is None or groups is not None:\n"
                "                return norms\n"
                "            squares = x.row_norms() ** 2 - 2 * x.inner(w) + w.row_norms() ** 2\n"
                "            return squares.clamp(min=0).sqrt() + self.norm_guard()",
            ),
        ),
        ("tests/gradients/test_differences.py::test_difference_norm_is_as_good_as_materialised",),
    ),
    Mutation(
        "look-ups of one token that cancel, squared as they are",
        "gradients/factors/lookup.py",
        (("lost = ~(right & (out >= self.positions * TINY**2 / LOST_SHARE))", "lost = out < 0"),),
        ("tests/methods/test_sensitivity.py::test_look_ups_of_one_token_that_cancel",),
    ),
    Mutation(
        "norms that lost digits stay as they are where nobody looks",
        "gradients/numerics.py",
        (("squares.masked_fill(lost, math.nan)", "squares"),),
        ("tests/gradients/test_factors.py::test_norms_that_lost_digits_are_nan_where_nobody_looks",),
    ),
    Mutation(
        "parameters that a forward writes are not looked at",
        "gradients/capture/isolation.py",
        (
            ("    if found:\n", "    if False:\n"),
            ("            raise ForwardWritesError(moved)\n", "            pass\n"),
        ),
        ("tests/gradients/test_coverage.py::test_a_forward_that_writes_parameters_is_refused_and_undone",),
    ),
    Mutation(
        "copies that share memory with the model",
        "training/setup/deep_copies.py",
        (("if not found.places().isdisjoint(again.places()):", "if False:"),),
        ("tests/training/test_neighbours.py::test_what_a_model_shares_with_its_copies_stays",),
    ),
    Mutation(
        "a gradient inside of a backward is taken for the record's",
        "gradients/checks/row_comparison.py",
        (("if backward != [torch._C._current_graph_task_id()]:", "if False:"),),
        ("tests/gradients/test_zoo.py::test_zoo[custom function that differentiates by a parameter]",),
    ),
    Mutation(
        "parameters may move before the optimiser's step",
        "training/step.py",
        (("if after.value() != before:", "if False:"),),
        ("tests/training/test_bad_input.py::test_a_model_that_writes_its_parameters_later_takes_no_step",),
    ),
    Mutation(
        "no guard for terms that cancel inside a record",
        "gradients/numerics.py",
        (("whole - norms <= NEGLIGIBLE * norms", "whole > 0"),),
        ("tests/methods/test_sensitivity.py::test_terms_that_cancel_inside_a_record",),
    ),
    Mutation(
        "squares of long rows added up in float32",
        "gradients/numerics.py",
        (("if pieces == 0:", "if pieces >= 0:"),),
        ("tests/methods/test_long_rows.py::test_a_long_constant_row_is_clipped_to_the_threshold",),
    ),
    Mutation(
        "the guard of rows that cancel does not grow with their terms",
        "gradients/numerics.py",
        (("max(GUARD, additions)", "GUARD"),),
        ("tests/methods/test_sensitivity.py::test_terms_that_cancel_inside_a_record",),
    ),
    Mutation(
        "the guard of rows that cancel does not grow with the width of their products",
        "gradients/numerics.py",
        (("whole = norms if errors is None else (squares + errors).sqrt_()", "whole = norms"),),
        ("tests/methods/test_sensitivity.py::test_wide_features_all_alike_that_cancel",),
    ),
    Mutation(
        "wide products are added up at once",
        "gradients/numerics.py",
        (("return max(SHORT_SUM, math.isqrt(width) + 1)", "return width"),),
        ("tests/gradients/test_factors.py::test_wide_products_lose_less_than_is_stated",),
    ),
    Mutation(
        "no guard for rows of many terms",
        "gradients/factors/base.py",
        (("min(self.positions, PARTIAL_SUM + self.positions // TERMS_PER_ADDITION)", "1"),),
        ("tests/methods/test_long_rows.py::test_a_long_constant_row_is_clipped_to_the_threshold",),
    ),
    Mutation(
        "the guard of a residual is smaller than its rounding",
        "gradients/views.py",
        (("SQUARE_GUARD = 64", "SQUARE_GUARD = 8"),),
        ("tests/methods/test_long_rows.py::test_the_square_of_a_residual_is_not_read_too_small",),
    ),
    Mutation(
        "a norm too small to read divides a length",
        "privacy/bounds/clipping.py",
        (("norms.clamp_min(SMALLEST_NORM)", "norms"),),
        ("tests/methods/test_long_rows.py::test_a_joint_release_of_a_row_too_small_to_read",),
    ),
    Mutation(
        "difference norm without its guard",
        "gradients/operator.py",
        (
            (
                "return norms if self._operands is None else norms.add_(self.norm_guard(groups))",
                "return norms",
            ),
        ),
        ("tests/gradients/test_differences.py::test_guard_is_the_stated_one_and_is_carried_everywhere",),
    ),
    Mutation(
        "norms of scaled rows without their diagonal",
        "gradients/factors/scaled.py",
        (
            (
                "squared_rows(self.inner.rows(part).materialise() * self.diagonal)",
                "squared_rows(self.inner.rows(part).materialise())",
            ),
        ),
        ("tests/gradients/test_operator_laws.py::test_norms_sums_and_products_equal_the_matrix",),
    ),
    Mutation(
        "rows of other places subtracted",
        "privacy/rows.py",
        ((" or other._places != self._places:", ":"),),
        ("tests/privacy/test_provenance.py::test_rows_of_other_records_never_meet",),
    ),
    Mutation(
        "the noise of another clip norm taken out of Adam's second moments",
        "methods/scaled/dp_adam_bc.py",
        (("clip_norm = self.threshold.at(context.step, learned)", "clip_norm = 1.0"),),
        ("tests/methods/test_scaled_and_filtered.py::test_adambc_knows_the_noise_of_its_releases",),
    ),
    Mutation(
        "AdaClip's estimates not scaled back",
        "methods/scaled/adaclip.py",
        (("value = value * divisor[name].to(value.dtype)", "value = value.to(divisor[name].dtype)"),),
        ("tests/methods/test_scaled_and_filtered.py::test_adaclip_by_its_formula",),
    ),
    Mutation(
        "the noise of AdaClip's estimates taken for that of unscaled ones",
        "methods/scaled/adaclip.py",
        (("(std * divisor[name]).square()", "std**2 * 0"),),
        ("tests/methods/test_scaled_and_filtered.py::test_adaclip_takes_the_noise_out_of_the_spread",),
    ),
    Mutation(
        "scaled estimates not divided by their scale",
        "methods/scaled/scale_then_privatise.py",
        (("estimate = divided(mean, parts)", "estimate = mean"),),
        ("tests/methods/test_scaled_and_filtered.py::test_scaling_by_second_moments_by_its_formula",),
    ),
    Mutation(
        "second moments of several layers that each take the whole bound",
        "privacy/bounds/second_moments.py",
        (("torch.full_like(norms, len(names) ** -0.25)", "torch.ones_like(norms)"),),
        ("tests/methods/test_joint_whitening.py::test_one_record_moves_the_second_moments_by_their_bounds",),
    ),
    Mutation(
        "second moments of gradients as long as they are",
        "privacy/bounds/second_moments.py",
        (
            (
                "weights = weights_for(torch.full_like(norms, len(names) ** -0.25), norms)",
                "weights = torch.full_like(norms, len(names) ** -0.25)",
            ),
        ),
        ("tests/methods/test_joint_whitening.py::test_one_record_moves_the_second_moments_by_their_bounds",),
    ),
    Mutation(
        "the bound of a replaced record's second moment taken for that of one more",
        "privacy/bounds/second_moments.py",
        (
            (
                "make_bounded(as_private(value, rows.draw), 1.0, math.sqrt(2), rows.draw, bad)",
                "make_bounded(as_private(value, rows.draw), 1.0, 1.0, rows.draw, bad)",
            ),
        ),
        ("tests/methods/test_joint_whitening.py::test_one_record_moves_the_second_moments_by_their_bounds",),
    ),
    Mutation(
        "norms of whitened rows taken before they are whitened",
        "methods/scaled/joint_whitening.py",
        (
            ("return rows.multiplied(roots)", "return rows"),
            (
                "released, rest = self.released(context, learned, view=whitened, others=moments)",
                "released, rest = self.released(context, learned, view=whitened, others=moments)\n"
                "        for name, root in roots.items():\n"
                '            released["gradient"][name] = released["gradient"][name] @ root',
            ),
        ),
        ("tests/methods/test_joint_whitening.py::test_it_is_its_formulas_on_formed_rows",),
    ),
    Mutation(
        "both sums at the whole multiplier",
        "methods/scaled/joint_whitening.py",
        (
            ("noise_multiplier / math.sqrt(1 - self.share)", "noise_multiplier"),
            ("noise_multiplier / math.sqrt(self.share)", "noise_multiplier"),
        ),
        ("tests/methods/test_joint_whitening.py::test_both_releases_are_one_gaussian_of_the_multiplier",),
    ),
    Mutation(
        "second moments without their noise",
        "methods/scaled/joint_whitening.py",
        (
            (
                "def moments(rows: PrivateRows) -> dict[str, Bounded]:\n"
                '            return {"input_moments": input_moments(rows, names)}',
                "raw = []\n\n        def moments(rows: PrivateRows) -> dict[str, Bounded]:\n"
                "            raw.append(input_moments(rows, names))\n"
                '            return {"input_moments": raw[-1]}',
            ),
            (
                'released["input_moments"][name].to(kept.dtype)',
                "sum(one.value[name]._held for one in raw).to(kept.dtype)",
            ),
        ),
        (
            "tests/methods/test_joint_whitening.py::test_the_noise_of_moments_and_gradients_is_what_it_says",
            "tests/methods/test_laws.py::test_thresholds_are_functions_of_what_was_released",
        ),
    ),
    Mutation(
        "a row's product with a matrix from private values",
        "privacy/rows.py",
        (("if any(isinstance(matrix, Private) for matrix in matrices.values()):", "if False:"),),
        ("tests/privacy/test_provenance.py::test_what_scales_and_shifts_rows_is_public",),
    ),
    Mutation(
        "the other use of a weight not multiplied",
        "gradients/factors/multiplied.py",
        (
            (
                "left, right = (_outer(cast(OuterFactor, operand), matrix) for operand in factor._operands)",
                "left, right = (cast(OuterFactor, operand) for operand in factor._operands)",
            ),
        ),
        ("tests/gradients/test_operator_laws.py::test_inputs_may_be_multiplied_and_have_second_moments",),
    ),
    Mutation(
        "a coefficient of the low-pass filter that is not applied",
        "methods/filtered/doppler.py",
        (("value - factor * earlier[name] for", "value for"),),
        ("tests/methods/test_scaled_and_filtered.py::test_the_filter_by_its_definition",),
    ),
    Mutation(
        "the point ahead of DiSK taken behind",
        "methods/filtered/disk.py",
        (("value + self.gamma * (value", "value - self.gamma * (value"),),
        ("tests/methods/test_scaled_and_filtered.py::test_disk_by_its_formula",),
    ),
    Mutation(
        "a run with other users of the same records joins a journal",
        "privacy/ledger/journal_records.py",
        (("if _are_other_users(record.owners, owners):", "if False:"),),
        ("tests/training/test_users.py::test_runs_in_a_journal_have_the_same_users_of_the_same_records",),
    ),
    Mutation(
        "a user who is set aside to evaluate on is trained on, too",
        "data/records.py",
        (("share, seed=0, by=OWNER)", "share, seed=0)"),),
        ("tests/cli/test_cli_users.py::test_the_owner_is_no_input_and_a_user_is_never_split",),
    ),
    Mutation(
        "the count of a learned threshold without noise",
        "methods/dp_sgd.py",
        (
            (
                "released = context.ledger.release(draw, draw.query(sums, at=at))",
                "asked = draw.query(sums, at=at)\n        released = context.ledger.release(draw, asked)",
            ),
            (
                '(count,) = released["below_threshold"].values()',
                '(count,) = (v._held for v in asked["below_threshold"].value.values())',
            ),
        ),
        ("tests/methods/test_dp_sgd.py::test_a_learned_threshold_moves_by_the_noised_count",),
    ),
    Mutation(
        "labels decided by a step, which rounding flips for all records at once",
        "privacy/bounds/counts.py",
        (
            (
                "((raw / threshold - 1 + width) / (2 * width)).clamp(0, 1)",
                "(raw > threshold).double()",
            ),
        ),
        ("tests/methods/test_rounded_norms.py::test_tail_labels",),
    ),
    Mutation(
        "a client answers another request for a round that is over",
        "federated/client.py",
        (("if number <= last:", "if number < 0:"),),
        ("tests/federated/test_client.py::test_the_same_round_gets_the_same_answer_and_is_charged_once",),
    ),
    Mutation(
        "a client ignores extras that its method does not take",
        "federated/client.py",
        (("if name not in takes:", "if False:"),),
        ("tests/federated/test_hostile_server.py::test_a_request_that_is_none_is_refused_and_free",),
    ),
    Mutation(
        "a client clips at any radius that the server names",
        "federated/messages.py",
        (
            ("0 < value <= largest * _MACHINES_APART and", "0 < value and"),
            ("min(float(value), largest)", "float(value)"),
        ),
        ("tests/federated/test_client.py::test_nonsense_radii_cost_nothing",),
    ),
    Mutation(
        "keys in memory follow Python's random numbers",
        "privacy/noise/secrets.py",
        (("self._key = os.urandom(32)", 'self._key = __import__("random").randbytes(32)'),),
        ("tests/privacy/test_noise.py::test_a_key_follows_no_generator_of_the_process",),
    ),
    Mutation(
        "keys in a folder follow Python's random numbers",
        "privacy/noise/secrets.py",
        (("    key = os.urandom(32)", '    key = __import__("random").randbytes(32)'),),
        ("tests/privacy/test_noise.py::test_a_key_follows_no_generator_of_the_process",),
    ),
    Mutation(
        "the bound for a replaced record may be changed",
        "privacy/bounds/bounded.py",
        (
            (
                "    def __setattr__(self, name: str, value: object) -> None:\n",
                "    def __setattr__(self, name: str, value: object) -> None:\n"
                '        if name != "add_remove":\n'
                "            return object.__setattr__(self, name, value)\n",
            ),
        ),
        ("tests/privacy/test_bounded.py::test_a_bound_cannot_be_forged",),
    ),
    Mutation(
        "the micro-batches of a draw share their dropout masks",
        "training/forwards.py",
        (
            (
                "return secret_randomness(self.draw, self.rank, self.number)",
                "return secret_randomness(self.draw, self.rank, 0)",
            ),
        ),
        ("tests/training/test_loop.py::test_two_micro_batches_of_equal_records_see_other_masks",),
    ),
    Mutation(
        "DP-SVRG clips the difference in place of the pair",
        "methods/anchored/dp_svrg.py",
        (
            (
                "clip(at_x, Abadi(), clip_norm) - clip(at_w, Abadi(), clip_norm)",
                "clip(at_x - at_w, Abadi(), 2 * clip_norm)",
            ),
        ),
        (
            "tests/methods/test_anchors.py::test_each_gradient_of_the_pair_is_clipped_before_they_are_subtracted",
        ),
    ),
    Mutation(
        "biased GEP keeps its subspace for an epoch",
        "methods/projected/gep.py",
        (
            (
                "    default_refresh: ClassVar[int | None] = 1\n\n\n",
                "    default_refresh: ClassVar[int | None] = None\n\n\n",
            ),
        ),
        ("tests/methods/test_projected.py::test_how_often_a_method_asks_for_a_subspace_by_default",),
    ),
    Mutation(
        "the guard of a difference is smaller than the stated one",
        "gradients/operator.py",
        (("mul_(GUARD * torch.finfo", "mul_(3 * torch.finfo"),),
        ("tests/gradients/test_differences.py::test_guard_is_the_stated_one_and_is_carried_everywhere",),
    ),
    Mutation(
        "every guard is smaller than the stated one",
        "gradients/numerics.py",
        (("GUARD = 4\n", "GUARD = 3\n"),),
        ("tests/gradients/test_differences.py::test_guard_is_the_stated_one_and_is_carried_everywhere",),
    ),
    Mutation(
        "a server's rate and its complement exchanged",
        "federated/server.py",
        (
            (
                "value + self.server_rate * (mean[name] - value)",
                "mean[name] + self.server_rate * (value - mean[name])",
            ),
        ),
        ("tests/federated/test_driver.py::test_a_servers_rate_is_the_share_of_the_way_to_the_mean",),
    ),
    Mutation(
        "a server that restarts forgets the average of its mean squares",
        "federated/methods/server_radius.py",
        (
            (
                'return {"variant": self.variant, **self._state}',
                'return {"variant": self.variant, **self._state, "mean": None}',
            ),
        ),
        ("tests/federated/test_server_radius.py::test_a_server_that_restarts_goes_on",),
    ),
    Mutation(
        "epochs that are no whole number of steps are rounded down",
        "app/settings.py",
        (("math.ceil(steps - 1e-9)", "int(steps)"),),
        ("tests/cli/test_cli_calibrate.py::test_epochs_instead_of_steps",),
    ),
    Mutation(
        "an npz whose compressed numbers are damaged ends in a traceback",
        "data/readers/npz.py",
        (("zipfile.BadZipFile, zlib.error, EOFError", "zipfile.BadZipFile, EOFError"),),
        ("tests/data/test_cifar.py::test_damaged_npz",),
    ),
    Mutation(
        "a client's mean of a round holds the rounds before",
        "federated/methods/averaged_iterate.py",
        (
            (
                "return _from_here(super().rebase(state, params), params)",
                "return super().rebase(state, params)",
            ),
        ),
        ("tests/federated/test_averaged_iterate.py::test_it_is_the_mean_over_steps_clients_and_rounds",),
    ),
    Mutation(
        "queries of subsets are Poisson samples",
        "methods/adaptive_rms/adaptive_rms.py",
        (("    if isinstance(sampling, WithoutReplacement):\n", "    if False:\n"),),
        ("tests/app/test_sampling_settings.py::test_a_query_of_subsets_is_a_subset",),
    ),
    Mutation(
        "subsets without replacement are accounted under add-or-remove",
        "app/settings.py",
        (
            (
                "return self.relation or RELATIONS[self.sampling == SUBSETS]",
                "return self.relation or RELATIONS[0]",
            ),
        ),
        ("tests/app/test_sampling_settings.py::test_a_training_samples_as_it_is_told",),
    ),
    Mutation(
        "a number beyond its declared range is taken as it is",
        "data/readers/tables.py",
        (
            (
                "value, span = min(max(_finite(cell), self.low), self.high) - self.low, self.high - self.low",
                "value, span = _finite(cell) - self.low, self.high - self.low",
            ),
        ),
        ("tests/data/test_tables.py::test_typed_columns",),
    ),
    Mutation(
        "a target beyond its declared range is taken as it is",
        "data/readers/tables.py",
        (
            (
                "return 2.0 * (min(max(_finite(cell), self.low), self.high) - self.low)",
                "return 2.0 * (_finite(cell) - self.low)",
            ),
        ),
        ("tests/data/test_tables.py::test_a_number_and_several_labels_as_targets",),
    ),
    Mutation(
        "a cell that is no declared class is shown",
        "data/readers/tables.py",
        (
            (
                '"the cell is not a declared class. Repair the row, drop it, or declare it."',
                'f"{cell!r} is not a declared class. Repair it: the cell is not."',
            ),
        ),
        ("tests/data/test_tables.py::test_bad_cells_name_their_place",),
    ),
    Mutation(
        "a header that is a row of data is shown",
        "data/readers/tables.py",
        (
            (
                "{', '.join(map(repr, missing or twice))}. {remedy}",
                "{', '.join(map(repr, missing or twice))}, not {names}. {remedy}",
            ),
        ),
        ("tests/data/test_tables.py::test_tabs_and_header",),
    ),
    Mutation(
        "rows without a user count as one user's",
        "data/readers/tables.py",
        (("if not cell or _means_unknown(cell, self.unknown):", "if False:"),),
        ("tests/cli/test_cli_users.py::test_a_row_without_an_owner_stops_the_command",),
    ),
    Mutation(
        "a schema with places to be filled in is used",
        "data/readers/schema.py",
        (
            (
                "    if left:\n        raise SchemaError(",
                "    if left and not left:\n        raise SchemaError(",
            ),
        ),
        ("tests/data/test_schema.py::test_what_is_described_is_left_to_be_filled_in",),
    ),
    Mutation(
        "ranges are read from the private rows",
        "data/readers/schema.py",
        (
            (
                "low, high = _range(found or ())",
                "low, high = _range(found or cells)",
            ),
        ),
        ("tests/data/test_schema.py::test_what_is_described_is_left_to_be_filled_in",),
    ),
    Mutation(
        "categories are read from the private rows",
        "data/readers/schema.py",
        (("for cell in found or () if", "for cell in found or cells if"),),
        ("tests/data/test_schema.py::test_what_is_described_is_left_to_be_filled_in",),
    ),
    Mutation(
        "the population of a schema is counted",
        "data/readers/schema.py",
        (('f"population = {_toml(TO_FILL_IN)} ', 'f"population = {len(columns[0])} '),),
        ("tests/data/test_schema.py::test_what_is_described_is_left_to_be_filled_in",),
    ),
    Mutation(
        "a population that nobody stated is counted",
        "data/readers/schema.py",
        (
            (
                '    size = values.get("population")\n',
                '    size = values.get("population") or sum(1 for _ in rows_of_file(path))\n',
            ),
        ),
        ("tests/data/test_schema.py::test_schemas_that_cannot_be_used",),
    ),
    Mutation(
        "the private rows pass for public ones",
        "data/readers/schema.py",
        (("if is_same(path, public_rows)", "if not is_same(path, public_rows)"),),
        ("tests/data/test_schema.py::test_public_rows_fill_in_ranges_and_categories",),
    ),
    Mutation(
        "a first row of data gives the names of the columns",
        "data/readers/schema.py",
        (("                _check_names(path, names)\n", ""),),
        ("tests/data/test_schema.py::test_a_first_row_of_data_is_no_header_and_is_not_shown",),
    ),
    Mutation(
        "the column of users is an input, if a schema says so",
        "data/readers/schema.py",
        (
            (
                "columns = [column if one.name == owner else one for one in table.columns]",
                "columns = list(table.columns)",
            ),
            ("(*columns, *([] if owner in there else [column]))", "(*columns, replace(column, name=owner))"),
        ),
        ("tests/cli/test_cli_users.py::test_the_owner_is_no_input_and_a_user_is_never_split",),
    ),
    Mutation(
        "what was set aside is counted",
        "data/records.py",
        (
            (
                "return train, aside, max(1, round(population * (1 - share)))",
                "return train, aside, len(train)",
            ),
        ),
        ("tests/data/test_schema.py::test_the_rest_of_the_rows_is_a_share_of_the_stated_population",),
    ),
    Mutation(
        "where a record goes follows from its place",
        "data/records.py",
        (("digest.update(before.to_bytes", "digest.update(i.to_bytes"),),
        ("tests/data/test_schema.py::test_one_record_more_moves_no_other_one_between_the_parts",),
    ),
    Mutation(
        "users are trained on and evaluated on",
        "data/records.py",
        (("rows.set_aside(share, seed=0, by=OWNER)", "rows.set_aside(share, seed=0)"),),
        ("tests/cli/test_cli_users.py::test_the_owner_is_no_input_and_a_user_is_never_split",),
    ),
    Mutation(
        "a label out of range is shown",
        "data/records.py",
        (('f"a label {bound}. Recode', 'f"a label from {low} to {high} {bound}. Recode'),),
        ("tests/data/test_records.py::test_bad_fields_are_refused",),
    ),
    Mutation(
        "classes are those that have images",
        "data/readers/image_folders.py",
        (
            (
                "for child in Path(path).iterdir() if child.is_dir()))",
                "for child in Path(path).iterdir() if child.is_dir() and any(child.iterdir())))",
            ),
        ),
        ("tests/cli/test_cli_tables.py::test_images_in_folders",),
    ),
    Mutation(
        "images are standardised by the mean of all",
        "data/readers/images.py",
        (("part -= part.mean(1, keepdim=True)", "part -= part.mean()"),),
        ("tests/data/test_idx.py::test_images_are_standardised_one_by_one",),
    ),
    Mutation(
        "texts are as long as the longest of them",
        "data/readers/text.py",
        (
            (
                "tokens = torch.zeros(len(texts), self.length, dtype=torch.int64)",
                "tokens = torch.zeros(len(texts), min(self.length, max(map(len, map(self.words, texts)))), "
                "dtype=torch.int64)",
            ),
        ),
        ("tests/data/test_text.py::test_tokens_of_a_text_do_not_depend_on_other_texts",),
    ),
    Mutation(
        "a label that was not declared is shown",
        "data/readers/text.py",
        (("{place}: the label is not", "{place}: the label {name!r} is not"),),
        ("tests/data/test_text.py::test_bad_files",),
    ),
    Mutation(
        "the population of a folder of images is counted",
        "app/settings.py",
        (
            (
                'if form == "images" and (self.population is None or self.image_size is None):',
                'if form == "images" and self.image_size is None:',
            ),
        ),
        ("tests/cli/test_cli_tables.py::test_what_folders_of_images_need",),
    ),
    Mutation(
        "the population of own data is counted",
        "app/settings.py",
        (('if form == "code" and self.population is None:', "if False:"),),
        ("tests/cli/test_cli_train.py::test_bad_input_is_refused_before_anything_is_spent",),
    ),
    Mutation(
        "public records cut users in two",
        "app/settings.py",
        (('("public_records", "last", "give them to the method from Python"),\n', ""),),
        ("tests/cli/test_cli_users.py::test_slips_are_answered",),
    ),
    Mutation(
        "a subset cuts users in two",
        "app/settings.py",
        (('("subset", "first", "give a file with fewer users"),\n', ""),),
        ("tests/cli/test_cli_users.py::test_slips_are_answered",),
    ),
    Mutation(
        "owners count the rows that they were dealt",
        "app/federation/participants.py",
        (("n = self.population(number)", "n = len(self.parts[number])"),),
        ("tests/cli/test_cli_federate.py::test_a_table_is_shared_out_to_the_owners",),
    ),
    Mutation(
        "a record among its own copies is not compared",
        "gradients/checks/record_trials.py",
        (("follows_company(losses, batch, before))", "None)"),),
        ("tests/gradients/test_zoo.py::test_zoo[trimmed to the longest]",),
    ),
    Mutation(
        "records are compared at the parameters of the start alone",
        "gradients/checks/record_trials.py",
        (("for share in (0.5, 0.05):", "for share in ():"),),
        ("tests/gradients/test_coverage.py::test_trials_are_made_where_no_parameter_is_zero",),
    ),
    Mutation(
        "nobody sees a guard that looks for NaN in the whole batch",
        "gradients/checks/record_trials.py",
        (("infects(*self._on_host(batch))", "False"),),
        ("tests/gradients/test_zoo.py::test_zoo[no steps where a loss is not finite]",),
    ),
    Mutation(
        "the plan of all records follows one of them",
        "training/forwards.py",
        (
            (
                "gradients = self.engine.by_plan(batch,",
                "gradients = self.engine(batch,",
            ),
        ),
        (
            "tests/training/test_neighbours.py"
            "::test_a_record_that_runs_other_operations_leaves_others_their_random_numbers",
        ),
    ),
    Mutation(
        "the plan follows private records at the start",
        "training/setup/micro_batches.py",
        (("engine.plan_on(public, prepared, pipeline.trials.params)", "False"),),
        (
            "tests/training/test_neighbours.py"
            "::test_a_record_that_runs_other_operations_leaves_others_their_random_numbers",
        ),
    ),
    Mutation(
        "what a forward keeps is gone in its backward",
        "gradients/engine_inputs.py",
        (("nullcontext() if scope is _SCOPE.get() else scope", "scope"),),
        ("tests/gradients/test_engine.py::test_what_a_forward_keeps_is_there_in_its_backward",),
    ),
    Mutation(
        "rows are not compared beside other records",
        "gradients/engine.py",
        (
            (
                "if names := self._moved(before.rows(same), after):",
                "if names := self._moved(after, after):",
            ),
        ),
        ("tests/gradients/test_zoo.py::test_zoo[straight-through where some record is an outlier]",),
    ),
    Mutation(
        "no gradient becomes NaN where rows are compared",
        "gradients/checks/record_mixing.py",
        (("NOT_USUAL = (math.nan, math.inf, 1e30)", "NOT_USUAL = (1e30,)"),),
        (
            "tests/gradients/test_zoo.py::"
            "test_zoo[custom function whose backward gives nothing where some gradient is NaN]",
        ),
    ),
    Mutation(
        "no outlier is among the other records",
        "gradients/checks/record_mixing.py",
        (("OUTLIERS = (100.0, 10.0, 3.0)", "OUTLIERS = (1.0,)"),),
        ("tests/gradients/test_zoo.py::test_zoo[straight-through where some record is an outlier]",),
    ),
    Mutation(
        "a model that refuses outliers is not tried among smaller ones",
        "gradients/checks/record_mixing.py",
        (("OUTLIERS = (100.0, 10.0, 3.0)", "OUTLIERS = (100.0,)"),),
        ("tests/gradients/test_zoo.py::test_zoo[straight-through by outliers where larger ones raise]",),
    ),
    Mutation(
        "rows that become NaN count as unmoved",
        "gradients/engine.py",
        (
            (
                "(~(distances <= tolerance * whole[:, None])).any(0)",
                "(distances > tolerance * whole[:, None]).any(0)",
            ),
            ("moved[place] |= not distance <=", "moved[place] |= distance >"),
        ),
        ("tests/gradients/test_engine.py::test_a_mixture_that_gives_nan_is_seen",),
    ),
    Mutation(
        "random numbers are watched in the forward alone",
        "gradients/checks/record_trials.py",
        (
            (
                "            if not losses.requires_grad:\n                return",
                "            if True:\n                return",
            ),
        ),
        (
            "tests/training/test_neighbours.py::"
            "test_a_random_number_for_a_whole_micro_batch[a sign in the backward]",
            "tests/training/test_neighbours.py::"
            "test_a_random_number_for_a_whole_micro_batch[a sign for the backward]",
        ),
    ),
    Mutation(
        "whose random numbers they are is told by the losses alone",
        "gradients/capture/random_numbers.py",
        (
            (
                "if not _length(map(torch.sub, gradient, other)) <= 1e-3 * _length(gradient):",
                "if False:",
            ),
        ),
        (
            "tests/training/test_neighbours.py::"
            "test_a_random_number_for_a_whole_micro_batch[the first record's sign in the backward]",
        ),
    ),
    Mutation(
        "rows are compared under random numbers of one seed",
        "gradients/engine.py",
        (("            if may_follow_numbers(measured):\n", "            if False:\n"),),
        ("tests/gradients/test_zoo.py::test_zoo[custom function whose backward mixes by a rare coin]",),
    ),
    Mutation(
        "a model that asks NumPy for random numbers seems to ask for none",
        "gradients/capture/random_numbers.py",
        (("asked.numbers = constant.has_met or bool(state.moved())", "asked.numbers = constant.has_met"),),
        ("tests/gradients/test_asked_numbers.py::test_what_is_asked_is_seen[NumPy]",),
    ),
    Mutation(
        "a model whose layers drop something seems to have no dropout",
        "gradients/capture/random_numbers.py",
        (("asked.dropout = no_dropout.has_met or any(before)", "asked.dropout = no_dropout.has_met"),),
        ("tests/gradients/test_asked_numbers.py::test_what_is_asked_is_seen[recurrent layer]",),
    ),
    Mutation(
        "a forward that stops short of its plan seems to follow it",
        "gradients/engine.py",
        (("            capture.check_followed()\n", "            pass\n"),),
        (
            "tests/gradients/test_asked_numbers.py::test_a_forward_alone_tells_whether_records_follow_the_plan[True]",
        ),
    ),
    Mutation(
        "random numbers of Python are not held",
        "gradients/capture/random_numbers.py",
        (("    random.setstate((3, (*words, 0), None))\n", ""),),
        ("tests/gradients/test_zoo.py::test_zoo[mixup behind Python's rare coin]",),
    ),
    Mutation(
        "hooks on gradients are not seen at the start",
        "gradients/capture/planner.py",
        (("if _changes_gradients(model, large):", "if False:"),),
        ("tests/gradients/test_zoo.py::test_zoo[hook on the batch's gradient, far away]",),
    ),
    Mutation(
        "what a forward keeps in attributes stays",
        "gradients/capture/attributes.py",
        (("            attributes.update(own)", "            pass"),),
        ("tests/gradients/test_coverage.py::test_what_a_forward_keeps_in_attributes_is_forgotten",),
    ),
    Mutation(
        "tensors of a model's own may change in place",
        "gradients/capture/attributes.py",
        (("if tensor._version != version", "if False"),),
        ("tests/gradients/test_attributes.py::test_a_tensor_that_changes_in_place_is_refused",),
    ),
    Mutation(
        "items may keep the random numbers that they drew",
        "training/setup/pipeline_trials.py",
        (("if first and not second:", "if False:"),),
        ("tests/training/test_neighbours.py::test_a_cache_of_random_items_is_refused",),
    ),
    Mutation(
        "nobody sees whether a data set keeps something of the first records",
        "training/setup/pipeline_trials.py",
        (
            ("        untouched.losses(first)\n", ""),
            ("MOST_READS, WORK, WAIT = 1000", "MOST_READS, WORK, WAIT = 0"),
        ),
        ("tests/training/test_neighbours.py::test_a_pipeline_that_keeps_something_is_refused",),
    ),
    Mutation(
        "tiny losses are held against an absolute tolerance",
        "gradients/checks/record_mixing.py",
        (("tolerance * min(1.0, largest)", "tolerance"),),
        ("tests/gradients/test_coverage.py::test_tiny_losses_are_held_against_their_own_size",),
    ),
    Mutation(
        "half precision excuses what moves in the same shapes",
        "gradients/checks/record_mixing.py",
        (("low_precision and is_reshaped)", "low_precision)"),),
        ("tests/gradients/test_coverage.py::test_half_precision_rounds_anew_in_other_shapes",),
    ),
    Mutation(
        "a plan for made-up records is not tried on the example",
        "gradients/engine.py",
        (("if plan == before[0].get(signature(example)):", "if True:"),),
        ("tests/gradients/test_zoo.py::test_zoo[records sorted by sign]",),
    ),
    Mutation(
        "a start moves the user's random numbers",
        "training/setup/training_setup.py",
        (("with processes.together(), random_numbers_from(0, place):", "with processes.together():"),),
        ("tests/training/test_loop.py::test_a_start_leaves_the_global_random_numbers_where_they_were[dict]",),
    ),
    Mutation(
        "a bound is put on values of another draw",
        "privacy/bounds/bounded.py",
        (("        if tensor.draw != draw:", "        if False:"),),
        ("tests/privacy/test_bounded.py::test_a_bound_is_for_values_of_its_own_draw",),
    ),
    Mutation(
        "on a device only the first line of many tensors is hashed",
        "privacy/digests.py",
        (
            (
                "torch.split(lines, HASHED_AT_ONCE // HASHED_BYTES)",
                "torch.split(lines[:1], HASHED_AT_ONCE // HASHED_BYTES)",
            ),
        ),
        ("tests/privacy/test_ledger.py::test_what_is_hashed_on_a_device_is_copied_at_once",),
    ),
    Mutation(
        "random numbers that nobody saw are not tried",
        "gradients/checks/record_trials.py",
        (("return asked.numbers or any(", "return asked.numbers and any("),),
        ("tests/gradients/test_asked_numbers.py::test_numbers_that_nobody_sees_are_tried[put_back-0.1-0.0]",),
    ),
    Mutation(
        "sums that are not finite are released",
        "privacy/ledger/ledger.py",
        (("bad = [] if is_finite else", "bad = [] if True else"),),
        ("tests/privacy/test_ledger.py::test_refusals_release_and_charge_nothing[not finite]",),
    ),
    Mutation(
        "something is disclosed before what was required is checked",
        "privacy/ledger/ledger.py",
        (
            (
                '        self.check_required()\n        self._unproven("disclose"',
                '        self._unproven("disclose"',
            ),
        ),
        ("tests/privacy/test_ledger.py::test_nothing_leaves_where_a_check_that_was_required_fails",),
    ),
    Mutation(
        "parameters that are others than at the start train on",
        "training/step.py",
        (("if now.get(name) is not parameter:", "if False:"),),
        (
            "tests/training/test_loop.py"
            "::test_parameters_that_were_converted_or_replaced_are_refused_until_they_are_back",
        ),
    ),
    Mutation(
        "a digest is taken of the values as they are when it is asked for",
        "privacy/digests.py",
        (
            (
                "Unread([*compressed(on_device, self._hashing)] if on_device else [], finished)",
                "Unread([], lambda: finished(*(compressed(on_device, self._hashing) if on_device else [])))",
            ),
        ),
        ("tests/test_host.py::test_an_unread_digest_is_of_the_values_as_they_were[on a device]",),
    ),
    Mutation(
        "a digest that an interrupt ended goes on with a hash that is begun",
        "privacy/digests.py",
        (("whole = state.copy()", "whole = state"),),
        (
            "tests/training/test_interrupted_step.py"
            "::test_a_digest_that_was_interrupted_is_that_of_its_value[on a device]",
        ),
    ),
    Mutation(
        "of what is read together, each value is the first one",
        "_host.py",
        (("part.clone().view(like.dtype)", "parts[0].clone().view(like.dtype)"),),
        ("tests/test_host.py::test_one_copy_brings_all",),
    ),
    Mutation(
        "a copy that was interrupted passes for read",
        "_host.py",
        (
            (
                "    for value in values:\n        for at",
                "    for value in values:\n        value._is_read = True\n        for at",
            ),
        ),
        ("tests/test_host.py::test_what_an_interrupt_left_on_the_device_is_copied_again",),
    ),
    Mutation(
        "a question is asked again once, whatever for",
        "training/step.py",
        (("if type(error) in met:", "if met:"),),
        ("tests/training/test_bad_input.py::test_a_step_is_taken_again_for_both_reasons_in_any_order",),
    ),
    Mutation(
        "on a device nobody looks at the norms of a draw",
        "training/context.py",
        (("if all_finite is not None:", "if False:"),),
        ("tests/training/test_bad_input.py::test_on_a_device_a_draw_with_a_bad_record_is_asked_again",),
    ),
    Mutation(
        "a micro-batch tells that all its records are finite where one is",
        "privacy/bounds/clipping.py",
        (("_all_finite.append(finite.all())", "_all_finite.append(finite.any())"),),
        (
            "tests/privacy/test_late_looks.py"
            "::test_a_record_that_is_not_finite_is_told_and_never_adds_a_number[clip-bad0]",
        ),
    ),
    Mutation(
        "a record that is not finite has a norm where nobody looked yet",
        "privacy/bounds/clipping.py",
        (("torch.where(places, norms, math.nan)", "torch.where(places, norms, 1.0)"),),
        (
            "tests/privacy/test_late_looks.py"
            "::test_a_record_that_is_not_finite_is_told_and_never_adds_a_number[clip-bad2]",
        ),
    ),
    Mutation(
        "what is derived from rows forgets to tell",
        "privacy/rows.py",
        (
            (
                "PrivateRows(rows, self.draw, self._places, self._all_finite)",
                "PrivateRows(rows, self.draw, self._places, [])",
            ),
        ),
        (
            "tests/privacy/test_late_looks.py"
            "::test_a_record_that_is_not_finite_is_told_and_never_adds_a_number[clip differences-bad0]",
        ),
    ),
    Mutation(
        "a step that is taken again for a record that is not finite has other records",
        "training/step.py",
        (
            (
                "                    assert self._began is not None\n"
                "                    self._ledger.rewind(self._began)\n",
                "",
            ),
        ),
        ("tests/training/test_bad_input.py::test_on_a_device_a_draw_with_a_bad_record_is_asked_again",),
    ),
    Mutation(
        "a digest does not tell which tensors were hashed on a device",
        "privacy/digests.py",
        (("hashed where they are: {places};", "hashed where they are;"),),
        ("tests/privacy/test_ledger.py::test_a_digest_tells_which_tensors_were_hashed_on_a_device",),
    ),
    Mutation(
        "all stages are paid for at the first one's noise",
        "privacy/plan.py",
        (
            (
                "self.combined_multiplier(pattern.names, pattern.first))",
                "self.combined_multiplier(pattern.names))",
            ),
        ),
        ("tests/privacy/test_staged.py::test_the_cost_is_that_of_every_draw_with_its_own_noise",),
    ),
    Mutation(
        "a stage begins a draw early",
        "privacy/mechanisms/staged.py",
        (("bisect_right(self.starts, ordinal)", "bisect_right(self.starts, ordinal + 1)"),),
        ("tests/privacy/test_staged.py::test_every_draw_has_the_noise_of_its_stage",),
    ),
    Mutation(
        "noise changes within an epoch",
        "privacy/plan.py",
        (("if change % epoch]", "if False]"),),
        ("tests/privacy/test_staged.py::test_what_is_refused",),
    ),
    Mutation(
        "releases of a late stage are booked as early ones",
        "privacy/ledger/run_record.py",
        (
            (
                "return stages[place] if place >= 0 and stages[place].holds(ordinal) else None",
                "return next((p for p in stages if self.used[p] < p.count), None)",
            ),
        ),
        ("tests/privacy/test_staged.py::test_draws_that_were_not_released_leave_their_stage",),
    ),
    Mutation(
        "a record that pushes another one out moves a sum by its own part alone",
        "privacy/accounting/loss_distribution.py",
        (("replace(plain, sigma=self.sigma / 2)", "plain"),),
        ("tests/privacy/test_truncated.py::test_no_number_of_records_has_a_larger_delta_than_the_bound",),
    ),
    Mutation(
        "a record pushes another one out only where two are too many",
        "privacy/accounting/epsilon.py",
        (("part.truncated_batch_size - 1, others", "part.truncated_batch_size + 1, others"),),
        ("tests/privacy/test_truncated.py::test_no_number_of_records_has_a_larger_delta_than_the_bound",),
    ),
    Mutation(
        "of too many records the first ones are taken",
        "privacy/sampling.py",
        (
            (
                "return found[uniform_subset(len(found), self.largest_size, generator)]",
                "return found[: self.largest_size]",
            ),
        ),
        ("tests/privacy/test_truncated.py::test_draws_are_cut_to_uniform_subsets",),
    ),
    Mutation(
        "a cap holds for any number of records",
        "privacy/sampling.py",
        (("if _check_records(num_records) > self.population:", "if False:"),),
        ("tests/privacy/test_truncated.py::test_more_records_than_the_population_are_refused",),
    ),
    Mutation(
        "noise of earlier steps is stretched to other shapes",
        "privacy/ledger/ledger.py",
        (("            if before != shapes:", "            if False:"),),
        (
            "tests/privacy/test_banded_gaussian.py::test_sums_of_other_shapes_than_before_are_refused_and_cost_nothing",
        ),
    ),
    Mutation(
        "a parameter that all processes hold counts once for each in a norm",
        "gradients/split.py",
        (("is_first or not is_a_copy(self._params[name])", "is_first or True"),),
        (
            "tests/gradients/test_sharded_engine.py::test_rows_of_a_tensor_parallel_model_are_those_of_the_whole",
        ),
    ),
    Mutation(
        "a process of a tensor parallel model clips by the norm of its part",
        "gradients/split.py",
        (("        dist.all_reduce(total, group=self._mesh.get_group())\n", ""),),
        (
            "tests/gradients/test_sharded_engine.py::test_rows_of_a_tensor_parallel_model_are_those_of_the_whole",
        ),
    ),
    Mutation(
        "a look-up in a table cut by rows counts what is in another process",
        "gradients/capture/local_operations.py",
        (("is_here = (own >= 0) & (own < count)", "is_here = own >= -len(table)"),),
        (
            "tests/gradients/test_sharded_engine.py::test_rows_of_a_tensor_parallel_model_are_those_of_the_whole",
        ),
    ),
    Mutation(
        "operations that see a part of each record are taken for whole ones",
        "gradients/capture/local_operations.py",
        (("    if all(map(is_a_copy, tensors)):\n", "    if True:\n"),),
        (
            "tests/gradients/test_sharded_engine.py"
            "::test_what_tensor_parallel_models_may_not_do_is_refused_by_name",
        ),
    ),
    Mutation(
        "processes sum what all of them hold apart, whatever was clipped by",
        "training/model_sharing.py",
        (("            sent = sent_by_first(", "            sent = list("),),
        (
            "tests/training/test_sharded_training.py"
            "::test_sums_of_what_all_processes_hold_are_those_of_the_first",
        ),
    ),
    Mutation(
        "processes that hold columns of a matrix draw the same noise",
        "_dtensor.py",
        (("else torch.tensor([begin])", "else torch.tensor([0])"),),
        ("tests/training/test_sharded_training.py::test_a_sharded_model_trains_as_in_one_process",),
    ),
    Mutation(
        "one range of columns is drawn again for the following rows",
        "privacy/noise/streams.py",
        (("values.as_strided(shape, (following - start, 1),", "values.as_strided(shape, (0, 1),"),),
        ("tests/privacy/test_noise.py::test_the_columns_of_a_matrix_are_those_of_the_whole_stream",),
    ),
    Mutation(
        "processes look up other records under the same numbers",
        "training/setup/same_records.py",
        (("    if len({first for first, _ in found}) > 1 or len(wholes) > 1:\n", "    if False:\n"),),
        ("tests/training/test_neighbours_in_processes.py::test_processes_with_other_data_are_refused",),
    ),
    Mutation(
        "a process of a model held in parts tries what it has time for",
        "training/setup/training_setup.py",
        (("is_held_in_parts = model in SHARDED and processes.count > 1", "is_held_in_parts = False"),),
        (
            "tests/training/test_neighbours_in_processes.py"
            "::test_processes_that_read_at_their_own_speed_try_the_same",
        ),
    ),
    Mutation(
        "processes that run the same records add their sums up",
        "training/model_sharing.py",
        (("        return after_exchange(sums, first)\n", "        return added_over_processes(sums)\n"),),
        (
            "tests/training/test_sharded_training.py"
            "::test_sums_of_what_all_processes_hold_are_those_of_the_first",
        ),
    ),
    Mutation(
        "other machines are asked by micro-batch",
        "training/record_source.py",
        (
            (
                "self._data.announce(torch.cat([_NOBODY, *parts]), int(number))",
                "pass",
            ),
        ),
        ("tests/training/test_record_places.py::test_a_whole_draw_is_announced_before_its_first_forward",),
    ),
    Mutation(
        "records of a machine that does not answer are left out",
        "training/model_sharing.py",
        (("GatherError | NoAnswerError | ProcessError", "GatherError | ProcessError"),),
        (
            "tests/training/test_record_places.py"
            "::test_a_machine_that_does_not_answer_ends_the_step_and_books_nothing",
        ),
    ),
    Mutation(
        "data whose loss asks nobody for them",
        "training/setup/training_setup.py",
        (("if given.data is not of_loss:", "if of_loss is not None and given.data is not of_loss:"),),
        ("tests/training/test_record_places.py::test_loss_and_data_belong_together",),
    ),
    Mutation(
        "answers of one draw are taken for another's",
        "training/record_source.py",
        (("            self.kept.clear()\n", "            pass\n"),),
        (
            "tests/training/test_record_places.py"
            "::test_a_draw_has_a_number_and_what_is_kept_of_it_goes_with_it",
        ),
    ),
    Mutation(
        "a statement is silent about machines that compute gradients",
        "training/setup/training_setup.py",
        (("Assumption.ELSEWHERE: rows.source.is_elsewhere", "Assumption.ELSEWHERE: False"),),
        ("tests/training/test_record_places.py::test_the_statement_names_the_other_machines",),
    ),
)
