#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.13.0: `QuantizedCache("fp8", config)` takes one scale for a layer from the prompt and
# keeps it. A later key or value that is larger than all of the prompt is clipped to the prompt's largest, and nothing is
# logged: one of three times that size comes back at a third. So a short prompt makes a worse cache than a long one.
# An infinite number comes back finite. With torch 2.10.0 the same numbers become NaN (seen by hand, CPU), and from then
# on so does every output.
#
# Source: transformers/cache_utils.py, `Fp8QuantizedLayer.update` passes the first scale to `_quantize`, which casts
# without a clamp. torch's cast to float8_e4m3fn gave NaN beyond 464 in 2.10 and saturates at 448 in 2.13.
#
# Seen: torch 2.13.0, transformers 5.24.0, CPU:
#     largest key of the prompt 4.00, of the next token 12.00, as the cache gives it back 4.00
#     infinity comes back as 4.00
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import math

import torch
from transformers import LlamaConfig, QuantizedCache

torch.manual_seed(0)
config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=128)


def returned(token: torch.Tensor) -> float:
    """The largest key of a token behind a prompt, as the cache gives it back."""
    cache = QuantizedCache("fp8", config)
    cache.update(prompt, prompt, 0)
    keys, _ = cache.update(token, token, 0)
    return float(keys[:, :, -1].abs().max())


prompt = torch.randn(1, 2, 16, 64)
prompt *= 4 / prompt.abs().max()
token = torch.randn(1, 2, 1, 64)
token *= 12 / token.abs().max()
found = returned(token)
print(f"largest key of the prompt {prompt.abs().max():.2f}, of the next token {token.abs().max():.2f}, ", end="")
print(f"as the cache gives it back {found:.2f}")
assert math.isclose(found, 4, rel_tol=1e-3), found
token[..., 0] = math.inf
found = returned(token)
print(f"infinity comes back as {found:.2f}")
assert math.isclose(found, 4, rel_tol=1e-3), found
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
