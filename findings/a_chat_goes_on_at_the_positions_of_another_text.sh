#!/usr/bin/env bash
# transformers 5.24.0: Qwen2-VL, and other models with `rope_deltas`, keep on the module how far the positions of a text
# with a picture are from the numbers of its tokens. `generate` takes this number, whichever cache it is given. So the
# next turn of a chat over the chat's own cache has the positions of another text, without a word:
# - if the model has read anything else in between;
# - if `generate` has refused a turn with a second picture, although the cache holds no token of it;
# - if the tokens of a second picture were cropped from the cache.
#
# Source: models/qwen2_vl/modeling_qwen2_vl.py (`_prepare_position_ids_for_generation`: it sets
# `self.model.rope_deltas` before anything is checked).
#
# Seen: torch 2.13.0, transformers 5.24.0, CPU, random weights. "Right": the logits of the same text in one piece.
#     the next turn: right
#     behind another text: wrong
#     behind a refused turn: wrong
#     behind a crop: wrong
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import DynamicCache, Qwen2VLConfig, Qwen2VLForConditionalGeneration

PICTURE, BEGIN, END, VIDEO = 90, 91, 92, 93
torch.manual_seed(0)
text = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
}
vision = {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4}
names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
config = Qwen2VLConfig(
    text_config=text, vision_config=vision, **dict(zip(names, (PICTURE, BEGIN, END, VIDEO))), tie_word_embeddings=False
)
model = Qwen2VLForConditionalGeneration(config).eval()
for name, weight in model.named_parameters():
    if weight.ndim >= 2:
        torch.nn.init.normal_(weight, std=1.0 if "embed_tokens" in name else 1.5 * weight.shape[-1] ** -0.5)
model.generation_config.update(
    eos_token_id=None, pad_token_id=0, suppress_tokens=[0, PICTURE, BEGIN, END, VIDEO], do_sample=False,
    max_new_tokens=4, output_logits=True, return_dict_in_generate=True,
)  # fmt: skip


def picture(height, width):
    pixels = torch.randn(height * width, 96, generator=torch.Generator().manual_seed(width))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def types(ids):
    return (ids == PICTURE).int()


def read(ids, pictures, **options):
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types(ids), **pictures, **options
    )


one, two = picture(4, 4), picture(4, 8)
both = {name: torch.cat([one[name], two[name]]) for name in one}
first = torch.tensor([[5, 6, BEGIN, *[PICTURE] * 4, END, 7, 8]])
second = torch.tensor([[11, BEGIN, *[PICTURE] * 8, END, 13]])
more = torch.tensor([[21, 22, 23]])


def chat():
    """A first turn with a picture, and the cache of it."""
    cache = DynamicCache(config=config)
    return cache, read(first, one, cache=cache).sequences


def read_another(cache, ids):
    read(torch.tensor([[3, 4, 5]]), {})
    return cache


def refuse(cache, ids):
    held = cache.get_seq_length()
    try:
        read(torch.cat([ids, second], 1), both, cache=cache)
    except ValueError:
        assert cache.get_seq_length() == held
    return cache


def crop(cache, ids):
    """A cache of both pictures, without the second one and what came behind it."""
    longer = DynamicCache(config=config)
    read(torch.cat([ids, second], 1), both, cache=longer)
    longer.crop(cache.get_seq_length() - longer.get_seq_length())
    return longer


def judge(output, ids, pictures):
    model.model.rope_deltas = None
    expected = read(ids, pictures)
    gap = (torch.stack(output.logits) - torch.stack(expected.logits)).abs().max()
    return "right" if gap < 1e-3 else "wrong"


calls = {"the next turn": None, "behind another text": read_another, "behind a refused turn": refuse, "behind a crop": crop}
for name, call in calls.items():
    cache, ids = chat()
    if call is not None:
        cache = call(cache, ids)
    ids = torch.cat([ids, more], 1)
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), cache=cache)
    print(f"{name}: {judge(output, ids, one)}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
the next turn: right
behind another text: wrong
behind a refused turn: wrong
behind a crop: wrong
SEEN
echo "as described"
