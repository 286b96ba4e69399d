"""Runs `eval perplexity`. Results are kept per mode and segment, so an interrupted run loses at most one forward.

`gate.py` checks the run before a number is written. Each segment starts with an empty cache and an exact first token,
and is compared by `measuring/fidelity.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_kvquant.cache.kvquant_cache import KVQuantCache
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.cache.support import formats_of
from hf_kvquant.calibration.choices import CALIBRATED_PRESET
from hf_kvquant.calibration.latent_search import collect_latents
from hf_kvquant.calibration.search import collect
from hf_kvquant.calibration.smoothing import is_smoothed, smooth_attention, smoothing_of, unsmooth
from hf_kvquant.cli.loading import source_of
from hf_kvquant.common.errors import UsageError
from hf_kvquant.common.naming import sha256
from hf_kvquant.common.progress import Tell
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.models.latent import keeps_latents
from hf_kvquant.models.probing import arbitrary_ids, forward
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.patching import patched
from hf_kvquant.preflight.divergence import alone
from hf_kvquant.presets import UNQUANTIZED

from ..choices import FEEDING_MODES as MODES
from ..choices import TOKENS, WINDOW
from ..measuring.fidelity import Chunks, Stream, compare, route
from ..measuring.pairs import check_pairs
from ..measuring.simulation import why_not_simulated
from ..preparation import Subject
from ..records import RunRecord, measuring, open_record
from .gate import Gate, mean
from .perplexity_results import of_segment, summarize
from .segments import FIRST_CHUNK, Segments, cut

WHERE = "eval perplexity"
# Bytes that the caches of all segments in one forward may take together: a small part of a GPU's memory.
CACHE_BYTES = 2**30
# Tokens on which one layer at a time is quantised. More are not needed, since the cost of a layer hardly depends on the
# text (`preflight/divergence.py`), and attention in one forward is quadratic in their number.
LAYER_TOKENS = 1024
# On how many tokens keys are calibrated here. Calibrating on the measured text would flatter a divergence, but none is
# computed here: only the keys of this text are shown.
CALIBRATION_TOKENS = 4096
KEY_PASSES = 3  # over these tokens, of the model or of what takes as long

# Windows without which there is no error bar, so no limit of time leaves them out.
LEAST_WINDOWS = 2


@dataclasses.dataclass(frozen=True)
class Step:
    """What is done next. It calls its `Tell` after every forward, without arguments."""

    what: str  # in words
    do: Callable[[Tell], None]
    tokens: int  # fed through a cache, in chunks; single tokens count as many as they take longer
    forwards: int = 1
    # It is left out if there is no time for so many tokens: its own, and those of the steps that belong to it.
    needs: int | None = None

    def run(self, tell: Tell) -> None:
        """Run the step, and tell its tokens evenly over its forwards."""
        told = 0

        def each(done: int = 0, /, doing: str | None = None) -> None:
            nonlocal told
            more = min(self.tokens // max(self.forwards, 1), self.tokens - told) if doing is None else 0
            told += more
            tell(more, doing)

        tell(doing=self.what)
        self.do(each)
        tell(self.tokens - told)


def measure(
    subject: Subject,
    source: Mapping[str, Any],
    text: str,
    *,
    output: str | None = None,
    mode: str = "chunked",
    chunk: int = 32,
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    prompt: int = FIRST_CHUNK,
    controls: bool = False,
    details: bool = False,
    usual: tuple[int, int] = (WINDOW, TOKENS),
    until: float | None = None,
    on_summary: Callable[[], None] = lambda: None,
) -> RunRecord:
    """Measure a text, and keep the results in the file `output`, or in memory.

    The keyword arguments are the options of `hf-kvquant eval perplexity` with these names, but for three. `usual` is
    that of `cut`. What would not end before `until`, on the clock of `time.monotonic`, is left out, except the checks
    and two windows; the part `left_out` says what, and how many minutes it would take. The record's part `summary` has
    aggregates per mode and preset, of the windows measured so far. `on_summary` is called when it has changed.
    """
    started = time.monotonic()
    model, configs = subject.model, subject.configs
    ids = subject.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    segments = cut(ids.to(model.device), model, window=window, stride=stride, tokens=tokens, prompt=prompt, usual=usual)
    prepared = subject.prepare()  # before it runs, since transforms found earlier do not fit changed weights
    unsimulated = why_not_simulated(model)
    modes = modes_of(mode, unsimulated, subject.name)
    dtype = stored_dtype(model, subject.name)
    settings = {
        "evaluation": "perplexity",
        **prepared,
        "tokens_sha256": sha256(ids.numpy().tobytes()),
        "stored_dtype": str(dtype).removeprefix("torch."),
        "source": source,
        "mode": mode,
        "chunk": chunk,
        "first_chunk": segments.prompt,
        "window": segments.length,
        "stride": segments.stride,
        "begins": segments.begins,
        "words_per_token": len(text.split()) / len(ids),
        "presets": {name: config.to_dict() for name, config in configs.items()},
        "controls": controls,
    }
    record = open_record(output, settings)
    try:
        sizes = sizes_of(model, configs, dtype)
        run = Run(record, subject, segments, chunk, can_simulate=unsimulated is None)
        windows = [step for mode in modes for step in run.segments_in(mode, sizes)]
        steps = [*run.checks(controls), *windows, *(run.details(text) if details else ())]

        def sum_up() -> None:
            summary = {mode: rows for mode in modes if (rows := summarize(record, mode, sizes, settings))}
            seconds = round(time.monotonic() - started, 1)
            record.put("summary", {"modes": summary, "unsimulated": unsimulated, "seconds": seconds})
            on_summary()

        more = ", or --chunk, or run fewer presets at once"
        total = sum(step.tokens for step in steps)
        with measuring(record, WHERE, total, unit="token", lower="--window", value=segments.length, more=more) as tell:
            left_out: list[Step] = []
            begun = time.monotonic()
            seconds_per_token, done = run.pace, 0
            tell_estimate(total * seconds_per_token, until)
            for step in steps:
                if until is not None and step.needs is not None:
                    if time.monotonic() + step.needs * seconds_per_token > until:
                        left_out.append(step)
                        continue
                step.run(tell)
                done += step.tokens
                if done:
                    seconds_per_token = (time.monotonic() - begun) / done
                if step in windows:
                    sum_up()
            tell(doing="the summary")
            minutes = sum(step.tokens for step in left_out) * seconds_per_token / 60
            record.put("left_out", {"what": [step.what for step in left_out], "minutes": round(minutes, 1)})
            sum_up()
    except NotImplementedError as error:
        raise UsageError(f"{subject.name} cannot be measured. {error}") from error
    return record


def tell_estimate(seconds: float, until: float | None) -> None:
    """Say on stderr how long the work takes, if it takes longer than half a minute."""
    if seconds >= 30:
        left = None if until is None else (until - time.monotonic()) / 60
        limit = "" if left is None else f". What does not fit into {max(left, 0):.1f} is left out"
        print(f"{WHERE}: about {seconds / 60:.1f} minutes{limit}.", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: makes its steps, each of which fills parts of the record that are not there yet."""

    record: RunRecord
    subject: Subject
    segments: Segments
    chunk: int
    can_simulate: bool

    @functools.cached_property
    def _seconds(self) -> tuple[float, float]:
        """Seconds that one cache takes for a token of a chunk, and for a single token: the least of two tries."""
        model, ids, config = self.subject.model, self.segments.ids[:1], self.subject.configs[UNQUANTIZED]
        with torch.inference_mode(), route(model, simulate=False):
            return (self._timed(model, ids, config, self.chunk), self._timed(model, ids, config, 1))

    @staticmethod
    def _timed(model: PreTrainedModel, ids: Tensor, config: KVQuantConfig, chunk: int) -> float:
        stream = Stream(model, ids[:, : FIRST_CHUNK + 2 * chunk], config, Chunks(FIRST_CHUNK, chunk), name=UNQUANTIZED)
        next(stream)
        times, started = [], time.perf_counter()
        for piece in stream:
            float(piece[0, 0, 0])  # waits for a GPU
            times.append((time.perf_counter() - started) / piece.shape[1])
            started = time.perf_counter()
        return min(times)

    @property
    def pace(self) -> float:
        """Seconds for a token of `Step.tokens`."""
        return self._seconds[0]

    @property
    def _single(self) -> int:
        """How many tokens of a chunk take as long as a single one."""
        return max(1, round(self._seconds[1] / self._seconds[0]))

    @property
    def _streams(self) -> int:
        """Caches that are fed: one of each config, and the unquantised one."""
        return len(self.subject.configs) + 1

    def checks(self, controls: bool) -> Iterator[Step]:
        """The checks that come before any number, with the controls or without."""
        gate = Gate(self.subject.model, self.segments.ids, self.subject.configs)
        tokens, presets = gate.ids.shape[1], len(self.subject.configs)
        if self.record.get("gate") is None:
            check = functools.partial(gate.check_modes, self.chunk, can_simulate=self.can_simulate)
            forwards = presets * (tokens + -(-tokens // self.chunk))
            yield Step(
                "the check of modes",
                lambda tell: self.record.put("gate", check(tell=tell)),
                presets * tokens * (self._single + 2),
                forwards,
            )
        if controls and self.record.get("controls") is None:
            weight = presets * tokens * self._single
            yield Step("the controls", lambda tell: self.record.put("controls", gate.run_controls()), weight)

    def segments_in(self, mode: str, sizes: Mapping[str, Mapping[str, Any]]) -> Iterator[Step]:
        """The segments to measure in one mode, as many in one step as memory allows."""
        begins = self.segments.begins
        missing = [index for index, begin in enumerate(begins) if self.record.get(f"{mode} {begin}") is None]
        at_once = 1 if mode == "simulated" else segments_at_once(self.subject.model, self.segments.length, sizes)
        for indices in (missing[i : i + at_once] for i in range(0, len(missing), at_once)):
            which = f"window {indices[0] + 1}" + (f" to {indices[-1] + 1}" if len(indices) > 1 else "")
            length, size = self.segments.length, 1 if mode == "decode" else self.chunk
            tokens = len(indices) * length * self._streams * (self._single if mode == "decode" else 1)
            yield Step(
                f"{mode}, {which} of {len(begins)}",
                functools.partial(self.measure_segments, mode, indices),
                tokens,
                1 if mode == "simulated" else -(-length // size),
                needs=tokens if indices[0] >= LEAST_WINDOWS else None,
            )

    def measure_segments(self, mode: str, indices: Sequence[int], tell: Tell) -> None:
        """Measure some segments in one forward per chunk."""
        how: dict[str, Any] = {"first_chunk": self.segments.prompt, "chunk_size": 1 if mode == "decode" else self.chunk}
        how["simulate"] = mode == "simulated"
        compared = compare(self.subject.model, self.segments.ids[indices], self.subject.configs, on_chunk=tell, **how)
        for index, results in zip(indices, compared, strict=True):
            begin = self.segments.begins[index]
            newest = self.segments.newest(begin)
            found = {name: of_segment(name, each, newest) for name, each in results.items()}
            self.record.put(f"{mode} {begin}", found)

    def details(self, text: str) -> Iterator[Step]:
        """The divergence of the first segment with one layer quantised at a time, and its keys."""
        model, known = self.subject.model, self.record.get("layers") or {}
        layers = KVQuantCache(model.config, UNQUANTIZED).layers
        missing = [i for i, layer in enumerate(layers) if isinstance(layer, KVQuantLayer) and str(i) not in known]
        length = min(self.segments.length, LAYER_TOKENS)
        tokens, forwards = length * (self._streams - 1), 1 if self.can_simulate else -(-length // self.chunk)
        if self.record.get("keys") is None:
            keys = functools.partial(key_magnitudes, model, self.subject.tokenizer, text, self.segments.ids[:1])
            fed = KEY_PASSES * CALIBRATION_TOKENS
            yield Step("keys", lambda tell: self.record.put("keys", keys()), fed, needs=fed)
        for place, index in enumerate(missing):
            do = functools.partial(self.measure_layer, index)
            yield Step(f"layer {index} alone", do, tokens, forwards, needs=tokens * (len(missing) - place))

    def measure_layer(self, index: int, tell: Tell) -> None:
        """Quantise one layer alone: simulated, or in chunks if the model cannot be simulated."""
        known = self.record.get("layers") or {}
        configs = {
            name: alone(index, config.formats(index))
            for name, config in self.subject.configs.items()
            if name != UNQUANTIZED
        }
        ids = self.segments.ids[:1, :LAYER_TOKENS]
        how: dict[str, Any] = {"first_chunk": FIRST_CHUNK, "chunk_size": self.chunk, "simulate": self.can_simulate}
        (compared,) = compare(self.subject.model, ids, configs, on_chunk=tell, **how)
        found = {}
        for name, each in compared.items():
            check_pairs(f"preset {name}", each)
            found[name] = {"kld": mean(each.kld), "tokens": len(each.kld)}
        self.record.put("layers", {**known, str(index): found})


def key_magnitudes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, ids: Tensor
) -> dict[str, Any]:
    """The largest magnitude of each key channel over some tokens (`[1, tokens]` int64), before and after calibration.

    Of models that keep latents (MLA), of each channel of a latent.

    The model is left as it was. If it is calibrated already, its own centres and factors are used, else those that
    calibrating on the text finds.

    Returns:
        `layers`: by index, `before` and `after` (`[num_kv_heads, head_dim]`; after: of the keys minus their centre,
        divided by their factors), and `choice`, what calibration chose. Or `unmeasured`: why nothing was measured.
    """
    is_calibrated = is_smoothed(model)
    state = smoothing_of(model)
    if is_calibrated and state is None:
        return {"unmeasured": "the checkpoint is calibrated, and its factors did not come with it"}
    options: dict[str, Any] = {"mode": "auto", "num_tokens": CALIBRATION_TOKENS, "window": ids.shape[1]}
    try:
        result = (
            smooth_attention(model, tokenizer, [text], CALIBRATED_PRESET, **options) if state is None else state.result
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return {"unmeasured": " ".join(str(error).split())}
    try:
        windows = [(ids.cpu(), torch.ones_like(ids.cpu()))]
        names = {layer.layer_idx: layer.name for layer in result.layers}
        has_latents = keeps_latents(text_config_of(model))
        keys = collect_latents(model, windows, names) if has_latents else collect(model, windows, names)
    finally:
        if not is_calibrated:
            unsmooth(model)

    def short(values: Tensor) -> list[list[float]]:  # with the four digits that a picture needs
        return [[float(f"{value:.3e}") for value in row] for row in values.tolist()]

    layers = {}
    for layer in result.layers:
        # Factors folded into the weights have already divided the keys, and must divide the centre as well.
        in_weights = layer.factor if layer.placement == "weights" else torch.ones_like(layer.factor)
        center = None if layer.center is None else layer.center / in_weights
        seen = keys[layer.layer_idx]
        layers[layer.layer_idx] = {
            "choice": layer.choice,
            "before": short(seen.largest(None) * in_weights),
            "after": short(seen.largest(center) / (layer.factor / in_weights)),
        }
    return {"preset": CALIBRATED_PRESET, "tokens": ids.shape[1], "is_calibrated": is_calibrated, "layers": layers}


def segments_at_once(model: PreTrainedModel, length: int, sizes: Mapping[str, Mapping[str, Any]]) -> int:
    """How many segments of so many tokens go through one forward.

    One, on a CPU. On a GPU, a chunk of one segment takes less time than the host needs to launch it.
    """
    if model.device.type == "cpu":
        return 1
    bytes_per_token = [size["bytes_per_token"] for size in sizes.values()]
    # The unquantised cache of the comparison is as large as any.
    return max(1, int(CACHE_BYTES / (length * (sum(bytes_per_token) + max(bytes_per_token)))))


def modes_of(mode: str, unsimulated: str | None, name: str) -> tuple[str, ...]:
    """The modes to run of a model that cannot be simulated for the given reason, or can (`None`)."""
    if unsimulated is None:
        return MODES if mode == "all" else (mode,)
    if mode == "simulated":
        raise UsageError(f"`--mode` must be chunked, decode or all for {name}, got simulated. {unsimulated}")
    print(
        f"{WHERE}: chunked and decode are compared with each other only, not with simulated. {unsimulated}",
        file=sys.stderr,
    )
    return MODES[1:] if mode == "all" else (mode,)


def stored_dtype(model: PreTrainedModel, name: str) -> torch.dtype:
    """The dtype of an unquantised cache in normal use: that of the checkpoint, whatever `--dtype` measures in."""
    spelled = AutoConfig.from_pretrained(source_of(name)).dtype
    found = getattr(torch, spelled) if isinstance(spelled, str) else spelled
    return found if isinstance(found, torch.dtype) else model.dtype


@torch.inference_mode()
def sizes_of(
    model: PreTrainedModel, configs: Mapping[str, KVQuantConfig], dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Bits per cached value and bytes per token under each config, over the layers whose cache can be quantised.

    One token teaches the shapes of keys and values. What is not quantised has the given dtype.
    """
    cache = KVQuantCache(model.config, UNQUANTIZED)
    with patched(model, UNQUANTIZED):
        forward(model, arbitrary_ids(model, 1), cache=cache)
    shapes = [storage.shape for storage in cache.storages]  # of keys and values: batch, num_kv_heads, head_dims
    num_values = sum(num_kv_heads * sum(head_dims) for _, num_kv_heads, *head_dims in shapes)
    sizes = {}
    for name, config in configs.items():
        formats = formats_of(text_config_of(model), dataclasses.replace(config, sliding=True)).values()
        num_bytes = sum(
            side.bytes_per_token(num_kv_heads, head_dim, dtype)
            for each, (_, num_kv_heads, *head_dims) in zip(formats, shapes, strict=True)
            for side, head_dim in zip((each.key, each.value), head_dims, strict=True)
        )
        sizes[name] = {"bits_per_value": 8 * num_bytes / num_values, "bytes_per_token": num_bytes}
    return sizes
