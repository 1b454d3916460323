"""Chat templates by name: `chat_template: chatml`, `chat_template: nanochat`.

Source: ChatML as OpenAI defined it; karpathy/nanochat (`nanochat/tokenizer.py`, revision 92d63d4) for the layout of nanochat.
"""

from collections.abc import Collection
from typing import NamedTuple


class NamedTemplate(NamedTuple):
    """A chat template.

    Attributes:
        text: the Jinja template.
        special_tokens: those that it writes and that the tokenizer must have. Without any, text will do.
    """

    text: str
    special_tokens: tuple[str, ...] = ()


CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The template for models that have none."""

NANOCHAT_TOKENS = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)

# Answers with calls of a tool are lists of parts, or messages with `tool_calls` and messages of the role `tool`. Both are one
# turn of the assistant. The loss is computed on what the assistant writes, and not on the output of the tool.
_NANOCHAT = r"""
{%- set has_system = messages[0].role == 'system' -%}
{%- if has_system and (messages | length < 2 or messages[1].role != 'user') -%}
  {{- raise_exception('message 1 is a system message, which a user message must follow') -}}
{%- elif has_system and messages[0].content is not string -%}
  {{- raise_exception('message 1 is a system message, and its content must be text') -}}
{%- endif -%}
<|bos|>
{%- for message in messages[1 if has_system else 0:] -%}
  {%- set number = 'message ' ~ (loop.index + (1 if has_system else 0)) -%}
  {%- set before = 'nothing' if loop.first else loop.previtem.role -%}
  {%- if message.role == 'user' -%}
    {%- if before not in ('nothing', 'assistant') -%}
      {{- raise_exception(number ~ ' has the role user after ' ~ before ~ ', but user and assistant must alternate') -}}
    {%- elif message.content is not string -%}
      {{- raise_exception(number ~ ' has the role user, and its content must be text') -}}
    {%- endif -%}
    <|user_start|>
    {%- if loop.first and has_system -%}{{- messages[0].content ~ '\n\n' -}}{%- endif -%}
    {{- message.content -}}
    <|user_end|>
  {%- elif message.role == 'assistant' -%}
    {%- if before not in ('user', 'tool') -%}
      {{- raise_exception(number ~ ' has the role assistant after ' ~ before ~ ', but a conversation begins with user,'
        ' and user and assistant must alternate') -}}
    {%- elif before == 'user' -%}
      <|assistant_start|>
    {%- endif -%}
    {%- set is_text = message.content is string or not message.content -%}
    {%- for part in ([{'type': 'text', 'text': message.content or ''}] if is_text else message.content) -%}
      {%- if part.text is not string -%}
        {{- raise_exception(number ~ ' has a part whose text is not text') -}}
      {%- elif part.type == 'text' -%}
        {%- generation -%}{{- part.text -}}{%- endgeneration -%}
      {%- elif part.type == 'python' -%}
        {%- generation -%}<|python_start|>{{- part.text -}}<|python_end|>{%- endgeneration -%}
      {%- elif part.type == 'python_output' -%}
        <|output_start|>{{- part.text -}}<|output_end|>
      {%- else -%}
        {{- raise_exception(number ~ ' has a part of the type ' ~ part.type ~ ', but text, python or python_output is'
          ' expected') -}}
      {%- endif -%}
    {%- endfor -%}
    {%- if message.tool_calls and message.tool_calls | length > 1 -%}
      {{- raise_exception(number ~ ' has several tool_calls, but a call is answered before the next one begins. Write a'
        ' message for each') -}}
    {%- elif message.tool_calls -%}
      {%- set given = message.tool_calls[0].function.arguments -%}
      {%- set call = given if given is string else given.values() | first -%}
      {%- if call is not string or call.lstrip().startswith('{') or (given is mapping and given | length != 1) -%}
        {{- raise_exception(number ~ ' has a call whose arguments are not the text of the call, or a mapping with only'
          ' that') -}}
      {%- endif -%}
      {%- generation -%}<|python_start|>{{- call -}}<|python_end|>{%- endgeneration -%}
    {%- endif -%}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}
      {%- generation -%}<|assistant_end|>{%- endgeneration -%}
    {%- endif -%}
  {%- elif message.role == 'tool' -%}
    {%- if before != 'assistant' or not loop.previtem.tool_calls -%}
      {{- raise_exception(number ~ ' has the role tool, but the message before it has no tool_calls') -}}
    {%- elif message.content is not string -%}
      {{- raise_exception(number ~ ' has the role tool, and its content must be text') -}}
    {%- elif not loop.last and loop.nextitem.role != 'assistant' -%}
      {{- raise_exception(number ~ ' has the role tool, and the assistant must go on after it') -}}
    {%- endif -%}
    <|output_start|>{{- message.content -}}<|output_end|>
  {%- else -%}
    {{- raise_exception(number ~ ' has the role ' ~ message.role ~ ', but system (only first), user, assistant or tool is'
      ' expected') -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role == 'user' -%}<|assistant_start|>{%- endif -%}
"""

NAMED: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate(CHATML),
    "nanochat": NamedTemplate(_NANOCHAT.strip(), NANOCHAT_TOKENS),
}


def template_of_tokens(vocabulary: Collection[str]) -> str:
    """The name of the template for a tokenizer without one: that whose special tokens it has, else ChatML."""
    special = (name for name, template in NAMED.items() if template.special_tokens)
    return next((name for name in special if set(NAMED[name].special_tokens) <= set(vocabulary)), "chatml")
