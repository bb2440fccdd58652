"""What a worker must know of a model: its name on the queues, its folder, its formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace import demo_model

EngineName = Literal["transformers", "null"]

_TOKENIZER_FILES = ["tokenizer*", "*.jinja", "chat_template.json", "config.json", "generation_config.json", "tekken*"]
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json", "*.gguf"]
DEFAULT_MODEL_LEN = 4096


class ModelNotFound(Exception):
    """No such model folder, and no hub has it under this name."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A served model. ``name`` is the queue's; ``path`` a folder with tokenizer, configuration and weights.

    The parsers are names of formats, or "auto" for those that the chat template asks for; ``formats`` is a TOML file
    with more of them. max_model_len counts tokens, prompt and output together; None takes what the configuration says.
    """

    name: str
    path: Path
    engine: EngineName = "transformers"
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    formats: Path | None = None
    max_model_len: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_rows: int = 32

    @classmethod
    def of(cls, model: str | Path, *, weights: bool = True, name: str | None = None, **rest: Any) -> ModelSpec:
        """The spec of ``demo`` (shipped), of a folder, or of a hub name. Raises ModelNotFound.

        weights=False fetches only what the CPU roles need. The served name is the folder's or hub's unless given.
        """
        if model == "demo":
            parsers = {"reasoning_parser": "qwen3", "tool_parser": "hermes"}
            return cls(name=name or "demo", path=demo_model.PATH, **(parsers | rest))
        path = Path(model) if Path(model).is_dir() else _fetch(str(model), weights=weights)
        return cls(name=name or served_name(model), path=path, **rest)

    def model_len(self) -> int:
        """The length bound that every role applies, in tokens."""
        if self.max_model_len is not None:
            return self.max_model_len
        config = self.config()
        inner = config.get("text_config", config)
        length = inner.get("max_position_embeddings")
        return int(length) if isinstance(length, int) else DEFAULT_MODEL_LEN

    def config(self) -> dict[str, Any]:
        """The model's config.json; empty if there is none."""
        file = self.path / "config.json"
        return json.loads(file.read_text()) if file.is_file() else {}


def served_name(model: str | Path) -> str:
    """The name on the queues, unless another is given: that of the folder, else the hub's."""
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else str(model)


def _fetch(name: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = _TOKENIZER_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except HFValidationError:
        raise ModelNotFound(f"model: {name!r} is neither a folder nor a model name") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(f"model: {name!r} is no folder, and the hub did not give it: {error}") from None
