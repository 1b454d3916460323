"""nanochat's own code, from a checkout. Arguments: train, rows, evaluate or step, and a JSON file with the options.

train      runs scripts/base_train.py. Records the weights that it starts from, the loss of each microbatch, and some rows.
rows       records the rows of its loader, of both splits.
evaluate   loads checkpoints with nanochat's code: logits of each; of one, also bits per byte and the answers to CORE.
step       times optimizer steps for benchmarks/cpu_peers.py.

Runs in the folder `base_dir` instead of ~/.cache/nanochat. tiktoken and rustbpe are not needed: nanochat's tokenizer gets an
encoding that reads a `tokenizer.json`.
"""

import importlib.machinery
import itertools
import json
import os
import pickle
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import common
import numpy as np
import torch

SEED = 42  # nanochat's
LONGEST_PROMPT = 16_384  # tokens
NOISE, NOISE_OF_FACTORS = 0.02, 0.1  # standard deviations


class Encoding:
    """The methods of tiktoken's encodings that nanochat calls, for a `tokenizer.json`."""

    def __init__(self, file):
        import tokenizers

        self._file = file
        self._backend = tokenizers.Tokenizer.from_file(file)
        self._backend.encode_special_tokens = True  # as plain text
        self.n_vocab = self._backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens_set = {token.content for token in self._backend.get_added_tokens_decoder().values()}

    def __reduce__(self):
        return Encoding, (self._file,)

    def encode_ordinary(self, text):
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts, num_threads):
        return [found.ids for found in self._backend.encode_batch(texts, add_special_tokens=False)]

    def encode_single_token(self, token):
        return self._backend.token_to_id(token)

    def decode(self, ids):
        return self._backend.decode(ids)

    def num_bytes(self):
        """Bytes of each token: a token of a byte-level tokenizer has one character for each. Special tokens have none."""
        special = map(self.encode_single_token, self.special_tokens_set)
        counts = torch.zeros(self.n_vocab, dtype=torch.int32)
        for token, number in self._backend.get_vocab(with_added_tokens=True).items():
            counts[number] = len(token)
        counts[list(special)] = 0
        return counts


class Watched:
    """A model that records the loss of each microbatch, and the rows of the first."""

    def __init__(self, model, losses, rows):
        self._model, self._losses, self._rows = model, losses, rows

    def __call__(self, tokens, targets, **options):
        loss = self._model(tokens, targets, **options)
        if not options:  # evaluation gives a reduction
            self._losses.append(loss.item())
            if not self._rows:
                self._rows.append(tokens.clone())  # the loader fills the same tensor again
        return loss

    def __getattr__(self, name):
        return getattr(self._model, name)


def compile_nothing(watch=lambda model: model):
    """Replaces torch.compile, with and without arguments, also as a decorator."""

    def uncompiled(given=None, **_):
        if given is None:
            return lambda function: function
        return watch(given) if isinstance(given, torch.nn.Module) else given

    torch.compile = uncompiled


