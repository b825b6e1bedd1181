"""The model: its files, its weights, its adapters, and kinds of models that are not served."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import GIVEN, Spelling

_STORED = "the checkpoint's own config says how its weights are stored"
_TEXT = "models here read and write text alone"
_LORA = Spelling("is --lora here", {"lora": GIVEN}, takes="many")

# What only a stored checkpoint has: to name it asks for no more than the checkpoint.
_FORMATS = "modelslim|compressed-tensors|awq|gptq|gguf|modelopt|modelopt_fp8|modelopt_fp4|w4afp8"
_FORMATS += "|moe_wna16|blockwise_int8|w8a8_int8"
FILES: Mapping[str, str | Spelling] = {
    "--model-path": "model",
    "--max-model-len": "context_length",
    **ignored("not needed: no remote code is run", "--trust-remote-code --code-revision X"),
    **ends(
        "prompts are encoded as the model's own code does: leave it out",
        "--tokenizer-mode auto|slow|hf|deepseek_v32|deepseek_v4|X",
    ),
    **ignored("not needed: the runtime reads tokenizer.json itself", "--tokenizer-backend X"),
    **ends(
        f"{_STORED}: leave it out, or give --quantize, which rounds while loading",
        f"--quantization {_FORMATS}|X --speculative-draft-model-quantization X",
    ),
    **ends(
        "an FP8 cache takes no scales from outside: leave it out, or give --kv-cache-dtype auto",
        "--quantization-param-path X --calculate-kv-scales",
    ),
    **ignored(_STORED, "--allow-deprecated-quantization"),
    **ends("the model's code is the runtime's own: leave it out", "--model-impl auto|X"),
    **ends(
        "the checkpoint's config.json is read: put it there",
        "--config-format auto|hf|X --model-config-parser auto|hf|X",
    ),
    **ends(
        "code from outside is a plugin here: docs/writing-a-plugin.md",
        """
        --model-class-overrides {}|X  --worker-cls auto|X  --worker-extension-cls X
        --scheduler-cls X  --io-processor-plugin X  --tool-parser-plugin X
        --reasoning-parser-plugin X  --middleware X
        """,
    ),
    **ends(
        "text comes in and goes out: leave it out",
        "--skip-tokenizer-init --enable|disable-prompt-embeds",
    ),
    **ends(
        "is read from the checkpoint's folder: put it there",
        "--tokenizer X --tokenizer-path X --tokenizer-revision X "
        "--decrypted-config-file X --decrypted-draft-config-file X --hf-config-path X",
    ),
    **ends("is for hf download: --model takes the folder that it prints", "--revision X"),
    **ends("is the variable HF_HUB_CACHE here", "--download-dir X"),
    **ends("is the variable HF_TOKEN here", "--hf-token X..."),
    **ends("is a change of the checkpoint's config.json here", "--hf-overrides X"),
    **ends("is a change of the checkpoint's config.json", "--json-model-override-args X"),
    **ends(
        "is a change of generation_config.json here",
        """
        --generation-config auto|X  --override-generation-config X  --preferred-sampling-params X
        --sampling-defaults model|X
        """,
    ),
    **ends("no checksum is compared: check the files before the start", "--model-checksum X..."),
    **ends("the files stay: delete them after the start", "--delete-ckpt-after-loading"),
    **ends(
        "is --quantize here, or a checkpoint that was exported before the start",
        """
        --modelopt-quant X  --modelopt-checkpoint-restore-path X
        --modelopt-checkpoint-save-path X  --modelopt-export-path X  --quantize-and-serve
        --quantization-config X
        """,
    ),
}
LOADING: Mapping[str, str | Spelling] = {
    **ends("is a loader plugin here: docs/writing-a-plugin.md", "--custom-weight-loader X..."),
    **ends(
        "weights are read from files: leave it out",
        """
        --modelexpress-config X
        --remote-instance-weight-loader-seed-instance-ip X
        --remote-instance-weight-loader-seed-instance-service-port N
        --remote-instance-weight-loader-send-weights-group-ports X
        --remote-instance-weight-loader-backend X
        --remote-instance-weight-loader-start-seed-via-transfer-engine
        --weight-cache-mode off|X
        """,
    ),
    **ends(
        "weights do not change while the server runs: leave it out",
        """
        --checkpoint-engine-wait-weights-before-ready  --rl-on-policy-target X
        --rl-quant-profile X  --weight-transfer-config X
        """,
    ),
    **ignored(
        "weights are read from files",
        """
        --engine-info-bootstrap-port N  --weight-cache-socket X  --weight-cache-timeout N
        """,
    ),
    **ignored(
        "threads read the files, and nothing stays mapped",
        """
        --model-loader-extra-config X  --startup-weight-load-mode X
        --weight-loader-disable-mmap  --weight-loader-drop-cache-after-load
        --weight-loader-prefetch-checkpoints  --weight-loader-prefetch-num-threads N
        --safetensors-load-strategy X  --safetensors-prefetch-num-threads N
        --safetensors-prefetch-block-size N  --max-parallel-loading-workers N
        """,
    ),
    **ignored(
        "of weights, only files that the checkpoint's index names are read",
        "--ignore-patterns X... --pt-load-map-location X",
    ),
    **ignored("a rank loads what it holds", "--enable|disable-ep-weight-filter"),
    **ignored("the log says how loading goes", "--[no-]use-tqdm-on-load"),
    **ends(
        "answers have the name of --served-model-name, and no version: leave it out",
        "--weight-version default|X",
    ),
}
ADAPTERS: Mapping[str, str | Spelling] = {
    "--lora-paths": _LORA,
    "--lora-modules": _LORA,
    "--max-loras-per-batch": "max_loras",
    **ignored("not needed: --lora or --max-loras says so", "--enable|disable-lora"),
    **ignored("--max-loras says how many adapters are held", "--max-cpu-loras N"),
    **ignored("--max-loras says how many adapters are held", "--max-loaded-loras N"),
    **ignored("an adapter leaves its slot when it is unloaded", "--lora-eviction-policy X"),
    **ignored("no step runs while an adapter is read", "--enable-lora-overlap-loading"),
    **ignored(
        "requests of all loaded adapters share a step",
        "--lora-drain-wait-threshold N --specialize-active-lora",
    ),
    **ignored(
        "the adapter's files say so",
        """
        --[no-]experts-shared-outer-loras  --enable|disable-mixed-moe-lora-format
        --enable|disable-moe-shared-loras
        """,
    ),
    **ignored("ranks hold their parts of an adapter", "--fully-sharded-loras"),
    **ends("adapters have the compute dtype: --dtype is for all", "--lora-dtype auto|X"),
    **ignored("is always so here", "--lora-strict-loading"),
    **ends("an adapter that does not fit is refused: mend its files", "--no-lora-strict-loading"),
}
OTHERS: Mapping[str, str | Spelling] = {
    **ignored(
        _TEXT,
        """
        --language-model-only  --limit-mm-per-prompt X  --limit-mm-data-per-request X
        --mm-attention-backend X  --mm-feature-transport X  --mm-global-cache-backend X
        --[no-]mm-enable-dp-encoder  --mm-io-worker-num N  --mm-preprocess-cache-size-mb N
        --mm-process-config X  --mm-processor-worker-num N  --trust-mm-content-hashes
        --enable-broadcast-mm-inputs-process  --enable-mm-global-cache
        --enable-prefix-mm-cache  --enable-precise-embedding-interpolation
        --allowed-media-domains X...  --media-url-max-file-size-mb N
        --image-processor-backend X  --disable-fast-image-processor
        --asr-max-buffer-seconds N  --asr-max-concurrent-sessions N  --language-only
        --encoder-transfer-backend X  --encoder-bootstrap-port N
        --enable-adaptive-dispatch-to-encoder
        """,
    ),
    **ignored(
        "no images, sound or video are read",
        """
        --allowed-local-media-path X  --media-io-kwargs X  --trust-request-mm-kwargs
        --mm-processor-kwargs X  --mm-processor-cache-gb N  --mm-processor-cache-type X
        --mm-processor-device X  --mm-hasher-algorithm X  --mm-shm-cache-max-object-size-mb N
        --mm-tensor-ipc X  --mm-ipc-gpu-memory-gb N  --[no-]mm-device-do-normalize
        --interleave-mm-strings  --skip-mm-profiling  --video-pruning-rate N
        --video-pruning-method X  --disable|enable-chunked-mm-input
        --enable|disable-shm-tensor-arena
        """,
    ),
    **ignored(
        "no encoder of images, sound or video runs",
        """
        --mm-encoder-tp-mode X  --mm-encoder-attn-backend X  --mm-encoder-attn-dtype X
        --mm-encoder-fp8-scale-path X  --mm-encoder-fp8-scale-save-path X
        --mm-encoder-fp8-scale-save-margin N  --ec-transfer-config X  --ec-manager-config X
        --default-mm-loras X  --enable|disable-tower-connector-lora
        """,
    ),
    **ignored(
        "models that rank or classify are not served",
        """
        --pooler-config X  --max-lora-cls-labels N
        --[no-]enable-flash-late-interaction  --disable-flash-late-interaction
        """,
    ),
    **ends(
        f"{_TEXT}: leave it out",
        """
        --enable-multimodal  --is-embedding  --encoder-only  --encoder-urls X...
        --encoder-register-urls X...  --prefill-only-disable-kv-cache  --enable-mis
        --enable|disable-mm-embeds  --mm-encoder-only
        --runner auto|generate|X  --convert auto|none|X
        """,
    ),
    **ends(
        "requests bring no code: leave it out",
        """
        --enable-custom-logit-processor  --logits-processors X...
        """,
    ),
    **ends(
        "models that write by diffusion are not served: leave it out",
        """
        --dllm-algorithm X  --dllm-algorithm-config X  --diffusion-config X
        """,
    ),
    **ignored("models that write by diffusion are not served", "--[no-]dllm-fdfo"),
    **ignored(
        "models with Mamba or linear attention are not served",
        """
        --mamba-backend X  --mamba-ssm-dtype X  --mamba-max-states-per-path N
        --mamba-cache-philox-rounds N  --mamba-radix-cache-strategy X
        --mamba-track-interval N  --mamba-full-memory-ratio N  --max-mamba-cache-size N
        --enable|disable-mamba-cache-stochastic-rounding  --enable-int8-mamba-checkpoint
        --int8-mamba-ckpt-size N  --linear-attn-backend X  --linear-attn-decode-backend X
        --linear-attn-prefill-backend X  --linear-attn-verify-backend X
        --enable-linear-replayssm  --enable-linear-replayssm-spec
        --linear-replayssm-cache-len N
        """,
    ),
    **ignored(
        "models with a state in place of a KV cache are not served",
        """
        --mamba-ssu-algorithm X  --mamba-cache-dtype X  --mamba-ssm-cache-dtype X
        --mamba-block-size N  --mamba-cache-mode X  --use-replayssm  --replayssm-buffer-len N
        --enable|disable-mamba-shared-prefix-checkpoint  --gdn-prefill-backend X
        --kda-prefill-backend X  --kda-decode-backend X
        """,
    ),
    **ignored(
        "the model that has this part is not served",
        """
        --enable-megamoe-for-layernorm-sp  --enable-scattered-sconv
        --[no-]ple-offload-embedding  --ple-offload-backend X  --ple-offload-dir X
        --qsa-indexer-dtype X  --kv-sharing-fast-prefill
        --engram-config X  --[no-]cohere-is-reasoning-model  --cohere-format X
        """,
    ),
}
