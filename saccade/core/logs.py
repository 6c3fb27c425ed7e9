"""Log configuration of server commands: lines on stderr, as text or as JSON."""

from __future__ import annotations

import json
import logging
import os
import time

from saccade.core.settings import LogFormat

TEXT = "%(levelname)s %(name)s: %(message)s"


def configure_logging(log_format: LogFormat = "text") -> None:
    """Log to stderr. Lines of text include the time, unless systemd's journal adds it."""
    if log_format == "json":
        formatter: logging.Formatter = JsonFormatter()
    else:
        formatter = logging.Formatter(TEXT if is_journal() else f"%(asctime)s {TEXT}")
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def is_journal() -> bool:
    """Return True if stderr is connected to systemd's journal."""
    stderr = os.fstat(2)
    return os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"


class JsonFormatter(logging.Formatter):
    """Formats each record as a JSON object on one line, with the time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of JSON for a record."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
