"""JSON log lines."""

import logging

from ray._common.formatters import JSONFormatter


def name_loggers() -> None:
    """Add the logger's name to JSON lines, which Ray writes with RAY_LOGGING_CONFIG_ENCODING=JSON."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JSONFormatter):
            handler.formatter.set_additional_log_standard_attrs(["name"])
