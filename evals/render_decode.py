"""What the pages say about decode attention of one layer on a GPU, from what `bench_decode.py` measures."""

from __future__ import annotations

from decode_cases import PROMPT, thousands
from parts import Part, Pivot, Results, Row, Table, Text, at, flat, origin

# What is shown of `decode.json`. Names are those of decode_cases.py.
GPU_CASES = ["64x8k", "512x8k-1head", "32x4k-32heads", "128x16k", "64x16k-ragged", "16x8k", "1x128k", "1x8k", "1x1k"]
GPU_PRESETS = ["int8", "int4"]
PEER_CASES = ["64x8k", "512x8k-1head", "1x128k", "1x8k"]


def described(case: Row) -> Row:
    """A case with what tables say of it: `64 x 8k` or `64 x 1 to 16k`, and query heads over key-value heads."""
    shape = case["shape"]
    context = ("1 to " if shape["is_ragged"] else "") + f"{shape['context'] // 1024}k"
    heads = f"{shape['num_q_heads']}/{shape['num_kv_heads']}"
    return {**case, "context": context, "size": f"{shape['batch']} x {context}", "heads": heads}


def shown_cases(gpu: Results, names: list[str]) -> list[Row]:
    """The named cases that were measured, in the order of the names."""
    return [described(case) for name in names if (case := at(name, gpu["cases"]))]


def gpu_rows(gpu: Results) -> list[Row]:
    """The presets that are shown of each case."""
    rows = flat({"cases": shown_cases(gpu, GPU_CASES)}, "cases", "rows")
    return [row for row in rows if row["preset"] in GPU_PRESETS]


def kernels(gpu: Results) -> list[Row]:
    """What was measured of each case: ours, then the others."""
    cases = shown_cases(gpu, PEER_CASES)
    ours = [{**row, "kernel": f"hf_kvquant `{row['preset']}`"} for row in flat({"cases": cases}, "cases", "rows")]
    others = []
    for row in flat({"cases": cases}, "cases", "peers"):
        dtype, _, name = row["peer"].partition(" ")
        others.append({**row, "kernel": f"{name}, {dtype}"})
    return ours + others


gpu_table = Pivot(
    gpu_rows,
    {"batch x context": "{size}", "heads": "{heads}", "best bf16, µs": "{best_bf16.median_us:us}"},
    {"`{preset}`, µs": "{median_us:us}", "against bf16": "{speedup:.2f}x", "of bandwidth": "{share:.0%}"},
    num_text=2,
)
gpu_caption = Text(
    "One decode step of one layer on an {gpu}, head_dim 128, {query_dtype} queries. Heads are query heads over "
    "key-value heads. Ours includes appending the new token, and rotating and centring keys where the preset does so; "
    "the other kernels only attend. The best bf16 kernel is the fastest of PyTorch's and FlashInfer's, each at its "
    "best setting. The bandwidth is that of a plain kernel reading as many bytes in the same run. Times are medians of "
    "{replays} replays of a CUDA graph, after a short rest; its calls rotate over buffers four times the L2 cache. "
    "Driver {driver}, CUDA {cuda}, {date:day}, `evals/results/decode.json`."
)
peer_table = Pivot(kernels, {"kernel, µs": "{kernel}"}, {"{size}, {heads}": "{median_us:us}"})
peer_caption = Text(
    "Measured in the same run as the table above. Other kernels: {versions}. A dash: not measured.",
    versions=lambda gpu: ", ".join(
        f"{name.removesuffix('-python')} {number}" for name, number in gpu["peer_versions"].items() if number
    ),
)


