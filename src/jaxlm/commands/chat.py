"""Chats with the model of a checkpoint or a Hugging Face folder through its chat template.

    jaxlm chat --checkpoint checkpoints/tuned
    echo "What is a mesh?" | jaxlm chat --checkpoint model-folder --temperature 0

Each input line is a user turn. `/help` lists the commands, such as `/reset` for a new conversation; `/exit` or end of input
ends the program. Ctrl-C stops the current answer, or ends the program if no answer is being generated. A model with tokens
for tool calls can use a calculator: `12 * 7 is <<12 * 7=84>>84` shows the call, its output and the answer.
"""

import argparse
import dataclasses
import itertools
import re
import sys
import time
from collections.abc import Iterator, Sequence

from jaxlm.core.errors import ConfigError, did_you_mean
from jaxlm.data.tokenizer.chat_template import ChatTemplate, turn_end_texts, turn_ends
from jaxlm.data.tokenizer.templates import template_of_tokens
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.generate import GenerationConfig, stream_tokens
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.sampling import StopStrings
from jaxlm.models.inference.tools.calls import CALL, OUTPUT, TEXT, TOOL_TOKENS, ToolCalls
from jaxlm.models.inference.unstacked import Generator
from jaxlm.session.exit_codes import command
from jaxlm.session.generation_options import add_generation_options, generation_config_of, tool_calls_of
from jaxlm.session.load_model import checkpoint_parser, open_model, parse_with_keys, to_stderr

_TOKENS_PER_UPDATE = 4
_INCOMPLETE_CHARACTER = "\ufffd"
_COMMAND = re.compile(r"/[a-zA-Z]*")
_RESET, _EXIT = ("/reset", "/new"), ("/exit", "/quit")
_COMMANDS = {
    "/help": "lists the commands",
    " or ".join(_RESET): "starts a new conversation",
    " or ".join(_EXIT): "ends",
}


@command
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options, keys = parse_with_keys(_parser(), arguments)
    loaded = open_model(options.checkpoint, keys, options.adapter, options.weights)
    if not loaded.model.is_causal:
        raise ConfigError(
            f"--checkpoint: {loaded.location} has model.use_bidirectional_attention: true, so it cannot write an answer token"
            " by token. `jaxlm sample` fills in masks instead"
        )
    template = _load_template(options.chat_template, loaded.tokenizer)
    stop_ids = tuple(dict.fromkeys((*loaded.tokenizer.stop_ids, *turn_ends(template, loaded.tokenizer))))
    calls = _tool_calls(options, loaded.tokenizer, template)
    config = generation_config_of(options, stop_ids)
    with loaded.plan.layout.use():
        model = loaded.for_inference(options.quantize)
        conversation = Conversation(model, loaded.tokenizer, template, config, options.system, calls)
        for line in _input_lines(sys.stdin.isatty()):
            if _COMMAND.fullmatch(line):
                _obey(conversation, line)
            elif line:
                _answer(conversation, line)
    return 0


