"""Defects: what no part of the server expects. The server goes on, and its log says where."""

import logging

from kvpolicy.errors import error_origin
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.logs import log
from kvpolicy.serve.record import Record


def note_defect(record: Record, error: Exception) -> None:
    """Log a defect, by class and place.

    Args:
        record: The request in which it was found.
        error: What was raised.
    """
    log("defect", logging.ERROR, request_id=record.id, **error_origin(error))
    record.outcome = record.outcome and "failed"


def answer_to_defect(record: Record) -> ApiError:
    """What the client is told.

    Args:
        record: Its request.
    """
    return ApiError(500, f"the server has failed; its log tells of {record.id}")
