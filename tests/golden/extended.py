"""A tokenizer with more markers than its publisher gave it, for formats whose own tokenizer is not at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.golden.markup import MARKERS


def extended(source: Path, folder: Path) -> Path:
    """Write the tokenizer of `source` to `folder` with the markers behind its last id, and give the folder."""
    file = json.loads((source / "tokenizer.json").read_text("utf-8"))
    known = {token["content"] for token in file["added_tokens"]}
    taken = [*(token["id"] for token in file["added_tokens"]), *file["model"]["vocab"].values()]
    first = 1 + max(taken)
    missing = [marker for marker in MARKERS if marker not in known]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [{"id": first + number, "content": marker, **flags} for number, marker in enumerate(missing)]
    file["added_tokens"] += added
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(file, ensure_ascii=False), "utf-8")
    shutil.copy(source / "tokenizer_config.json", folder)
    (folder / "tokenizer_config.json").chmod(0o644)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    if "added_tokens_decoder" in config:
        config["added_tokens_decoder"] |= {str(token["id"]): {**flags, "content": token["content"]} for token in added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), "utf-8")
    return folder
