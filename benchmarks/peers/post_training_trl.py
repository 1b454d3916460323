"""TRL's part of trl_peers.py: its trainers without evaluation, logging or saving. Arguments: method, [compile], folder."""

import sys
import tempfile
from pathlib import Path

import common
import post_training_rows as work
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback


class Ticks(TrainerCallback):
    """Tells the clock each step's loss."""

    def __init__(self, clock):
        self._clock = clock
        self.trainer = None

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = not self._clock.tick(self.trainer.last_figure)


def in_order(kind):
    """A trainer that keeps the order of rows and each step's loss, and takes datasets of token ids as they are."""

    class InOrder(kind):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset, *_, **__):
            return dataset

        def training_step(self, *args, **kwargs):
            self.last_figure = super().training_step(*args, **kwargs)
            return self.last_figure

    return InOrder


class Grpo(trl.GRPOTrainer):
    """Keeps each step's entropy. The order of prompts is that of the dataset."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.last_figure = self._metrics["train"]["entropy"][-1]
        return loss


def dataset(method: str) -> Dataset:
    """The rows of all steps, as token ids; for `grpo`, the prompts."""
    if method == work.GRPO:
        return Dataset.from_list([{"prompt": text} for text in work.prompts()])
    steps = [work.rows(number).tolist() for number in range(work.DISTINCT)]
    if not work.is_dpo(method):
        found = [ids for step in steps for ids in step]
        hidden = [-100] * work.PROMPT
        return Dataset.from_list([{"input_ids": ids, "labels": hidden + ids[work.PROMPT :]} for ids in found])
    pairs = [(step[at], step[at + 1]) for step in steps for at in range(0, work.SEQUENCES, 2)]
    return Dataset.from_list(
        [
            {"prompt_ids": c[: work.PROMPT], "chosen_ids": c[work.PROMPT :], "rejected_ids": r[work.PROMPT :]}
            for c, r in pairs
        ]
    )


def arguments(method: str, folder: str, *, compiled: bool):
    """The configuration of the trainer."""
    examples = work.SEQUENCES // 2 if work.is_dpo(method) else work.SEQUENCES
    usual = {
        "output_dir": folder,
        "max_steps": common.MOST_STEPS,
        "per_device_train_batch_size": examples,
        "learning_rate": work.LEARNING_RATE[method],
        "lr_scheduler_type": "constant",
        "adam_beta1": work.BETAS[0],
        "adam_beta2": work.BETAS[1],
        "adam_epsilon": work.EPSILON,
        "weight_decay": 0.0,
        "max_grad_norm": work.CLIP,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "torch_compile": compiled,
        "report_to": [],
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if method == work.GRPO:
        return trl.GRPOConfig(
            **usual,
            beta=work.KL_COEF,
            num_generations=work.GROUP,
            max_completion_length=work.NEW_TOKENS,
            generation_kwargs={"min_new_tokens": work.NEW_TOKENS},
            shuffle_dataset=False,
        )
    if work.is_dpo(method):
        return trl.DPOConfig(**usual, max_length=None, beta=work.BETA)
    return trl.SFTConfig(**usual, max_length=None)


def trainer_of(method: str):
    """The class of the trainer."""
    if method == work.GRPO:
        return Grpo
    return in_order(trl.DPOTrainer if work.is_dpo(method) else trl.SFTTrainer)


def main():
    method, *compiled, folder = sys.argv[1:]
    clock = common.Clock(version=trl.__version__, **work.facts(method))
    model = AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=work.tokenizer(), eos_token="<eos>", pad_token="<eos>")
    extra = {"reward_funcs": work.even_share} if method == work.GRPO else {}
    if work.is_lora(method):
        from peft import LoraConfig

        extra = {
            "peft_config": LoraConfig(
                r=work.RANK, lora_alpha=work.ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
            )
        }
    ticks = Ticks(clock)
    with tempfile.TemporaryDirectory() as output:
        ticks.trainer = trainer_of(method)(
            model=model,
            args=arguments(method, output, compiled=bool(compiled)),
            train_dataset=dataset(method),
            processing_class=tokenizer,
            callbacks=[ticks],
            **extra,
        )
        ticks.trainer.train()


main()
