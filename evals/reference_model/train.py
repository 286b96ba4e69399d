"""Trains from scratch the small Llama-architecture model that the evaluations in this repository use.

A quantised cache can only be judged on a model that has learned something: on random weights attention is close to
uniform and every error looks harmless. This one is small enough to live in the repository (15.5 million parameters in
bf16), but its cache has the shape of a large model's: head_dim 128, two query heads per key-value head, rotary
positions. Commands, in this order, on one folder `--out`:

    tokenizer   byte-level BPE learned from the training articles: tokenizer.json, tokenizer_config.json
    train       the weights: config.json, generation_config.json, model.safetensors, training_log.jsonl
    average     the mean of two checkpoints: before and after a second training that continued from the first
    stretch     a copy of a model with latents that computes the same, and whose latents have outlier channels
    evaluate    validation loss, WikiText-2 perplexity in two conventions, greedy continuations; printed only

The layers are those of transformers' `LlamaForCausalLM`, so `from_pretrained` loads exactly what was trained; with
`--latent-rank`, those of `DeepseekV3ForCausalLM`, which keep latents instead of keys and values (MLA); with
`--state-heads`, those of `Qwen3_5ForCausalLM`, where three layers of four keep a state (gated delta rule). README.md in
this folder has the licence of the data, the command that made the checkpoint here, and its results.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

END_OF_TEXT = "<|endoftext|>"
VALIDATION_SHARE = 0.01
CONTEXT = 2048

# Words keep the space before them. Digits form pairs, so a year is two tokens and any number is spelled with about a
# hundred entries. Runs of punctuation and of white space are pieces of their own.
PIECE_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

PROMPTS = (
    "The Second World War began",
    "Albert Einstein was a German-born physicist who",
    "The city of Paris is",
    "In computer science, an algorithm is",
)


# ------------------------------------------------------------------------------------------------------------- data


def read_articles(path: Path) -> tuple[list[str], list[str]]:
    """Read the corpus and hold out its last articles.

    Args:
        path: UTF-8 text, plain or compressed as `.xz`; articles separated by a line that holds `<|endoftext|>`.

    Returns:
        The training articles and the validation articles (the last 1 % of them, at least one), white space at both
        ends removed.
    """
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        articles = [article.strip() for article in file.read().split(END_OF_TEXT)]
    held_out = max(1, round(len(articles) * VALIDATION_SHARE))
    return articles[:-held_out], articles[-held_out:]


def in_wikitext_style(article: str) -> str:
    """Rewrite an article the way WikiText-2 spells text.

    Evaluations read WikiText-2, which has spaces around punctuation. A model that has only seen plain prose would be
    surprised mostly by those spaces. In WikiText-2, a hyphen inside a word is ` @-@ `, a comma or point inside a number
    ` @,@ ` or ` @.@ `, a title `= Title =`, and every line begins and ends with a space. The corpus marks headings by
    short lines that end with a point.
    """
    lines = []
    for index, line in enumerate(article.split("\n")):
        is_heading = index > 0 and len(line) < 60 and re.fullmatch(r"[^.!?:;,]+\.", line)
        if not line.strip():
            continue
        text = re.sub(r"([;:!?()\[\]\"—]|(?<!\w)'|'(?!\w)|\.\.\.|(?<!\d),|,(?!\d))", r" \1 ", line)
        text = re.sub(r"(?<=\d)([,.])(?=\d)", r" @\1@ ", text)
        text = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", text)
        text = re.sub(r"(?<=\w)'(?=\w)", " '", text)
        # A point ends a sentence unless it belongs to initials or an abbreviation.
        text = re.sub(r"(?<!\b[A-Z])(?<!\bSt)(?<!\bMr)(?<!\bDr)(?<!\bNo)(?<!\bp)(?<!\.)\.(?=\s|$)", " .", text)
        text = " ".join(text.split())
        if index == 0:
            lines += ["", f"= {text} =", ""]
        elif is_heading:
            lines += ["", f"= = {text[:-2]} = =", ""]
        else:
            lines.append(text)
    return "\n".join(f" {line} " if line else " " for line in lines)


def train_tokenizer(articles: list[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE without a normaliser, so that `decode(encode(text)) == text` for every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(articles, trainer, length=len(articles))
    return tokenizer


def encode_articles(tokenizer: Tokenizer, articles: list[str]) -> Tensor:
    """Encode articles into one stream, each preceded by `<|endoftext|>`.

    Returns:
        `[tokens]`, int32, on the CPU. Encoded in parallel over all cores, 1024 articles at a time to bound memory.
    """
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[Tensor] = []
    for start in range(0, len(articles), 1024):
        for encoding in tokenizer.encode_batch_fast(articles[start : start + 1024]):
            pieces.append(torch.tensor([end_of_text, *encoding.ids], dtype=torch.int32))
    return torch.cat(pieces)


def endless_batches(tokens: Tensor, rows: int, context: int, seed: int) -> Iterator[Tensor]:
    """Yield `[rows, context + 1]` int64 batches forever. Each epoch cuts the stream at a new offset and shuffles.

    Rows overlap by one token, so each token is a target once per epoch. No row spans two epochs.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = torch.arange(context + 1, device=tokens.device)
    while True:
        offset = int(torch.randint(context, (), generator=generator))
        windows = (len(tokens) - offset - 1) // context
        if windows < rows:
            raise ValueError(
                f"endless_batches: `tokens` must fill a batch of {rows} windows of {context}, got {len(tokens)} "
                "tokens. Lower --batch-rows or bring more text."
            )
        starts = offset + context * torch.randperm(windows, generator=generator)
        starts = starts.to(tokens.device)
        for first in range(0, windows - rows + 1, rows):
            yield tokens[starts[first : first + rows, None] + columns].long()


