"""The table of decode steps of a model with states, from what `bench_generate.py` measures."""

from __future__ import annotations

from parts import Part, Table, Text
from render_latent import newest_of, paths_of

# Results files, and what computes the layers with a state in them.
FILES = {"generate_qwen3_5_4b": "PyTorch", "generate_qwen3_5_4b_fla": "flash-linear-attention"}

step_table = Table(
    lambda files: [{**case, "by": FILES[name]} for name in files for case in files[name]["cases"]],
    {
        "states by": "{by}",
        "sequences x tokens": "{batch} x {context:,}",
        "transformers, ms": "{rows.dynamic.step_ms:.1f} ({rows.dynamic.p10_ms:.1f} to {rows.dynamic.p90_ms:.1f})",
        "`int8`, ms": "{rows.int8-capture.step_ms:.1f} ({rows.dynamic.step_ms/rows.int8-capture.step_ms:.1f})",
        "`int4`, ms": "{rows.int4-capture.step_ms:.1f} ({rows.dynamic.step_ms/rows.int4-capture.step_ms:.1f})",
    },
)
caption = Text(
    "A step of `generate` with the shape of Qwen3.5-4B, 24 of 32 layers with a state alone, random weights in "
    "bfloat16. Of transformers, the median and the fastest and slowest tenth: its attention is cuDNN's, which makes a "
    "plan for each new number of tokens. Our steps are captured; how many times as fast in brackets. transformers "
    "{newest.transformers}, {newest.gpu}, torch {newest.torch}, {newest.date:day} ({paths}).",
    newest=newest_of,
    paths=paths_of,
)
PARTS = (Part("states-generate", (), (step_table, caption), optional=(*FILES,)),)
