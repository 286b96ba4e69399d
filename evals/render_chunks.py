"""What the pages say about attention of many new tokens on a GPU, from what `bench_chunks.py` measures."""

from __future__ import annotations

from decode_cases import thousands
from parts import Cell, Part, Results, Row, Table, Text, of, origin

# The columns and their headings, in order, of those that were measured. Names are those of bench_chunks.py.
KERNELS = {
    "flash": "flash, bf16",
    "cudnn": "cuDNN, bf16",
    "fa2": "FlashInfer FA2, bf16",
    "fa3": "FlashInfer FA3, bf16",
    "fa3-fwd": "FA3, bf16",
    "none": "`none`",
    "int8": "`int8`",
    "int4": "`int4`",
}
COMPARED = ("int8", "int4")
# From so many new tokens on, the kernel for chunks attends in each case.
MANY = 32
# From so many on, in most models, tiles of long chunks are filled once. They are measured in a run of their own.
LONG = 1024


def case_name(case: Row) -> str:
    """`1 x 32k + 1,024`."""
    return f"{case['batch']} x {thousands(case['length'])} + {case['num_new']:,}"


def columns(results: Results) -> dict[str, Cell]:
    """Those of what was measured."""
    return {
        "batch x context + new tokens": case_name,
        **{
            f"{heading}, µs": of("us", f"{{{name}:,.0f}}")
            for name, heading in KERNELS.items()
            if name in results["cases"][0]["us"]
        },
        **{f"{KERNELS[name]} against bf16": of("speedup", f"{{{name}:.2f}}x") for name in COMPARED},
    }


chunk_table = Table(lambda results: [case for case in results["cases"] if case["num_new"] < LONG], columns)
long_table = Table("cases", columns)
caption = Text(
    "Many new tokens at once, as in a chunk of a prompt, a chat's next turn or a check of proposed tokens: attention "
    "of one layer with 32 query and 8 key-value heads of {head_dim}. The context includes the new tokens. Ours reads "
    "codes; the others read bf16 keys and values. cuDNN runs without a causal mask, which PyTorch cannot align with "
    "the last token. Medians of replays of a CUDA graph, cold in L2. {gpu}, torch {torch}, {flashinfer}{date:day}, "
    "`evals/results/chunks.json`.",
    flashinfer=lambda results: (
        f"flashinfer {version}, " if (version := results["peer_versions"]["flashinfer-python"]) else ""
    ),
)
long_caption = Text(
    "The same for long chunks. FA3 is the package fa3-fwd {peer_versions.fa3-fwd}. {gpu}, torch {torch}, {date:day}, "
    "`evals/results/chunks_long.json`."
)


def longer(results: Results, is_many: bool, is_plain: bool) -> list[float]:
    """By how much steps of several new tokens take longer in pages: of many or few, without codes or with."""
    return [
        us / case["us"][name] - 1
        for case in results["cases"]
        for name, us in case["pages_us"].items()
        if case["num_new"] > 1 and (name == "none") == is_plain and (is_plain or (case["num_new"] >= MANY) == is_many)
    ]


pages_sentence = Text(
    "A chunk of a prompt attends over pages about as fast as over sequences side by side. The time of a layer changes "
    f"by {{many:range+.0%}} from {MANY} new tokens on, and by {{few:range+.0%}} with fewer. With `none` it changes by "
    "{plain:range+.0%}.",
    origin("chunks_pages", "torch"),
    many=lambda results: longer(results, is_many=True, is_plain=False),
    few=lambda results: longer(results, is_many=False, is_plain=False),
    plain=lambda results: longer(results, is_many=True, is_plain=True),
)
PARTS = (
    Part("chunks", ("chunks",), (chunk_table, caption)),
    Part("chunks-long", ("chunks_long",), (long_table, long_caption)),
    Part("chunks-pages", ("chunks_pages",), (pages_sentence,)),
)