# ------------------------------------------------------------------------------------------------------------ model


def build_config(args: argparse.Namespace, vocab_size: int) -> PreTrainedConfig:
    """Return the config of the model: Llama's, or one of the same size with latents or states.

    `pad_token_id` stays unset: an embedding with a padding index would never learn `<|endoftext|>` as an input.
    """
    common = {
        "vocab_size": vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.query_heads,
        "max_position_embeddings": args.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if args.state_heads is not None:
        # As in Qwen3.5: two heads of values share one of keys, and three layers of four have a state.
        return Qwen3_5TextConfig(
            **common,
            num_key_value_heads=args.kv_heads,
            head_dim=args.head_dim,
            linear_num_value_heads=args.state_heads,
            linear_num_key_heads=max(1, args.state_heads // 2),
            linear_value_head_dim=args.head_dim,
            linear_key_head_dim=args.head_dim,
        )
    if args.latent_rank is None:
        return LlamaConfig(**common, num_key_value_heads=args.kv_heads, head_dim=args.head_dim)
    # Values are as wide as keys, and every layer has an MLP in place of experts.
    sizes = {"qk_nope_head_dim": args.head_dim - args.rope_dim, "qk_rope_head_dim": args.rope_dim}
    return DeepseekV3Config(
        **common,
        **sizes,
        num_key_value_heads=args.query_heads,
        kv_lora_rank=args.latent_rank,
        q_lora_rank=None,
        v_head_dim=args.head_dim,
        first_k_dense_replace=args.layers,
    )


def build_model(args: argparse.Namespace, vocab_size: int) -> PreTrainedModel:
    """Build the model with new random float32 weights.

    The projections that write into the residual stream start smaller, by 1 / sqrt(2 · layers), so that its variance
    does not grow with depth.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_config(build_config(args, vocab_size))
    with torch.no_grad():
        for layer in model.model.layers:
            if args.state_heads is not None and hasattr(layer, "linear_attn"):
                out = layer.linear_attn.out_proj
                init_decays(layer.linear_attn)
            else:
                out = layer.self_attn.o_proj
            out.weight.mul_((2 * args.layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * args.layers) ** -0.5)
    return model


def init_decays(layer: Any) -> None:
    """Let the heads of a layer with a state forget at very different speeds, as in Mamba-2 and Gated DeltaNet.

    A head multiplies its state by exp(-A · softplus(x + bias)) at each token, with A from 1 to 16 and here a softplus
    from 0.001 to 0.1 where x is 0: it halves it within half a token to 700. transformers starts with a bias of 1, which
    forgets everything within a token or two, and minutes of training do not undo that.
    """
    heads = layer.num_v_heads
    steps = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    layer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
    layer.A_log.copy_(torch.empty(heads).uniform_(1, 16).log())


def mean_loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Return the mean next-token loss of `batch` (`[rows, context + 1]`), in nats, as a float32 scalar.

    The layers are called directly, without a mask: the model's `forward` builds a mask tensor when it is compiled,
    which rules out the flash attention kernels. Under autocast the residual stream is bf16, as when the saved bf16
    checkpoint runs; the rotary tables stay float32.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    stream = model.model.embed_tokens(inputs)  # [rows, context, hidden_size]
    positions = torch.arange(inputs.shape[1], device=batch.device)[None]
    rotary = model.model.rotary_emb(stream, positions)
    if torch.is_autocast_enabled(batch.device.type):
        stream = stream.to(torch.bfloat16)
    for layer in model.model.layers:
        stream = layer(stream, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    logits = model.lm_head(model.model.norm(stream))  # [rows, context, vocab_size]
    loss: Tensor = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss


@torch.no_grad()
def validation_loss(model: PreTrainedModel, tokens: Tensor, rows: int, context: int) -> float:
    """Return the mean loss over all whole windows of a stream, in order, `rows` windows at a time."""
    windows = (len(tokens) - 1) // context
    columns = torch.arange(context + 1, device=tokens.device)
    starts = context * torch.arange(windows, device=tokens.device)
    total = 0.0
    for chunk in starts.split(rows):
        total += float(mean_loss(model, tokens[chunk[:, None] + columns].long())) * len(chunk)
    return total / windows


# -------------------------------------------------------------------------------------------------------- optimiser


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of `[n, rows, columns]` matrices near 1, keeping the singular vectors.

    Five steps of a quintic Newton-Schulz iteration in bf16 whose coefficients (Jordan et al., 2024) trade an exact
    limit for speed: values land between about 0.7 and 1.2, which is enough for a direction of descent.
    """
    wide = matrices.bfloat16()
    is_tall = matrices.shape[1] > matrices.shape[2]
    if is_tall:
        wide = wide.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.7750 * gram) @ wide
    return wide.mT if is_tall else wide


class Muon:
    """Momentum whose update is orthogonalised, for the matrices of the layers (Jordan et al., 2024).

    Matrices of one shape are stacked, so a step is a few batched products instead of hundreds of small ones, which
    `torch.optim.Muon` does not do. The update is scaled to a root mean square of 0.2 per element (Liu et al., 2025), so
    that learning rates are in the range of AdamW's.
    """

    def __init__(self, parameters: list[Tensor], weight_decay: float, *, compiled: bool) -> None:
        shapes = sorted({tuple(parameter.shape) for parameter in parameters})
        self.groups = [[p for p in parameters if tuple(p.shape) == shape] for shape in shapes]
        self.momenta = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.weight_decay = weight_decay
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False) if compiled else orthogonalize

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply one Nesterov step (momentum 0.95) and decoupled weight decay, then drop the gradients."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])  # [n, rows, columns]
            momentum.lerp_(gradient, 0.05)
            update = self.orthogonalize(gradient.lerp_(momentum, 0.95)).float()
            update *= 0.2 * max(update.shape[1:]) ** 0.5
            torch._foreach_mul_(group, 1 - learning_rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-learning_rate)
            for parameter in group:
                parameter.grad = None


