"""Faults of the engine: its steps, pages and ranks."""

from __future__ import annotations

from fault import Fault

INPUTS = "core/ds_runtime/engine/step/inputs.py"

ENGINE: tuple[Fault, ...] = (
    Fault(
        "logits that nobody looks at",
        "core/ds_runtime/engine/step/result.py",
        "(total - total) == 0",
        "total.new_ones(total.shape).bool()",
        ("tests/e2e/test_broken_logits.py::test_the_choice_ends_and_nothing_of_it_stays",),
    ),
    Fault(
        "pages of a broken answer that stay cached",
        "core/ds_runtime/kv/prefix.py",
        "if i >= known or not n.is_proved",
        "if not n.is_proved",
        ("tests/core/engine/test_pages_prefix.py::test_what_is_discarded_is_never_matched_again",),
    ),
    Fault(
        "decode page off by one",
        INPUTS,
        "slots = [p[t // n] * n",
        "slots = [p[max(t - 1, 0) // n] * n",
        (
            "tests/core/engine/test_batch.py::test_batch_equals_the_naive_construction",
            "tests/core/engine/test_batch.py",
        ),
    ),
    Fault(
        "swapped shard",
        "core/ds_runtime/parallel/layout.py",
        "share = shard.slice(size,",
        "last = shard.size - 1 - shard.rank\n                "
        "share = (shard if cut.dim else Shard(last, shard.size)).slice(size,",
        ("tests/core/model/test_parity.py::test_tensor_parallel",),
    ),
    Fault(
        "stale prefix",
        "core/ds_runtime/kv/prefix.py",
        "        if not node.is_cut:\n            del parent.children[node.key]\n",
        "",
        ("tests/core/engine/test_scheduler.py::test_the_oldest_request_is_never_held_up",),
    ),
    Fault(
        "shared seed",
        "core/ds_runtime/engine/step/streams.py",
        "return _mix((_mix((seed + _GOLDEN) & _MASK) + (choice + 1) * _GOLDEN) & _MASK)",
        "return _mix((seed + _GOLDEN) & _MASK)",
        ("tests/core/engine/test_sampler.py::test_uniforms_are_uniform_and_streams_differ",),
    ),
    Fault(
        "abort leaks a page",
        "core/ds_runtime/kv/rank_pages.py",
        "self.pool.free(request.pages[request.num_shared :])",
        "self.pool.free(request.pages[request.num_shared : -1])",
        ("tests/core/engine/test_scheduler.py::test_one_request_alone",),
    ),
    Fault(
        "a prompt goes on where no snapshot is",
        "core/ds_runtime/kv/snapshots.py",
        "        while node.parent is not None and node not in self:\n",
        "        while False:\n",
        ("tests/core/engine/test_snapshots.py::TestSnapshots",),
    ),
    Fault(
        "what prompts have gone on from is pushed out",
        "core/ds_runtime/kv/snapshots.py",
        "if len(self._read) > self.pool.num_pages // 4:",
        "if self._read:",
        ("tests/core/engine/test_toy_model.py::test_answers_under_way_push_no_beginning_out",),
    ),
    Fault(
        "answers under way take every snapshot",
        "core/ds_runtime/kv/snapshots.py",
        "if answers and count - free - self.num_kept >= count // 2:",
        "if False:",
        ("tests/core/engine/test_toy_model.py::test_answers_have_half_of_the_blocks",),
    ),
    Fault(
        "a snapshot is offered before it is copied",
        "core/ds_runtime/kv/transfer/leases.py",
        "self.settle()  # its reader may look before this engine does anything more",
        "pass",
        ("tests/core/engine/test_handover.py::test_a_snapshot_is_there_when_it_is_offered",),
    ),
    Fault(
        "what came first is the cause, though somebody saw another",
        "core/ds_runtime/parallel/link/messages.py",
        "min(causes, key=lambda cause: cause.known)",
        "causes[0]",
        (
            "tests/core/parallel/test_link_ends.py::test_one_that_was_killed_is_told_of_by_another_and_is_first",
        ),
    ),
    Fault(
        "pages of a lease that has ended are kept",
        "core/ds_runtime/kv/transfer/handover.py",
        "                if said.whole and pull.ticket is None:\n",
        "                if pull.ticket is None:\n",
        (
            "tests/core/engine/test_handover.py::test_a_lease_ends_with_time_and_its_reader_keeps_nothing",
        ),
    ),
    Fault(
        "pages of a pull that failed are lost",
        "core/ds_runtime/kv/transfer/handover.py",
        "        self._pages.pool.free(blocks.pages)\n",
        "        self._pages.pool.free(blocks.pages[1:])\n",
        ("tests/core/engine/test_handover.py::test_no_page_leaks_when_either_side_leaves",),
    ),
    Fault(
        "bytes of another meeting reach a page",
        "core/ds_runtime/kv/transfer/mailbox.py",
        "known = line is not None and (answers, epoch) == (line.own, line.theirs)\n",
        "known = line is not None\n",
        ("tests/core/engine/test_socket_pairs.py::test_bytes_of_another_pair_reach_no_page",),
    ),
    Fault(
        "a pull is forgotten before its read is given up",
        "core/ds_runtime/kv/transfer/handover.py",
        "            self._transfer.release(pull.ticket)  # until then its blocks are written to\n",
        "            del self._pulls[pull.token]\n            self._transfer.release(pull.ticket)\n"
        "            self._pulls[pull.token] = pull\n",
        (
            "tests/core/engine/test_handover.py::test_a_read_that_cannot_be_given_up_keeps_its_pages",
        ),
    ),
    Fault(
        "a snapshot that became another still stands",
        "core/ds_runtime/kv/snapshots.py",
        "            pin.stands = False\n",
        "            pass\n",
        ("tests/core/engine/test_handover.py::test_pages_that_turn_out_broken_are_not_kept",),
    ),
    Fault(
        "a lease is renewed for ever",
        "core/ds_runtime/kv/transfer/leases.py",
        "lease.until = min(now + max(lease.seconds, LEAST), lease.last)",
        "lease.until = now + lease.seconds",
        (
            "tests/core/engine/test_handover.py::test_a_lease_of_no_time_is_renewed_as_one_of_a_second_and_lives_as_long",
        ),
    ),
    Fault(
        "weights that changed since they were loaded have a digest",
        "core/ds_runtime/kv/digest.py",
        "        if loaded.get(file) != Stamp.of(file):\n",
        "        if False:\n",
        (
            "tests/core/model/test_weights_digest.py::test_files_that_changed_since_they_were_loaded_have_none",
        ),
    ),
    Fault(
        "a peer's page numbers are believed",
        "core/ds_runtime/kv/transfer/sockets.py",
        "        if not self.holds(blocks):\n",
        "        if False:\n",
        ("tests/core/engine/test_socket_transfer.py::test_a_read_of_what_is_not_there_is_stopped",),
    ),
    Fault(
        "a piece's slot is filled before it was taken",
        "core/ds_runtime/kv/transfer/sockets.py",
        "            slot = peer.free.pop()\n",
        "            slot = peer.free[0]\n",
        ("tests/core/engine/test_socket_transfer.py::test_blocks_come_byte_for_byte",),
    ),
    Fault(
        "spare rows write to a page",
        INPUTS,
        "np.array(slots + [-1] * dummies, np.int64)",
        "np.array(slots + [0] * dummies, np.int64)",
        ("tests/e2e/test_graphs.py::test_a_replay_changes_what_an_eager_step_changes",),
    ),
    Fault(
        "spare rows of prompts write to a page",
        "core/ds_runtime/engine/capture/prefill.py",
        "self.slots[n:].fill_(-1)",
        "self.slots[n:].fill_(0)",
        ("tests/e2e/test_prefill_graphs.py::test_answers_are_those_of_eager_steps",),
    ),
    Fault(
        "captures between steps write to pages",
        "core/ds_runtime/engine/capture/prefill.py",
        "self._rows.spare()",
        "self._rows.spare(self.size)",
        (
            "tests/e2e/test_prefill_graphs.py::test_what_the_start_has_no_time_for_is_captured_while_idle",
        ),
    ),
    Fault(
        "spare rows read a foreign page",
        "core/ds_runtime/engine/step/transfer.py",
        "spare = [[self._spare]] * (",
        "spare = [[0]] * (",
        ("tests/e2e/test_graphs.py::test_a_replay_changes_what_an_eager_step_changes",),
    ),
    Fault(
        "a replay on the last step's page table",
        "core/ds_runtime/engine/step/transfer.py",
        "if self._held is table or (self._held is not None and np.array_equal(self._held, table)):",
        "if self._held is not None and self._held.shape == table.shape:",
        ("tests/e2e/test_graphs.py::test_answers_are_those_of_eager_steps",),
    ),
    Fault(
        "a recorded chain of drafts attends by an older plan",
        "core/ds_runtime/engine/speculate/chain.py",
        "self._parts.prepare(batch, self._keys, inside=True if self.size else None)",
        "self._parts.prepare(batch, () if self.size else self._keys)",
        ("tests/e2e/test_speculation_captured.py::test_every_kind_of_request",),
    ),
    Fault(
        "ranks add up as the library likes",
        "core/ds_runtime/parallel/world.py",
        "{groups: InOrder(own, shares) for groups, own in made.items()}",
        "made",
        ("tests/core/test_bind_invariant.py::test_every_group_of_several_ranks_adds_up_so",),
    ),
    Fault(
        "a level of a tree reads where the one before it no longer writes",
        "core/ds_runtime/engine/trees/drafting.py",
        "if any(map(given_up, self._runs)):",
        "if not self._runs:",
        (
            "tests/plugins/test_cpu_graphs.py::test_a_tree_whose_levels_cannot_all_be_recorded_grows_op_by_op",
        ),
    ),
    Fault(
        "drafts of another rank's sequences",
        "core/ds_runtime/engine/speculate/chain.py",
        "self._mine(found[-1])",
        "found[-1][: batch.num_tokens]",
        (
            "tests/e2e/test_speculation_pairs.py::test_ranks_that_divide_sequences_draft_for_their_own",
        ),
    ),
    Fault(
        "a captured step takes the wrong rows",
        INPUTS,
        "np.array([w.row * width for w in works] + [",
        "np.array([*range(len(works))] + [",
        ("tests/e2e/test_graphs.py::test_answers_are_those_of_eager_steps",),
    ),
    Fault(
        "logits of another rank's rows",
        "core/ds_runtime/parallel/row_order.py",
        "free = [group * size for group in range(groups)]",
        "free = [(groups - 1 - group) * size for group in range(groups)]",
        ("tests/core/parallel/test_exchange.py::test_a_steps_rows_enter_leave_and_are_collected",),
    ),
    Fault(
        "every rank computes attention of all sequences",
        "core/ds_runtime/parallel/exchange.py",
        "[work for work in works if work.group == self.group]",
        "list(works)",
        ("tests/e2e/test_dp_attention_kv.py::test_the_kv_of_a_sequence_lies_on_one_rank_only",),
    ),
    Fault(
        "sums of a group leave out its other ranks",
        "core/ds_runtime/parallel/exchange.py",
        "self._inside.all_reduce(summed)[:count]",
        "summed[:count]",
        ("tests/core/parallel/test_exchange.py::test_a_steps_rows_enter_leave_and_are_collected",),
    ),
    Fault(
        "the shared experts of a group's own rows are lost",
        "core/ds_runtime/parallel/exchange.py",
        "summed[:count].add_(own)",
        "summed[:count].add_(0 * own)",
        ("tests/core/parallel/test_exchange.py::test_a_steps_rows_enter_leave_and_are_collected",),
    ),
    Fault(
        "a group preempts the requests of another",
        "core/ds_runtime/engine/schedule/scheduler.py",
        "victim = next(r for r in reversed(self.running) if r.group == request.group)",
        "victim = self.running[-1]",
        ("tests/core/engine/test_scheduler_ranks.py::test_ranks_preempt_their_own_requests_only",),
    ),
    Fault(
        "results read before they have come",
        "core/ds_runtime/engine/engine.py",
        "len(self._launched) > self._ahead",
        "len(self._launched) >= self._ahead",
        ("tests/e2e/test_overlap.py::test_messages_are_the_same_step_by_step",),
    ),
    Fault(
        "tokens beyond the end reach the client",
        "core/ds_runtime/engine/schedule/scheduler.py",
        "if request.is_finished:  # aborted, or ended by the step before",
        "if False:",
        ("tests/e2e/test_overlap.py::test_messages_are_the_same_step_by_step",),
    ),
)
