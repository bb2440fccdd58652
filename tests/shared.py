"""Where the recorded vectors and the real tokenizers lie: beside the checkout. A stranger's checkout has none."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


def golden_folder() -> Path:
    """The recorded vectors and exchanges; skips the test where there are none."""
    return _folder("golden")


def tokenizer_folder(name: str) -> Path:
    """A real tokenizer; skips the test where there are none."""
    return _folder("tokenizers") / name


def _folder(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"no shared/{name} beside this checkout", allow_module_level=True)
    return folder
