"""What derendering needs of a tokenizer: its tokens' spellings, which are special, how they join into text.

Only the decode side is read. A vocabulary of 150,000 tokens loads in a tenth of a second and holds its spellings
alone: a few megabytes.
"""

from headrace.workers.derender.vocabulary.load import load_vocabulary
from headrace.workers.derender.vocabulary.spelling import REPLACEMENT
from headrace.workers.derender.vocabulary.table import InBytes, InContext, Tokens, Vocabulary

__all__ = ["REPLACEMENT", "InBytes", "InContext", "Tokens", "Vocabulary", "load_vocabulary"]
