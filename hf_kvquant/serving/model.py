"""`PatchedModels`: transformers' model manager, with one model, which is patched when it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality
from transformers.distributed.configuration_utils import DistributedConfig

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
        num_ranks: Of tensor parallelism; 1 for none.
        **options: Of `ModelManager`: `device`, `dtype`, `trust_remote_code`, `attn_implementation`.

    Raises:
        DoesNotFit: See `patch`.
        OSError, ValueError: There is no such model, or it takes more than text.
    """

    def __init__(
        self,
        name: str,
        config: KVQuantConfig,
        prepare: Callable[[PreTrainedModel], None],
        num_ranks: int = 1,
        **options: Any,
    ) -> None:
        self._config, self._prepare, self._num_ranks = config, prepare, num_ranks
        super().__init__(force_model=name, continuous_batching=True, **options)
        self.name = name

    def _load_model(self, *args: Any, **options: Any) -> PreTrainedModel:
        model: PreTrainedModel
        model = super()._load_model(*args, **options) if self._num_ranks == 1 else self._load_part(args[0])
        self._prepare(model)
        try:
            return patch(model, self._config)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise DoesNotFit(str(error)) from error

    def _load_part(self, model_id_and_revision: str) -> PreTrainedModel:
        """The part of this rank, which transformers' server does not load."""
        is_path = os.path.exists(model_id_and_revision)  # then it has no revision, since 5.24
        name, _, revision = (model_id_and_revision, "", "main") if is_path else model_id_and_revision.rpartition("@")
        model: Any = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
            distributed_config=DistributedConfig(tp_plan="auto", tp_size=self._num_ranks),
        )
        part: PreTrainedModel = model.eval()
        return part

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        model: PreTrainedModel
        model, processor = self.load_model_and_processor(self.process_model_name(self.name))
        if self.get_model_modality(model, processor=processor) is not Modality.LLM:
            raise ValueError(f"{type(model).__name__} takes more than text, and only text is served.")
        return model

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """The one model. Before 5.24, transformers lists what the hub's cache holds, and fails without such a cache."""
        return [{"id": self.name, "object": "model", "created": 0, "owned_by": ""}]
