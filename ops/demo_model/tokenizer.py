"""The tokenizer: byte-level BPE in which spaces, digits and capitals stand alone.

A word is then the same tokens wherever it stands, which is what makes copying learnable for so small a model.
"""

import re
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ops.demo_model.dialogue import TEMPLATE, Message, Tool
from ops.demo_model.draw import Draw
from ops.demo_model.mixture import EVERYTHING, draw_example

PAD, END = "<|endoftext|>", "<|im_end|>"
SPECIAL = [PAD, "<|im_start|>", END]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CONTEXT = 2048

_WORD = r"[A-Z]?[a-z]+|[A-Z]|[0-9]|\n+"
_PUNCTUATION = r"(?:[^\sA-Za-z0-9]+(?: (?=[^\sA-Za-z0-9]))?)+"  # a space inside punctuation joins it: `": "`
PATTERN = rf"{_WORD}|{_PUNCTUATION}|\s"


def train_tokenizer(draw: Draw, size: int = 1024, examples: int = 8000) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` tokens, trained on drawn examples, with the chat template in it."""
    control = re.compile("|".join(map(re.escape, SPECIAL + ADDED)))
    texts = [control.sub("\n", "".join(draw_example(draw, EVERYTHING))) for _ in range(examples)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(ADDED),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def transformers_prompt(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: list[Tool] | None, think: bool
) -> str:
    """The prompt as transformers renders it from the tokenizer's own template."""
    rendered = tokenizer.apply_chat_template(
        messages,  # type: ignore[arg-type]  # typed there as plain dicts
        tools=tools,  # type: ignore[arg-type]
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=think,
    )
    return cast("str", rendered)


def word_pieces(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """The alphabetic tokens, sorted: what made-up words are glued from."""
    return tuple(sorted(token for token in tokenizer.get_vocab() if re.fullmatch("[a-z]{1,5}", token)))
