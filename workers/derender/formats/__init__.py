"""Formats of reasoning and tool calls: rows of two tables, read by a few scanners that can stop anywhere."""

from headrace.workers.derender.formats.declared import NONE, Declared
from headrace.workers.derender.formats.found import CallPiece, Found
from headrace.workers.derender.formats.message import MessageScanner, ScanState
from headrace.workers.derender.formats.reasoning import REASONING, ReasoningFormat
from headrace.workers.derender.formats.tools import TOOLS, ToolFormat

__all__ = [
    "NONE",
    "REASONING",
    "TOOLS",
    "CallPiece",
    "Declared",
    "Found",
    "MessageScanner",
    "ReasoningFormat",
    "ScanState",
    "ToolFormat",
]
