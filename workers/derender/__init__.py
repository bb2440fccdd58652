"""Tokens to text, reasoning and tool calls.

`Derenderer` serves the derender endpoints' requests, one by one, with the state carried by the caller. A worker
that holds its streams uses `Session`, which does the same work without pydantic or JSON per chunk:

    derenderer = Derenderer.load(folder, tool_parser="hermes", reasoning_parser="qwen3", max_model_len=40960)
    session = Session(
        derenderer,
        request,                            # ChatCompletionRequest or CompletionRequest, once
        run=job.run,                        # names the request for good; tool-call ids derive from it
        id=job.request_id, created=job.created, model=job.model,
        prompt_token_ids=prompt,            # the whole prompt where a parser is set
    )
    out = session.step(chunk)               # wire.TokenChunk -> wire.ChatChunk or wire.CompletionChunk, always one
    session.stopped                         # choices cut at a stop string: the engine may be told to stop
    saved = session.checkpoint()            # bytes; Session(..., checkpoint=saved) gives the same later chunks
    whole = session.final(choices, usage=usage)   # the response for the whole outputs, steps taken or not

`TextSession` does so for a generate request with output_mode "text"; it looks for no formats.

The parsers are formats by name (docs/formats.md), "auto" being those that the model's chat template asks for.

One session per request holds a state per choice index. A chunk with a finish reason gives out what was held back;
chunks without choices (usage, prompt) go through as they are. Load one Derenderer per model and share it.
"""

from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.session import Session
from headrace.workers.derender.text_session import TextSession

__all__ = ["Derenderer", "Session", "TextSession"]
