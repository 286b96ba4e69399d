"""Split plans of a cache's steps: one a step for all layers, always of the lengths that the step attends to.

A CPU takes a plan, checks it and makes no use of it. So there, the plans that reach the ops are compared with what they
must be. GPUs deal by them, and results must not change by more than roundings.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import compare
import models
import pytest
import torch
from models import left_padded
from test_capture import Recorded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvquant import KVQuantCache, KVQuantConfig, ops, patched
from hf_kvquant.cache.handle import MaskNotes
from hf_kvquant.config import PRESETS
from hf_kvquant.graphs import capture
from hf_kvquant.ops import planning
from hf_kvquant.storage import dealing, offloading, rewind
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.storage.lengths import Lengths
from hf_kvquant.upstream.releases import cache_of, with_cache

SLOTS = 33, 66
TOKENS = planning.MIN_TOKENS, planning.TOKENS_BETWEEN
NEW_TOKENS = 5
CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CODED = [name for name in PRESETS if name != "none"]


class Watch(TorchDispatchMode):
    """Looks at every decode, also in replays: counts plans, and compares each with that of the lengths of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.dealt = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.made += name == "split_plan"
        if name == "decode":
            named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            plan = {**named, **(kwargs or {})}.get("split_plan")
            if plan is None:
                self.others += 1
            else:
                self.dealt += 1
                lengths, starts = named["lengths"], named["starts"]
                if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
                    return func(*args, **(kwargs or {}))  # nothing has been computed yet
                expected = planning.split_plan_reference(lengths.cpu(), starts.cpu(), *SLOTS, *TOKENS)
                compare.assert_same(plan, expected, "split plan")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def every_device_takes_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a GPU does; graphs and offloading on a CPU, too."""
    made = ops.Operands.__init__

    def takes_plans(self: Any, key_planes: Any, value_planes: Any, layout: Any, *args: Any, **kwargs: Any) -> None:
        made(self, key_planes, value_planes, layout, *args, **kwargs)
        if key_planes.codes.device.type == "cpu":
            self.takes_split_plan = all(each.is_quantized for each in layout.formats) and not layout.is_ring

    monkeypatch.setattr(ops.Operands, "__init__", takes_plans)
    monkeypatch.setattr(ops, "num_slots_of", lambda device, num_kv_heads, num_sequences: SLOTS)
    monkeypatch.setattr(dealing, "MIN_SEQUENCES_PER_SLOT", 0)
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    monkeypatch.setattr(offloading, "HOMES", frozenset(("cpu", "cuda")))
    yield


def generated(
    model: Any, config: Any, inputs: dict[str, Tensor] | None = None, **options: Any
) -> tuple[Watch, Any, KVQuantCache]:
    placed = {name: value.to(model.device) for name, value in (inputs or left_padded()).items()}
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    with patched(model, config), Watch() as watch:
        output = model.generate(**placed, **{**defaults, **options})
    return watch, output.sequences, cache_of(output)


@pytest.fixture
def model(device: str) -> Any:
    return models.on(device, models.llama(torch.bfloat16))


# --- which batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "num_tokens", "expected"),
    [
        ([0, 0, 0], 100, False),
        ([50, 50, 50], 100, False),  # as much padding, but all alike
        ([0, 50, 99], 100, True),
        ([0, 0, 38], 100, True),
        ([0, 0, 37], 100, False),
        ([40, 40, 78], 140, True),  # what all have in common does not count
        ([5], 100, False),
        ([100, 100], 100, False),
        ([0, 0], 0, False),
    ],
)
def test_uneven_batches(starts: list[int], num_tokens: int, expected: bool, device: str) -> None:
    made = torch.tensor(starts, dtype=torch.int32, device=device)
    assert ops.is_uneven(made, num_tokens) is expected
    assert ops.is_uneven(made, torch.tensor(num_tokens, device=device)) is expected


def test_one_number_turns_plans_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MIN_PADDING", 1)
    assert not ops.is_uneven(torch.tensor([0, 99, 99, 99]), 99) and not ops.is_uneven(torch.tensor([0, 5]), 5)


@pytest.mark.parametrize("pads", [(0,), (1, 0, 1), (4,)], ids=["none", "little", "alike"])
def test_even_batches_get_no_plan(model: Any, pads: tuple[int, ...]) -> None:
    watch, _, _ = generated(model, "int4-token", left_padded(pads=pads))
    assert watch.made == watch.dealt == 0 and watch.others == 2 * (NEW_TOKENS - 1)


def test_one_sequence_needs_no_plan(model: Any) -> None:
    watch, _, _ = generated(model, "int4-token", left_padded(batch=1))
    assert watch.made == 0


def test_a_mask_decides_anew(model: Any) -> None:
    """Chunks of several tokens bring a mask that the host may read; a cache that starts over forgets."""
    cache = KVQuantCache(model.config, "int4-token")
    assert not cache.notes.is_uneven and not MaskNotes().is_uneven
    with patched(model, "int4-token"), torch.no_grad():
        for tokens, pads, expected in ((9, (8, 0, 5), True), (60, (8, 0, 5), False), (61, (8, 0, 5), False)):
            mask = left_padded(tokens=tokens, pads=pads)["attention_mask"].to(model.device)
            new = torch.randint(3, 60, (3, tokens - cache.get_seq_length()), device=model.device)
            model(new, attention_mask=mask, **with_cache(cache))
            assert cache.notes.is_uneven is expected
        cache.notes.is_uneven = True
        cache.reset()
        assert not cache.notes.is_uneven


# --- which steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"static": True}, {"offloading": True}], ids=["growing", "static", "offloaded"])
@pytest.mark.parametrize("preset", CODED)
def test_layers_share_the_plan_of_a_step(model: Any, preset: str, config: dict[str, Any]) -> None:
    options = {"disable_compile": True} if config.get("static") else {}
    watch, sequences, _ = generated(model, {"preset": preset, **config}, **options)
    assert (watch.made, watch.dealt, watch.others) == (NEW_TOKENS - 1, 2 * (NEW_TOKENS - 1), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MIN_PADDING", 1)
        other, expected, _ = generated(model, {"preset": preset, **config}, **options)
    assert other.made == other.dealt == 0
    if model.device.type == "cpu":
        compare.assert_same(sequences, expected, preset)


@pytest.mark.parametrize("preset", ["int8", "int4-channel"])
def test_windows_of_dense_tokens(model: Any, preset: str) -> None:
    watch, _, _ = generated(model, {"preset": preset, "sink_length": 2, "residual_length": 3})
    assert watch.made == NEW_TOKENS - 1 and watch.dealt == 2 * watch.made


def test_beams_are_dealt_with_their_own_padding(model: Any) -> None:
    watch, _, _ = generated(model, "int4-token", num_beams=3)
    assert watch.made == NEW_TOKENS - 1 and watch.dealt == 2 * watch.made


def test_sliding_windows_get_no_plan(device: str) -> None:
    """In rings or not: long sequences have the same work there."""
    gemma = models.build("gemma2", torch.bfloat16, layer_types=["full_attention", "sliding_attention"])
    watch, _, _ = generated(models.on(device, gemma), "int4-token")
    assert (watch.made, watch.dealt, watch.others) == (NEW_TOKENS - 1,) * 3


def test_own_attention(device: str) -> None:
    bloom = models.build("bloom", torch.bfloat16)
    watch, _, _ = generated(models.on(device, bloom), "int4-token")
    assert watch.made == NEW_TOKENS - 1 and watch.dealt == 2 * watch.made


@pytest.mark.parametrize("preset", CODED)
def test_captured_steps_make_their_plan_in_every_replay(model: Any, preset: str) -> None:
    config = {"preset": preset, "capture": True}
    watch, sequences, _ = generated(model, config)
    expected, uncaptured, _ = generated(model, {"preset": preset, "static": True}, disable_compile=True)
    if model.device.type == "cpu":  # where replays show what they call
        assert (watch.made, watch.dealt) == (expected.made, expected.dealt)
    compare.assert_same(sequences, uncaptured, preset)


def test_captured_steps_with_and_without_a_plan_are_told_apart(model: Any) -> None:
    config = {"preset": "int4-token", "capture": True}
    with patched(model, config):
        for pads in ((3, 0, 5), (0,), (3, 0, 5)):
            inputs = {name: value.to(model.device) for name, value in left_padded(pads=pads).items()}
            with Watch() as watch:
                model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            if model.device.type == "cpu":
                assert (watch.dealt > 0, watch.others > 0) == (len(pads) > 1, len(pads) == 1)


def test_a_saved_cache_keeps_whether_it_has_plans(model: Any, tmp_path: Any) -> None:
    _, _, cache = generated(model, "int4-token")
    cache.save(tmp_path / "cache", model)
    assert KVQuantCache.load(tmp_path / "cache", model).notes.is_uneven


# --- the lengths behind a plan ----------------------------------------------------------------------------------------

BATCH, HEADS, DIM = 3, 2, 64
STARTS = [0, 700, 1500]


class Step:
    """Layers of one cache, fed the same tokens on a device."""

    def __init__(self, device: str, preset: str = "int4-token", num_layers: int = 2, **options: Any) -> None:
        lengths = Lengths()
        formats = KVQuantConfig.resolve({"preset": preset, **options.pop("windows", {})}).formats(0)
        self.stores = [LayerStore(formats, lengths=lengths, **options) for _ in range(num_layers)]
        self.starts = torch.tensor(STARTS, dtype=torch.int32, device=device)
        self.device = device

    def drawn(self, tokens: int, heads: int = HEADS) -> Tensor:
        return torch.randn(len(self.starts), heads, tokens, DIM, dtype=torch.bfloat16, device=self.device)

    def fill(self, tokens: int) -> None:
        for store in self.stores:
            store.starts = self.starts
            store.extend(self.drawn(tokens), self.drawn(tokens))
            store.flush()

    def decode(self, **options: Any) -> list[Tensor]:
        outs = []
        for store in self.stores:
            store.extend(self.drawn(1), self.drawn(1))
            given = {"softmax_scale": DIM**-0.5, "starts": self.starts, "is_uneven": True, **options}
            outs.append(store.attend(self.drawn(1, 2 * HEADS), **given)[0])
        return outs


def selected(step: Step, index: list[int]) -> None:
    for store in step.stores:
        store.select(torch.tensor(index, device=step.device))
    step.starts = step.starts[torch.tensor(index, device=step.device)]


CHANGES: dict[str, Callable[[Step], Any]] = {
    "reorder": lambda step: selected(step, [2, 0, 0]),
    "select": lambda step: selected(step, [0, 2]),
    "repeat": lambda step: selected(step, [0, 0, 1, 1, 2, 2]),
    "crop": lambda step: [rewind.crop(store, 300) for store in step.stores],
    "crop of padding": lambda step: [rewind.crop(store, 1000) for store in step.stores],
    "ragged": lambda step: [store.place((1700, 1990, 1600)) for store in step.stores],
    "ragged, reordered": lambda step: (
        [store.place((1700, 1990, 1600)) for store in step.stores] and selected(step, [1, 2, 0])
    ),
    "reset": lambda step: [store.reset() for store in step.stores] and step.fill(1900),
    "replays": lambda step: [
        (store.length_group.tensor.add_(1), store.length_group.note_replayed(1)) for store in step.stores[:1]
    ],
    "a replay that failed": lambda step: step.stores[0].length_group.ask_device(),
}


@pytest.mark.parametrize("is_static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_is_of_the_present_lengths(name: str, is_static: bool, device: str) -> None:
    step = Step(device, max_cache_len=2100 if is_static else None)
    step.fill(2000)
    with Watch() as watch:
        step.decode()
        CHANGES[name](step)
        step.decode()
        step.decode()
    assert (watch.made, watch.dealt, watch.others) == (3, 6, 0)


@pytest.mark.parametrize("name", ["crop", "ragged", "reset", "replays", "a replay that failed"])
def test_a_plan_goes_with_its_lengths(name: str, device: str) -> None:
    """Also before the next step."""
    step = Step(device, max_cache_len=2100)
    step.fill(2000)
    with Watch() as watch:
        step.decode()
        CHANGES[name](step)
        for store in step.stores:
            store.attend(step.drawn(1), softmax_scale=0.1, starts=step.starts, is_uneven=True)
    assert (watch.made, watch.dealt) == (2, 4)


def test_a_layer_that_counts_alone_makes_its_own_plan(device: str) -> None:
    step = Step(device)
    step.fill(2000)
    rewind.crop(step.stores[1], 100)
    with Watch() as watch:
        step.decode()
        step.decode()
    assert (watch.made, watch.dealt) == (4, 4)
    with Watch() as watch:
        for store in (*step.stores, *step.stores):
            store.attend(step.drawn(1), softmax_scale=0.1, starts=step.starts, is_uneven=True)
    assert (watch.made, watch.dealt) == (2, 4)


@pytest.mark.parametrize("options", [{"num_splits": 2}, {"sliding_window": 50}, {"starts": None}, {"is_uneven": False}])
def test_calls_that_get_no_plan(options: dict[str, Any], device: str) -> None:
    step = Step(device)
    step.fill(2000)
    with Watch() as watch:
        step.decode(**options)
    assert watch.made == 0 and watch.others == 2


def test_chunks_and_float32_get_no_plan(device: str) -> None:
    step = Step(device)
    step.fill(2000)
    store = step.stores[0]
    with Watch() as watch:
        store.extend(step.drawn(2), step.drawn(2))
        store.attend(step.drawn(2), softmax_scale=0.1, starts=step.starts, is_uneven=True)
        store.attend(step.drawn(1).float(), softmax_scale=0.1, starts=step.starts, is_uneven=True)
    assert watch.made == 0


def test_few_sequences_get_no_plan(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for least, made in ((3, 1), (4, 0)):  # of the three sequences that there are
        monkeypatch.setattr(dealing, "MIN_SEQUENCES_PER_SLOT", least / SLOTS[0])
        step = Step(device)
        step.fill(2000)
        with Watch() as watch:
            step.decode()
        assert watch.made == made


def test_heads_have_their_own_plans(device: str) -> None:
    """Layers with more heads cut sequences into fewer shares."""
    step = Step(device)
    step.fill(2000)
    with Watch() as watch:
        step.decode()
        group = step.stores[0].length_group
        assert group is not None and list(group.plans_of(0)) == [HEADS]
        plans = group.plans_of(0)
        store, query = step.stores[0], step.drawn(1)
        operands, lengths = store.residency.operands, store.lengths
        assert dealing.step_plan(operands, HEADS, lengths, plans, query, step.starts, {}) is plans[HEADS]
        assert dealing.step_plan(operands, 4, lengths, plans, query, step.starts, {}) is plans[4] is not plans[HEADS]
    assert watch.made == 2


def test_copies_make_plans_of_their_own(device: str) -> None:
    step = Step(device)
    step.fill(2000)
    step.decode()
    copied = copy.deepcopy(step)
    file = io.BytesIO()
    pickle.dump(step.stores, file)
    step.stores = pickle.loads(file.getvalue())
    for each in (copied, step):
        group = each.stores[0].length_group
        assert group is not None and group.plans_of(0) == {}
        with Watch() as watch:
            each.decode()
        assert (watch.made, watch.dealt) == (1, 2)


def test_a_compiled_step_gets_no_plan() -> None:
    """Each layer would make its own: what layers share is on the host, where a compiled step must change nothing."""
    step = Step("cpu", max_cache_len=2100)
    step.fill(2000)
    key, value, query = step.drawn(1), step.drawn(1), step.drawn(1)

    def attend() -> Tensor:
        store = step.stores[0]
        store.extend(key, value)
        return store.attend(query, softmax_scale=0.1, starts=step.starts, is_uneven=True)[0]

    called: set[str] = set()

    def noted(graph: Any, inputs: Any) -> Any:
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(attend, backend=noted, fullgraph=True)()
    assert any("decode" in name for name in called) and not any("split_plan" in name for name in called)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def twice(**options: Any) -> tuple[Step, Step]:
    """The same tokens in two caches."""
    first = Step("cuda", **options)
    first.fill(2000)
    second = copy.deepcopy(first)
    return first, second


def stepped(step: Step, seed: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(seed)
    return step.decode(**options)


@CUDA_ONLY
@pytest.mark.parametrize("windows", [{}, {"sink_length": 4, "residual_length": 40}], ids=["codes", "windows"])
@pytest.mark.parametrize("is_static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("preset", CODED)
def test_steps_are_the_same_with_plans(preset: str, is_static: bool, windows: dict[str, int]) -> None:
    """Over two blocks of keys, which fill in between; growing buffers move."""
    dealt, plain = twice(preset=preset, windows=windows, max_cache_len=2300 if is_static else None)
    for seed in range(140):
        actual, expected = stepped(dealt, seed), stepped(plain, seed, is_uneven=False)
        for own, other in zip(actual, expected, strict=True):
            bound = 4 * torch.finfo(torch.bfloat16).eps * float(other.abs().max())
            compare.assert_close(own, other.float().cpu(), bound, f"{preset}, step {seed}")
    for own, other in zip(dealt.stores, plain.stores, strict=True):
        for x, y in zip(own.planes, other.planes, strict=True):
            compare.assert_same_planes(x, y, preset)
        assert own.buffers.counters is not None and not own.buffers.counters.any()


@CUDA_ONLY
@pytest.mark.parametrize("preset", CODED)
def test_replayed_steps_are_the_same_with_plans(preset: str) -> None:
    """A plan depends on lengths and padding alone, so a graph gives the bits of eager steps, whatever it is fed."""
    replayed, eager = twice(preset=preset, max_cache_len=2300)
    key, value = replayed.drawn(1), replayed.drawn(1)
    query = replayed.drawn(1, 2 * HEADS)
    starts = replayed.starts.clone()

    def run(step: Step, starts: Tensor) -> list[Tensor]:
        outs = []
        for store in step.stores:
            store.extend(key, value)
            options = {"softmax_scale": DIM**-0.5, "starts": starts, "is_uneven": True}
            outs.append(store.attend(query, **options)[0])
        return outs

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(replayed, starts)
    torch.cuda.current_stream().wait_stream(stream)
    run(eager, starts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = run(replayed, starts)
    group = replayed.stores[0].length_group
    assert group is not None
    for number in range(140):
        for x in (key, value, query):
            x.normal_()
        starts.copy_(torch.tensor([number, 700 + 2 * number, 1500 - 5 * number], dtype=torch.int32))
        if number > 0:
            group.note_replayed(1)
        graph.replay()
        for own, other in zip(outs, run(eager, starts), strict=True):
            compare.assert_same(own, other, f"{preset}, replay {number}")
    for own, other in zip(replayed.stores, eager.stores, strict=True):
        assert own.lengths.tolist() == other.lengths.tolist() == [2141] * BATCH
        for x, y in zip(own.planes, other.planes, strict=True):
            compare.assert_same_planes(x, y, preset)


@CUDA_ONLY
@pytest.mark.parametrize("name", [name for name in CHANGES if "replay" not in name])  # replays change no tokens
def test_caches_that_change_are_the_same_with_plans(name: str) -> None:
    for is_static in (False, True):
        dealt, plain = twice(preset="int4-channel", max_cache_len=2300 if is_static else None)
        for each, is_uneven in ((dealt, True), (plain, False)):
            torch.manual_seed(5)
            each.decode(is_uneven=is_uneven)
            CHANGES[name](each)
        for seed in range(3):
            actual, expected = stepped(dealt, seed), stepped(plain, seed, is_uneven=False)
            for own, other in zip(actual, expected, strict=True):
                bound = 4 * torch.finfo(torch.bfloat16).eps * float(other.abs().max())
                compare.assert_close(own, other.float().cpu(), bound, f"{name}, step {seed}")
