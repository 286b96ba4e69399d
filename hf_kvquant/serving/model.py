"""`PatchedModels`: transformers' model manager, with one model, which is patched when it is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality
from transformers.distributed.configuration_utils import DistributedConfig

from ..common.errors import BadTemplate, ConfigDoesNotFit
from ..config import KVQuantConfig
from ..patching import patch


class PatchedModels(ModelManager):
    """Loads a model, prepares and patches it.

    Args:
        name: A folder or a hub id.
        config: To patch it with.
        prepare: Called with the model before it is patched.
        num_ranks: Of tensor parallelism; 1 for none.
        served_name: By which clients call the model; `None` for `name`.
        chat_template: In place of the tokenizer's own.
        **options: Of `ModelManager`: `device`, `dtype`, `trust_remote_code`, `attn_implementation`.

    Attributes:
        model: Patched.
        tokenizer: Of the model.

    Raises:
        ConfigDoesNotFit: See `patch`.
        NotImplementedError: Likewise.
        OSError, ValueError: There is no such model, or it takes more than text.
        BadTemplate: See there.
    """

    def __init__(
        self,
        name: str,
        config: KVQuantConfig,
        prepare: Callable[[PreTrainedModel], None],
        num_ranks: int = 1,
        *,
        served_name: str | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        self._config, self._prepare, self._num_ranks = config, prepare, num_ranks
        super().__init__(force_model=name, continuous_batching=True, **options)
        self.served_name = served_name or name
        self._owner = name.partition("/")[0] if "/" in name and not os.path.exists(name) else "local"
        self._created = int(time.time())
        found: Any = self.load_model_and_processor(self.process_model_name(name))
        self.model: PreTrainedModel = found[0]
        self.tokenizer: Any = found[1]
        if self.get_model_modality(self.model, processor=self.tokenizer) is not Modality.LLM:
            raise ValueError(f"{type(self.model).__name__} takes more than text, and only text is served.")
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
            _check_template(self.tokenizer)

    def _load_model(self, *args: Any, **options: Any) -> PreTrainedModel:
        model: PreTrainedModel
        model = super()._load_model(*args, **options) if self._num_ranks == 1 else self._load_part(args[0])
        self._prepare(model)
        try:
            return patch(model, self._config)
        except (TypeError, ValueError) as error:
            raise ConfigDoesNotFit(str(error)) from error

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

    def card(self) -> dict[str, Any]:
        """The model as OpenAI's API describes it. `created` is when it was loaded."""
        return {"id": self.served_name, "object": "model", "created": self._created, "owned_by": self._owner}

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """See `ModelManager`: the one model."""
        return [self.card()]

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """The same, by its name before 5.24."""
        return [self.card()]


def _check_template(tokenizer: Any) -> None:
    """Refuse a template that cannot be read. One that only refuses this chat may take others."""
    from jinja2 import TemplateError, TemplateSyntaxError  # optional, and transformers says so if it is missing

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise BadTemplate(f"line {error.lineno}, {error.message}") from error
    except TemplateError:
        pass
