"""A conversation with a checkpoint, or a Hugging Face folder, in the words of its chat template.

    python -m jaxlm.chat --checkpoint checkpoints/tuned
    echo "What is a mesh?" | python -m jaxlm.chat --checkpoint model-folder --temperature 0

Each line is a turn. `/exit` or the end of the input ends the conversation, `/new` begins another; Ctrl-C stops what is being
written, and ends the conversation where nothing is.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.generate import GenerationConfig, stream_tokens
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.unstacked import Generator
from jaxlm.run.exit_codes import run_command
from jaxlm.run.generation_options import add_generation_options, generation_config_of
from jaxlm.run.load_model import checkpoint_parser, open_model, parse_with_keys

_EVERY = 4  # tokens that are shown at once
_HALF_A_CHARACTER = "\ufffd"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return run_command(lambda: _chat(sys.argv[1:] if arguments is None else arguments))


def _parser() -> argparse.ArgumentParser:
    parser = checkpoint_parser(
        "jaxlm.chat",
        "Talks with a trained model: each line is a turn, /new begins again, /exit ends. Keys of the saved configuration"
        " may follow: --trainer.mp f32.",
        or_else="; or a folder of Hugging Face, or the hub's name or name@revision",
    )
    parser.add_argument("--system", default=None, help="what the model is told before the first turn")
    parser.add_argument(
        "--chat_template", default=None, help="a template, or the path of a .jinja file (default: the tokenizer's)"
    )
    add_generation_options(parser, max_new_tokens=512, temperature=0.7)
    return parser


def _chat(arguments: Sequence[str]) -> int:
    options, keys = parse_with_keys(_parser(), arguments)
    named = open_model(options.checkpoint, keys, options.adapter, options.weights)
    template = ChatTemplate.load(options.chat_template, named.tokenizer, "--chat_template")
    stop_ids = tuple(dict.fromkeys((*named.stop_ids, *turn_ends(template, named.tokenizer))))
    with named.plan.layout.use():
        model = named.for_use()
        talk = Conversation(model, named.tokenizer, template, generation_config_of(options, stop_ids), options.system)
        for line in _lines(sys.stdin.isatty()):
            if line == "/new":
                talk.begin()
            elif line:
                _answer(talk, line)
    return 0


def _lines(asks: bool) -> Iterator[str]:
    """What is typed or piped in, until `/exit`, the end, or Ctrl-C."""
    while True:
        try:
            line = input("> " if asks else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        yield line


def _answer(talk: "Conversation", line: str) -> None:
    began = time.perf_counter()
    try:
        for piece in talk.answer(line):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except ConfigError as error:
        print(f"{error}. /new begins a new conversation", file=sys.stderr)
        return
    seconds = time.perf_counter() - began
    print(flush=True)
    print(f"[{talk.num_tokens} tokens, {talk.num_tokens / seconds:.1f} tokens/s]", file=sys.stderr, flush=True)


class Conversation:
    """The turns so far, and who answers them. What is said already is not read anew in every turn."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        decoding: GenerationConfig,
        system: str | None = None,
    ):
        self._writer, self._tokenizer, self._template, self._decoding = (
            Generator.of(model),
            tokenizer,
            template,
            decoding,
        )
        self._system = system
        self.begin()

    def begin(self) -> None:
        """Forgets all turns."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.num_tokens = 0
        self._kept = PrefixCache()

    def answer(self, line: str) -> Iterator[str]:
        """Yields what the model answers, piece by piece; whatever was yielded is its turn, even if nobody reads on.

        Raises:
            ConfigError: the conversation is longer than the model can read. It is then as before.
        """
        asked = [*self.messages, {"role": "user", "content": line}]
        (encoded,) = self._tokenizer.encode_with_offsets([self._template.prompt(asked, "the conversation")])
        prompt = encoded[0].tolist()
        ids: list[int] = []
        shown = ""
        self.num_tokens = 0
        pieces = stream_tokens(
            self._writer, [prompt], self._fitting(len(prompt)), every=_EVERY, prefix_cache=self._kept
        )
        first = next(pieces, [[]])
        self.messages = asked
        try:
            for (new,) in itertools.chain([first], pieces):
                ids += new
                self.num_tokens = len(ids)
                text = self._tokenizer.decode(ids)
                if not text.endswith(_HALF_A_CHARACTER):
                    yield text[len(shown) :]
                    shown = text
            rest = self._tokenizer.decode(ids)[len(shown) :]
            if rest:
                shown += rest
                yield rest
        finally:
            self.messages = [*asked, {"role": "assistant", "content": shown}]

    def _fitting(self, num_asked: int) -> GenerationConfig:
        """The decoding, with as many new tokens as there is room for behind the prompt."""
        room = self._writer.model.Pos.size - num_asked
        if room < 1:
            raise ConfigError(f"the conversation has {num_asked} tokens; the model reads {self._writer.model.Pos.size}")
        return dataclasses.replace(self._decoding, max_new_tokens=min(room, self._decoding.max_new_tokens))


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special token that the template writes behind what the assistant says; none where it writes no such token."""
    said = "jaxlm"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    text = template.render(turns, "a conversation", mark=False).text
    (ids, begins, _) = tokenizer.encode_with_offsets([text])[0]
    behind = ids[begins >= text.rindex(said) + len(said)]
    special = [int(i) for i in behind if not tokenizer.decode([int(i)])]
    return tuple(special[:1])


if __name__ == "__main__":
    sys.exit(main())
