"""The engines, by the name that a model's spec gives. Each is imported only when it is built."""

from __future__ import annotations

import os

from headrace.workers.generate.engine import Engine, ModelRefused
from headrace.workers.models import ModelSpec


def build(spec: ModelSpec) -> Engine:
    """The engine that serves this model; nothing is loaded yet. Raises ModelRefused where its libraries are absent."""
    if spec.engine == "null":
        from headrace.workers.generate.engines.null import NullEngine, settings_of

        return NullEngine(settings_of(spec))
    # Before torch is imported: OpenMP's threads otherwise spin while they wait for each other, and on cores that others
    # use too (a second worker is enough) a step takes many times as long. docs/performance.md has the figures.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from headrace.workers.generate.engines.loop import TransformersSettings
        from headrace.workers.generate.engines.transformers import TransformersEngine
    except ModuleNotFoundError as error:
        needed = "the transformers engine needs torch and transformers: pip install 'headrace[generate]'"
        raise ModelRefused(f"{spec.name} cannot be served, there is no {error.name}; {needed}") from error

    return TransformersEngine(
        TransformersSettings(
            model=str(spec.path),
            device=spec.device,
            dtype=spec.dtype,
            max_model_len=spec.max_model_len,
            rows=spec.max_rows,
        )
    )
