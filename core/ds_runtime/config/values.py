"""What settings of the engine may be. Torch-free."""

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8")
FORMS = ("auto", "off", "all")
WORDS = {"bf16": "bfloat16", "half": "float16", "float": "float32", "fp8_e4m3": "fp8"}
QUANTIZE = ("none", "int8", "int4")
SHARE = {"above": 0, "most": 1}  # of something: what `setting` is told
MOST_REQUESTS = 1 << 16  # that run at once
MAX_ITL = 50.0  # milliseconds between tokens, of a server
