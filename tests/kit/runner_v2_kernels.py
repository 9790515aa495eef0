"""NumPy in place of the Triton kernels that run in each step of vLLM's second model runner.

Triton's interpreter takes a hundred times as long for them, and cannot do two. What has other parameters than those
known here, in another release, or a case that is not computed here, goes to the interpreter.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

STAND_INS: dict[str, tuple[Callable[..., Any], frozenset[str]]] = {}
"""By a kernel's name what is called instead, with its grid, and the parameters that are known."""


def stands_in(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        STAND_INS[name] = (function, frozenset(inspect.signature(function).parameters))
        return function

    return note


def install(interpreter: Any) -> None:
    """Have ``triton.runtime.interpreter`` call the stand-ins."""
    interpret = interpreter.InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        function, known = STAND_INS.get(self.fn.__name__, (None, frozenset()))
        given = dict(zip(self.arg_names, args, strict=False)) | {
            name: value for name, value in kwargs.items() if name in self.arg_names
        }
        stands = function is not None and not warmup and given.keys() <= known
        if not stands or function(grid, **given) is NotImplemented:
            interpret(self, *args, grid=grid, warmup=warmup, **kwargs)

    interpreter.InterpretedFunction.run = run


def integers(address: int, count: int) -> Any:
    """The int32 that lie at an address."""
    return np.frombuffer((ctypes.c_int32 * count).from_address(address), np.int32)


@stands_in("_topk_log_softmax_kernel")
def topk_log_softmax(
    grid,
    output_ptr,
    logits_ptr,
    logits_stride,
    topk_ids_ptr,
    topk_ids_stride,
    topk,
    vocab_size,
    BLOCK_SIZE,
    TOPK_BLOCK_SIZE,
):
    logits = logits_ptr.float()
    output_ptr.copy_(logits.gather(1, topk_ids_ptr[:, :topk]) - logits.logsumexp(1, keepdim=True))


@stands_in("_ranks_kernel")
def ranks(grid, output_ptr, logits_ptr, logits_stride, token_ids_ptr, vocab_size, BLOCK_SIZE):
    chosen = logits_ptr.gather(1, token_ids_ptr.long().view(-1, 1))
    output_ptr.copy_((logits_ptr >= chosen).sum(1))


@stands_in("_gumbel_sample_kernel")
def gumbel_sample(
    grid,
    local_argmax_ptr,
    local_argmax_stride,
    local_max_ptr,
    local_max_stride,
    logits_cache_ptr,
    logits_cache_stride_0,
    logits_cache_stride_1,
    logits_cache_col_ptr,
    logits_cache_source_ptr,
    logits_cache_source_stride,
    logits_ptr,
    logits_stride,
    expanded_idx_mapping_ptr,
    seeds_ptr,
    pos_ptr,
    temp_ptr,
    vocab_size,
    BLOCK_SIZE,
    IS_DRAFTING,
    APPLY_TEMPERATURE,
    USE_FP64,
    PER_TOKEN_COL,
):
    rows = expanded_idx_mapping_ptr.numpy()
    if logits_cache_ptr is not None or (rows < 0).any():
        return NotImplemented
    heat = temp_ptr.numpy()[rows]
    for block in range(grid[1]):
        part = logits_ptr[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].float().numpy()
        if heat.any():  # other noise than the kernel's, which the interpreter does not compute
            part = part.astype(np.float32)
            for row in np.flatnonzero(heat):
                noise = np.random.default_rng([int(seeds_ptr[rows[row]]) % 2**63, int(pos_ptr[row]), block]).gumbel(
                    size=part.shape[1]
                )
                part[row] = part[row] / (heat[row] if APPLY_TEMPERATURE else 1.0) + noise
        best = part.argmax(1)
        local_argmax_ptr[:, block].numpy()[:] = best + block * BLOCK_SIZE
        local_max_ptr[:, block].numpy()[:] = part[np.arange(len(part)), best]


@stands_in("_post_update_kernel")
def post_update(
    grid,
    idx_mapping_ptr,
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    output_bin_counts_ptr,
    output_bin_counts_stride,
    sampled_tokens_ptr,
    sampled_tokens_stride,
    num_sampled_ptr,
    num_rejected_ptr,
    query_start_loc_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    total_len_ptr,
    draft_tokens_ptr=None,
    draft_tokens_out_ptr=None,
    num_draft_tokens=0,
):
    if draft_tokens_ptr is not None or (output_bin_counts_ptr is not None and output_bin_counts_ptr.dim() != 2):
        return NotImplemented
    total, every, sampled = total_len_ptr.numpy(), all_token_ids_ptr.numpy(), sampled_tokens_ptr.numpy()
    last, computed, rejected = (
        last_sampled_tokens_ptr.numpy(),
        num_computed_tokens_ptr.numpy(),
        num_rejected_ptr.numpy(),
    )
    starts = query_start_loc_ptr.numpy() if query_start_loc_ptr is not None else None
    for row, (slot, count) in enumerate(zip(idx_mapping_ptr.tolist(), num_sampled_ptr.tolist(), strict=False)):
        if slot < 0:
            continue
        if count > 0:
            tokens = sampled[row, :count]
            last.reshape(-1)[slot] = tokens[-1]
            every[slot, total[slot] : total[slot] + count] = tokens
            total[slot] += count
            if output_bin_counts_ptr is not None:
                np.add.at(output_bin_counts_ptr.numpy()[slot], tokens, 1)
        computed[slot] += (starts[row + 1] - starts[row] if starts is not None else 0) - rejected[row]


@stands_in("_get_num_sampled_and_rejected_kernel")
def num_sampled_and_rejected(
    grid, num_sampled_ptr, num_rejected_ptr, seq_lens_ptr, cu_num_logits_ptr, idx_mapping_ptr, prefill_len_ptr
):
    count = grid[0]
    sampled, rejected = num_sampled_ptr.numpy()[:count], num_rejected_ptr.numpy()[:count]
    chunked = seq_lens_ptr.numpy()[:count] < prefill_len_ptr.numpy()[idx_mapping_ptr.numpy()[:count]]
    sampled[chunked] = 0
    rejected[:] = np.where(chunked, 0, np.diff(cu_num_logits_ptr.numpy()[: count + 1]) - sampled)


@stands_in("_prepare_pos_seq_lens_kernel")
def pos_seq_lens(
    grid, pos_ptr, seq_lens_ptr, idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr, max_num_reqs, BLOCK_SIZE
):
    count, lengths, places = grid[0] - 1, seq_lens_ptr.numpy(), pos_ptr.numpy()
    lengths[count:max_num_reqs] = 0
    starts = query_start_loc_ptr.numpy().tolist()
    computed = num_computed_tokens_ptr.numpy()[idx_mapping_ptr.numpy()[:count]].tolist()
    for row, before in enumerate(computed):
        size = starts[row + 1] - starts[row]
        lengths[row] = before + size
        places[starts[row] : starts[row + 1]] = np.arange(before, before + size)


@stands_in("_combine_sampled_and_draft_tokens_kernel")
def combine(
    grid,
    input_ids_ptr,
    idx_mapping_ptr,
    last_sampled_tokens_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    prefill_len_ptr,
    draft_tokens_ptr,
    draft_tokens_stride,
    cu_num_logits_ptr,
    logits_indices_ptr,
    BLOCK_SIZE,
    NUM_NEW_SAMPLED_TOKENS=1,
):
    ids, ends, logits = input_ids_ptr.numpy(), query_start_loc_ptr.numpy(), cu_num_logits_ptr.numpy()
    indices, drafts = logits_indices_ptr.numpy(), draft_tokens_ptr.numpy()
    last, lengths, prefill = last_sampled_tokens_ptr.numpy().reshape(-1), seq_lens_ptr.numpy(), prefill_len_ptr.numpy()
    for row, slot in enumerate(idx_mapping_ptr.numpy().tolist()[: grid[0]]):
        count, end = int(logits[row + 1] - logits[row]), int(ends[row + 1])
        indices[logits[row] : logits[row + 1]] = np.arange(end - count, end)
        if lengths[row] <= prefill[slot]:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and lengths[row] - count >= prefill[slot]:
            ids[end - count] = last[slot]
        if (new := count - NUM_NEW_SAMPLED_TOKENS) > 0:
            ids[end - new : end] = drafts[slot, :new]


@stands_in("_gather_block_tables_kernel")
def gather_block_tables(
    grid,
    batch_idx_to_req_idx,
    src_block_table_ptrs,
    dst_block_table_ptrs,
    block_table_strides,
    num_blocks_ptr,
    num_blocks_stride,
    num_reqs,
    BLOCK_SIZE,
    num_computed_tokens_ptr=None,
    sliding_window_reach_ptr=None,
    block_sizes_ptr=None,
    MASK_SLIDING_WINDOW=False,
):
    if MASK_SLIDING_WINDOW:
        return NotImplemented
    counts, slots = num_blocks_ptr.numpy(), batch_idx_to_req_idx.numpy()
    for group in range(grid[0]):
        stride = int(block_table_strides[group])
        source, target = int(src_block_table_ptrs[group]), int(dst_block_table_ptrs[group])
        for row in range(grid[1]):
            if row >= num_reqs:
                integers(target + 4 * row * stride, stride)[:] = 0
                continue
            slot = int(slots[row])
            count = int(counts[group, slot])
            if count:
                integers(target + 4 * row * stride, count)[:] = integers(source + 4 * slot * stride, count)


@stands_in("_compute_slot_mappings_kernel")
def slot_mappings(
    grid,
    max_num_tokens,
    idx_mapping,
    query_start_loc,
    pos,
    block_table_ptrs,
    block_table_strides,
    block_sizes,
    slot_mapping_enabled,
    dcp_sharded,
    slot_mappings_ptr,
    slot_mappings_stride,
    cp_rank,
    CP_SIZE,
    CP_INTERLEAVE,
    PAD_ID,
    TRITON_BLOCK_SIZE,
):
    slots = idx_mapping.numpy().tolist()[: grid[1] - 1]
    if CP_SIZE != 1 or min(slots, default=0) < 0 or not slot_mapping_enabled.all():
        return NotImplemented
    starts, places, result = query_start_loc.numpy(), pos.numpy(), slot_mappings_ptr.numpy()
    for group in range(grid[0]):
        stride, size, table = int(block_table_strides[group]), int(block_sizes[group]), int(block_table_ptrs[group])
        result[group, starts[len(slots)] : max_num_tokens] = PAD_ID
        for row, slot in enumerate(slots):
            here = places[starts[row] : starts[row + 1]]
            result[group, starts[row] : starts[row + 1]] = (
                integers(table + 4 * slot * stride, stride)[here // size].astype(np.int64) * size + here % size
            )


@stands_in("_apply_grammar_bitmask_kernel")
def grammar_bitmask(
    grid,
    logits_ptr,
    logits_stride,
    logits_indices_ptr,
    cu_num_logits_ptr,
    bitmask_ptr,
    bitmask_stride,
    vocab_size,
    MASK_STRIDE,
    BLOCK_SIZE,
):
    logits, starts, masks = logits_ptr.numpy(), cu_num_logits_ptr.numpy(), bitmask_ptr.numpy()
    for index, place in enumerate(logits_indices_ptr.numpy().tolist()[: grid[0]]):
        row, position = divmod(place, MASK_STRIDE)
        if position < starts[row + 1] - starts[row]:
            bits = np.unpackbits(np.ascontiguousarray(masks[index]).view(np.uint8), bitorder="little")[:vocab_size]
            logits[starts[row] + position, :vocab_size][bits == 0] = -np.inf


@stands_in("precopy_mamba_align_fused_kernel")
def precopy_states(
    grid,
    mamba_state_idx_ptr,
    src_col_ptr,
    token_bias_ptr,
    block_table_ptrs_ptr,
    block_table_stride_req,
    state_base_addrs_ptr,
    state_block_strides_ptr,
    state_elem_sizes_ptr,
    state_inner_sizes_ptr,
    state_conv_widths_ptr,
    state_group_indices_ptr,
    state_dim_row_count_ptr,
    state_dim_row_stride_ptr,
    idx_mapping_ptr,
    num_reqs,
    COPY_BLOCK_SIZE,
    CONV_STATE_DIM_FIRST,
    HAS_IDX_MAPPING=True,
    TEMPORAL_TILES=1,
):
    """Nothing where no state is copied, as in most steps."""
    if not HAS_IDX_MAPPING:
        return NotImplemented
    slots = idx_mapping_ptr.numpy()[:num_reqs]
    source, target = (each.numpy()[slots[slots >= 0]] for each in (src_col_ptr, mamba_state_idx_ptr))
    return NotImplemented if ((source >= 0) & (source != target)).any() else None


@stands_in("postprocess_mamba_fused_kernel")
def postprocess_states(
    grid,
    num_accepted_tokens_ptr,
    mamba_state_idx_ptr,
    num_scheduled_tokens_ptr,
    num_computed_tokens_ptr,
    num_draft_tokens_ptr,
    block_table_ptrs_ptr,
    block_table_stride_req,
    state_base_addrs_ptr,
    state_block_strides_ptr,
    state_elem_sizes_ptr,
    state_inner_sizes_ptr,
    state_conv_widths_ptr,
    state_group_indices_ptr,
    state_dim_row_count_ptr,
    state_dim_row_stride_ptr,
    num_accepted_tokens_out_ptr,
    idx_mapping_ptr,
    num_reqs,
    block_size,
    COPY_BLOCK_SIZE,
    CONV_STATE_DIM_FIRST,
    HAS_IDX_MAPPING=False,
    PRECOMPUTED_NEW_COMPUTED=False,
    TEMPORAL_TILES=1,
):
    """As above."""
    if not (HAS_IDX_MAPPING and PRECOMPUTED_NEW_COMPUTED):
        return NotImplemented
    slots = idx_mapping_ptr.numpy()[:num_reqs]
    slots = slots[slots >= 0]
    computed, running = num_computed_tokens_ptr.numpy()[slots], mamba_state_idx_ptr.numpy()[slots]
    at = computed - num_accepted_tokens_ptr.numpy()[slots] + 1
    aligned = computed // block_size * block_size
    ended = aligned >= at
    if (ended & ((running != aligned // block_size - 1) | (aligned != at))).any():
        return NotImplemented
    num_accepted_tokens_out_ptr.numpy()[slots[ended]] = 1
    return None
