"""Hugging Face Trainer on GPT2LMHeadModel without evaluation, logging or saving."""

import functools
import tempfile

import common
import torch
import transformers


def load(model, given):
    put = lambda parameter, *arrays: parameter.data.copy_(torch.cat([torch.from_numpy(a) for a in arrays], 1))  # noqa: E731
    put(model.transformer.wte.weight, given["tokens"])
    put(model.transformer.wpe.weight, given["positions"])
    for i, block in enumerate(model.transformer.h):
        put(block.attn.c_attn.weight, *(given[f"{i}.{n}"] for n in "qkv"))
        put(block.attn.c_proj.weight, given[f"{i}.o"])
        put(block.mlp.c_fc.weight, given[f"{i}.up"])
        put(block.mlp.c_proj.weight, given[f"{i}.down"])


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self._batch = functools.lru_cache(maxsize=2)(common.batch)

    def __len__(self):
        return common.MOST_STEPS * common.BATCH

    def __getitem__(self, index):
        step, row = divmod(index, common.BATCH)
        inputs, targets = (torch.from_numpy(a[row]).long() for a in self._batch(step))
        # The model shifts labels itself, so the row includes its last target and the first token is not a target.
        return {"input_ids": torch.cat([inputs, targets[-1:]]), "labels": torch.cat([inputs, targets[-1:]])}


class InOrder(transformers.Trainer):
    """A Trainer that keeps the order of rows and records each step's loss."""

    def __init__(self, *args, clock, **kwargs):
        super().__init__(*args, **kwargs)
        self._clock = clock

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):
        self._loss = super().training_step(*args, **kwargs)
        return self._loss


class Ticks(transformers.TrainerCallback):
    def __init__(self, clock):
        self._clock = clock
        self.trainer = None

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = not self._clock.tick(self.trainer._loss)


def main():
    clock = common.Clock(version=transformers.__version__)
    config = transformers.GPT2Config(
        vocab_size=common.VOCAB,
        n_positions=common.SEQ_LEN + 1,
        n_embd=common.HIDDEN,
        n_layer=common.LAYERS,
        n_head=common.HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    given = common.weights()
    given["positions"] = given["positions"][
        [*range(common.SEQ_LEN), common.SEQ_LEN - 1]
    ]  # the row's last token needs a position too
    load(model, given)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=common.MOST_STEPS,
            per_device_train_batch_size=common.BATCH,
            learning_rate=common.LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=common.BETAS[0],
            adam_beta2=common.BETAS[1],
            adam_epsilon=common.EPSILON,
            weight_decay=common.WEIGHT_DECAY,
            max_grad_norm=common.CLIP,
            use_cpu=True,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        ticks = Ticks(clock)
        trainer = InOrder(model, arguments, train_dataset=Rows(), callbacks=[ticks], clock=clock)
        ticks.trainer = trainer
        trainer.train()


main()
