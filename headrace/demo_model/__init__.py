"""The demo model that ships with Headrace: a toy chat model, so that a fresh machine has something to serve.

The folder holds config, weights (safetensors), tokenizer and chat template as transformers lays them out, and
demo.jsonl, the requests of `headrace demo`. What it is and what it cannot do: docs/demo_model.md.
"""

from pathlib import Path

PATH: Path = Path(__file__).resolve().parent
"""The folder of the model, for whatever takes a model folder."""