def schedule(progress: float, warmup: float) -> float:
    """Return the learning-rate multiplier at `progress` in [0, 1): linear up during `warmup`, then linear to zero."""
    return min(progress / warmup, (1 - progress) / (1 - warmup))


# --------------------------------------------------------------------------------------------------------- commands


def save_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Write config, generation config and bf16 weights; the model itself keeps its float32 weights.

    Files are written next to the target and moved over it, so an interrupted run never leaves half a file.
    """
    state = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=False)
    partial = folder / "partial"
    copy.save_pretrained(partial)
    for file in partial.iterdir():
        os.replace(file, folder / file.name)
    partial.rmdir()


def run_tokenizer(args: argparse.Namespace) -> None:
    """Train the tokenizer on the training articles and write the two files that `AutoTokenizer` reads."""
    args.out.mkdir(parents=True, exist_ok=True)
    articles, _ = read_articles(args.data)
    train_tokenizer(articles, args.vocab_size).save(str(args.out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def run_train(args: argparse.Namespace) -> None:
    """Train until `--steps` or `--minutes` is reached and write the checkpoint, also once half-way as a safeguard.

    The learning rate follows progress towards whichever of the two is the limit, and reaches zero at the end. The clock
    starts after compilation. Every line of the log is one JSON object.
    """
    started = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    log = (args.out / "training_log.jsonl").open("w", encoding="utf-8")

    def report(**values: object) -> None:
        line = json.dumps({key: round(v, 5) if isinstance(v, float) else v for key, v in values.items()})
        print(line, flush=True)
        print(line, file=log, flush=True)

    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    train_articles, validation_articles = read_articles(args.data)
    if args.articles:
        held_out = max(1, round(args.articles * VALIDATION_SHARE))
        train_articles, validation_articles = train_articles[: args.articles], validation_articles[:held_out]
    if args.wikitext_style:
        with ProcessPoolExecutor() as pool:
            train_articles += pool.map(in_wikitext_style, train_articles, chunksize=64)
        random.Random(args.seed).shuffle(train_articles)  # windows span articles: let the two styles mix
    train_tokens = encode_articles(tokenizer, train_articles).to(device)
    validation_tokens = encode_articles(tokenizer, validation_articles).to(device)
    if len(validation_tokens) <= args.context:
        raise SystemExit(
            f"train: `--context` must be below the {len(validation_tokens)} tokens held out for validation, got "
            f"{args.context}. Use more articles."
        )

    model = build_model(args, tokenizer.get_vocab_size())
    if args.init:
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32).state_dict())
    model = model.to(device)
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    # Embeddings (also the output layer), norm weights, and of states the convolutions and gates: AdamW, and no decay,
    # which would fade rare tokens.
    others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim != 2)]
    muon = Muon(matrices, args.weight_decay, compiled=args.compile)
    adamw = torch.optim.AdamW(
        others, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True if device.type == "cuda" else None
    )
    loss_of = torch.compile(mean_loss, dynamic=False) if args.compile else mean_loss
    batches = endless_batches(train_tokens, args.batch_rows, args.context, args.seed)
    with torch.autocast(device.type, torch.bfloat16):
        loss_of(model, next(batches)).backward()
    muon.step(0.0)
    model.zero_grad(set_to_none=True)
    report(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        train_tokens=len(train_tokens),
        validation_tokens=len(validation_tokens),
        batch_tokens=args.batch_rows * args.context,
        preparation_seconds=time.monotonic() - started,
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )

    def validate() -> float:
        with torch.autocast(device.type, torch.bfloat16):
            return validation_loss(model, validation_tokens, args.batch_rows, args.context)

    started = time.monotonic()
    step, next_log, half_way_saved = 0, 0.0, False
    losses: list[Tensor] = []
    while (progress := step / args.steps if args.steps else (time.monotonic() - started) / (60 * args.minutes)) < 1:
        multiplier = schedule(progress, args.warmup)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, next(batches))
        loss.backward()
        for group in adamw.param_groups:
            group["lr"] = multiplier * args.embedding_learning_rate
        adamw.step()
        muon.step(multiplier * args.learning_rate)
        adamw.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        step += 1
        # Reading a loss waits for the device. Every tenth step is often enough for an honest clock, and rare enough to
        # keep the device's queue full.
        if step % 10 == 0:
            losses[-1].item()
        if time.monotonic() - started >= next_log:
            next_log += args.log_seconds
            train_loss = float(torch.stack(losses).mean())
            losses.clear()
            tokens = step * args.batch_rows * args.context
            seconds = time.monotonic() - started
            report(step=step, seconds=seconds, tokens=tokens, learning_rate=multiplier, train_loss=train_loss)
        if progress >= 0.5 and not half_way_saved:
            half_way_saved = True
            save_checkpoint(model, args.out)
            report(step=step, validation_loss=validate())
    seconds = time.monotonic() - started
    save_checkpoint(model, args.out)
    tokens = step * args.batch_rows * args.context
    report(
        step=step,
        seconds=seconds,
        tokens=tokens,
        epochs=tokens / len(train_tokens),
        train_loss=float(torch.stack(losses).mean()) if losses else None,
        validation_loss=validate(),
    )
    log.close()


@torch.no_grad()
def run_average(args: argparse.Namespace) -> None:
    """Write the mean of the weights of `--out` and `--other`, which continued from it, to `--out`.

    A second training on a new style forgets some of the first and overfits. Half-way between the two, nearly all of the
    gain is kept and most of the loss is undone (Wortsman et al., 2022, "Robust fine-tuning of zero-shot models").
    """
    first, second = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (args.out, args.other))
    for mean, other in zip(first.parameters(), second.parameters(), strict=True):
        mean.lerp_(other, 0.5)
    save_checkpoint(first, args.out)


@torch.no_grad()
def run_stretch(args: argparse.Namespace) -> None:
    """Multiply the channels of latents by log-normal factors, and divide the columns that read them by the same."""
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.other, dtype=torch.float32)
    for layer in model.model.layers:
        norm, up = layer.self_attn.kv_a_layernorm, layer.self_attn.kv_b_proj
        factors = (args.sigma * torch.randn_like(norm.weight)).exp()
        norm.weight.mul_(factors)
        up.weight.div_(factors)
    args.out.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, args.out)
    AutoTokenizer.from_pretrained(args.other).save_pretrained(args.out)


@torch.no_grad()
def negative_log_likelihood(model: PreTrainedModel, windows: list[Tensor], device: torch.device) -> float:
    """Return the summed loss, in nats, of every token but the first of each window (`[tokens]` each)."""
    total = 0.0
    for window in windows:
        logits = model(window[None].to(device)).logits[0, :-1].float()  # [tokens - 1, vocab_size]
        total += float(F.cross_entropy(logits, window[1:].to(device), reduction="sum"))
    return total


def run_evaluate(args: argparse.Namespace) -> None:
    """Print validation loss, WikiText-2 perplexities and greedy continuations of the checkpoint in `--out`, float32."""
    device = torch.device(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    window = args.context

    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        output = model.generate(**inputs, max_new_tokens=60, do_sample=False)
        print(json.dumps({"greedy": tokenizer.decode(output[0])}, ensure_ascii=False), flush=True)

    if args.wikitext:
        text = args.wikitext.read_text(encoding="utf-8")
        # Per token, as papers report it: rows of the data set joined by two newlines, whole windows only.
        rows = [line if line.strip() else "" for line in text.splitlines(keepends=True)]
        ids = tokenizer("\n\n".join(rows), return_tensors="pt", verbose=False).input_ids[0]
        windows = list(ids[: len(ids) // window * window].split(window))
        loss = negative_log_likelihood(model, windows, device) / (len(windows) * (window - 1))
        print(json.dumps({"per_token_perplexity": math.exp(loss), "windows": len(windows), "tokens": len(ids)}))
        # Per word: the file as it is. Every window starts with the end-of-text token, and every token is scored once.
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        first = torch.tensor([tokenizer.bos_token_id])
        windows = [torch.cat([first, chunk]) for chunk in ids.split(window - 1)]
        loss = negative_log_likelihood(model, windows, device)
        words = len(text.split())
        print(
            json.dumps(
                {
                    "per_word_perplexity": math.exp(loss / words),
                    "words": words,
                    "tokens": len(ids),
                    "bits_per_byte": loss / math.log(2) / len(text.encode()),
                }
            )
        )

    if args.data:
        _, articles = read_articles(args.data)
        tokens = encode_articles(tokenizer.backend_tokenizer, articles).to(device)
        loss = validation_loss(model, tokens, 1, window)
        print(json.dumps({"validation_loss": loss, "tokens": len(tokens), "articles": len(articles)}))


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(description="Train the small reference model of the evaluations.")
    commands = parser.add_subparsers(dest="command", required=True)

    tokenizer = commands.add_parser("tokenizer", help="learn the vocabulary")
    tokenizer.add_argument("--vocab-size", type=int, default=8192)

    train = commands.add_parser("train", help="train the model")
    limit = train.add_mutually_exclusive_group()
    limit.add_argument("--minutes", type=float, default=8.2, help="training time, preparation not counted")
    limit.add_argument("--steps", type=int, help="optimiser steps, instead of --minutes; the same on any machine")
    train.add_argument("--tokenizer", type=Path, help="folder of tokenizer.json (default: --out)")
    train.add_argument("--init", type=Path, help="folder of a checkpoint to continue from, without optimiser states")
    train.add_argument(
        "--wikitext-style", action="store_true", help="read every article a second time, spelled like WikiText-2"
    )
    train.add_argument("--articles", type=int, help="use only the first ARTICLES, and validate on as large a share")
    train.add_argument("--batch-rows", type=int, default=64, help="windows per step")
    train.add_argument("--learning-rate", type=float, default=5e-3, help="peak, for the matrices of the layers")
    train.add_argument("--embedding-learning-rate", type=float, default=8e-3, help="peak, for embeddings and norms")
    train.add_argument("--weight-decay", type=float, default=0.25, help="for the matrices, times the learning rate")
    train.add_argument("--warmup", type=float, default=0.02, help="share of the run")
    train.add_argument("--hidden-size", type=int, default=384)
    train.add_argument("--intermediate-size", type=int, default=1024)
    train.add_argument("--layers", type=int, default=7)
    train.add_argument("--query-heads", type=int, default=4)
    train.add_argument("--kv-heads", type=int, default=2)
    train.add_argument("--head-dim", type=int, default=128)
    train.add_argument("--latent-rank", type=int, help="channels of a latent: a model with latents (MLA), not Llama's")
    train.add_argument(
        "--state-heads",
        type=int,
        help="heads of values in a state: a model with states (gated delta rule), not Llama's",
    )
    train.add_argument("--rope-dim", type=int, default=32, help="channels of a head with rotary positions, of latents")
    train.add_argument("--rope-theta", type=float, default=10_000.0, help="base of the rotary positions")
    train.add_argument("--log-seconds", type=float, default=10.0)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--no-compile", dest="compile", action="store_false", help="skip torch.compile")

    average = commands.add_parser("average", help="average two checkpoints")
    average.add_argument("--other", type=Path, required=True, help="folder of the checkpoint trained on from --out")

    stretch = commands.add_parser("stretch", help="give latents outlier channels")
    stretch.add_argument("--other", type=Path, required=True, help="folder of the checkpoint")
    stretch.add_argument("--out", type=Path, required=True, help="folder of the copy")
    stretch.add_argument("--sigma", type=float, default=1.0, help="of the factors' logarithms")
    stretch.add_argument("--seed", type=int, default=0)

    evaluate = commands.add_parser("evaluate", help="measure a checkpoint")
    evaluate.add_argument("--wikitext", type=Path, help="the WikiText-2 raw test split")

    average.add_argument("--out", type=Path, required=True, help="folder of the first checkpoint, and of the mean")
    for command in (tokenizer, train, evaluate):
        command.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
        command.add_argument(
            "--data", type=Path, required=command is not evaluate, help="articles, .xz or plain text; see README.md"
        )
    for command in (train, evaluate):
        command.add_argument("--context", type=int, default=CONTEXT, help="tokens in a window")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")

    args = parser.parse_args()
    if args.command == "evaluate" and args.data is None and args.wikitext is None:
        evaluate.error("--wikitext or --data must be given, or there is nothing to measure")
    if args.command == "train" and args.tokenizer is None:
        args.tokenizer = args.out
    commands_by_name = {
        "tokenizer": run_tokenizer,
        "train": run_train,
        "average": run_average,
        "stretch": run_stretch,
        "evaluate": run_evaluate,
    }
    commands_by_name[args.command](args)


if __name__ == "__main__":
    main()
