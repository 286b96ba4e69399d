"""`PatchedModels`: transformers' model manager, with one model, which is patched when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality

from ..config import KVQuantConfig
from ..patching import patch


class DoesNotFit(Exception):
    """The config does not fit the model."""


class PatchedModels(ModelManager):
    """Loads a model, prepares and patches it.

    Args:
        name: A folder or a hub id. Clients name the model by it.
        config: To patch it with.
        prepare: Called with the model before it is patched.
        **options: Of `ModelManager`: `device`, `dtype`, `trust_remote_code`, `attn_implementation`.

    Raises:
        DoesNotFit: See `patch`.
        OSError, ValueError: There is no such model, or it takes more than text.
    """

    def __init__(
        self, name: str, config: KVQuantConfig, prepare: Callable[[PreTrainedModel], None], **options: Any
    ) -> None:
        self._config, self._prepare = config, prepare
        super().__init__(force_model=name, continuous_batching=True, **options)
        self.name = name

    def _load_model(self, *args: Any, **options: Any) -> PreTrainedModel:
        model: PreTrainedModel = super()._load_model(*args, **options)
        self._prepare(model)
        try:
            return patch(model, self._config)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise DoesNotFit(str(error)) from error

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        model: PreTrainedModel
        model, processor = self.load_model_and_processor(self.process_model_name(self.name))
        if self.get_model_modality(model, processor=processor) is not Modality.LLM:
            raise ValueError(f"{type(model).__name__} takes more than text, and only text is served.")
        return model

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """The one model. transformers lists what the hub's cache holds, and fails without such a cache."""
        return [{"id": self.name, "object": "model", "created": 0, "owned_by": ""}]
