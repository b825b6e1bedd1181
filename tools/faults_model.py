"""Faults of the model and its ops: what is loaded, bound and computed."""

from __future__ import annotations

from fault import Fault

MODEL: tuple[Fault, ...] = (
    Fault(
        "negative NaN in weights",
        "core/ds_runtime/checkpoint/nan.py",
        'pairs = (("i", last), ("u", last | 1 << (8 * size - 1)))',
        'pairs = (("i", last),)',
        ("tests/core/model/test_nan_weights.py::test_every_number_that_a_dtype_has",),
    ),
    Fault(
        "codes from attention although a prefix is there",
        "core/ds_runtime/model/attention.py",
        "or part is None or part.prefix or",
        "or part is None or",
        (
            "tests/e2e/test_quantised_inputs.py::test_attention_quantises_neither_beside_a_decode_nor_behind_a_prefix",
        ),
    ),
    Fault(
        "bounds of rows that hold for every method",
        "core/ds_runtime/ops/binding/bound.py",
        "and method in (kernel.rows.methods or (method,))",
        "",
        ("tests/core/test_bind.py::test_bounds_may_hold_for_one_method_alone",),
    ),
    Fault(
        "softmax scale without mscale squared",
        "core/ds_runtime/description/config.py",
        "scale *= self.yarn.multiplier(self.yarn.mscale_all_dim) ** 2",
        "scale *= 1.0",
        ("tests/core/model/test_parity.py::test_whole_prompts",),
    ),
    Fault(
        "masked groups 0 instead of -inf",
        "core/ds_runtime/ops/reference/matrices/moe.py",
        'closed = float("-inf") if routing.method == "noaux_tc" else 0.0',
        "closed = 0.0",
        (
            "tests/core/ops/test_reference_routing.py::test_a_closed_group_is_never_chosen_however_low_the_bias",
        ),
    ),
    Fault(
        "bias kept in the routing weights",
        "core/ds_runtime/ops/reference/matrices/moe.py",
        "weights = scores.gather(1, ids)",
        "weights = choice.gather(1, ids)",
        ("tests/core/ops/test_reference_routing.py::test_noaux_tc_equals_transformers",),
    ),
    Fault(
        "half-split rope",
        "core/ds_runtime/ops/reference/attention/rope.py",
        "a, b = x[..., 0:r:2], x[..., 1:r:2]",
        "a, b = x[..., : r // 2], x[..., r // 2 : r]",
        ("tests/core/ops/test_reference_small.py::test_rope_equals_both_forms_of_transformers",),
    ),
    Fault(
        "nibbles swapped",
        "core/ds_runtime/weights/layouts.py",
        "torch.stack((data & 15, data >> 4), dim=-1)",
        "torch.stack((data >> 4, data & 15), dim=-1)",
        ("tests/core/model/test_published_formats.py::test_any_part_is_that_part_of_the_whole",),
    ),
    Fault(
        "AWQ's order taken backwards",
        "core/ds_runtime/weights/layouts.py",
        "_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)",
        "_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        ("tests/core/model/test_published_formats.py::test_any_part_is_that_part_of_the_whole",),
    ),
    Fault(
        "a global scale that divides multiplies",
        "core/ds_runtime/weights/layouts.py",
        "self.sent(1 / value if self.encoding.divides else value)",
        "self.sent(value)",
        ("tests/core/model/test_published_formats.py::test_any_part_is_that_part_of_the_whole",),
    ),
    Fault(
        "a conversion is not said",
        "core/ds_runtime/ops/binding/bind.py",
        "converts = str(conversion)",
        'converts = ""',
        ("tests/core/test_conversions.py::test_the_format_that_a_weight_is_held_in",),
    ),
    Fault(
        "fp8 scale transposed",
        "core/ds_runtime/ops/weight.py",
        "scale = scale_grid(part, compute)\n",
        "scale = scale_grid(part, compute)\n    scale = scale.t().reshape(scale.shape)\n",
        (
            "tests/core/ops/test_reference_formats.py::test_fp8_blocks_equal_an_element_by_element_loop",
        ),
    ),
    Fault(
        "page off by one",
        "core/ds_runtime/ops/reference/attention/cache.py",
        "owners = pages[tokens // page_size].to(torch.int64)",
        "owners = pages[(tokens - 1).clamp_min(0) // page_size].to(torch.int64)",
        ("tests/core/ops/test_reference_attention.py::test_what_is_written_is_gathered",),
    ),
    Fault(
        "merge missing",
        "core/ds_runtime/model/attention.py",
        "merged, merged_lse = self.ops.merge_state(own_out, own_lse, *old)",
        "merged, merged_lse = own_out, old[1]",
        ("tests/core/model/test_parity.py::test_random_schedules",),
    ),
    Fault(
        "a rule of assembly that nobody applies",
        "core/ds_runtime/assembly/rules.py",
        "RULES = (uncaptured, widening, index_keys, crowded",
        "RULES = (uncaptured, widening, crowded",
        ("tests/core/test_rules.py::test_a_rule_says_what_it_changed_and_why",),
    ),
    Fault(
        "refusal ignored",
        "core/ds_runtime/ops/binding/bind.py",
        "        if (said := _asked(check, facts)) is not None:\n",
        "        if (said := _asked(check, facts)) is not None and not said:\n",
        ("tests/core/test_bind.py::test_a_refusal_is_kept_word_for_word_and_the_next_serves",),
    ),
    Fault(
        "plugin half registered",
        "core/ds_runtime/plugins/manager.py",
        "            self.manager.unregister(plugin)\n",
        "            pass\n",
        (
            "tests/core/test_plugins.py::test_a_plugin_that_cannot_be_loaded_is_named_and_leaves_nothing",
        ),
    ),
    Fault(
        "pin beats a refusal",
        "core/ds_runtime/ops/binding/bind.py",
        "if all(sentence is not None for _, sentence in said):",
        "if not said:",
        ("tests/core/test_bind.py::test_a_pin_never_beats_a_refusal",),
    ),
    Fault(
        "a kernel whose rows' bits hang on others is bound where they must not",
        "core/ds_runtime/ops/binding/invariant.py",
        "            yield NO_BITS",
        "            yield from ()",
        (
            "tests/core/test_bind_invariant.py::test_a_kernel_without_the_tag_is_refused_in_words_that_name_the_flag",
        ),
    ),
    Fault(
        "choices of experts of other ranks reach the last one here",
        "core/ds_runtime/ops/reference/matrices/moe.py",
        "torch.unique(ids[ids >= 0]).tolist()",
        "torch.unique(ids).tolist()",
        ("tests/conformance/test_ops.py",),
    ),
    Fault(
        "every rank takes the experts of the first for its own",
        "core/ds_runtime/weights/loader.py",
        "local = self.placement.local(here.rank)",
        "local = self.placement.local(0)",
        ("tests/e2e/test_expert_parallel.py::test_mixed_batches_give_what_one_rank_gives",),
    ),
)
