"""Writes a checkpoint as a folder for transformers, vLLM or PEFT, or a manifest as a configuration.

jaxlm convert to-hf --checkpoint checkpoints/mine --output_dir mine-hf --dtype bfloat16 --verify true
jaxlm convert to-hf --checkpoint model-folder --adapter adapter-folder --output_dir merged
jaxlm convert to-nanochat --checkpoint checkpoints/d12 --output_dir base_checkpoints/d12
jaxlm convert caramba manifest.yml --target quick --output quick.yaml
jaxlm convert stackwise config.yaml --output run.yaml
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError, Parser
from jaxlm.core.publish import Location
from jaxlm.interop.hf.folder import DTYPES, PARTS, STORED_FORMATS, Parts, StoredFormat, parse_export_dtype
from jaxlm.interop.hf.hub import check_upload, check_upload_name, local_folder, upload_folder
from jaxlm.interop.hf.model_card import README, ModelCard
from jaxlm.interop.hf.verify import verify_folder
from jaxlm.interop.peft.names import BaseRows
from jaxlm.interop.pretrained import hf_name
from jaxlm.models.base import LanguageModel
from jaxlm.plan.load_config import foreign_as_yaml
from jaxlm.reading.decode import choice_name
from jaxlm.reading.foreign import ForeignConfig
from jaxlm.reading.overrides import Arguments
from jaxlm.session.command_parts import CommandPart, parts_of, run_parts
from jaxlm.session.exit_codes import command
from jaxlm.session.export import Exporter, check_new_folder, logged_evaluation, model_card, output_folder
from jaxlm.session.generation_options import add_adapter_option
from jaxlm.session.inference_model import InferenceModel
from jaxlm.session.load_model import LoadedModel, add_checkpoint_options, open_model, with_adapter
from jaxlm.surgery.base import export_form, merge_surgeries, stored_form
from jaxlm.surgery.lora import round_adapters, save_peft, saved_modules

_NUM_COMPARED = 32  # tokens
_RELATIVE_TOLERANCE = 1e-3  # of the largest logit; both sides compute in float32, in different orders


@command
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parts = parts_of("convert")
    options = _parser(parts).parse_args(arguments)
    if (code := run_parts(parts, options, None)) is not None:
        return code
    if options.direction in ForeignConfig.known_names():
        return _convert_foreign(options)
    if options.adapter is not None and options.adapters == "only":
        raise ConfigError(
            f"--adapter {options.adapter}: merged into the model, but --adapters only writes no model. Remove one of them"
        )
    folder, verify = output_folder(options.output_dir), options.verify == "true"
    if not isinstance(folder, Path) and (needs_local := "--verify" if verify else options.upload and "--upload"):
        raise ConfigError(f"{needs_local}: given, but {folder} is a URL. Write a local folder, and copy it there")
    if options.upload is not None:
        check_upload_name(options.upload, "--upload")
    check_new_folder(folder, "adapter_config.json" if options.adapters == "only" else "config.json")
    opened = open_model(options.checkpoint, {}, options.adapter, options.weights)
    if options.upload is not None:
        check_upload("--upload")
    of_source = {"--parts": options.parts, "--stored_format": options.stored_format}
    of_source["--dtype source"] = options.dtype == "source"
    if options.adapters == "only" and (given := next((key for key, value in of_source.items() if value), None)):
        raise ConfigError(f"{given}: given, but --adapters only writes no part of the source. Remove it")
    dtype = opened.plan.precision.params if options.dtype is None else parse_export_dtype(options.dtype, "--dtype")
    with opened.plan.layout.use():
        if options.adapters == "only":
            _write_adapters(folder, opened, dtype, _card(opened, options.checkpoint, "peft"), verify=verify)
        else:
            card = _card(opened, options.checkpoint, "transformers")
            parts_of_source, stored = options.parts or "all", options.stored_format or "decode"
            _write_model(folder, opened, dtype, card, verify=verify, parts=parts_of_source, stored=stored)
    if options.upload is not None:
        step = "" if opened.step is None else f", step {opened.step}"
        print(f"pushed to {upload_folder(Path(folder), options.upload, f'{options.checkpoint}{step}')}")
    return 0


def _convert_foreign(options: argparse.Namespace) -> int:
    arguments = Arguments(options.file, options.target, options.config_root)
    written = foreign_as_yaml(arguments, options.direction)
    if options.output is None:
        print(written, end="")
        return 0
    path = Path(options.output)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(written)
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be created ({error.strerror}). Name another file") from error
    print(f"wrote {path}. Train it with: jaxlm train --config_path {path}")
    return 0


def _card(opened: LoadedModel, name: str, library: str) -> ModelCard:
    """The model card. Args: name: as given on the command line."""
    if opened.step is None:
        return model_card(opened.plan, opened.model, None, {}, base=name, library=library)
    logged = logged_evaluation(opened.plan.config, opened.step)
    return model_card(opened.plan, opened.model, opened.step, logged, library=library)


def _write_model(
    folder: Location,
    opened: LoadedModel,
    dtype: Any,
    card: ModelCard,
    *,
    verify: bool,
    parts: Parts,
    stored: StoredFormat,
) -> None:
    plan = opened.plan
    exporter = Exporter(plan, opened.tokenizer, opened.source(), dtype, parts, stored)
    model = export_form(opened.load(), opened.surgeries)
    exporter.write(folder, model, opened.model, card, opened.merged)
    kind = "in the dtypes of its source" if dtype is None else f"as {jnp.dtype(dtype).name}"
    print(f"wrote {opened.location} to {folder} {kind}{exporter.describe(model)}")
    if verify:
        print(verify_folder(Path(folder), model, opened.model, plan.layout))


def _write_adapters(folder: Location, opened: LoadedModel, dtype: Any, card: ModelCard, *, verify: bool) -> None:
    plan = opened.plan
    base = hf_name(plan.config.initialize_from_hf, plan.data[0].tokenizer)
    if verify and base is None:
        raise ConfigError(
            f"--verify: {opened.location} did not start from a Hugging Face model (initialize_from_hf), so there is no base"
            " to load the adapters into. Remove --verify, or --adapters only"
        )
    if base is not None and plan.data[0].added_tokens:
        raise ConfigError(
            f"--adapters only: {opened.location} has data.added_tokens, and {base} has no rows for them. Adapters do not"
            " contain them: write the whole model, without --adapters only"
        )
    if opened.model != plan.model:
        kinds = dict.fromkeys(choice_name(type(one)) for one in opened.surgeries)
        raise ConfigError(
            f"--adapters only: {opened.location} has another architecture than the model that the run started from (surgery"
            f" {' and '.join(kinds)}), so adapters alone would not fit it. Write the whole model, without --adapters only"
        )
    model, saved, rows = opened.load(), saved_modules(opened.surgeries), None
    files = {README: card.text().encode()}
    source = opened.source()
    if base is not None and (num_rows := source.vocab_size) is not None:
        rows = BaseRows(base, num_rows, lambda: source.by_modules(local_folder(base, "--adapters only", weights=True)))
    made_of = {"base": base or "", "files": files, "saved": saved, "rows": rows, "modules": source.modules}
    save_peft(folder, model, opened.model, plan.layout, dtype=dtype, **made_of)
    print(f"wrote the adapters of {opened.location} to {folder}")
    if base is not None and verify:
        print(_verify_adapters(Path(folder), base, opened, round_adapters(model, dtype, saved)))


def _verify_adapters(folder: Path, base: str, opened: LoadedModel, model: LanguageModel) -> str:
    """Compares the logits of the base with the adapters in `folder` with those of the trained model, both in float32.

    Raises:
        ConfigError: they differ.
    """
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if tree.is_inexact(x) else x, model)
    merged = merge_surgeries(exact, opened.surgeries)
    before = open_model(base, {"trainer.mp": "f32"})
    as_stored = jax.jit(functools.partial(stored_form, surgeries=opened.surgeries))
    adapted = with_adapter(replace(before, load=lambda: as_stored(before.load())), str(folder))
    with adapted.plan.layout.use():
        read = InferenceModel(adapted, adapted.for_inference())
    trained = InferenceModel(opened, merged)
    size = min(merged.Vocab.size, read.model.Vocab.size)
    length = min(merged.Pos.size, read.model.Pos.size, _NUM_COMPARED)
    ids = np.random.default_rng(0).integers(0, size, length).tolist()
    ours, theirs = (one.logits([ids])[0][:, :size] for one in (trained, read))
    difference = float(np.abs(ours - theirs).max())
    if not difference <= _RELATIVE_TOLERANCE * float(np.abs(ours).max()):
        raise ConfigError(
            f"{folder}: {base} with these adapters differs from {opened.location}: logits by up to {difference:.3g}. The run"
            " has also changed other parameters, or its base is not the same any more. Write the whole model instead"
            " (without --adapters only)"
        )
    return f"verified: {base} with the adapters has the checkpoint's logits, within {difference:.1e}"


def _parser(parts: Sequence[CommandPart]) -> argparse.ArgumentParser:
    parser = Parser(prog="jaxlm convert", description="Exports a trained model to another format.")
    directions = parser.add_subparsers(dest="direction", required=True)
    for name in ForeignConfig.known_names():
        add = directions.add_parser(name, help=f"write a file of {name} as a configuration of jaxlm").add_argument
        add("file", help=ForeignConfig.get_choice_class(name).meaning)
        add("--target", help="a target or entrypoint of the file (default: its default, or its only one)")
        add("--config_root", help="folder that has all included files (default: the file's)")
        add("--output", help="YAML file to create; it must not exist (default: print it)")
    for part in parts:
        part.add_options(directions)
    meaning = "write a folder for transformers and vLLM or, with --adapters only, for PEFT"
    to_hf = directions.add_parser("to-hf", help=meaning)
    add_checkpoint_options(to_hf, or_else="; or a Hugging Face folder or hub name, such as the base of --adapter")
    add_adapter_option(to_hf)
    add = to_hf.add_argument
    add("--output_dir", required=True, help="folder or URL to create; it must not exist")
    kinds = f"{', '.join(DTYPES)}, or source for that of each tensor in the folder it was made from"
    add("--dtype", help=f"dtype of the weights: {kinds} (default: as trained)")
    meaning = (
        "of a multimodal folder that the model was made from: copy the other parts too, or write the text model alone"
    )
    add("--parts", choices=PARTS, help=f"{meaning} (default all)")
    meaning = "write what the codes and scales of its source (fp8, MXFP4) stand for, or copy them (default decode)"
    add("--stored_format", choices=STORED_FORMATS, help=meaning)
    verified = "load the written folder again and compare its logits and tokens with the checkpoint's (default false)"
    add("--verify", choices=("true", "false"), default="false", help=verified)
    adapters = "merge LoRA adapters into the weights, or write only the adapters (default merge)"
    add("--adapters", choices=("merge", "only"), default="merge", help=adapters)
    add("--upload", help="also push the folder to this repository of the Hugging Face Hub")
    return parser


if __name__ == "__main__":
    sys.exit(main())
