"""How the daemon logs: one line an event, as text or JSON, to standard error."""

import json
import logging
import sys
import time
from contextvars import ContextVar

from kvhold_server.config import ServerConfig

# The trace of the call that is being served; set by rpc/tracing.py only while tracing is on.
CURRENT_TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace_id := CURRENT_TRACE_ID.get():
            line["trace_id"] = trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(config: ServerConfig) -> None:
    """Once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
