"""Text generation with a masked-diffusion model: new tokens are masks at first, and each pass over the text fills in some.

Source: Nie et al. 2025, "Large Language Diffusion Models" (arXiv:2502.09992), section 2.4 and appendix A: low-confidence
remasking, and blocks from left to right (semi-autoregressive), as in Arriola et al. 2025 (arXiv:2503.09573). A pass for each
part of the model: time as depth, as in StackWise, and Shing et al. 2025, DiffusionBlocks (arXiv:2506.14202).

Shapes: B rows, N tokens of a block, C tokens whose logits are computed at once, D embed, V vocab.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, EMBED, POSITION
from jaxlm.core.errors import ConfigError, check_at_least
from jaxlm.core.field_types import PositiveInt, check_fields
from jaxlm.core.rules import Rules, excludes
from jaxlm.core.sharding import replicated
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.diffusion import Denoiser
from jaxlm.models.inference.generate import GenerationConfig, check_fits
from jaxlm.models.inference.padding import padded_length, program_rows
from jaxlm.models.inference.sampling import Sampling, TokenDistribution, log_likelihoods, row_keys

Remasking = Literal["low_confidence", "random"]
PassSchedule = Literal["equal", "depth"]
_CHUNK = 64  # tokens of each row whose logits are computed at once


@dataclass(frozen=True)
class DenoisingConfig:
    """Says how a model whose tokens attend to later ones fills in new tokens.

    Attributes:
        num_steps: passes over the text, among which the new tokens are divided equally. Null fills in one token in each;
            fewer passes are faster, and the tokens of a pass do not know of each other.
        block_length: new tokens are filled in block by block, from left to right, this many in each. Null has one block.
        remasking: which predictions of a pass are kept: `low_confidence` keeps the most likely ones; `random` any.
        schedule: how many tokens each pass fills in: `equal` numbers; `depth` is for a model of which parts have noise of
            their own (surgery `denoisers`), and has one pass for each, from the most noise to the least. It leaves as many
            masks as the next part was trained on.
    """

    num_steps: PositiveInt | None = None
    block_length: PositiveInt | None = None
    remasking: Remasking = "low_confidence"
    schedule: PassSchedule = "equal"

    key_rules: ClassVar[Rules] = (
        excludes(
            "num_steps",
            "block_length",
            when="schedule",
            is_="depth",
            why="which has one pass over the whole text for each part of the model",
        ),
    )

    def plan(self, lengths: Sequence[int], num_new: int, denoisers: Sequence[Denoiser]) -> "Passes":
        """The passes over texts of some lengths, of which `num_new` tokens at the end are new.

        Raises:
            ConfigError: see `passes` and `check_parts`.
        """
        if self.schedule == "equal":
            blocks, counts = np.array(self.passes(num_new), np.int32).T
            return Passes(blocks, np.broadcast_to(counts[:, None], (len(blocks), len(lengths))))
        self.check_parts(denoisers)
        left, counts = np.full(len(lengths), num_new), []
        for limit in [*(denoiser.max_fraction for denoiser in denoisers[:-1][::-1]), 0.0]:
            # A fraction such as 0.15 of 100 must not be 14 because of rounding.
            after = np.minimum(left, np.floor(limit * np.asarray(lengths) + 1e-6).astype(int))
            counts.append(left - after)
            left = after
        filled = np.array([count for count in counts if count.any()], np.int32)
        return Passes(np.zeros(len(filled), np.int32), filled)

    def check_parts(self, denoisers: Sequence[Denoiser]) -> None:
        """Raises `ConfigError` if the passes are those of a model with parts, and this one has none."""
        if self.schedule == "depth" and not denoisers:
            raise ConfigError(
                "schedule: depth given, but no part of this model has a noise of its own (preset.depth_times with at:"
                " prepend, objective diffusion_blocks). Remove it"
            )

    def passes(self, num_new: int) -> list[tuple[int, int]]:
        """The block of each pass, and how many of its tokens the pass fills in.

        Raises:
            ConfigError: there are fewer passes than blocks, or more than new tokens.
        """
        length = min(self.block_length or num_new, num_new)
        sizes = [min(length, num_new - start) for start in range(0, num_new, length)]
        num_steps = num_new if self.num_steps is None else self.num_steps
        if not len(sizes) <= num_steps <= num_new:
            raise ConfigError(
                f"num_steps: {num_steps} given for {num_new} new tokens in {len(sizes)} blocks. Expected {len(sizes)} to"
                f" {num_new}: at least one pass for each block, and at least one token in each pass"
            )
        ends = np.cumsum([0, *sizes]) * num_steps // num_new  # passes until the end of each block, by its tokens
        ends = np.maximum(ends, np.arange(len(ends)))
        ends = np.minimum(ends, num_steps - np.arange(len(sizes), -1, -1))
        passes = []
        for block, (size, first, end) in enumerate(zip(sizes, ends, ends[1:], strict=False)):
            counts = np.diff(np.arange(end - first + 1) * size // (end - first))
            passes += [(block, int(count)) for count in counts if count]
        return passes


@dataclass(frozen=True)
class Passes:
    """Says what each pass over some texts fills in.

    Attributes:
        blocks: int32 [passes], the block of new tokens.
        counts: int32 [passes, texts], how many of its tokens.
    """

    blocks: np.ndarray
    counts: np.ndarray


def denoised(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    generation: GenerationConfig,
    mask_id: int | None,
    config: DenoisingConfig | None,
) -> list[list[int]]:
    """`denoise_tokens` with the options of generation. Raises `ConfigError` also for those that mean nothing to it."""
    if generation.cache_dtype is not None:
        raise ConfigError(f"cache_dtype: {generation.cache_dtype} given, but there is no cache in denoising. Remove it")
    return denoise_tokens(
        model,
        prompts,
        generation.max_new_tokens,
        mask_id,
        generation.sampling,
        config or DenoisingConfig(),
        seed=generation.seed,
        stop_ids=generation.stop_ids,
    )


def check_denoising(
    prompts: Sequence[Sequence[int]],
    num_new: int,
    mask_id: int | None,
    sampling: Sampling,
    model: LanguageModel,
    config: DenoisingConfig,
) -> int:
    """The id of the mask token. Raises `ConfigError` if the model cannot fill in `num_new` tokens after each prompt."""
    check_fields(config)
    if model.is_causal:
        changed = {
            one.name: getattr(config, one.name) for one in fields(config) if getattr(config, one.name) != one.default
        }
        given = ", ".join(f"{name}: {value}" for name, value in changed.items()) or "denoising"
        raise ConfigError(
            f"{given} given, but this model predicts next tokens, and no hidden ones: it was not trained with"
            f" model.use_bidirectional_attention. Remove {', '.join(changed) or 'it'}"
        )
    if mask_id is None:
        raise ConfigError(
            "the model's tokenizer names no mask token, in whose place tokens are filled in. Set `mask_token` in its"
            " tokenizer_config.json"
        )
    if sampling.repetition_penalty != 1:
        raise ConfigError(
            f"repetition_penalty: {sampling.repetition_penalty} given, but tokens are filled in in any order. Remove it"
        )
    check_at_least("max_new_tokens", num_new, 0)
    for number, prompt in enumerate(prompts):
        if any(not 0 <= token < model.Vocab.size or token == mask_id for token in prompt):
            raise ConfigError(
                f"prompt {number} has ids outside the vocabulary of {model.Vocab.size} tokens, or the mask token ({mask_id})"
            )
        check_fits(number, len(prompt), num_new, model.Pos.size)
    return mask_id


def denoise_tokens(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    mask_id: int | None,
    sampling: Sampling,
    config: DenoisingConfig,
    *,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[list[int]]:
    """`num_new` tokens after each prompt, or those before the first of `stop_ids`. None is the mask token.

    The tokens of a row depend only on the seed and its prompt. If there is a layout, call this inside `layout.use()`.

    Raises:
        ConfigError: see `check_denoising` and `DenoisingConfig.plan`.
    """
    mask_id = check_denoising(prompts, num_new, mask_id, sampling, model, config)
    config.check_parts(model.traits.denoisers)
    if not prompts or not num_new:
        return [[] for _ in prompts]
    num_rows = program_rows(len(prompts))
    width = min(model.Pos.size, padded_length(max(map(len, prompts)) + num_new))
    tokens, segment_ids = np.zeros((num_rows, width), np.int32), np.zeros((num_rows, width), np.int32)
    starts = np.zeros(num_rows, np.int32)
    for row, prompt in enumerate(prompts):
        starts[row], end = len(prompt), len(prompt) + num_new
        tokens[row, : starts[row]], tokens[row, starts[row] : end], segment_ids[row, :end] = prompt, mask_id, 1
    axes = (Axis(BATCH, num_rows), Axis(POSITION, width))
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    inputs = Inputs(*(hax.named(jnp.asarray(a), axes) for a in (tokens, positions, segment_ids)))
    passes = config.plan([len(prompt) + num_new for prompt in prompts], num_new, model.traits.denoisers)
    counts = np.zeros((len(passes.blocks), num_rows), np.int32)
    counts[:, : len(prompts)] = passes.counts
    filled = _denoise(
        model,
        inputs,
        jnp.asarray(starts),
        jnp.int32(num_new),
        jnp.int32(mask_id),
        jnp.asarray(passes.blocks),
        jnp.asarray(counts),
        row_keys(prompts, num_rows, seed),
        sampling.numbers,
        min(config.block_length or num_new, num_new),
        config.remasking,
    )
    rows = [np.asarray(filled)[row, len(prompt) : len(prompt) + num_new] for row, prompt in enumerate(prompts)]
    stops = [np.flatnonzero(np.isin(row, stop_ids)) for row in rows]
    return [row[: found[0] if len(found) else None].tolist() for row, found in zip(rows, stops, strict=True)]


@functools.partial(jax.jit, static_argnums=(9, 10))
def _denoise(
    model: LanguageModel,
    inputs: Inputs,
    starts: jax.Array,
    num_new: jax.Array,
    mask_id: jax.Array,
    blocks: jax.Array,
    counts: jax.Array,
    keys: jax.Array,
    distribution: TokenDistribution,
    block_length: int,
    remasking: Remasking,
) -> jax.Array:
    """The tokens after all passes, int32 [B, position], on every device.

    Args:
        starts: int32 [B], the position of the first new token.
        blocks, counts: int32 [passes] and [passes, B], see `Passes`.
        keys: one per row.
    """
    inputs = hax.auto_sharded(inputs)
    axes = inputs.tokens.axes
    place_N = jnp.arange(block_length)
    rows = jnp.arange(axes[0].size)[:, None]

    def one_pass(number: jax.Array, tokens: jax.Array) -> jax.Array:
        block, count_B = blocks[number], counts[number]
        index_BN = starts[:, None] + block * block_length + place_N
        is_new_N = block * block_length + place_N < num_new
        is_text_BT = inputs.segment_ids.rearrange((BATCH, POSITION)).array != 0
        left_B = ((tokens == mask_id) & is_text_BT).sum(axis=1) / jnp.maximum(is_text_BT.sum(axis=1), 1)
        fractions = NamedArray(left_B.astype(jnp.float32), axes[:1])
        now = Inputs(NamedArray(tokens, axes), inputs.positions, inputs.segment_ids, mask_fractions=fractions)
        final = model.hidden(now).final
        final_BND = final.rearrange((BATCH, POSITION, ...)).array[rows, jnp.minimum(index_BN, axes[1].size - 1)]
        of_pass = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        drawn_BN, confidence_BN = _predict(model, final_BND, mask_id, of_pass, distribution)
        if remasking == "random":
            confidence_BN = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 0), (block_length,)))(
                of_pass
            )
        now_BN = tokens[rows, jnp.minimum(index_BN, axes[1].size - 1)]
        is_open_BN = (now_BN == mask_id) & is_new_N
        order_BN = jnp.argsort(jnp.where(is_open_BN, -confidence_BN, jnp.inf), axis=1)
        rank_BN = jnp.argsort(order_BN, axis=1)
        is_filled_BN = is_open_BN & (rank_BN < count_B[:, None])
        outside = jnp.where(is_filled_BN, index_BN, axes[1].size)  # writes beyond the end are dropped
        return tokens.at[rows, outside].set(drawn_BN, mode="drop")

    tokens = inputs.tokens.rearrange((BATCH, POSITION)).array
    return replicated(jax.lax.fori_loop(0, blocks.shape[0], one_pass, tokens))


def _predict(
    model: LanguageModel,
    final_BND: jax.Array,
    mask_id: jax.Array,
    keys: jax.Array,
    distribution: TokenDistribution,
) -> tuple[jax.Array, jax.Array]:
    """A token for each place of a block, int32 [B, N], and its log-probability in the model's distribution."""
    batch, length, width = final_BND.shape
    size = min(_CHUNK, length)
    num_chunks = -(-length // size)
    padded = jnp.pad(final_BND, ((0, 0), (0, num_chunks * size - length), (0, 0)))
    chunks_KBCD = padded.reshape(batch, num_chunks, size, width).swapaxes(0, 1)
    is_logits = model.lm_head() is None
    axes = (Axis(BATCH, batch), Axis(POSITION, size), model.Vocab if is_logits else Axis(EMBED, width))

    def one_chunk(item: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, x_BCD = item
        logits_BCV = model.logits(NamedArray(x_BCD, axes)).rearrange((BATCH, POSITION, model.Vocab)).array
        ids = jnp.arange(logits_BCV.shape[-1])
        logits = jnp.where(ids == mask_id, -jnp.inf, logits_BCV.astype(jnp.float32)).reshape(batch * size, -1)
        place_C = 1 + number * size + jnp.arange(size)
        of_tokens = jax.vmap(lambda key: jax.vmap(lambda place: jax.random.fold_in(key, place))(place_C))(keys)
        drawn = distribution.draw(distribution.logits(logits, None), of_tokens.reshape(-1))
        return drawn.reshape(batch, size), log_likelihoods(logits, drawn).reshape(batch, size)

    results = jax.lax.map(one_chunk, (jnp.arange(num_chunks), chunks_KBCD))
    drawn, log_p = (result.swapaxes(0, 1).reshape(batch, -1)[:, :length] for result in results)
    return drawn, log_p
