"""What a model's folder says of the formats that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from headrace.workers.derender.formats.registry import About

_TEMPLATES: Final = ("chat_template.jinja", "additional_chat_templates/*.jinja")


def about(path: str | Path) -> About:
    """Read the folder of this tokenizer: all its chat templates, and its config.json's model_type.

    Raises ValueError, naming the file, where one cannot be read.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    templates = [file.read_text("utf-8") for pattern in _TEMPLATES for file in sorted(folder.glob(pattern))]
    for name in ("chat_template.json", "tokenizer_config.json"):
        templates += _templates(_read(folder / name).get("chat_template"))
    model_type = _read(folder / "config.json").get("model_type")
    return About("\n".join(templates) or None, model_type if isinstance(model_type, str) else None)


def _templates(given: object) -> list[str]:
    """A template, or a list of named ones."""
    if isinstance(given, list):
        given = [entry.get("template") if isinstance(entry, dict) else None for entry in given]
        return [template for template in given if isinstance(template, str)]
    return [given] if isinstance(given, str) else []


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
