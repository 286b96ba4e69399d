"""What users can choose in evaluations, and what these do by default: names and numbers that `--help` shows.

They are apart from what measures because that imports torch and transformers, for which `--help` must not wait.
"""

from hf_kvquant.presets import PRESETS, UNQUANTIZED

# --- preparation ------------------------------------------------------------------------------------------------------

OUTLIER_PAIRS = 3  # RoPE pairs per head whose channels are made larger
OUTLIER_FACTOR = 10.0  # about that of large models
BIAS_NORM = 100.0

# --- perplexity -------------------------------------------------------------------------------------------------------

WINDOW = 2048
TOKENS = 16384
SPLIT, FIELD = "test", "text"
FEEDING_MODES = ("simulated", "chunked", "decode")

# --- long -------------------------------------------------------------------------------------------------------------

TESTS = ("passkey", "needle", "recall")
# Presets are scored only where the unquantised cache gets this share of answers right. A test that the model fails
# anyway says nothing about the cache, and right answers by chance would make a preset look better than it is.
MIN_ACCURACY = 0.9

# --- report -----------------------------------------------------------------------------------------------------------

PLAIN, OUTLIERS, TASKS = "plain", "outliers", "tasks"
# What a report measures unless it is asked for all: few presets, short windows and no more minutes than these.
REPORTED_PRESETS = ("int8", "k8v4", "int4", "int4-token")
MINUTES = 5.0
SHORT_WINDOW, SHORT_TOKENS = 512, 4096
CONTEXT = 32768  # tokens for which it tells the memory

# --- recipes ----------------------------------------------------------------------------------------------------------

# Tokens at the beginning of the text that recipes may learn from. They are never measured.
SAMPLE_TOKENS = 8192
# What a budget of bits is spent on. They have the same dense tokens.
BUDGET_PRESETS = ["k4v2", "int2"]
# What users can name; `recipes/catalogue.py` has the recipes.
RECIPE_NAMES = (
    *(name for name in PRESETS if name != UNQUANTIZED),
    *("int3:4+128", "int2-g64:4+128", "int4-channel+int2:4+128"),
    *("naive-4", "naive-3", "naive-2", "quarot-4", "quarot-3", "quarot-2", "saw-4"),
    *("kivi-4", "kivi-2"),
    *("kvquant-4", "kvquant-3"),
    *("turboquant-4", "turboquant-3", "turboquant-2", "turboquant-prod-4", "turboquant-prod-3"),
    "polarquant",
    *("kvarn-k4v4", "kvarn-k4v2", "kvarn-k2v2"),
    "oscar-2",
    *("mxfp4", "nvfp4"),
    *("quanto-4", "quanto-2", "q8_0", "q4_0", "vllm-int4"),
)
