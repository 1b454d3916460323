"""Shared by the peers of trl_peers.py: the shape, the data and the optimizer. Needs only numpy.

A Llama of 10.6 million parameters, 8 sequences per step of a prompt of 97 tokens and an answer of 160, so 256 predictions
each and no padding; float32; AdamW (0.9, 0.999, 1e-8) without weight decay, clipping at 1.0, a constant learning rate. `sft`
minimizes the loss of the answers, `dpo` that of four pairs with a frozen copy of the model as the reference, `dpo-lora` the
same with adapters of rank 16 at all linear layers, where the model without them is the reference.

`grpo` samples 4 answers of 160 tokens to each of two prompts of 96 tokens in every step, rewards them with `even_share`, and
updates once, with the KL divergence from the initial model. No answer ends earlier. So 8 sequences of 256 tokens are sampled,
scored by the reference, and trained on. Each program draws its own samples. The loss is 0 by construction, so the mean
entropy of the predictions is recorded in its place.
"""

import numpy as np

MODEL = {
    "seq_len": 256,
    "hidden_dim": 256,
    "intermediate_dim": 704,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 4,
    "tie_word_embeddings": True,
}
VOCAB, PROMPT, SEQUENCES = 16384, 97, 8
GRPO = "grpo"
GROUP, GRPO_PROMPT, NEW_TOKENS, KL_COEF = 4, 96, 160, 0.04
LEARNING_RATE = {"sft": 1e-4, "sft-lora": 1e-3, "dpo": 1e-5, "dpo-lora": 1e-4, GRPO: 1e-6}
BETAS, EPSILON, CLIP, BETA, RANK, ALPHA = (0.9, 0.999), 1e-8, 1.0, 0.1, 16, 32.0
DISTINCT = 32  # steps with different rows; then they repeat


def is_dpo(method: str) -> bool:
    return method.startswith("dpo")


def is_lora(method: str) -> bool:
    return method.endswith("lora")


def rows(step: int) -> np.ndarray:
    """Tokens of a step, int32 [8, 257]. Sequences 2n and 2n + 1 have the same prompt: they are the pair n."""
    rng = np.random.default_rng(step % DISTINCT)
    tokens = (rng.zipf(1.2, size=(SEQUENCES, MODEL["seq_len"] + 1)) - 1) % VOCAB
    tokens[1::2, :PROMPT] = tokens[::2, :PROMPT]
    return tokens.astype(np.int32)


def prompts() -> list[str]:
    """The prompts of `grpo`, two for each step, as words of `tokenizer`."""
    ids = np.concatenate([rows(step)[::GROUP, :GRPO_PROMPT] for step in range(DISTINCT)])
    return [" ".join(f"w{max(number, 1)}" for number in prompt) for prompt in ids.tolist()]


def tokenizer():
    """A tokenizer with a word for each token but the first, which is `<eos>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": 0, **{f"w{number}": number for number in range(1, VOCAB)}}
    found = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return found


def even_share(completion_ids, **_) -> list[float]:
    """The share of even tokens in each answer."""
    return [sum(number % 2 == 0 for number in ids) / len(ids) for ids in completion_ids]


def flops_per_token(method: str) -> float:
    """FLOPs of a token: forward and backward, the forward pass of the reference, and for `grpo` that of sampling. Adapters
    save a third.
    """
    width, layers = MODEL["hidden_dim"], MODEL["num_layers"]
    weights = layers * (4 * width**2 + 3 * width * MODEL["intermediate_dim"]) + VOCAB * width
    forward = 2 * weights + layers * 4 * width * MODEL["seq_len"] / 2
    return forward * ((2 if is_lora(method) else 3) + is_dpo(method) + 2 * (method == GRPO))


def facts(method: str) -> dict[str, float]:
    """What a peer's first answer says about its work."""
    tokens = SEQUENCES * MODEL["seq_len"]
    return {"tokens_per_step": tokens, "flops_per_token": flops_per_token(method)}
