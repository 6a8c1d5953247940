"""Bugs that the tests must notice, for `mutants.py`.

Tests -> (module of the package, function, code to find in it, what it becomes). The code is a statement, an expression
or a keyword argument that the function has exactly once; `pass` takes a statement away. `mutants.py --list` says which
ones no longer fit the package, and what to write instead.
"""

KERNELS, EAGER, PASSES, SUMS = "engine/kernels.py", "engine/eager.py", "engine/passes.py", "engine/sums_triton.py"
LANES, SWEEPS, REDUCTION = "engine/transports/sum_lanes.py", "linear_head/sweeps.py", "head_loss/reduction.py"
MEGATRON = "integrations/megatron/head.py"


def statistic(name: str) -> tuple[str, str]:
    """The two modules of a family of statistics: its definition, and its device functions."""
    return f"statistics/{name}.py", f"statistics/{name}_triton.py"


SOFTMAX, SOFTMAX_DEVICE = statistic("softmax")
COLLISION, COLLISION_DEVICE = statistic("collision")
ENTROPY, ENTROPY_DEVICE = statistic("entropy")
ARGMAX, ARGMAX_DEVICE = statistic("argmax")
_, TOTAL_DEVICE = statistic("total")
TEACHER, TEACHER_DEVICE = statistic("teacher")
DIVERGENCE, DIVERGENCE_DEVICE = statistic("divergence")
TOPK, TOPK_DEVICE = statistic("topk")
ENTRIES, ENTRIES_DEVICE = statistic("entries")