def _load_template(template: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """The given template, else the tokenizer's, else the one for its special tokens, else ChatML."""
    if template is None and tokenizer.chat_template is None:
        template = template_of_tokens(tokenizer.vocabulary())
        to_stderr(f"note: the tokenizer has no chat template; {template} is used. --chat_template sets another")
    elif template is None:
        tokenizer.note_template(to_stderr)
    return ChatTemplate.load(template, tokenizer, "--chat_template")


def _tool_calls(options: argparse.Namespace, tokenizer: Tokenizer, template: ChatTemplate) -> ToolCalls | None:
    """Returns what answers the model's tool calls; None if nothing does, or if the template cannot write calls."""
    calls = tool_calls_of(options, tokenizer)
    if calls is None or _writes_calls(template):
        return calls
    if options.tool is not None:
        raise ConfigError(
            f"--tool: '{options.tool}' given, but the chat template ({template.origin}) does not write a part of the type"
            f" {CALL} between {TOOL_TOKENS[0]} and {TOOL_TOKENS[1]}. Remove --tool, or set --chat_template nanochat"
        )
    return None


def _writes_calls(template: ChatTemplate) -> bool:
    parts = [{"type": TEXT, "text": "a"}, {"type": CALL, "text": "1"}, {"type": OUTPUT, "text": "2"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]
    call_start, call_end, output_start, output_end = TOOL_TOKENS
    written = f"a{call_start}1{call_end}{output_start}2{output_end}"
    try:
        return written in template.render(messages, "a conversation", mark=False).text
    except ConfigError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = checkpoint_parser(
        "chat",
        "Chats with a trained model. Each line is a user turn; /help lists the commands. You can override keys of the saved"
        " configuration: --trainer.mp f32.",
        or_else="; or a Hugging Face folder, or a hub repository name or name@revision",
    )
    parser.add_argument("--system", help="system message at the start of the conversation")
    parser.add_argument(
        "--chat_template",
        help="chat template: chatml, nanochat, a text, or the path of a .jinja file (default: the tokenizer's, else nanochat"
        " if it has its tokens, else chatml)",
    )
    add_generation_options(parser, max_new_tokens=512, temperature=0.7)
    return parser


def _input_lines(interactive: bool) -> Iterator[str]:
    """The input lines, until `/exit`, `/quit`, end of input or Ctrl-C."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line in _EXIT:
            return
        yield line


def _obey(conversation: "Conversation", command: str) -> None:
    if command in _RESET:
        return conversation.begin()
    if command != "/help":
        to_stderr(f"{command} is not a command.{did_you_mean(command, ('/help', *_RESET, *_EXIT), '', '')}")
    print("\n".join(f"{names}: {meaning}" for names, meaning in _COMMANDS.items()), file=sys.stderr, flush=True)


def _answer(conversation: "Conversation", line: str) -> None:
    started = time.perf_counter()
    try:
        for piece in conversation.answer(line):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except ConfigError as error:
        return to_stderr(f"{error}. Use /reset to start a new conversation")
    seconds = time.perf_counter() - started
    print(flush=True)
    num_tokens = conversation.num_tokens
    print(f"[{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s]", file=sys.stderr, flush=True)


@dataclasses.dataclass(eq=False)
class Conversation:
    """A conversation with a model. A KV cache of earlier turns is reused, so each turn processes only new tokens."""

    model: LanguageModel
    tokenizer: Tokenizer
    template: ChatTemplate
    config: GenerationConfig
    system: str | None = None
    calls: ToolCalls | None = None

    def __post_init__(self):
        self._generator = Generator.of(self.model)
        ends = turn_end_texts(self.template, self.tokenizer)
        of_text = StopStrings.of_text(ends, self.tokenizer.decode)
        self._stops = of_text if self.calls is None else StopStrings(ends, self.calls.fragments)
        self.begin()

    def begin(self) -> None:
        """Starts a new conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.num_tokens = 0
        self._prefix_cache = PrefixCache()

    def answer(self, line: str) -> Iterator[str]:
        """Yields the model's answer in pieces. If the caller stops early, the pieces yielded so far become its turn.

        Raises:
            ConfigError: the conversation is longer than the model's sequence length. The conversation is then unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": line}]
        (encoded,) = self.tokenizer.encode_with_offsets([self.template.prompt(messages, "the conversation")])
        prompt = encoded[0].tolist()
        ids: list[int] = []
        shown = ""
        self.num_tokens = 0
        pieces = stream_tokens(
            self._generator,
            [prompt],
            self._config_for(len(prompt)),
            every=_TOKENS_PER_UPDATE,
            until=self._stops.until,
            prefix_cache=self._prefix_cache,
            tools=self.calls,
        )
        first = next(pieces, [[]])
        beginnings = [stop[:end] for stop in self._stops.texts for end in range(1, len(stop))]
        self.messages = messages
        try:
            for (new_ids,) in itertools.chain([first], pieces):
                ids += new_ids
                self.num_tokens = len(ids)
                text = self._stops.before(ids)
                if not text.endswith((_INCOMPLETE_CHARACTER, *beginnings)):
                    yield text[len(shown) :]
                    shown = text
            if rest := self._stops.before(ids)[len(shown) :]:
                shown += rest
                yield rest
        finally:
            self.messages = [*messages, {"role": "assistant", "content": self._content(ids, shown)}]

    def _content(self, ids: list[int], shown: str) -> str | list[dict[str, str]]:
        """An answer as the content of its message: its text, or parts if it has calls."""
        if self.calls is None:
            return shown
        kept = list(ids)
        while kept and len(self.calls.show(kept[:-1])) >= len(shown):
            kept.pop()  # what follows the string that ended the answer
        parts, num_beyond = self.calls.parts(kept), len(self.calls.show(kept)) - len(shown)
        if all(part["type"] == TEXT for part in parts):
            return shown
        if num_beyond > 0 and parts[-1]["type"] != OUTPUT:
            parts[-1] = {**parts[-1], "text": parts[-1]["text"][:-num_beyond]}
        return parts

    def _config_for(self, num_prompt_tokens: int) -> GenerationConfig:
        """The generation config, with `max_new_tokens` limited to what fits after the prompt."""
        seq_len = self._generator.model.Pos.size
        room = seq_len - num_prompt_tokens
        if room < 1:
            raise ConfigError(
                f"the conversation has {num_prompt_tokens} tokens, but the model's maximum sequence length is {seq_len}"
            )
        return dataclasses.replace(self.config, max_new_tokens=min(room, self.config.max_new_tokens))


if __name__ == "__main__":
    sys.exit(main())
