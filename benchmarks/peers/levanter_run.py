"""Levanter's own Trainer and GPT-2, with its own initialization. Argument: compilation cache.

It does not run as installed (1.2.dev1644). gitpython and chex are missing from its requirements. Its default loss
passes `jnp.mean` a mask that is not boolean, which jax rejects since 0.10; here the mask is made boolean. Its
next-token loss has no target for a row's last token: 255 targets per row instead of 256.
"""

import itertools
import sys
import tempfile
from datetime import timedelta

import common
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import levanter
from levanter.checkpoint import CheckpointerConfig
from levanter.distributed import RayConfig
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample, compute_next_token_loss
from levanter.optim import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig


def example(config, step):
    Batch, Pos = hax.Axis("batch", common.BATCH), config.Pos
    tokens = hax.named(jnp.asarray(common.batch(step)[0]), (Batch, Pos))
    mask = hax.broadcast_to(LmExample.causal_loss_mask(Pos), (Batch, Pos))
    return LmExample(tokens=tokens, loss_mask=mask, attn_mask=AttentionMask.causal())


def mean(losses, axis=None, where=None):
    """The mean over a boolean mask, which jax accepts."""
    return hax.mean(losses, axis, where=where.astype(bool))


def main():
    clock = common.Clock(version=getattr(levanter, "__version__", "1.2.dev1644"))
    sizes = {"seq_len": common.SEQ_LEN, "hidden_dim": common.HIDDEN}
    config = Gpt2Config(**sizes, num_layers=common.LAYERS, num_heads=common.HEADS)
    optimizer = AdamConfig(
        learning_rate=common.LEARNING_RATE,
        beta1=common.BETAS[0],
        beta2=common.BETAS[1],
        epsilon=common.EPSILON,
        weight_decay=common.WEIGHT_DECAY,
        max_grad_norm=common.CLIP,
        lr_schedule="constant",
        warmup=0.0,
        min_lr_ratio=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer_config = TrainerConfig(
            id="peer",
            tracker=NoopConfig(),
            num_train_steps=common.MOST_STEPS,
            train_batch_size=common.BATCH,
            mp=jmp.get_policy("f32"),
            checkpointer=CheckpointerConfig(base_path=folder, save_interval=timedelta(hours=9), keep=[]),
            ray=RayConfig(auto_start_cluster=False, start_workers=False),
            jax_compilation_cache_dir=sys.argv[1],
            log_jaxprs=False,
            log_xla_hlo=False,
            require_accelerator=False,
            log_dir=folder,
        )
        levanter.initialize(trainer_config)
        loss = lambda model, rows, *, key=None: compute_next_token_loss(model, rows, key=key, reduction=mean)  # noqa: E731
        with Trainer(trainer_config, optimizer.build(common.MOST_STEPS), loss) as trainer:
            Vocab = hax.Axis("vocab", common.VOCAB)
            keys = jax.random.split(jax.random.PRNGKey(0))
            state = trainer.initial_state(keys[0], model_init=lambda: config.build(Vocab, key=keys[1]))
            for step in itertools.count():
                info = trainer.train_step(state, example(config, step))
                state = info.state
                if not clock.tick(info.loss):
                    break


main()
