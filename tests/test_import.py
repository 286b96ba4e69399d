"""What importing the package does and does not do, with the compiled extension, without it, and with a stale one.

Imports are looked at from fresh interpreters, which are slow to start: each script below checks all it can.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import pathlib
import pickle
import sys
import textwrap
import types
from typing import Any

import models
import pytest
import torch
from waiting import run

import hf_kvquant
from hf_kvquant import ops
from hf_kvquant.spec.layout import LAYOUT_FIELDS

PACKAGE = pathlib.Path(hf_kvquant.__file__).parent


def run_script(script: str) -> str:
    """Runs a script in a fresh interpreter in which warnings are errors, and returns what it printed to stderr."""
    done = run([sys.executable, "-W", "error", "-c", textwrap.dedent(script)], cwd=PACKAGE.parent)
    assert done.stdout == "", done.stdout
    return done.stderr


# --- the public names -------------------------------------------------------------------------------------------------


def test_all_is_sorted() -> None:
    # As ruff sorts it: constants, classes, the rest.
    order = sorted(hf_kvquant.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert hf_kvquant.__all__ == order


def test_all_is_what_there_is() -> None:
    assert set(hf_kvquant.__all__) == {*hf_kvquant._MODULES, "__version__"}
    for name, module in hf_kvquant._MODULES.items():
        value = getattr(hf_kvquant, name)
        assert value is vars(importlib.import_module(f"hf_kvquant.{module}"))[name]
        assert getattr(value, "__name__", name) == name
    assert set(hf_kvquant.__all__) <= set(dir(hf_kvquant))
    with pytest.raises(AttributeError) as caught:
        _ = hf_kvquant.pach
    assert str(caught.value) == "module 'hf_kvquant' has no attribute 'pach'"


def test_type_checkers_are_told_the_same() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name: node.module for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert told == hf_kvquant._MODULES


def test_report_is_the_function_whoever_imports_the_module() -> None:
    for name in ("report", "state"):  # as Python does once it has imported a module
        setattr(hf_kvquant, name, importlib.import_module(f"hf_kvquant.{name}"))
    assert inspect.isfunction(hf_kvquant.report) and inspect.ismodule(hf_kvquant.state)


def test_the_package_is_typed_and_has_a_version() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert hf_kvquant.__version__.count(".") == 2


# --- what an import does ----------------------------------------------------------------------------------------------


def test_importing_adds_ops_and_two_implementations_and_nothing_else() -> None:
    run_script(
        """
        import logging
        import torch
        import transformers
        from transformers import GenerationMixin, PreTrainedModel
        from transformers import cache_utils, masking_utils, modeling_utils
        from transformers.generation import utils as generation_utils

        registries = {
            "attention": modeling_utils.ALL_ATTENTION_FUNCTIONS,
            "mask": masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
        }
        owners = (
            GenerationMixin, PreTrainedModel, cache_utils.Cache, cache_utils.DynamicCache, cache_utils.StaticCache,
            cache_utils.QuantizedCache, cache_utils, masking_utils, modeling_utils, generation_utils,
            torch.nn.functional, torch.Tensor,
        )

        def schemas():
            return {schema.name for schema in torch._C._jit_get_all_schemas()}

        def settings():
            return (
                torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist(),
                logging.getLogger().handlers, logging.getLogger().level, logging.getLogger("hf_kvquant").handlers,
            )

        entries = {name: {key: registry[key] for key in registry.valid_keys()} for name, registry in registries.items()}
        members = [dict(vars(owner)) for owner in owners]
        mappings = dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING), dict(cache_utils.STATIC_LAYER_TYPE_MAPPING)
        ops, before = schemas(), settings()

        import hf_kvquant

        assert schemas() == ops and "hf_kvquant" not in registries["attention"].valid_keys()
        hf_kvquant.PRESETS  # any name

        assert not torch.cuda.is_initialized()
        with_reference = ("append", "decode", "attend_latent")
        expected = {f"hf_kvquant::{op}{of}" for op in with_reference for of in ("", "_reference")}
        others = ["dequantize", "rms_norm", "add_rms_norm", "rotary", "silu_mul"]
        others += ["packed_linear", "prefetch", "split_plan", "attend_chunk", "serves_chunk"]
        others += ["why_general", "why_no_latent_kernel", "conv_step", "delta_step"]
        others += ["delta_gates", "conv_chunks", "delta_chunks"]
        expected |= {f"hf_kvquant::{op}" for op in others}
        assert schemas() - ops == expected, schemas() - ops
        assert ops <= schemas()
        for name, registry in registries.items():
            assert set(registry.valid_keys()) - entries[name].keys() == {"hf_kvquant", "hf_kvquant-eager"}, name
            for key, value in entries[name].items():
                assert registry[key] is value, (name, key)
        for owner, then in zip(owners, members):
            now = vars(owner)
            assert now.keys() == then.keys(), (owner, now.keys() ^ then.keys())
            for key in then:
                assert now[key] is then[key], (owner, key)
        assert mappings == (cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, cache_utils.STATIC_LAYER_TYPE_MAPPING)
        assert settings() == before
        """
    )


def test_nothing_is_imported_before_it_is_used_and_a_pickle_brings_what_it_needs(tmp_path: pathlib.Path) -> None:
    model = hf_kvquant.patch(models.build("llama"), "int4-token")
    ids = torch.arange(1, 9)[None]
    how = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **how)
    (tmp_path / "model").write_bytes(pickle.dumps((model, ids, how, expected)))
    script = """
        import logging, sys
        logging.disable()  # what torchao says of itself, if there is one

        import hf_kvquant
        hf_kvquant.__version__, dir(hf_kvquant)
        assert not {"torch", "transformers"} & sys.modules.keys()

        import pickle, torch, warnings
        warnings.simplefilter("default")  # transformers' own
        model, ids, how, expected = pickle.load(open(PATH, "rb"))
        assert torch.equal(model.generate(ids, **how), expected)
        import hf_kvquant.report
        assert hf_kvquant.report(model).layers
        """
    run_script(script.replace("PATH", repr(str(tmp_path / "model"))))


def test_nothing_here_needs_evaluations_or_what_they_need() -> None:
    run_script(
        """
        import logging, sys
        logging.disable()  # what torchao says of itself, if there is one
        for name in ("hf_kvquant_evals", "lm_eval", "matplotlib", "jinja2"):
            sys.modules[name] = None

        import importlib, pkgutil, warnings
        import torch, transformers
        warnings.simplefilter("default")  # those of other packages
        import hf_kvquant
        # The server needs fastapi and more, and its chat templates jinja2, which comes with torch.
        for found in pkgutil.walk_packages(hf_kvquant.__path__, "hf_kvquant."):
            if not found.name.startswith(("hf_kvquant.serving", "hf_kvquant._C", "hf_kvquant.__main__")):
                importlib.import_module(found.name)
        """
    )


def test_without_the_extension_the_reference_serves_and_says_so_once() -> None:
    log = run_script(
        """
        import sys
        sys.modules["hf_kvquant._C"] = None  # what an import finds where nothing was compiled

        import logging
        logging.basicConfig(format="LOG %(name)s: %(message)s")

        import torch
        import hf_kvquant
        from hf_kvquant import ops
        from hf_kvquant.spec import reference
        from hf_kvquant.config import PRESETS, LayerFormats
        from hf_kvquant.storage.layer_store import LayerStore

        assert isinstance(ops.extension(), ImportError)
        assert not ops.has_kernels("cpu") and not ops.has_kernels("cuda")
        for formats in PRESETS.values():
            storage = LayerStore(LayerFormats(*formats))
            chunks = [(torch.randn(2, 2, q_len, 64), torch.randn(2, 2, q_len, 64)) for q_len in (5, 1, 1)]
            for key, value in chunks:
                query = torch.randn(2, 4, key.shape[2], 64)
                storage.extend(key, value)
                out, lse = storage.attend(query, softmax_scale=0.125)
            dense = []
            for side, kv_format in enumerate(formats):
                x = torch.cat([chunk[side] for chunk in chunks], dim=2)
                if kv_format.is_quantized and kv_format.block_size is None:  # a block of 7 tokens is dense
                    x = reference.dequantize(reference.quantize(x, kv_format), kv_format)
                dense.append(x)
            lengths = torch.tensor([7, 7], dtype=torch.int32)
            expected, expected_lse = reference.decode_attention(query, *dense, lengths, softmax_scale=0.125)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(lse, expected_lse)
        """
    )
    lines = [line for line in log.splitlines() if line.startswith("LOG hf_kvquant")]
    assert lines == [
        "LOG hf_kvquant.ops: ops: no compiled kernels for cpu, the PyTorch reference runs: correct, slower "
        "(import of hf_kvquant._C halted; None in sys.modules). "
        "Install a compiler and reinstall: pip install --no-build-isolation ."
    ]


# --- the extension ----------------------------------------------------------------------------------------------------

CONSTANTS = {
    "OPS_VERSION": ops.OPS_VERSION,
    "TOKEN_ALIGNMENT": 64,
    "BLOCK_SIZE": 128,
    "MAX_RING_LENGTH": 2**30,
    "MAX_SCRATCH_BYTES": 2**26,
    "NUM_COUNTERS": ops.NUM_COUNTERS,
    "MAX_CUDA_HEAD_DIM": ops.MAX_CUDA_HEAD_DIM,
    "LAYOUT_FIELDS": " ".join(LAYOUT_FIELDS),
    "LAYOUT_VALUES": "none int8 int4 fp8 int3 int2; tensor token head group channel; linear ring",
    "HAS_CPU": 1,
    "HAS_CUDA": 0,
}


def load(monkeypatch: pytest.MonkeyPatch, **constants: Any) -> Any:
    """`ops.extension()`, past its cache, where the extension is a module with these constants."""
    module = types.ModuleType("hf_kvquant._C")
    vars(module).update(constants)
    monkeypatch.setitem(sys.modules, "hf_kvquant._C", module)
    return ops.extension.__wrapped__()


def test_an_extension_of_the_same_age_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(monkeypatch, **CONSTANTS)
    assert module is sys.modules["hf_kvquant._C"]
    monkeypatch.setattr(ops.kernels, "extension", lambda: module)
    assert ops.has_kernels("cpu") and not ops.has_kernels("cuda") and not ops.has_kernels("xpu")


@pytest.mark.parametrize(
    ("changed", "expected", "found"),
    [
        ({"OPS_VERSION": ops.OPS_VERSION - 1}, f"OPS_VERSION {ops.OPS_VERSION}", str(ops.OPS_VERSION - 1)),
        ({"OPS_VERSION": None}, f"OPS_VERSION {ops.OPS_VERSION}", "None"),
        ({"TOKEN_ALIGNMENT": 128}, "TOKEN_ALIGNMENT 64", "128"),
        ({"NUM_COUNTERS": 64}, "NUM_COUNTERS 4096", "64"),
        ({"LAYOUT_FIELDS": "rows"}, f"LAYOUT_FIELDS {' '.join(LAYOUT_FIELDS)}", "rows"),
    ],
    ids=str,
)
def test_an_extension_of_another_age_is_refused(
    changed: dict[str, Any], expected: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = {name: value for name, value in (CONSTANTS | changed).items() if value is not None}
    with pytest.raises(RuntimeError) as caught:
        load(monkeypatch, **constants)
    assert str(caught.value) == (
        f"ops: the extension must be built from this version of the package ({expected}), got {found}. "
        "Reinstall: pip install --no-build-isolation ."
    )


def test_a_package_of_another_age_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.kernels, "OPS_VERSION", ops.OPS_VERSION + 1)
    with pytest.raises(RuntimeError, match="must be built from this version of the package"):
        load(monkeypatch, **CONSTANTS)


def test_why_there_is_no_extension_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", refuse)
    reason = ops.extension.__wrapped__()
    assert isinstance(reason, ImportError) and str(reason) == "hf_kvquant._C: undefined symbol"


def test_a_device_without_kernels_is_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = load(monkeypatch, **CONSTANTS)
    monkeypatch.setattr(ops.kernels, "extension", lambda: module)
    with caplog.at_level(logging.WARNING, logger="hf_kvquant"):
        ops.kernels._log_reference.cache_clear()
        ops.kernels.warn_reference(torch.device("cuda:0"), 128)
        ops.kernels.warn_reference(torch.device("cuda:0"), 128)
    assert [record.getMessage() for record in caplog.records] == [
        "ops: no compiled kernels for cuda, the PyTorch reference runs: correct, slower "
        "(it was built without kernels for cuda). Install a compiler and reinstall: pip install --no-build-isolation ."
    ]
