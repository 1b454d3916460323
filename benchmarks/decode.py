"""Compares greedy decoding with transformers' `generate`: one random Llama, the same prompts, on a CPU or a GPU.

    python benchmarks/decode.py --rounds 5
    python benchmarks/decode.py --dtype bfloat16 --layers 16 --hidden 2048     # on a GPU

The peers are jaxlm, jaxlm with int8 weights (`--quantize int8`), and transformers. All read the same folder. Their
processes run in turn, round after round, so that other load on the machine affects all alike. Processing the prompts
counts. Compiling and the first call do not count and are reported separately. Prints medians with quartiles of tokens/s
and the fraction of equal tokens. The last line printed is JSON. Needs the extras `torch` and `hf`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from processes import PeerFailedError, answer_of, spread

HERE = Path(__file__).parent
PEERS = {
    "jaxlm": ("decode_jaxlm.py", "plain"),
    "jaxlm, int8 weights": ("decode_jaxlm.py", "int8"),
    "transformers": ("decode_torch.py",),
}
VOCAB = 8192


def main() -> None:
    """Runs every peer in every round for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes per peer (default 5)")
    parser.add_argument("--repeats", type=int, default=3, help="measured calls per process (default 3)")
    parser.add_argument("--batches", default="1,16", help="batch sizes, separated by commas (default 1,16)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate per prompt (default 64)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default 12)")
    parser.add_argument("--hidden", type=int, default=768, help="width of the model (default 768)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default float32")
    options = parser.parse_args()
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(Path(folder), options.layers, options.hidden)
        print(f"{parameters / 1e6:.0f} million parameters", file=sys.stderr)
        for batch in map(int, options.batches.split(",")):
            sizes = [folder, batch, options.prompt, options.new, options.repeats, options.dtype]
            results[f"batch {batch}"] = measured([str(size) for size in sizes], options.rounds)
    print(json.dumps({"parameters": parameters, **results}))


def write_model(folder: Path, num_layers: int, hidden_dim: int) -> int:
    """Writes a random Llama with an unused tokenizer. Returns its number of parameters."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_dim,
        intermediate_size=hidden_dim * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_dim // 64,
        num_key_value_heads=hidden_dim // 64,
        max_position_embeddings=2048,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    return sum(parameter.numel() for parameter in model.parameters())


def measured(sizes: list[str], rounds: int) -> dict[str, dict]:
    """Runs all peers and prints a line for each. Returns the numbers by peer."""
    answers: dict[str, list[dict]] = {name: [] for name in PEERS}
    for number in range(rounds):
        for name, (script, *form) in PEERS.items():
            try:
                answers[name].append(answer_of([sys.executable, str(HERE / "peers" / script), *sizes, *form]))
            except PeerFailedError as error:
                raise SystemExit(f"{name} failed:\n{error}") from error
            rate = statistics.median(answers[name][-1]["tokens_per_second"])
            print(f"round {number + 1}, batch {sizes[1]}: {name}: {rate:.1f} tokens/s", file=sys.stderr)
    reference = [token for row in answers["transformers"][0]["tokens"] for token in row]
    summary = {}
    for name, runs in answers.items():
        # One process is one measurement: its calls are not independent.
        rate, low, high = spread([statistics.median(answer["tokens_per_second"]) for answer in runs])
        tokens = [token for row in runs[0]["tokens"] for token in row]
        same = statistics.mean(a == b for a, b in zip(tokens, reference, strict=True))
        first = statistics.median(answer["first_s"] for answer in runs)
        print(
            f"batch {sizes[1]:>3}  {name:20} {rate:8.1f} ({low:.1f}-{high:.1f}) tokens/s"
            f"  first call {first:5.1f} s  same tokens {same:.1%}"
        )
        summary[name] = {"tokens_per_second": rate, "quartiles": [low, high], "first_s": first, "same_tokens": same}
    return summary


if __name__ == "__main__":
    main()
