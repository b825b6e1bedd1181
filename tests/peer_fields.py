"""Fields of vLLM's and SGLang's request types, with the values that they have by default there.

vLLM (https://github.com/vllm-project/vllm, commit 002032ee): vllm/entrypoints/openai/*/protocol.py,
vllm/entrypoints/anthropic/protocol.py, vllm/entrypoints/serve/*/protocol.py. SGLang
(https://github.com/sgl-project/sglang, commits 004c82e0, 001067ff, 00c17caf), in python/sglang/srt:
entrypoints/openai/protocol.py, managers/io_struct.py, sampling/sampling_params.py.
"""

from __future__ import annotations

from typing import Any


def _none(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split())


def _false(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), False)


_VLLM_SAMPLING = {
    **_none("top_k min_p repetition_penalty watermarking truncate_prompt_tokens truncation_side"),
    **_none("prompt_logprobs logprob_token_ids allowed_token_ids thinking_token_budget"),
    **_none("frequency_penalty logit_bias presence_penalty seed temperature top_p"),
    **_false("use_beam_search include_stop_str_in_output ignore_eos"),
    "length_penalty": 1.0,
    "min_tokens": 0,
    "n": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
}
_VLLM_EXTRA = {
    **_none("structured_outputs session_id return_tokens_as_token_ids return_token_ids"),
    **_none("cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection"),
    **_none("stream_interval stream_options response_format user model"),
    **_false("stream echo return_token_offsets"),
    "priority": 0,
    "request_id": "0f1e2d3c",
    "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0,
}
VLLM: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_VLLM_SAMPLING,
        **_VLLM_EXTRA,
        **_none("max_completion_tokens tools reasoning_effort documents chat_template"),
        **_none("chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text"),
        **_false("logprobs continue_final_message add_special_tokens"),
        "top_logprobs": 0,
        "tool_choice": "none",
        "include_reasoning": True,
        "parallel_tool_calls": True,
        "add_generation_prompt": True,
    },
    "/v1/completions": {
        **_VLLM_SAMPLING,
        **_VLLM_EXTRA,
        **_none("logprobs suffix prompt_embeds"),
        "max_tokens": 16,
        "add_special_tokens": True,
    },
    "/v1/responses": {
        **_none("include instructions max_output_tokens max_tool_calls metadata model logit_bias"),
        **_none("previous_response_id prompt reasoning temperature text top_p top_k user"),
        **_none("prompt_cache_key mm_processor_kwargs cache_salt previous_input_messages"),
        **_none("previous_response structured_outputs repetition_penalty seed vllm_xargs"),
        **_false("background stream include_stop_str_in_output enable_response_messages"),
        **_false("ignore_eos"),
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": True,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "skip_special_tokens": True,
        "request_id": "resp_0f1e2d3c",
        "priority": 0,
        "stop": [],
    },
    "/v1/messages": {
        **_none("metadata output_config stop_sequences system temperature tool_choice tools"),
        **_none("top_k top_p kv_transfer_params chat_template_kwargs"),
        "stream": False,
    },
    "/v1/messages/count_tokens": _none("system tool_choice tools chat_template_kwargs"),
    "/tokenize": {
        **_none(
            "model chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools"
        ),
        **_false("return_token_strs continue_final_message"),
        "add_special_tokens": True,
        "add_generation_prompt": True,
    },
}

_SGLANG_OPENAI = {
    **_none("logit_bias seed stop stream_options user stop_token_ids stop_regex lora_path"),
    **_none("session_id session_params response_format custom_params custom_logit_processor"),
    **_none("images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank"),
    **_none("disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt"),
    **_none("ngram_corpus_id priority regex ebnf"),
    **_false("stream return_hidden_states return_routed_experts return_cached_tokens_details"),
    **_false("return_token_ids no_stop_trim ignore_eos"),
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "n": 1,
    "min_tokens": 0,
    "routed_experts_start_len": 0,
    "skip_special_tokens": True,
}
SGLANG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_SGLANG_OPENAI,
        **_none("top_logprobs max_completion_tokens temperature top_p tools reasoning_effort task"),
        **_none("top_k min_p repetition_penalty chat_template_kwargs max_dynamic_patch"),
        **_none("min_dynamic_patch input_ids"),
        **_false("logprobs return_prompt_token_ids return_meta_info continue_final_message"),
        **_false("use_audio_in_video"),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
    },
    "/v1/completions": {
        **_SGLANG_OPENAI,
        **_none("best_of logprobs suffix json_schema custom_labels"),
        "echo": False,
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
    "/v1/responses": {
        **_none("session_id extra_key ngram_corpus_id stop top_k min_p repetition_penalty"),
        **_none("chat_template_kwargs"),
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "priority": 0,
    },
    "/generate": {
        **_none("rid session_id input_embeds image_data video_data audio_data mm_hashes"),
        **_none("mm_content_hashes video_config sampling_params return_logprob logprob_start_len"),
        **_none("top_logprobs_num token_ids_logprob return_sampling_mask modalities"),
        **_none("session_params lora_path lora_id custom_logit_processor"),
        **_none("positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room"),
        **_none("bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank"),
        **_none("disagg_prefill_dp_rank kv_router_hint routing_key conversation_id"),
        **_none("http_worker_ipc max_thinking_tokens priority extra_key custom_labels"),
        **_none("external_trace_header received_time need_wait_for_mm_inputs"),
        **_none("num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch"),
        **_none("image_max_dynamic_patch video_max_dynamic_patch images_config cache_salt"),
        **_none("multi_item_delimiter_indices"),
        **_false("use_audio_in_video return_text_in_logprobs return_flat_raw_top_logprobs"),
        **_false("return_flat_raw_top_logprobs_b64 stream return_hidden_states"),
        **_false("return_routed_experts return_indexer_topk background require_reasoning"),
        **_false("no_logs return_bytes return_entropy return_prompt_token_ids"),
        "log_metrics": True,
        "routed_experts_start_len": 0,
    },
    "/tokenize": _none("tools tool_choice reasoning_effort chat_template_kwargs"),
}
SGLANG_SAMPLING: dict[str, Any] = {
    **_none("stop stop_token_ids stop_regex json_schema regex ebnf structural_tag custom_params"),
    **_none("stream_interval logit_bias sampling_seed"),
    **_false("ignore_eos no_stop_trim"),
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 1 << 30,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
# Both servers', of the routes for operators, by the body here.
OPERATORS: dict[str, dict[str, Any]] = {
    "LoadAdapterRequest": {
        **_false("load_inplace is_3d_lora_weight pinned"),
        **_none("lora_id rid http_worker_ipc"),
    },
    "UnloadAdapterRequest": _none("lora_int_id lora_id rid http_worker_ipc"),
    "AbortRequest": {
        **_false("abort_all"),
        **_none("finished_reason abort_message http_worker_ipc"),
    },
}
