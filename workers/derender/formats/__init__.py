"""Formats of reasoning and tool calls: rows of two tables, read by a few scanners that can stop anywhere."""

from headrace.workers.derender.formats.declared import NONE, Declared
from headrace.workers.derender.formats.found import CallPiece, Found
from headrace.workers.derender.formats.message import MessageScanner, Phase, ScanState
from headrace.workers.derender.formats.reasoning import REASONING, ReasoningFormat
from headrace.workers.derender.formats.registry import AUTO, About, FormatError, Formats
from headrace.workers.derender.formats.scanner import Scanner, scanner
from headrace.workers.derender.formats.tools import TOOLS, ToolFormat

__all__ = [
    "AUTO",
    "NONE",
    "REASONING",
    "TOOLS",
    "About",
    "CallPiece",
    "Declared",
    "FormatError",
    "Formats",
    "Found",
    "MessageScanner",
    "Phase",
    "ReasoningFormat",
    "ScanState",
    "Scanner",
    "ToolFormat",
    "scanner",
]
