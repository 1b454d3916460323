"""Lists the keys of records that neither the format, nor the chat template, nor rewards read."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlm.core.errors import ConfigError, listed
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.chat import (
    OF_TEMPLATE,
    REASONING,
    TOOLS,
    VARIABLES,
    ConversationFormat,
    are_messages,
    for_template,
    template_variables,
)
from jaxlm.data.formats.completions_format import template_of
from jaxlm.data.sources.record_files import Record, glance
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer

_MAX_FILES, _RECORDS = 10, 100  # of each file


def describe_records(
    config: FormatConfig, tokenizer: Tokenizer, files: Sequence[TextFile], text_key: str
) -> str | None:
    """Says how the first records are read, and which of their keys are not; None if the configuration says it all."""
    first = [file for file in files if file.has_records][:_MAX_FILES]
    records: list[Record] = []
    with contextlib.suppress(ConfigError):  # said when they are tokenized, unless nobody reads what is wrong with them
        records.extend(
            record for file in first for record in itertools.islice(glance(file.path, config.keys), _RECORDS)
        )
    kinds = () if config.has_loss_mask else _kinds(config, records)  # masks are drawn
    has_turns = any(_turns(record.values.get(key)) for record in records for key in config.keys)
    template = template_of(config, tokenizer, "data.format") if has_turns else None
    unread = dict.fromkeys(key for record in records for key in _unread(config, template, record, text_key))
    unread |= dict.fromkeys(_left_out(config, template, records)) if template else {}
    return "; ".join((*kinds, *([f"not read: {listed(unread)}"] if unread else []))) or None


def _kinds(config: FormatConfig, records: Sequence[Record]) -> Iterator[str]:
    """Which keys of the format have a text in the first record, which have messages, and which no record has."""
    first = records[0].values if records else {}
    kinds = {
        "read as text": [key for key in config.keys if isinstance(first.get(key), str)],
        "read as messages": [key for key in config.keys if are_messages(first.get(key))],
        "in no record": [key for key in config.keys if records and all(r.values.get(key) is None for r in records)],
    }
    return (f"{kind}: {listed(keys)}" for kind, keys in kinds.items() if keys)


def _unread(config: FormatConfig, template: ChatTemplate | None, record: Record, text_key: str) -> Iterator[str]:
    values = {key: value for key, value in record.values.items() if _says_something(value)}
    read, tools = {*config.keys, config.key_of_text(text_key)}, TOOLS
    if isinstance(config, ConversationFormat):
        tools = config.tools_field or TOOLS
    turns = {key: turns for key in config.keys if key != tools and (turns := _turns(values.get(key)))}
    if turns and template is not None:
        read |= {VARIABLES, *([tools] if TOOLS in template.reads.variables else [])}
    yield from (key for key in values if key not in read and (config.makes != "prompts" or key in OF_TEMPLATE))
    for key, turn in ((key, turn) for key, of_key in turns.items() for turn in of_key):
        said = [name for name in turn if name not in config.keys_of_turns and _says_something(turn[name])]
        for name in said:
            names = REASONING if name in REASONING else (name,)
            if template is None or not any(name in template.reads.keys for name in names):
                yield f"{key}[].{name}"


def _left_out(config: FormatConfig, template: ChatTemplate, records: Sequence[Record]) -> Iterator[str]:
    """The roles whose messages a template leaves out: what they say changes nothing."""
    seen: set[str] = set()
    for record in records:
        with contextlib.suppress(ConfigError):  # said when it is tokenized
            lists, tools = [record.values.get(key) for key in config.keys], TOOLS
            if isinstance(config, ConversationFormat):
                lists, tools = [config.messages(record)], config.tools_field or TOOLS
            variables = template_variables(record, template, tools)
            for messages in map(for_template, filter(are_messages, lists)):
                text = template.prompt(messages, record.where, variables)
                for role in [m["role"] for m in messages if m.get("content") and m["role"] not in seen]:
                    others = [m | {"content": "jaxlm"} if m["role"] == role else m for m in messages]
                    seen.add(role)
                    if template.prompt(others, record.where, variables) == text:
                        yield f"messages of the role {role}"


def _turns(value: Any) -> list[dict[str, Any]]:
    return [turn for turn in value if isinstance(turn, dict)] if isinstance(value, list) else []


def _says_something(value: Any) -> bool:
    return value is not None and value not in ("", [], {})
