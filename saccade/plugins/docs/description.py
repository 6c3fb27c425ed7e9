"""Describes the operation for /docs in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Description

OPERATIONS = Description((ApiOperation("get", "/docs", "This API description as a web page"),))
