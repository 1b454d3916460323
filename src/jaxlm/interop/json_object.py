"""Reads JSON files that other programs wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.core.bounded_read import open_regular, parse_json, read_lines, read_text
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


def read_json_lines(path: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file of JSON lines, each with its place. Raises `ConfigError`. Args: key: what names the file."""
    with open_regular(path) as file:
        for number, content in enumerate(read_lines(file, path), start=1):
            if not content.strip():
                continue
            place = f"{path}, line {number}"
            try:
                line = content.decode()
                record = parse_json(line)
                json.dumps(record, ensure_ascii=False).encode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{key}: {place}: not UTF-8 text: {error}. Save the file as UTF-8") from error
            except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
                raise ConfigError(f"{key}: {place}: not valid Unicode: {error}. Correct the text") from error
            except ValueError as error:
                raise ConfigError(f"{key}: {place}: not a JSON object: {error}") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{key}: {place}: a JSON object expected, but it is {line.strip()[:60]}")
            yield place, record
