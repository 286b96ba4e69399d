"""Many tokens of layers with states in one call: what it computes, where it stands in, and where it does not."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any

import models
import pytest
import torch
from cases import REFUSED
from test_state_steps import CUDA_ONLY, OPS, RULES, STATE_DTYPES, count, error, fuse_batches, theirs
from torch import Tensor

from hf_kvquant import patched
from hf_kvquant.graphs import state_chunks, state_steps
from hf_kvquant.graphs.fusion import fused_prompts
from hf_kvquant.graphs.state_chunks import (
    CONV_CHUNKS,
    DELTA_CHUNKS,
    REPLACED,
    SequenceInputs,
    Sequences,
    SequenceStates,
    serves_chunks,
)
from hf_kvquant.graphs.trials import Chooser
from hf_kvquant.spec import state_chunks as reference
from hf_kvquant.state import notes_on
from hf_kvquant.upstream.releases import HAS_STATES

if not HAS_STATES:
    pytest.skip("states need transformers 5.24", allow_module_level=True)

# Tokens of the sequences of a row: a decoding request, none, parts of a chunk and of its 16 rows, whole chunks, more.
LENGTHS = [(1,), (1, 0, 5, 64), (130, 1, 1, 16, 17), (65, 200, 48, 33)]
PADDING = 7  # tokens behind the last
HALVES = [torch.bfloat16, torch.float16]


def sequences(lengths: tuple[int, ...], device: str = "cpu") -> tuple[Sequences, int]:
    """Sequences that write every other slot, of which all but the first read what they write, and the number of slots.

    The first reads the last slot.
    """
    count = len(lengths)
    write = [2 * i + 1 for i in range(count)]
    return Sequences.of(lengths, [2 * count + 1, *write[1:]], write, torch.device(device)), 2 * count + 2


def delta_inputs(
    shape: tuple[int, ...], tokens: int, slots: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Query, key and value as slices of one projection, g, beta and the states of all slots."""
    k_heads, heads, key_dim, value_dim = shape
    sizes = [k_heads * key_dim, k_heads * key_dim, heads * value_dim]
    spare = -sum(sizes) % 8  # rows begin at multiples of 16 bytes
    rows = torch.randn(1, tokens, sum(sizes) + spare, device=device).to(dtype).split([*sizes, spare], dim=-1)[:3]
    dims = (k_heads, key_dim), (k_heads, key_dim), (heads, value_dim)
    vectors = [row.unflatten(-1, dim) for row, dim in zip(rows, dims, strict=True)]
    g = -torch.randn(1, tokens, heads, device=device).square() / 4
    beta = torch.randn(1, tokens, heads, device=device).sigmoid().to(dtype)
    return [*vectors, g, beta, torch.randn(slots, heads, key_dim, value_dim, device=device)]


