"""Fields of other servers' and clients' requests that no body here has, and what they may say.

Clients send every field that they know, on any route. One that a route does not act on is accepted
there where it asks for what happens anyway, and refused where it would change the answer. What asks
for nothing is neutral of any field: null, false, "" and []; but no false where true is what happens
anyway. Here are, for each protocol, the fields with what else is neutral of them. `body.py` alone
reads the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, "tuple[Any, ...] | None"]

NOTHING: tuple[Any, ...] = ()  # beside what is neutral of any field
EMPTY: tuple[Any, ...] = ({},)
ANY = None  # whatever it says changes no answer


def is_neutral(value: Any, also: tuple[Any, ...] | None) -> bool:
    """Whether `value` asks for nothing, of a field of which `also` is neutral."""
    return also is ANY or any(_same(value, one) for one in neutral_values(also))


def neutral_values(also: tuple[Any, ...]) -> list[Any]:
    """All values that are neutral of such a field."""
    every: list[Any] = [None, "", [], *([] if any(one is True for one in also) else [False])]
    return every + [one for one in also if not any(_same(one, known) for known in every)]


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON: true is no 1, and 1.0 is 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return bool(a == b)


# Sampling, as all of them call it: on routes that draw nothing, or under another name.
_SAMPLING: Fields = {
    "frequency_penalty": (0,),
    "logit_bias": EMPTY,
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "seed": NOTHING,
    "stop": NOTHING,
    "stop_token_ids": NOTHING,
    "temperature": (1,),
    "top_k": (-1, 0),
    "top_p": (1,),
    "max_tokens": NOTHING,
    "ignore_eos": NOTHING,
    "skip_special_tokens": (True,),
}

# Chat, completions and responses. https://github.com/openai/openai-python, src/openai/types
OPENAI: Fields = {
    **_SAMPLING,
    "access_programs": NOTHING,
    "audio": NOTHING,
    "background": NOTHING,
    "background_options": NOTHING,
    "best_of": (1,),
    "conversation": NOTHING,
    "context_management": NOTHING,
    "echo": NOTHING,
    "function_call": ("auto", "none"),
    "functions": NOTHING,
    "image": NOTHING,
    "include": (["reasoning.encrypted_content"],),
    "instructions": NOTHING,
    "logprobs": (False,),  # of completions as well, where it is a number
    "max_completion_tokens": NOTHING,
    "max_output_tokens": NOTHING,
    "max_tool_calls": ANY,
    "metadata": ANY,
    "modalities": (["text"],),
    "moderation": NOTHING,
    "parallel_tool_calls": (True,),
    "personality": NOTHING,
    "prediction": ANY,
    "previous_response_id": NOTHING,
    "prompt": NOTHING,
    "prompt_cache_key": ANY,
    "prompt_cache_options": ANY,
    "prompt_cache_retention": ANY,
    "reasoning": EMPTY,
    "reasoning_effort": NOTHING,
    "response_format": ({}, {"type": "text"}),
    "safety_identifier": ANY,
    "service_tier": ANY,
    "store": ANY,
    "stream": NOTHING,
    "stream_options": EMPTY,
    "suffix": NOTHING,
    "text": (
        {},
        {"format": {"type": "text"}},
    ),
    "tool_choice": ("auto", "none"),
    "tools": NOTHING,
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "user": ANY,
    "verbosity": ANY,
    "web_search_options": NOTHING,
}
# Messages, stable and beta. https://github.com/anthropics/anthropic-sdk-python, src/anthropic/types
ANTHROPIC: Fields = {
    **_SAMPLING,
    "betas": ANY,  # a header, which some clients also put here
    "billing_policy": NOTHING,
    "cache_control": ANY,  # the prefix cache needs no marks
    "compaction": NOTHING,
    "container": NOTHING,
    "context_management": ({}, {"edits": []}, {"edits": None}),
    "diagnostics": ANY,
    "fallback_credit_token": NOTHING,
    "fallbacks": NOTHING,
    "inference_geo": NOTHING,
    "mcp_servers": NOTHING,
    "metadata": ANY,
    "output_config": EMPTY,
    "service_tier": ANY,
    "speed": ANY,
    "stop_sequences": NOTHING,
    "system": NOTHING,
    "thinking": ({}, {"type": "disabled"}),
    "thread": NOTHING,
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "user_profile_id": ANY,
    "workspace_id": ANY,
}
# What engines add to chat, completions, responses and tokenisation, and of their own routes.
ENGINES: Fields = {
    **_SAMPLING,
    "abort_all": NOTHING,
    "abort_message": NOTHING,
    "add_generation_prompt": (True,),
    "add_special_tokens": NOTHING,
    "allowed_token_ids": NOTHING,
    "bad_words": NOTHING,
    "bootstrap_host": NOTHING,
    "bootstrap_port": NOTHING,
    "bootstrap_room": NOTHING,
    "cache_salt": NOTHING,
    "chat_template": NOTHING,
    "chat_template_kwargs": EMPTY,
    "continue_final_message": NOTHING,
    "custom_labels": ANY,
    "custom_logit_processor": NOTHING,
    "data_parallel_rank": ANY,  # which replica serves changes no answer
    "disagg_prefill_dp_rank": ANY,
    "documents": NOTHING,
    "ec_transfer_params": EMPTY,
    "enable_response_messages": NOTHING,
    "extra_key": NOTHING,
    "finished_reason": EMPTY,
    "guided_choice": NOTHING,
    "guided_decoding_backend": ANY,
    "guided_grammar": NOTHING,
    "guided_json": NOTHING,
    "guided_json_object": NOTHING,
    "guided_regex": NOTHING,
    "guided_whitespace_pattern": NOTHING,
    "images_config": ANY,
    "include_reasoning": (True,),
    "include_stop_str_in_output": NOTHING,
    "input_ids": NOTHING,
    "is_3d_lora_weight": NOTHING,
    "kv_transfer_params": EMPTY,
    "length_penalty": ANY,  # of beam search alone
    "load_inplace": NOTHING,
    "logprob_token_ids": NOTHING,
    "lora_int_id": ANY,  # adapters have names
    "lora_path": NOTHING,
    "max_dynamic_patch": ANY,
    "media_io_kwargs": EMPTY,
    "min_dynamic_patch": ANY,
    "mm_processor_kwargs": EMPTY,
    "ngram_corpus_id": ANY,  # of drafting
    "pinned": NOTHING,
    "previous_input_messages": NOTHING,
    "previous_response": NOTHING,
    "priority": (0,),
    "prompt_embeds": NOTHING,
    "prompt_logprobs": NOTHING,
    "repetition_detection": NOTHING,
    "request_id": ANY,
    "return_cached_tokens_details": NOTHING,
    "return_hidden_states": NOTHING,
    "return_meta_info": NOTHING,
    "return_mm_kwargs": ANY,  # of other routes
    "return_prompt_text": NOTHING,
    "return_prompt_token_ids": NOTHING,
    "return_routed_experts": NOTHING,
    "return_token_ids": NOTHING,
    "return_token_offsets": ANY,  # of other routes
    "return_token_strs": NOTHING,
    "return_tokens_as_token_ids": NOTHING,
    "rid": NOTHING,
    "routed_dp_rank": ANY,
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "session_id": ANY,
    "session_params": EMPTY,
    "spaces_between_special_tokens": ANY,  # byte-level tokenizers put none
    "stream_interval": ANY,  # how many tokens come at once
    "stream_reasoning": (True,),
    "structured_outputs": EMPTY,
    "task": NOTHING,
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": NOTHING,
    "truncation_side": ANY,  # of truncate_prompt_tokens
    "use_audio_in_video": ANY,
    "use_beam_search": NOTHING,
    "watermarking": NOTHING,
}
# Sampling parameters of /generate.
NATIVE_SAMPLING: Fields = {
    **_SAMPLING,
    "beam_width": (1,),
    "custom_params": EMPTY,
    "ebnf": NOTHING,
    "json_schema": NOTHING,
    "max_new_tokens": NOTHING,
    "min_new_tokens": (0,),
    "no_stop_trim": NOTHING,
    "regex": NOTHING,
    "sampling_seed": NOTHING,
    "spaces_between_special_tokens": ANY,
    "stop_regex": NOTHING,
    "stream_interval": ANY,
    "structural_tag": NOTHING,
}
# /generate itself.
NATIVE: Fields = {
    **NATIVE_SAMPLING,
    "audio_data": NOTHING,
    "background": NOTHING,
    "bootstrap_pair_key": NOTHING,
    "conversation_id": ANY,
    "decode_tp_size": NOTHING,
    "encoder_urls": NOTHING,
    "external_trace_header": ANY,
    "http_worker_ipc": NOTHING,
    "image_data": NOTHING,
    "image_max_dynamic_patch": ANY,  # this and what is like it: of images
    "input_embeds": NOTHING,
    "kv_router_hint": ANY,
    "log_metrics": ANY,
    "logprob_start_len": (-1,),
    "lora_id": NOTHING,
    "max_thinking_tokens": NOTHING,
    "mm_content_hashes": NOTHING,
    "mm_hashes": NOTHING,
    "modalities": (["text"],),
    "multi_item_delimiter_indices": NOTHING,
    "need_wait_for_mm_inputs": NOTHING,
    "no_logs": ANY,
    "num_items_assigned": NOTHING,
    "positional_embed_overrides": NOTHING,
    "received_time": ANY,
    "require_reasoning": NOTHING,
    "return_bytes": NOTHING,
    "return_entropy": NOTHING,
    "return_flat_raw_top_logprobs": NOTHING,
    "return_flat_raw_top_logprobs_b64": NOTHING,
    "return_indexer_topk": NOTHING,
    "return_logprob": NOTHING,
    "return_sampling_mask": NOTHING,
    "return_text_in_logprobs": NOTHING,
    "routing_key": ANY,
    "sampling_params": EMPTY,
    "token_ids_logprob": NOTHING,
    "top_logprobs_num": (0,),
    "video_config": ANY,
    "video_data": NOTHING,
    "video_max_dynamic_patch": ANY,
}


def _merged(*protocols: Fields) -> Fields:
    """All fields; what is neutral in one protocol is in all."""
    out: dict[str, tuple[Any, ...] | None] = {}
    for name, also in (pair for fields in protocols for pair in fields.items()):
        before = out.get(name, NOTHING)
        out[name] = None if before is None or also is None else (*before, *also)
    return out


REQUESTS = _merged(OPENAI, ANTHROPIC, ENGINES, NATIVE)
STREAM_OPTIONS: Fields = {"include_obfuscation": ANY}
