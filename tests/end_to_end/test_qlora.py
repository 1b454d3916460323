"""QLoRA of a Hugging Face folder: killed and resumed, sampled, and exported as adapters and as a whole model."""

import pytest

pytest.importorskip("transformers", reason="pip install jaxlm[hf]")
from tests.answers import write_instructions, write_model

pytestmark = pytest.mark.slow

RUN = """
initialize_from_hf: model
use_hf_model_config: true
data:
  train_urls: [instructions.jsonl]
  tokenizer: model
  format: {type: supervised, input_field: prompt, output_field: response}
  cache_dir: cache
trainer:
  id: run
  train_batch_size: 8
  log_dir: logs
  steps_per_eval: 100
  checkpointer: {base_path: checkpoints, save_interval: 1000s, keep: [{every: 5}]}
optimizer: {learning_rate: 1.0e-2, weight_decay: 0.0, warmup: 0}
phases:
  - name: qlora
    num_train_steps: 12
    surgery: [{type: quantize, kind: nf4}, {type: lora, target: 'attn|mlp', rank: 2}]
    trainable: ['\\.[ab]$']
"""


@pytest.fixture
def place(workplace):
    def prepared():
        place = workplace()
        write_model(place.folder / "model")
        write_instructions(place.folder / "instructions.jsonl")
        (place.folder / "run.yaml").write_text(RUN)
        return place

    return prepared


@pytest.mark.soak
def test_a_killed_run_ends_with_the_same_bits_and_is_exported(place):
    whole, killed = place(), place()
    out = whole.finish("--config_path", "run.yaml").out
    assert "parameters in nf4" in out
    killed.die("--config_path", "run.yaml", at="first phase")
    killed.finish("--config_path", "run.yaml")
    assert killed.losses() == whole.losses()
    assert killed.digest("step-12") == whole.digest("step-12")
    first, last = (whole.digest(f"step-{step}") for step in (5, 12))
    base = [path for path in last if ".base." in path and path.startswith("model.")]
    assert base
    assert {path: first[path] for path in base} == {path: last[path] for path in base}
    for name, more in (("adapters", ("--adapters", "only")), ("merged", ())):
        arguments = ("to-hf", "--checkpoint", "checkpoints/run", "--output_dir", name, "--verify", "true", *more)
        assert "verified" in whole.finish(*arguments, module="jaxlm.commands.convert").out
    prompt = ("--prompt", "a", "--temperature", "0", "--max_new_tokens", "8")
    names = ("checkpoints/run", "merged")
    texts = [whole.finish("--checkpoint", name, *prompt, module="jaxlm.commands.sample").out for name in names]
    assert texts[0] == texts[1]
