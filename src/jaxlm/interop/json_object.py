"""Reads JSON files that other programs wrote."""

from pathlib import Path
from typing import Any

from jaxlm.core.bounded_read import parse_json, read_text
from jaxlm.core.errors import ConfigError


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: the file cannot be read, or contains anything else.
    """
    try:
        content = parse_json(read_text(file, limit=None))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise ConfigError(f"{file} is not JSON: {error}. Download or write it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: a JSON object ({{...}}) expected, {type(content).__name__} found")
    return content
