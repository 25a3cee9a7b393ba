"""Rows that are used stay, with the question and with unusual tokens."""

from kvpolicy_usage.last_used import LastUsed
from kvpolicy_usage.question import Question
from kvpolicy_usage.unusual import Unusual

__all__ = ["LastUsed", "Question", "Unusual"]