def add_noise(model):
    """Initial weights at which every parameter matters: nanochat begins with zeros in each layer's last matrices."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += (NOISE if parameter.ndim > 1 else NOISE_OF_FACTORS) * noise


def keep_float32(optimizer):
    """Lets an optimizer class leave out its cast of updates to bfloat16."""
    step = optimizer.step

    def without_cast(self):
        torch.Tensor.bfloat16 = lambda tensor: tensor
        try:
            return step(self)
        finally:
            del torch.Tensor.bfloat16  # TensorBase has the real one

    optimizer.step = without_cast


def write_tokenizer(options):
    encoding, folder = Encoding(options["tokenizer"]), Path(options["base_dir"], "tokenizer")
    folder.mkdir()
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    torch.save(encoding.num_bytes(), folder / "token_bytes.pt")


def rows(options):
    write_tokenizer(options)
    from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit
    from nanochat.tokenizer import get_tokenizer

    found = {}
    for split in ("train", "val"):
        batches = tokenizing_distributed_data_loader_bos_bestfit(
            get_tokenizer(), *options["batch"], split, device="cpu"
        )
        pairs = itertools.islice(batches, options["num_batches"])
        found[split] = np.concatenate([np.append(x.numpy(), y[:, -1:].numpy(), axis=1) for x, y in pairs])
    np.savez(options["output"], **found)


def train(options):
    losses, rows = [], []
    compile_nothing(lambda model: Watched(model, losses, rows))
    from nanochat.checkpoint_manager import save_checkpoint
    from nanochat.gpt import GPT
    from nanochat.optim import MuonAdamW

    write_tokenizer(options)
    initialize = GPT.init_weights

    def init_weights(model):
        initialize(model)
        add_noise(model)
        meta = {"step": 0, "model_config": asdict(model.config)}
        save_checkpoint(options["start"], 0, model.state_dict(), None, meta)

    GPT.init_weights = init_weights
    if options["keeps_float32"]:
        keep_float32(MuonAdamW)
    sys.argv = ["base_train", *options["arguments"]]
    runpy.run_module("scripts.base_train", run_name="__main__")
    np.savez(options["output"], losses=losses, rows=rows[0].numpy())


def evaluate(options):
    compile_nothing()
    from nanochat import core_eval
    from nanochat.checkpoint_manager import load_model_from_dir
    from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit
    from nanochat.loss_eval import evaluate_bpb
    from nanochat.tokenizer import get_token_bytes
    from scripts.base_eval import evaluate_core

    device, answers = torch.device("cpu"), {}
    evaluate_example = core_eval.evaluate_example

    def evaluate_and_keep(idx, model, tokenizer, data, device, task_meta):
        try:
            answer = evaluate_example(idx, model, tokenizer, data, device, task_meta)
        except AssertionError as error:  # nanochat's evaluation ends there
            answer = str(error)
        answers.setdefault(f"{task_meta['dataset_uri']} {task_meta['num_fewshot']}", []).append(answer)
        return answer is True

    core_eval.evaluate_example = evaluate_and_keep
    rows, found, weights = torch.from_numpy(np.load(options["rows"])["rows"]), {}, []
    for name, folder in options["checkpoints"].items():
        path = Path(folder)
        model, tokenizer, meta = load_model_from_dir(str(path.parent), device, "eval", model_tag=path.name)
        with torch.no_grad():
            found[name] = model(rows).numpy()
        weights.append(without_padding(model, meta["model_config"]["vocab_size"]))
    # The last checkpoint is measured. Prompts of CORE may be longer than the rotations that it comes with.
    model.cos, model.sin = model._precompute_rotary_embeddings(LONGEST_PROMPT, model.cos.size(-1) * 2)
    batches = tokenizing_distributed_data_loader_bos_bestfit(tokenizer, *options["batch"], "val", device="cpu")
    bits = evaluate_bpb(model, batches, options["num_batches"], get_token_bytes())
    if options["questions"]:
        evaluate_core(model, tokenizer, device, max_per_task=options["questions"])
    farthest, distance = largest_distance(*weights)
    facts = {"bpb": bits, "answers": answers, "farthest": farthest, "distance": distance}
    Path(options["output"]).with_suffix(".json").write_text(json.dumps(facts))
    np.savez(options["output"], **found)


def without_padding(model, vocab_size):
    """The parameters by name, without the rows that no token stands for: jaxlm has none."""
    return {
        name: tensor[:vocab_size] if "wte" in name or "lm_head" in name or "value_embeds" in name else tensor
        for name, tensor in model.state_dict().items()
    }


def largest_distance(start, trained, converted):
    """The tensor that differs most between two trainings from the same start, relative to how far it moved."""
    norm = torch.linalg.vector_norm
    distances = {n: norm(converted[n] - trained[n]) / norm(trained[n] - start[n]) for n in start}
    farthest = max(distances, key=distances.get)
    return farthest, distances[farthest].item()


def created(sizes):
    """The same model in every process."""
    from nanochat.gpt import GPT, GPTConfig

    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = GPT(GPTConfig(**sizes))
    model.to_empty(device="cpu")
    model.init_weights()
    add_noise(model)
    return model


def step(options):
    clock = common.Clock(version=torch.__version__, **options["facts"])
    if not options["compiles"]:
        compile_nothing()
    from nanochat.checkpoint_manager import save_checkpoint

    model = created(options["sizes"])
    if options["start"] is not None:
        meta = {"step": 0, "model_config": asdict(model.config)}
        save_checkpoint(options["start"], 0, model.state_dict(), None, meta)
    optimizer = model.setup_optimizer(**options["rates"])
    first, last, rise = options["momentum"]
    loss_of = torch.compile(model, dynamic=False)
    for number in itertools.count():
        tokens, targets = (torch.from_numpy(a).long() for a in common.batch(number, *options["shape"]))
        loss = loss_of(tokens, targets)
        loss.backward()
        for group in optimizer.param_groups:
            if group["kind"] == "muon":
                group["momentum"] = first + (last - first) * min(number / rise, 1)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if not clock.tick(loss.item()):
            break


def main():
    mode, file = sys.argv[1:]
    options = json.loads(Path(file).read_text())
    os.environ["NANOCHAT_BASE_DIR"] = options["base_dir"]
    sys.path.insert(0, options["checkout"])
    for name in ("rustbpe", "tiktoken", "wandb"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    {"train": train, "rows": rows, "evaluate": evaluate, "step": step}[mode](options)


main()
