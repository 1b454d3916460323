"""The fixtures of the core's tests, for those of wings: small models and inputs, records, and runs of the command."""

from tests.data.conftest import open_with, tokenizer
from tests.end_to_end.conftest import again, finished, in_process, shared, two_processes, uninterrupted, workplace
from tests.models.conftest import as_inputs, built, gradient_of, logits_of, tiny, tiny_llama

__all__ = ["again", "as_inputs", "built", "finished", "gradient_of", "in_process", "logits_of", "open_with", "shared"]
__all__ += ["tiny", "tiny_llama", "tokenizer", "two_processes", "uninterrupted", "workplace"]