def conv_inputs(
    tokens: int, slots: int, state_len: int = 4, width: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Inputs of 72 channels, as a slice of more; their states, and a weight."""
    x = torch.randn(1, tokens, 80, device=device).to(dtype)[..., :72].transpose(1, 2)
    made = torch.randn(slots, 72, state_len, device=device), torch.randn(72, width, device=device)
    return [x, *(each.to(dtype) for each in made)]


def where(each: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    return each.begins, each.read, each.write


def unwritten(each: Sequences, slots: int) -> Tensor:
    return torch.ones(slots, dtype=torch.bool, device=each.write.device).index_fill(0, each.write, False)


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("name", "state_dtype"), RULES, ids=str)
def test_the_delta_rule_is_that_of_transformers(
    name: str, lengths: tuple[int, ...], normalizes: bool, state_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    each, slots = sequences(lengths)
    *vectors, states = delta_inputs((1, 2, 8, 8), sum(lengths) + PADDING, slots)
    states = states.to(state_dtype)
    if not normalizes:
        vectors[1] = vectors[1] / 8**0.5  # a rule whose keys are longer than 1 grows without bound
    expected, before = states.clone(), states.clone()
    out = reference.delta_chunks(*vectors, states, normalizes, *where(each))
    for tokens, read, write in zip(each.tokens, each.read, each.write, strict=True):
        if tokens.start == tokens.stop:
            expected[write] = before[read]
            continue
        query, key, value, g, beta = (x[:, tokens] for x in vectors)
        options = {"g": g, "beta": beta, "initial_state": before[read][None], "output_final_state": True}
        options["use_qk_l2norm_in_kernel"] = normalizes
        result, state = theirs(name, DELTA_CHUNKS)(query, key, value, **options)
        expected[write] = state[0]
        torch.testing.assert_close(out[:, tokens], result, rtol=1e-4, atol=1e-5)
    rtol = max(1e-4, torch.finfo(state_dtype).eps)  # one unit of float16 where results round to either side
    torch.testing.assert_close(states, expected, rtol=rtol, atol=1e-5)
    assert not out[:, sum(lengths) :].any()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "olmo_hybrid"])
def test_the_convolution_is_that_of_transformers(
    name: str, lengths: tuple[int, ...], has_silu: bool, has_bias: bool
) -> None:
    torch.manual_seed(0)
    each, slots = sequences(lengths)
    x, states, weight = conv_inputs(sum(lengths) + PADDING, slots)
    bias = torch.randn(72) if has_bias else None
    expected, before = states.clone(), states.clone()
    out = reference.conv_chunks(x, states, weight, bias, has_silu, *where(each)).transpose(1, 2)
    for tokens, read, write in zip(each.tokens, each.read, each.write, strict=True):
        seen = torch.cat((before[read][None], x[:, :, tokens]), dim=-1)
        expected[write] = seen[0, :, -4:]
        if tokens.start < tokens.stop:
            result = theirs(name, CONV_CHUNKS)(seen, weight, bias, "silu" if has_silu else None)
            torch.testing.assert_close(out[:, :, tokens], result[:, :, 4:])
    assert torch.equal(states, expected) and not out[:, :, sum(lengths) :].any()


@CUDA_ONLY
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 128, 128), (1, 1, 64, 64), (2, 2, 96, 40), (1, 2, 8, 2), (1, 3, 24, 130)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_kernel_of_the_delta_rule(
    lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, normalizes: bool, state_dtype: torch.dtype
) -> None:
    """Against float64, at most twice the error of PyTorch's float32, and what bfloat16 pairs and a rounding allow."""
    torch.manual_seed(0)
    each, slots = sequences(lengths, "cuda")
    *vectors, states = delta_inputs(shape, sum(lengths) + PADDING, slots, dtype, "cuda")
    states = states.to(state_dtype)
    if not normalizes:
        vectors[1] = (vectors[1].float() / shape[2] ** 0.5).to(dtype)
    exact, own, actual = states.double(), states.clone(), states.clone()
    exact_out = reference.delta_chunks(*(x.double() for x in vectors), exact, normalizes, *where(each))
    own_out = reference.delta_chunks(*vectors, own, normalizes, *where(each))
    out = OPS.delta_chunks(*vectors, actual, normalizes, *where(each))
    for x, y, z, what in ((out, own_out, exact_out, "out"), (actual, own, exact, "states")):
        bound = 2 * error(y, z) + 2**-12 * float(z.abs().max())
        assert x.dtype == y.dtype and x.shape == y.shape and error(x, z) <= bound, what
    kept = unwritten(each, slots)
    assert torch.equal(actual[kept], states[kept]) and not out[:, sum(lengths) :].any()
    assert torch.equal(out, OPS.delta_chunks(*vectors, states.clone(), normalizes, *where(each)))


@CUDA_ONLY
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(("state_len", "width"), [(4, 4), (3, 4), (8, 3), (1, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_kernel_of_the_convolution(
    lengths: tuple[int, ...], state_len: int, width: int, dtype: torch.dtype, has_bias: bool
) -> None:
    torch.manual_seed(0)
    each, slots = sequences(lengths, "cuda")
    x, states, weight = conv_inputs(sum(lengths) + PADDING, slots, state_len, width, dtype, "cuda")
    bias = torch.randn(72, device="cuda").to(dtype) if has_bias else None
    expected, actual = states.clone(), states.clone()
    out = reference.conv_chunks(x, expected, weight, bias, has_bias, *where(each))
    assert state_steps.is_close(OPS.conv_chunks(x, actual, weight, bias, has_bias, *where(each)), out)
    assert torch.equal(actual, expected)


@CUDA_ONLY
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("second", [1, 3])
def test_numbers_on_the_device_that_do_not_fit_do_no_harm(second: int, dim: int, state_dtype: torch.dtype) -> None:
    """Slots that do not exist are zero and not written, and tokens are those that there are: first one, or three."""
    begins = torch.tensor([-5, second, second - 1, 10**6], device="cuda")
    bad, good = torch.tensor([-1, 9, 2**40], device="cuda"), torch.arange(3, device="cuda")
    *vectors, states = delta_inputs((1, 2, dim, dim), 6, 3, torch.bfloat16, "cuda")
    states = states.to(state_dtype)
    x, inputs, weight = conv_inputs(6, 3, device="cuda")
    for name, given, held in (
        ("delta_chunks", [*vectors, states, True], states),
        ("conv_chunks", [x, inputs, weight, None, True], inputs),
    ):
        before, op = held.clone(), getattr(OPS, name)
        assert op(*given, begins, bad, bad).isfinite().all() and torch.equal(held, before)
        assert op(*given, begins, good, good).isfinite().all()


def test_states_beyond_float16_become_its_largest_number(device: str) -> None:
    """Of a prompt and a single token, whose states grow by 2 times the values; what is NaN stays NaN."""
    each, slots = sequences((3, 1), device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    key = torch.zeros(1, 4, 1, 64, device=device, dtype=dtype)
    key[0, torch.tensor([0, 3]), 0, 0] = 1
    value = torch.full_like(key, 3e4)
    g, beta = (torch.full((1, 4, 1), number, device=device) for number in (0.0, 2.0))
    states = torch.zeros(slots, 1, 64, 64, device=device)
    states[:, :, 0, 0], states[:, :, 1, 2] = -5e4, torch.nan
    states = states.half()
    OPS.delta_chunks(key, key, value, g, beta, states, False, *where(each))
    new = states[each.write]
    assert (new[:, 0, 0, 0] == torch.finfo(torch.float16).max).all() and new[:, 0, 1, 2].isnan().all()
    assert (new[:, 0, 0, 3:].float() - 6e4).abs().max() <= 2**-8 * 6e4  # bfloat16 has 3e4 not exactly
    assert not new[:, 0, 2:, 0].any()


def arguments(device: str) -> dict[str, list[Any]]:
    each, slots = sequences((3, 1), device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return {
        "delta_chunks": [*delta_inputs((1, 2, 8, 8), 6, slots, dtype, device), True, *where(each)],
        "conv_chunks": [*conv_inputs(6, slots, device=device), None, True, *where(each)],
    }


@pytest.mark.parametrize("name", ["delta_chunks", "conv_chunks"])
def test_opcheck(device: str, name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, tuple(arguments(device)[name]))


@pytest.mark.parametrize(
    ("name", "index", "change", "message"),
    [
        ("delta_chunks", 0, lambda x: x[0], "delta_chunks: `query` must be [1, "),
        ("delta_chunks", 1, lambda x: x[:, :3], "delta_chunks: `key` must be [1, 6, "),
        ("delta_chunks", 2, lambda x: x[0], "delta_chunks: `value` must be [1, 6, any, any]"),
        ("delta_chunks", 3, lambda x: x[:, :1], "delta_chunks: `g` must be [1, 6, "),
        ("delta_chunks", 4, lambda x: x[0], "delta_chunks: `beta` must be [1, 6, "),
        ("delta_chunks", 7, lambda x: x[:1], "delta_chunks: `begins` must "),
        ("delta_chunks", 7, lambda x: x.int(), "delta_chunks: `begins` must be ["),
        (
            "delta_chunks",
            8,
            lambda x: x[:1],
            "delta_chunks: `read_slots` must be [2] int64, got [1] int64.",
        ),
        (
            "delta_chunks",
            9,
            lambda x: x.int(),
            "delta_chunks: `write_slots` must be [2] int64,",
        ),
        ("conv_chunks", 0, lambda x: x.repeat(2, 1, 1), "conv_chunks: `x` must be [1, any, any]"),
        ("conv_chunks", 1, lambda x: x[:, :8], "conv_chunks: `state` must be [any, 72, any]"),
        (
            "conv_chunks",
            1,
            lambda x: x[..., :2].contiguous(),
            "conv_chunks: `state` must have from 3 to 8 inputs of each",
        ),
        ("conv_chunks", 2, lambda x: x[:8], "conv_chunks: `weight` must be [72, any]"),
        ("conv_chunks", 5, lambda x: x[None], "conv_chunks: `begins` must be ["),
        ("conv_chunks", 6, lambda x: x[:1], "conv_chunks: `read_slots` must be [2] int64"),
    ],
)
def test_arguments_that_do_not_fit(device: str, name: str, index: int, change: Any, message: str) -> None:
    given = arguments(device)[name]
    given[index] = change(given[index])
    with pytest.raises(REFUSED) as raised:
        getattr(OPS, name)(*given)
    assert str(raised.value).replace("torch.", "").startswith(message.removesuffix("]")), raised.value


@CUDA_ONLY
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (
            0,
            lambda x: x.float(),
            "`query` must be float16 or bfloat16, got float32. Use the model's own function.",
        ),
        (1, lambda x: x.half(), "`key` must be bfloat16 like `query`, got float16. Use the model's own function."),
        (
            1,
            lambda x: x.new_zeros(1, 6, 1, 9)[..., 1:],
            "`key` must have rows that begin at multiples of 16 bytes, got st",
        ),
        (
            2,
            lambda x: x.new_zeros(1, 6, 2, 9)[..., 1:],
            "`value` must have rows that begin at multiples of 4 bytes, got s",
        ),
        (5, lambda x: x.bfloat16(), "`state` must be [any, 2, 8, 8] float32, got [6, 2, 8, 8] bfloat16."),
    ],
)
def test_what_the_kernel_does_not_take(index: int, change: Any, message: str) -> None:
    given = arguments("cuda")["delta_chunks"]
    given[index] = change(given[index])
    with pytest.raises(REFUSED) as raised:
        OPS.delta_chunks(*given)
    assert str(raised.value).startswith(f"delta_chunks: {message}"), raised.value


@CUDA_ONLY
def test_heads_that_the_kernel_does_not_take() -> None:
    each, slots = sequences((3,), "cuda")
    for shape, message in (
        ((1, 1, 136, 8), "`key` must have a multiple of 8 channels up to 128, got 136. Use the model's own function."),
        ((1, 1, 12, 8), "`key` must have a multiple of 8 channels up to 128, got 12. Use the model's own function."),
        ((1, 1, 8, 7), "`value` must have an even number of channels, got 7. Use the model's own function."),
    ):
        given = delta_inputs(shape, 3, slots, torch.bfloat16, "cuda")
        with pytest.raises(REFUSED) as raised:
            OPS.delta_chunks(*given, True, *where(each))
        assert str(raised.value) == f"delta_chunks: {message}"
        assert not serves_chunks(given[-1], False, torch.bfloat16)
    assert serves_chunks(torch.zeros(1, 1, 128, 128, device="cuda"), False, torch.bfloat16)
    assert not serves_chunks(torch.zeros(1, 1, 128, 128, device="cuda"), False, torch.float32)


# --- where it stands in -----------------------------------------------------------------------------------------------


@pytest.mark.full(
    when=lambda name, preset: (preset == "none") != (name in ("qwen3_next", "lfm2")),
    reason="states know nothing of how keys are stored",
)
@pytest.mark.parametrize("preset", ["none", "int8"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2"])
def test_prompts_of_a_batch_are_one_call(
    name: str, preset: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every request gets the tokens of `generate`, also from prompts in chunks and in slots that others have left."""
    from test_batching import PROMPTS, alone, answers, batched, managed

    calls = count(monkeypatch, state_chunks)
    fuse_batches(monkeypatch)
    with patched(models.family(name), preset) as model, caplog.at_level(logging.INFO, "hf_kvquant"):
        expected = [alone(model, prompt) for prompt in PROMPTS]
        assert not calls
        with managed(model) as manager:
            assert answers(manager, PROMPTS) == answers(manager, PROMPTS) == expected
            short = [prompt for prompt in PROMPTS if len(prompt) == 1]
            assert answers(manager, short) == [expected[PROMPTS.index(prompt)] for prompt in short] != []
        assert batched(model, PROMPTS, max_batch_tokens=8) == expected
        assert set(calls) == ({"conv_chunks"} if name == "lfm2" else {"conv_chunks", "delta_chunks"})
        assert "as one kernel for all sequences." in caplog.text
        notes_on(model).fusion = None


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "kimi_linear"])
def test_layers_with_other_functions_have_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_batching import PROMPTS, alone, batched

    calls = count(monkeypatch, state_chunks)
    fuse_batches(monkeypatch)
    with patched(models.family(name), "none") as model:
        expected = [alone(model, prompt) for prompt in PROMPTS]
        assert batched(model, PROMPTS) == expected and not calls
        notes_on(model).fusion = None


def given_delta(lengths: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Sequences, dict[str, Any]]:
    each, slots = sequences(lengths)
    query, key, value, g, beta, states = delta_inputs((1, 2, 8, 8), sum(lengths) + PADDING, slots)
    options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return [query, key, value], states, each, options


@pytest.mark.parametrize("change", [{}, {"cu_seqlens": None}, {"scale": 0.5}, {"thread": 1}], ids=str)
@torch.no_grad()
def test_a_function_that_stays_gets_one_sequence_after_the_other(change: dict[str, Any]) -> None:
    """With options and threads that are not known, and where a function computes something else."""
    lengths = (3, 1, 0, 70)
    vectors, states, each, options = given_delta(lengths)
    original, seen = theirs("qwen3_5", DELTA_CHUNKS), []

    def doubled(query: Tensor, *args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
        seen.append(query.shape[1])
        out, state = original(query, *args, **kwargs)
        return 2 * out, state

    expected = states.clone()
    out = reference.delta_chunks(*vectors, options["g"], options["beta"], expected, True, *where(each))
    thread = threading.get_ident() + change.pop("thread", 0)
    given = SequenceStates.of(states, each)
    actual, new = REPLACED[DELTA_CHUNKS](
        Chooser(), doubled, thread, *vectors, initial_state=given, **{**options, **change}
    )
    assert new is given and seen[-3:] == [3, 1, 70]
    torch.testing.assert_close(actual[:, :-PADDING], 2 * out[:, :-PADDING], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change", [{"activation": "gelu"}, {"seq_idx": None}, {"thread": 1}, {"output_router_logits": True}, {}], ids=str
)
@torch.no_grad()
def test_a_convolution_that_stays(change: dict[str, Any]) -> None:
    lengths = (3, 1, 0, 70)
    each, slots = sequences(lengths)
    x, states, weight = conv_inputs(sum(lengths) + PADDING, slots)
    original, seen = theirs("qwen3_5", CONV_CHUNKS), []

    def doubled(x: Tensor, seq_idx: None = None, activation: str | None = None, **kwargs: Any) -> Tensor:
        seen.append(x.shape[-1] - 4)
        result: Tensor = 2 * original(x, **kwargs)
        return result

    expected = states.clone()
    out = reference.conv_chunks(x, expected, weight, None, False, *where(each)).transpose(1, 2)
    thread = threading.get_ident() + change.pop("thread", 0)
    given = SequenceInputs(x, SequenceStates.of(states, each))
    actual = REPLACED[CONV_CHUNKS](Chooser(), doubled, thread, given, weight, **change)
    assert seen[-4:] == [3, 1, 0, 70]
    torch.testing.assert_close(actual[:, :, :-PADDING], 2 * out[:, :, :-PADDING])
    assert torch.equal(states, expected)


@torch.no_grad()
def test_tensors_get_the_original() -> None:
    """Prompts on a CPU, where the kernels are PyTorch code for one token after the other."""
    vectors, _, _, options = given_delta((3,))
    x, _, weight = conv_inputs(5, 1)
    here = threading.get_ident()
    conv, delta = (theirs("qwen3_5", name) for name in (CONV_CHUNKS, DELTA_CHUNKS))
    assert torch.equal(REPLACED[CONV_CHUNKS](Chooser(), conv, here, x, weight), conv(x, weight))
    expected, actual = (
        function(*vectors, initial_state=None, **options)
        for function in (delta, lambda *args, **kwargs: REPLACED[DELTA_CHUNKS](Chooser(), delta, here, *args, **kwargs))
    )
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_prompts_of_generate(batch: int, has_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, they go through the kernels as sequences of one length, with and without states before them."""
    monkeypatch.setattr(state_chunks, "_is_prompt", lambda x, num_tokens: True)
    calls, here = count(monkeypatch, state_chunks), threading.get_ident()
    conv, delta = (theirs("qwen3_5", name) for name in (CONV_CHUNKS, DELTA_CHUNKS))
    chooser = Chooser()
    made = delta_inputs((1, 2, 8, 8), 70 * batch, 1, torch.bfloat16)
    rows = [x.unflatten(1, (batch, 70))[0] for x in made[:5]]
    options = {"g": rows[3], "beta": rows[4], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    options["initial_state"] = torch.randn(batch, 2, 8, 8) if has_state else None
    before = options["initial_state"].clone() if has_state else None
    expected = delta(*rows[:3], **options)
    x = torch.randn(batch, 70, 72).transpose(1, 2)
    weight = torch.randn(72, 4)
    for _ in range(2):  # the first call tries
        calls.clear()
        actual = REPLACED[DELTA_CHUNKS](chooser, delta, here, *rows[:3], **options)
        assert state_steps.is_close(actual, expected, torch.finfo(torch.bfloat16).eps)
        assert before is None or torch.equal(options["initial_state"], before)
        actual = REPLACED[CONV_CHUNKS](chooser, conv, here, x, weight, activation="silu")
        torch.testing.assert_close(actual, conv(x, weight, activation="silu"))
    assert calls == ["delta_chunks", "conv_chunks"]
    # Nothing else than the original for what the kernels do not compute.
    calls.clear()
    options["scale"] = None
    assert all(map(torch.equal, REPLACED[DELTA_CHUNKS](chooser, delta, here, *rows[:3], **options), expected))
    for thread, change in ((here, {"activation": "gelu"}), (here, {"seq_idx": None}), (here + 1, {})):
        assert torch.equal(REPLACED[CONV_CHUNKS](chooser, conv, thread, x, weight, **change), conv(x, weight, **change))
    assert not calls


@CUDA_ONLY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_only_blocks_for_prompts_change_them(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt of a model, before, in and after such a block: float32 keeps the model's delta rule."""
    model = models.on("cuda", models.family("qwen3_5_text")).to(dtype)
    ids = torch.arange(1, 141, device="cuda").view(2, 70) % models.VOCAB_SIZE
    before = model(ids, use_cache=True).logits
    with caplog.at_level(logging.INFO, "hf_kvquant"), fused_prompts(model):
        inside = model(ids, use_cache=True).logits
    notes_on(model).fusion = None
    assert (f"captured steps run {DELTA_CHUNKS}" in caplog.text) == (dtype == torch.bfloat16)
    assert f"captured steps run {CONV_CHUNKS}" in caplog.text
    assert torch.equal(model(ids, use_cache=True).logits, before)
    assert (inside - before).abs().max() <= 8 * torch.finfo(dtype).eps * before.abs().max()


def test_blocks_for_prompts_leave_a_cpu_alone() -> None:
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    before = dict(vars(module))
    with fused_prompts(models.family("qwen3_5_text")):
        assert dict(vars(module)) == before