short_sentence = Text(
    "One short sequence gains little: between 1,000 and 8,000 tokens, attention takes {times:range.0f} µs in every "
    "format. At 1,000 tokens the best bf16 kernel takes {cases.1x1k.best_bf16.median_us:.1f} µs and `int4` "
    "{cases.1x1k.rows.int4.median_us:.1f} µs. Batches of very unequal lengths use less of the bandwidth.",
    times=lambda gpu: [row["median_us"] for case in shown_cases(gpu, ["1x1k", "1x8k"]) for row in case["rows"]],
)
head_dim_sentence = Text(
    "A head_dim of 96 reaches {cases.64x8k-dim96.rows.*.share:range.0%} of the read bandwidth (`int8` is "
    "{cases.64x8k-dim96.rows.int8.speedup:.1f} times as fast as bf16). Other head_dims that are not 64, 128 or 256 "
    "take the same path."
)

# --- fewer bits, batches of unequal lengths, whole prompts ------------------------------------------------------------

few_bits_table = Pivot("cases.rows", {"preset": "`{preset}`"}, {"{case:x}, µs": "{median_us:.0f} ({share:.0%})"})
few_bits_caption = Text(
    "One decode step of one layer, as in the table above, and in brackets its share of the read bandwidth.",
    origin("decode_few_bits", "torch"),
)
uneven_table = Table(
    "cases.rows",
    {
        "sequences x tokens": "{case:x}",
        "preset": "`{preset}`",
        "cut alike": "{share:.0%}",
        "dealt by a plan": "{planned.share:.0%}",
        "pages, dealt by a plan": "{pages.share:.0%}",
    },
    num_text=2,
)
uneven_caption = Text(
    "Share of the read bandwidth in a decode step over sequences whose lengths are spread evenly over a range. The "
    "plan is made once a step and not counted.",
    origin("decode_uneven", "torch"),
)
pages_table = Pivot(
    lambda results: [row for row in flat(results, "cases", "rows") if not row["shape"]["is_ragged"]],
    {"preset": "`{preset}`"},
    {
        "{case:x}, µs": "{median_us:.0f}",
        "in pages": "{pages.median_us:.0f}",
        "longer": lambda row: f"{row['pages']['median_us'] / row['median_us'] - 1:+.1%}",
    },
)


def uneven_case(results: Results) -> Row:
    """The case of unequal lengths, with the date of its own run, if it has one."""
    return {**results, **next(case for case in results["cases"] if case["shape"]["is_ragged"])}


pages_caption = Text(
    "One decode step of one layer with 32 query and 8 key-value heads of 128, over sequences of equal length. With "
    "lengths spread evenly over a range ({uneven.case:x}), in pages {shares} of the read bandwidth "
    "({uneven.date:day}).",
    origin("decode_pages", "torch"),
    uneven=uneven_case,
    shares=lambda results: ", ".join(
        f"`{row['preset']}` reaches {row['pages']['share']:.0%}" for row in uneven_case(results)["rows"]
    ),
)
prompt_table = Table(
    "prompt",
    {
        "preset": "`{preset}`",
        "quantise, µs": "{median_us:.0f} ({share:.0%})",
        "dequantise, µs": "{dense.median_us:.0f} ({dense.share:.0%})",
    },
)
_BATCH, _NUM_KV_HEADS, _HEAD_DIM, _TOKENS = PROMPT
prompt_caption = Text(
    f"Keys and values of one layer, {_BATCH} x {thousands(_TOKENS)} tokens with {_NUM_KV_HEADS} heads of {_HEAD_DIM}, "
    "and in brackets the share of the bandwidth of a copy. Codes are dequantised only for attention that no kernel "
    "serves.",
    origin("dequantize", "torch"),
)
PARTS = (
    Part("decode", ("decode",), (gpu_table, gpu_caption)),
    Part("kernels", ("decode",), (peer_table, peer_caption)),
    Part("short", ("decode",), (short_sentence,)),
    Part("head-dim", ("decode",), (head_dim_sentence,)),
    Part("few-bits", ("decode_few_bits",), (few_bits_table, few_bits_caption)),
    Part("uneven", ("decode_uneven",), (uneven_table, uneven_caption)),
    Part("pages", ("decode_pages",), (pages_table, pages_caption)),
    Part("prompt", ("dequantize",), (prompt_table, prompt_caption)),
)