GROUPS = {
    "test_accuracy test_sharding test_generated test_losses test_bad_inputs test_bad_inputs_triton": [
        (SOFTMAX_DEVICE, "add_packet", "read(packet, rows.target, 0.0)", "0.0"),
        (SOFTMAX_DEVICE, "add_packet", "tl.fma(softmax.factor, softmax.sum, state[0])", "softmax.sum + state[0]"),
        (SOFTMAX_DEVICE, "with_target", "IGNORED * PACKETS", "IGNORED"),
        (SOFTMAX_DEVICE, "with_target", "tl.maximum(shift, target)", "shift"),
        (SOFTMAX_DEVICE, "with_target", "whole = others * factor + p_target", "whole = others * factor"),
        (SOFTMAX_DEVICE, "with_target", "~(whole > 0.0) | (owners != 1.0)", "~(whole > 0.0)"),
        (SOFTMAX_DEVICE, "finish", "tl.where(joined.target == joined.top, joined.log_sum, joined.log_sum - joined.offset)", "joined.log_sum"),
        (SOFTMAX_DEVICE, "finish", "joined.others * joined.factor / joined.whole", "joined.others * joined.factor"),
        (ENTROPY, "EntropyFamily.rescale", 'rows["moment"] + drop * rows["sum"]', 'rows["moment"]'),
        (ENTROPY_DEVICE, "rescale", "tl.fma(move.drop, move.sum, state[0])", "state[0]"),
        (ENTROPY_DEVICE, "add_packet", "tl.fma(softmax.drop, softmax.sum, moment)", "moment"),
        (ENTROPY_DEVICE, "finish", "joined.log_sum - mean", "joined.log_sum"),
        (ENTROPY_DEVICE, "coefficient", "tl.maximum(shifted, -200.0) - state[1]", "tl.maximum(shifted, -200.0)"),
        (COLLISION, "CollisionFamily.rescale", 'factor * factor * rows["squares"]', 'factor * rows["squares"]'),
        (COLLISION_DEVICE, "rescale", "move.factor * (move.factor * state[0])", "move.factor * state[0]"),
        (COLLISION_DEVICE, "add_packet", "softmax.factor * softmax.factor", "softmax.factor"),
        (COLLISION_DEVICE, "finish", "joined.factor * joined.factor * squares", "joined.factor * squares"),
        (COLLISION_DEVICE, "at_target", "tl.exp(offset) / token.whole - state[1]", "tl.exp(offset) / token.whole"),
        (ARGMAX, "ArgmaxFamily.join", "(joined.target == joined.shift) & (labels < index)", "joined.target == joined.shift"),
        (ARGMAX_DEVICE, "add", "(softmax.peak == softmax.before) & (tile.offset < state[0])", "(softmax.peak == softmax.before) & (tile.offset < 0)"),
        (ARGMAX_DEVICE, "add_packet", "tl.minimum(state[0], column)", "column"),
        (TOTAL_DEVICE, "direct", 'tl.where(tile.z == float("-inf"), 0.0, w)', "w"),
        ("statistics/family.py", "Family.join", "self.rescale(sums, joined.drop, joined.factor)", "sums"),
        ("statistics/family.py", "Family.join", "x + target[name] if name in target else x", "x"),
        ("statistics/family.py", "decay", "torch.where(empty, 0.0, difference.exp())", "difference.exp()"),
        (KERNELS, "_add_tile", "s *= move.factor", "pass"),
        (KERNELS, "statistics_kernel", 'tl.where(inside == chunk.target, float("-inf"), z)', "z"),
        (KERNELS, "statistics_kernel", "tl.where(i < waiting, i, i + BLOCK)", "i"),
        (KERNELS, "statistics_kernel", 'tl.where(inside < chunk.size, load_logits(inputs, chunk, columns, reading), float("-inf"))', "load_logits(inputs, chunk, columns, reading)"),
        (KERNELS, "_softmax_gradient", "tl.exp(offset) * common / token.whole", "tl.exp(offset) * common"),
        (KERNELS, "gradient_kernel", "dz *= slope", "pass"),
        (KERNELS, "gradient_kernel", "dz = tl.where(columns < valid_width, dz, 0.0)", "pass"),
        ("engine/triton.py", "_gradient", "padded = facts.valid_width < width", "padded = False"),
        (PASSES, "kernel_gradients", "target_logit if name not in grads else grads[name] + target_logit", "target_logit"),
    ],
    "test_sharding test_own_family test_generated": [
        (KERNELS, "merge_kernel", "core = softmax.add_packet(core, packet, terms, rows.packet)", "if first + k < 8:\n    core = softmax.add_packet(core, packet, terms, rows.packet)"),
        (EAGER, "logits_gradient", "dz * tile.slope", "dz"),
        (LANES, "to_lanes", "family.rescale(sums, shift, weight)", "family.rescale(sums, -shift, weight)"),
        (LANES, "to_lanes", "torch.where(shift.abs() > 600, torch.nan, shift.exp())", "shift.exp()"),
        (LANES, "from_lanes", "family.rescale(sums, -shift, factor)", "family.rescale(sums, shift, factor)"),
        ("symmetric_memory_triton.py", "packet_pointer", "offset + k % CHUNKS * size", "k % CHUNKS * size"),
        ("symmetric_memory_triton.py", "end_turn", "tl.store(memory.turns, turn + 1)", "tl.store(memory.turns, turn)"),
        ("engine/transports/symmetric_memory.py", "SymmetricMemory.write", "load_backend(request.facts.backend).local_statistics(packets, request, self)", "load_backend(request.facts.backend).local_statistics(packets, request)"),
        ("request.py", "TokenOrder.__init__", "alone and at > 0 and logits.stride(order[at - 1]) < logits.stride(d)", "at > 0 and logits.stride(order[at - 1]) < logits.stride(d)"),
        ("shard.py", "VocabShard.from_group", "-(-padded_size // world_size)", "padded_size // world_size"),
        ("shard.py", "VocabShard.valid_width", "max(0, min(self.stop, self.vocab_size) - self.start)", "self.stop - self.start"),
    ],
    "test_distillation": [
        ("statistics/__init__.py", "Layout.__init__", '(*self._rows("merged_rows"), *self.second[1::2])', '(*self.second[1::2], *self._rows("merged_rows"))'),
        ("statistics/__init__.py", "Layout.__init__", '(*self._rows("value_rows"), *self.second[::2])', '(*self.second[::2], *self._rows("value_rows"))'),
        (SOFTMAX, "SoftmaxFamily.joined", "student_factor * student_sum + at_target", "student_factor * student_sum"),
        (TEACHER, "TeacherFamily.join", 'gap = gap + weigh(joined.at_target, joined.scale * joined.target - sums["teacher_target"])', "pass"),
        (TEACHER_DEVICE, "peak", "tl.maximum(state[0], read(packet, rows.teacher_max, 0.0))", "read(packet, rows.teacher_max, 0.0)"),
        (SOFTMAX_DEVICE, "rescale_student", 'student *= tl.where(move.before == float("-inf"), 0.0, exp(move.drop * chunk.student_scale))', "pass"),
        (TEACHER_DEVICE, "add_softmax", "s *= factor", "pass"),
        (TEACHER_DEVICE, "add_softmax", "cross = tl.where(factor == 0.0, 0.0, factor * cross)", "pass"),
        (TEACHER_DEVICE, "add_softmax", "factor * tl.fma(drop, s, moment)", "factor * moment"),
        (TEACHER_DEVICE, "rescale", "gap = tl.where(factor == 0.0, 0.0, factor * gap)", "pass"),
        (TEACHER_DEVICE, "add_packet", "tl.fma(factor, s, state[1])", "s + state[1]"),
        (TEACHER_DEVICE, "direct", "p * (g * per_student) - q * (g * per_teacher)", "p * (g * per_student)"),
        (DIVERGENCE, "DivergenceFamily.second", "row_sum(student)", "row_sum(student + teacher)"),
        (DIVERGENCE, "DivergenceFamily.second", "row_sum(0.5 * p * (p - q).sign())", "row_sum(0.5 * p)"),
        (DIVERGENCE_DEVICE, "_add", "variation_mean += sign * p", "variation_mean += p"),
        (DIVERGENCE_DEVICE, "_store", "tl.store(out + rows.jsd_mean * n, mean)", "tl.store(out + rows.jsd_mean * n, 0.0)"),
        (EAGER, "_tile_gradient", "tile.scale * scaled", "scaled"),
        ("calls.py", "_teacher_scales", "temperature / student", "1.0 / student"),
        ("losses/distillation.py", "times_temperature_squared", "temperature**2 * values", "temperature * values"),
    ],
    "test_losses test_reduction test_terms": [
        (SUMS, "sums_kernel", 'divisor = tl.where(divisor == 0.0, float("inf"), divisor)', "pass"),
        (SUMS, "sums_kernel", "(SQUARES >> i) & 1", "False"),
        (SUMS, "sums_gradient_kernel", "2.0 * tl.load(value_ptrs[i] + token, mask=valid, other=0.0)", "tl.load(value_ptrs[i] + token, mask=valid, other=0.0)"),
        (REDUCTION, "_denominator", "count.clamp(min=1) if call.loss_weight is None else nonzero(count)", "count"),
        ("head_loss/token_sums.py", "nonzero", "denominator.double()", "denominator.float()"),
        ("head_loss/call.py", "_scored_labels", "return torch.where(token_weight == 0, ignore_index, labels.long())", "return labels"),
        ("head_loss/call.py", "_per_token", "value.dim() not in (0, labels.dim())", "False"),
    ],
    "test_topk_distillation test_topk": [
        (ENTRIES, "distinct_entries", "live if mask is None else live & mask", "live"),
        (PASSES, "second_exchange", "sums[::2].clamp(min=0)", "sums[1::2].clamp(min=0)"),
        (TOPK, "TopKFamily._rest", 'scale * (sums["topk_shift"] - shift) + log_sum - whole.log()', "log_sum - whole.log()"),
        (TOPK, "TopKFamily._rest", 'scale * (sums["topk_shift"] - top) + log_sum - whole.log()', "log_sum - whole.log()"),
        (TOPK, "TopKFamily._rest", "whole.log() - mean", "whole.log()"),
        (TOPK, "TopKFamily.second", "facts.beta", "1 - facts.beta"),
        (TOPK, "TopKFamily.scaled", 'common - grads["vocab_jsd"] * merged["vocab_jsd_mean"]', "common"),
        (TOPK, "TopKFamily.scaled", "fill_entries(dz, tile.entries, at)", "dz"),
        ("losses/distillation.py", "topk_reverse_kl", "tail - stats.tail_entropy", "tail + stats.tail_entropy"),
        (TOPK_DEVICE, "start", "ids < chunk.start + chunk.first", "ids <= chunk.start + chunk.first"),
        (TOPK_DEVICE, "add", "entry = state[4]", "pass"),
        (TOPK_DEVICE, "peak", "tl.maximum(tail, read(packet, rows.tail_max, 0.0))", "read(packet, rows.tail_max, 0.0)"),
        (TOPK_DEVICE, "peak", "tl.maximum(state[0], read(packet, rows.topk_max, 0.0))", "read(packet, rows.topk_max, 0.0)"),
        (TOPK_DEVICE, "_rest", "outside = 1.0 - inside", "outside = inside"),
        (TOPK_DEVICE, "direct", "tl.load(grads.at_entries + token.row * inputs.n_entries + token.positions, mask=token.readable, other=0.0)", "0.0"),
        (ENTRIES_DEVICE, "entry_statistics_kernel", "cross -= tl.where(mass == 0.0, 0.0, mass * drop)", "pass"),
        (ENTRIES_DEVICE, "entries_kernel", "log_tau += tl.log(tl.where(kept, total, 1.0))", "pass"),
        (ENTRIES_DEVICE, "entry_divergence_kernel", "tl.load(at + merged.inside * n)", "1.0"),
        (ENTRIES_DEVICE, "_store_everywhere", "outside * common + inside * _upstream(grads.tail_log_mass, row)", "outside * common"),
        ("topk.py", "topk_log_probs", "before >= top_p", "before > 2"),
        ("topk.py", "_local_keys", "bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits"),
    ],
    "test_policy test_kl test_policy_extremes test_policy_inputs test_policy_metrics test_rollout test_sequences test_preference": [
        ("head_loss/token_sums.py", "metric_sums", "valid if weight is None else valid & (weight != 0)", "valid"),
        ("losses/ratio.py", "log_ratio", "bounded(log_prob - other, -limit, limit)", "bounded(log_prob - other, high=limit)"),
        ("losses/ratio.py", "_Bounded.backward", "clamped * 0 * grad", "0.0"),
        ("losses/policy.py", "gmpo", "clamped = torch.where(advantages == 0, log_r * 0, clamped)", "pass"),
        ("losses/rollout.py", "sequence_masked_importance_weight", "torch.where(mean.isnan(), torch.nan, log_w.exp())", "log_w.exp()"),
        ("sequences.py", "Sequences.from_cu_seqlens", "bounds.clamp(0, tokens).cummax(0).values", "bounds"),
        ("sequences.py", "Sequences._global_sum", "self._poisoned(self._local_sum(values))", "self._local_sum(values)"),
        ("losses/policy.py", "_clipped_objective", "bounded(ratio, low, highest)", "bounded(ratio, low)"),
        ("losses/policy.py", "sapo", "advantages > 0", "advantages < 0"),
        ("losses/policy.py", "clip_cov", "mask & ~clipped_away", "mask"),
        ("losses/kl.py", "kl_estimate", 'value = with_gradient_of(value, _estimate(x, "k2"))', "pass"),
        ("losses/kl.py", "_estimate", "torch.expm1(-x) + x", "torch.expm1(x) - x"),
        ("losses/rollout.py", "icepop", "(weight < bounds[0]) | (weight > bounds[1])", "weight > bounds[1]"),
        ("losses/preference.py", "dpo", "logsigmoid(-h)", "logsigmoid(h)"),
        ("losses/metrics.py", "policy_metrics", "(ratio > dual_clip) & (advantages < 0)", "ratio > dual_clip"),
        ("sequences.py", "Sequences.from_cu_seqlens", "right=True", "right=False"),
        ("comm.py", "_combine", "column.amin(0)", "column.sum(0)"),
        ("head_loss/call.py", "check_call", "total / sequences.ranks", "total"),
    ],
    "test_linear test_main_grad test_linear_costs test_linear_refusals test_linear_compile": [
        (SWEEPS, "WeightSums.add", "not first or self.wanted.main_grad is not None", "not first"),
        (SWEEPS, "WeightSums.add", "self.bias[ids] += gradient.sum(0, dtype=self.bias.dtype)", "self.bias[ids] = gradient.sum(0, dtype=self.bias.dtype)"),
        (SWEEPS, "WeightSums.__init__", "wanted.weight if blocks == 1 else accumulation_dtype(wanted.weight)", "wanted.weight"),
        (SWEEPS, "gradient", "v is not ids[0]", "False"),
        ("request.py", "Request.columns", "min(max(facts.valid_width - here.start, 0), here.stop - here.start)", "here.stop - here.start"),
        ("request.py", "Request.columns", "facts.start + here.start", "facts.start"),
        ("request.py", "Request.columns", '("bias", "column_weight", "teacher")', '("bias", "column_weight")'),
        ("linear_head/blocks.py", "one_sweep_tokens", "max(0, budget - 4 * sizes.width * sizes.hidden)", "budget"),
        ("linear_head/valid_tokens.py", "ValidTokens.__init__", "valid.sum() > count", "valid.sum() < 0"),
        ("head_loss/linear_modes.py", "_with_denominator", "call.labels != call.definition.ignore_index", "call.labels == call.labels"),
        ("comm.py", "reduce_hidden", 'world_size == 1 or how == "none" or grad.numel() == 0', "world_size == 1 or grad.numel() == 0"),
        ("linear_head/autograd.py", "MainGrad.gradient", "weight.grad_added_to_main_grad = True", "pass"),
        ("linear_head/autograd.py", "OneSweep.backward", "torch.where(upstream == ctx.upstream, 1.0, torch.nan).to(upstream.dtype)", "torch.ones_like(upstream)"),
    ],
    "test_module": [
        ("vocab_rows.py", "_select_rows", "errors.append", "print"),
        ("vocab_rows.py", "VocabRows.reset_parameters", 'f"{self.init.seed} {first}"', 'f"{self.init.seed}"'),
        ("module.py", "VocabParallelEmbedding.forward", "torch.where(owned.unsqueeze(-1), part, 0.0).masked_fill(unknown.unsqueeze(-1), torch.nan)", "torch.where(owned.unsqueeze(-1), part, 0.0)"),
        ("module.py", "VocabParallelHead.logits", "F.linear(hidden, weight, bias)", "F.linear(hidden, weight)"),
        ("vocab_rows.py", "_select_rows", "given[shard.start : min(shard.stop, shard.vocab_size)]", "given[: shard.width]"),
        ("module.py", "multi_token_targets", "min(depth, length)", "min(1, length)"),
        ("module.py", "VocabParallelHead._transform_at", "replace(self.transform, temperature=call_transform.temperature)", "call_transform"),
        ("module.py", "_grad_anchor", "x.new_empty(0).requires_grad_()", "None"),
        ("engine/autograd.py", "ToShards.backward", "FromShards.apply(grad, *ctx.reduction)", "grad"),
        ("engine/autograd.py", "FromShards.backward", "ToShards.apply(grad, *ctx.reduction)", "grad"),
    ],
    "test_dtensor": [
        ("dtensor.py", "local_head", "weight.to_local(grad_placements=_weight_grad_placements(hidden, weight, dim))", "weight.to_local()"),
        ("dtensor.py", "_layout_shard", "shard.padded_size not in (None, rows)", "False"),
        ("dtensor.py", "_layout_shard", "_group_ranks(group) != _group_ranks(shard.group)", "False"),
        ("dtensor.py", "_expect_replicated", "not replicated", "False"),
        ("dtensor.py", "_weight_grad_placements", "others and not (is_dtensor(hidden) and hidden.device_mesh == weight.device_mesh)", "False"),
    ],
    "test_megatron": [
        (MEGATRON, "_transform", "config.mup_output_mult", "1.0"),
        (MEGATRON, "MegatronHead._linear_options", '"reduce_scatter" if layer.sequence_parallel else "none" if partial else "all_reduce"', '"none" if partial else "all_reduce"'),
        (MEGATRON, "MegatronHead.losses_from_hidden", "layer.weight if weight is None else weight", "layer.weight"),
        (MEGATRON, "MegatronHead._labels", "labels = labels.masked_fill((labels < 0) | (labels >= shard.vocab_size), IGNORED_LABEL)", "pass"),
        (MEGATRON, "_LossesOfSum.backward", "torch.where(far.any(), torch.nan, factor)", "factor"),
        ("integrations/megatron/installation.py", "_compare", "head.calls == calls_before", "False"),
        (MEGATRON, "MegatronHead._observed_losses", "out.loss.transpose(0, 1)", "out.loss"),
    ],
    "test_collectives test_autograd test_inplace test_layouts test_compile test_arguments": [
        ("engine/autograd.py", "first_derivative_only.wrapper", "(*saved, *upstream)", "upstream"),
        ("linear_head/autograd.py", "OneSweep.backward", "torch.is_grad_enabled()", "False"),
    ],
    "test_transports": [
        ("engine/transports/symmetric_memory.py", "SymmetricMemory.write", "self.in_exchange = True", "pass"),
        ("engine/transports/symmetric_memory.py", "SymmetricMemory.merge", "self.in_exchange = False", "pass"),
        ("engine/transports/__init__.py", "resolve_transport", "(choice.shared and choice.shared(request)) or choice.default", "choice.default"),
        ("linear_head/sweeps.py", "statistics", "TRANSPORTS[request.facts.transport].default", 'TRANSPORTS["gather"].default'),
    ],
    "test_agreement": [
        ("agreement.py", "Agreement.__exit__", "_compare(facts)", "pass"),
        ("agreement.py", "_describe", "SHARDED_DIM.get(name)", "0"),
        ("agreement.py", "_compare", "a != b or checksum != other_checksum", "a != b"),
        ("agreement.py", "Agreement.__exit__", "EXCEPTION_TYPES.get(name, RuntimeError)", "RuntimeError"),
        ("agreement.py", "_describe", "text, parts = value.__qualname__, _function_parts(value)", "text = value.__qualname__"),
        ("agreement.py", "_compare", "str(covered) != vocab_size", "False"),
        ("agreement.py", "_compare", "alike[True] and alike[False]", "False"),
        ("agreement.py", "Agreement.__exit__", "set(errors) != {errors[0]}", "True"),
    ],
    "test_verl test_nemo_rl": [
        ("integrations/nemo_rl.py", "_next_tokens", "labels[:, : ids.shape[1] - 1] = ids[:, 1:]", "labels[:, : ids.shape[1]] = ids"),
        ("integrations/verl.py", "_positive", "temperature.clamp(min=LOWEST_TEMPERATURE)", "temperature"),
        ("integrations/verl.py", "logits_processor.process", "label = label.masked_fill(~label_mask.bool(), IGNORED_LABEL)", "pass"),
    ],
}  # fmt: skip
